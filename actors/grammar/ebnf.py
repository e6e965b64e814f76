"""EBNF."""

from __future__ import annotations

from llguidance.gbnf_to_lark import any_to_lark


def to_lark(text: str) -> str:
    return any_to_lark(text)
