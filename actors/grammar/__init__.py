"""Constraints on output, shared by the tokenizer (which proves them) and the runner (which enforces them). No torch."""
