"""Deterministic prompts of an exact token count, for whatever tokenizer the server has.

A word list is filtered to words that are one token each with a leading space; n of them, joined by spaces, are n tokens.
Which words those are is asked of a tokenizer.json, else of the server's /tokenize, else every word counts as one token.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer

Count = Callable[[str], Awaitable[int]]
"""Text -> its number of tokens, special ones not counted."""

_TEXT = (
    "about above across act age air along also always animal answer apple area arm art ask away back ball bank base bear "
    "beat begin bell best big bird black blue board boat body bone book born both bottom box boy break bring brother "
    "brown build burn busy buy call came capital car card care carry case cat catch cause center chair chance change "
    "check child choose church circle city class clean clear climb clock close cloud coast cold color come common cook "
    "cool copy corn cost count country course cover cross crowd cry current cut dance dark day dead deal dear death deep "
    "design desk develop die differ direct doctor dog door double draw dream dress drink drive drop dry duck early ear "
    "earth east eat edge egg eight else end enemy engine enough enter equal even event ever every exact example eye face "
    "fact fair fall family famous far farm fast fat father fear feel feet field fight figure fill final find fine finger "
    "finish fire first fish fit five flat floor flow flower fly follow food foot force forest form four free fresh friend"
)
_WORDS = tuple(_TEXT.split())
_MIN_WORDS = 64
_PROBE = 32
"""Words in the text that a counting function is tried on."""


class Prompts:
    """Draws texts of n tokens from `random.Random` generators that the caller seeds."""

    def __init__(self, words: Sequence[str], exact: bool) -> None:
        self.words = list(words)
        self.exact = exact
        """False: a word is taken for a token, because nobody could count."""

    def text(self, rng: random.Random, tokens: int) -> str:
        """`tokens` words of one token each, the first one too when it follows text or a space."""
        return " ".join(rng.choices(self.words, k=tokens))


async def make_prompts(count: Count | None) -> Prompts:
    """The word list filtered by `count`; unfiltered when there is none or too few words are single tokens."""
    if count is None:
        return Prompts(_WORDS, exact=False)
    try:
        words = await _single_tokens(count)
    except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError):
        return Prompts(_WORDS, exact=False)
    return Prompts(words, exact=True) if len(words) >= _MIN_WORDS else Prompts(_WORDS, exact=False)


async def _single_tokens(count: Count) -> list[str]:
    """Words that are one token each, after a space as well as at the start of a text or line."""
    found: list[str] = []
    for start in range(0, len(_WORDS), _PROBE):
        found += await _passing(count, list(_WORDS[start : start + _PROBE]))
    return found


async def _passing(count: Count, words: list[str]) -> list[str]:
    """Two calls when all of `words` pass, else the halves are tried."""
    in_line = await count(" ".join(words + words)) == 2 * len(words)
    if in_line and await count("\n".join(words + words)) == 4 * len(words) - 1:
        return words
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return await _passing(count, words[:middle]) + await _passing(count, words[middle:])


def count_with_file(path: str) -> Count:
    """Counts with a tokenizer.json (or the folder that holds one). Raises ValueError when it can't be read."""
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"no tokenizer.json at {path}")
    tokenizer = Tokenizer.from_file(str(file))

    async def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


def count_with_server(session: aiohttp.ClientSession, base_url: str, model: str) -> Count:
    """Counts with the server's /tokenize (SGLang's and vLLM's shape: `count` or `tokens` in the answer)."""

    async def count(text: str) -> int:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        async with session.post(f"{base_url}/tokenize", json=body) as answer:
            answer.raise_for_status()
            document = await answer.json(content_type=None)
        tokens = document.get("tokens")
        return len(tokens) if isinstance(tokens, list) else int(document["count"])

    return count
