"""The vocabulary that grammars see."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from fakes.tokenizers_zoo import sentencepiece_like
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.llg import compile_regex_llg
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelSpec


def test_it_is_the_models(vocabulary: Vocabulary, smollm2_spec: ModelSpec) -> None:
    assert vocabulary.rows == smollm2_spec.config.vocab_size
    assert vocabulary.words == (vocabulary.rows + 31) // 32
    assert set(vocabulary.eos_ids) == set(smollm2_spec.eos_token_ids)
    assert len(vocabulary.control_ids) == 17
    assert len(vocabulary.tokens) == vocabulary.rows
    assert all(vocabulary.tokens[i] == b"" for i in vocabulary.control_ids)


@pytest.mark.parametrize("text", ["plain", "中文", "😀 emoji", "tab\tand\nline", "<|im_end|> as text"])
def test_encoding_gives_the_text_back_without_control_tokens(vocabulary: Vocabulary, text: str) -> None:
    ids = vocabulary.encode(text)
    assert b"".join(vocabulary.tokens[i] for i in ids).decode() == text
    assert not set(ids) & set(vocabulary.control_ids)


def test_what_can_be_spelled(vocabulary: Vocabulary) -> None:
    assert vocabulary.can_spell("日本語 😀")
    assert not vocabulary.can_spell("a\U00040000b")
    assert not vocabulary.can_spell("\x06")


def test_fingerprints_tell_vocabularies_apart(vocabulary: Vocabulary, smollm2_spec: ModelSpec) -> None:
    assert vocabulary.fingerprint == Vocabulary.load(smollm2_spec).fingerprint
    other = msgspec.structs.replace(smollm2_spec, eos_token_ids=(0,))
    assert vocabulary.fingerprint != Vocabulary.load(other).fingerprint


def test_a_model_without_a_tokenizer_is_told(smollm2_spec: ModelSpec) -> None:
    with pytest.raises(GrammarError, match="no tokenizer"):
        Vocabulary.load(msgspec.structs.replace(smollm2_spec, tokenizer_file=None))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"vocab": {}}}', "not json"])
def test_a_broken_tokenizer_is_a_startup_error(text: str) -> None:
    with pytest.raises(StartupError):
        Vocabulary(text, rows=8, eos_ids=(0,))


@pytest.mark.parametrize("extra", [0, 1, 31, 32, 100, -5])
def test_rows_need_not_be_the_tokenizers(extra: int) -> None:
    """Padded embeddings have rows without a token; a few tokenizers have ids past the last row. Neither is ever allowed."""
    text = sentencepiece_like().to_str()
    size = len(json.loads(text)["model"]["vocab"])
    made = Vocabulary(text, rows=size + extra, eos_ids=(1,))
    mask_W = np.full(made.words, -1, dtype=np.int32)
    compile_regex_llg("(?s:.)*", made).matcher().fill(mask_W)
    allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
    assert allowed.max() < min(size, size + extra)
    assert set(allowed) & set(made.control_ids) == {1}


def test_it_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, radixcast.actors.grammar.llg as m; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'jsonschema')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
