"""Driving matchers in tests: a text token by token, and seeded random walks under masks."""

from __future__ import annotations

import random

import numpy as np

from radixcast.actors.grammar.interface import Compiled, Matcher
from radixcast.actors.grammar.vocabulary import Vocabulary


def accepts(compiled: Compiled, vocabulary: Vocabulary, text: str) -> bool:
    """Whether the text's canonical tokens are allowed one after the other and the output may end then."""
    matcher = compiled.matcher()
    return all(matcher.accept(token) for token in vocabulary.encode(text)) and matcher.complete


def allowed_ids(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    """Ids of the mask."""
    mask_W = np.full(vocabulary.words, -1, dtype=np.int32)
    matcher.fill(mask_W)
    return np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist()


def walk(compiled: Compiled, vocabulary: Vocabulary, seed: int, *, most: int = 200) -> str | None:
    """A random output: closing tokens and the end are preferred, so that most walks end. None: it did not end in time."""
    draw = random.Random(seed)
    matcher = compiled.matcher()
    closing = np.array([piece[:1] in (b'"', b"}", b"]") for piece in vocabulary.tokens])
    out: list[int] = []
    for step in range(most):
        ids = np.array(allowed_ids(matcher, vocabulary))
        assert not matcher.error, matcher.error
        assert len(ids), f"dead end after {vocabulary.tokenizer.decode_str(out)!r}"
        ending = np.isin(ids, vocabulary.eos_ids)
        assert ending.any() == matcher.complete
        if ending.any() and (ending.all() or draw.random() < 0.3):
            assert matcher.accept(int(ids[ending][0]))
            return vocabulary.tokenizer.decode_bytes(out).decode("utf-8")
        pool = ids[~ending]
        if step > 10 and draw.random() < 0.5 and closing[pool].any():
            pool = pool[closing[pool]]
        token = int(draw.choice(pool))
        assert token not in vocabulary.control_ids
        assert matcher.accept(token)
        out.append(token)
    return None
