"""Reading tokenizer.json: the one place where tokenizer and detokenizer load theirs."""

from __future__ import annotations

from tokenizers import Tokenizer

from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelSpec


def load_tokenizer(model: ModelSpec) -> Tokenizer | None:
    """The model's tokenizer, without truncation and padding; None when it has none (ids in, ids out).

    Raises StartupError when the file can't be read.
    """
    if model.tokenizer_file is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(model.tokenizer_file)
    except Exception as error:  # the binding raises plain Exception for a missing, broken or unknown file
        raise StartupError(f"can't read the tokenizer {model.tokenizer_file}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
