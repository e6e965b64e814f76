"""A model's tokens as grammars see them: the bytes of each id, which ids end an output, and which no mask may ever allow.

Built from tokenizer.json alone (neither torch nor transformers is imported). `LLTokenizer` gets the tokenizer itself, not
only its pieces, as llguidance masks forced text to its *canonical* tokens.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from radixcast.actors.grammar.interface import GrammarError
from radixcast.protocols.buffers import Int32Array
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelSpec

_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_TEXT}{{1,{length}}}" for length in (1, 2, 3, 4, 6, 8, 10, 14, 30)),
    f"{_TEXT}+",
)
"""Sets of tokens that llguidance tests at once. The short lengths keep the last characters of a bounded string cheap: without
them a mask there is walked token by token."""

_NAMELESS = "\U0010fffe"
"""A code point that is no character: it stands in names of special tokens."""


class Vocabulary:
    """The vocabulary of one model; immutable and shared by all grammars of a process.

    `rows`: width of the logits; a mask has `words` = ceil(rows / 32) int32 words and zero bits past the tokenizer's last id.
    `eos_ids`: ids that end an output, inside `rows`. `control_ids`: special tokens and ids without bytes; no mask allows them,
    except that `eos_ids` are allowed when an output is complete. `fingerprint`: SHA-256 of all that masks depend on.
    """

    def __init__(self, tokenizer_json: str, *, rows: int, eos_ids: tuple[int, ...]) -> None:
        """Raises StartupError when llguidance can't read the tokenizer."""
        self.rows = rows
        self.words = (rows + 31) // 32
        self.eos_ids = tuple(sorted({i for i in eos_ids if 0 <= i < rows}))
        nameless, added, size = _without_control_names(tokenizer_json)
        try:
            self.tokenizer = llguidance.LLTokenizer(
                nameless,
                n_vocab=max(rows, size),
                eos_token=list(self.eos_ids) or [0],
                slices=list(SLICES),
            )
        except (ValueError, RuntimeError) as error:
            raise StartupError(f"tokenizer.json can't be used for grammars: {_first_line(error)}") from None
        self.eos_bits = self._bits(self.eos_ids)
        self.control_ids = tuple(i for i in range(rows) if i in added or self.tokenizer.is_special_token(i))
        self.never_bits = self._bits(self.control_ids) & ~self.eos_bits
        if not self.eos_ids:
            self.never_bits |= self._bits((0,))
        self.fingerprint = hashlib.sha256(
            f"{llguidance.__version__}\0{rows}\0{self.eos_ids}\0{tokenizer_json}".encode()
        ).hexdigest()

    @classmethod
    def load(cls, model: ModelSpec) -> Vocabulary:
        """The model's vocabulary. Raises GrammarError when it has no tokenizer, StartupError when that can't be read."""
        if model.tokenizer_file is None:
            raise GrammarError("this model has no tokenizer, so outputs can't be constrained", code="invalid_grammar")
        try:
            text = Path(model.tokenizer_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"can't read the tokenizer {model.tokenizer_file}: {error}") from None
        return cls(text, rows=model.config.vocab_size, eos_ids=model.eos_token_ids)

    @cached_property
    def tokens(self) -> list[bytes]:
        """Bytes of each id below `rows`; empty for control ids and ids that the tokenizer does not have."""
        control = set(self.control_ids)
        decode = self.tokenizer.decode_bytes
        return [b"" if i in control else decode([i]) for i in range(self.rows)]

    @cached_property
    def spelled_bytes(self) -> frozenset[int]:
        """Byte values that are a token of their own: any text of these can be written from any point."""
        return frozenset(piece[0] for piece in self.tokens if len(piece) == 1)

    def can_spell(self, text: str) -> bool:
        """Whether some tokens write exactly this text."""
        data = text.encode("utf-8")
        if self.spelled_bytes.issuperset(data):
            return True
        return self._spells(data)

    def encode(self, text: str) -> list[int]:
        """The canonical tokens of a text (special tokens in it are plain text)."""
        return self.tokenizer.tokenize_str(text)

    def _spells(self, data: bytes) -> bool:
        pieces = {piece for piece in self.tokens if piece}
        longest = max(map(len, pieces), default=0)
        reached = [True] + [False] * len(data)
        for start in range(len(data)):
            if reached[start]:
                for end in range(start + 1, min(start + longest, len(data)) + 1):
                    reached[end] = reached[end] or data[start:end] in pieces
        return reached[-1]

    def _bits(self, ids: tuple[int, ...]) -> Int32Array:
        flags = np.zeros(self.words * 32, dtype=np.uint8)
        flags[list(ids)] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)


def _without_control_names(tokenizer_json: str) -> tuple[str, set[int], int]:
    """The tokenizer with other names for its special tokens, their ids, and the number of ids that it speaks of.

    A tokenizer reads ``<|im_end|>`` in a text as the special token, so a constant that holds this text would have control
    tokens as its canonical ones, and no mask allows those. Under names that no text has, it is spelled like any other.
    """
    try:
        parsed: dict[str, Any] = json.loads(tokenizer_json)
        added = parsed.get("added_tokens") or []
        model = parsed["model"]
        vocabulary = model["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        largest = max(*ids, *(entry["id"] for entry in added), -1, -1)
        names = {entry["content"]: f"{_NAMELESS}{entry['id']}{_NAMELESS}" for entry in added if entry.get("special")}
        special = {entry["id"] for entry in added if entry.get("special")}
        for entry in added:
            entry["content"] = names.get(entry["content"], entry["content"])
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(piece, piece): i for piece, i in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        return json.dumps(parsed, ensure_ascii=False), special, largest + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"tokenizer.json can't be read: {error!r}") from None


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
