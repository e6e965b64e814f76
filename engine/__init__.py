"""Radixcast: what users touch."""

__version__ = "0.1.0"
