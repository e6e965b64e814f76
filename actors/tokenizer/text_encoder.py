"""Text to prompt ids and back, with the model's rules for BOS and the limit on length.

Thread-safe, and the GIL is free while a text is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from radixcast.protocols import limits
from radixcast.protocols.buffers import Int32Array
from radixcast.protocols.errors import ContextLengthExceeded, InvalidRequest
from radixcast.protocols.model import ModelSpec


class TextEncoder:
    """A tokenizer for prompts. Without one (`tokenizer` None) every text is refused: ids in, ids out."""

    def __init__(self, tokenizer: Tokenizer | None, model: ModelSpec) -> None:
        self._tokenizer = tokenizer
        self._bos = model.bos_token_id if model.add_bos else None
        self.vocab_size = model.config.vocab_size
        self.max_chars = model.context_length * limits.MAX_PROMPT_CHARS_PER_TOKEN
        """Longest text (characters) that is tokenised at all."""
        self._context_length = model.context_length

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def check_text(self, text: str, param: str) -> None:
        """Refuse what can't or need not be tokenised. Raises InvalidRequest, ContextLengthExceeded."""
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer: send input_ids", param=param)
        if len(text) > self.max_chars:
            raise ContextLengthExceeded(
                f"The input ({len(text)} characters) is longer than the model's context length "
                f"({self._context_length} tokens) can hold: at most {self.max_chars} characters are read.",
                param=param,
            )

    def encode(self, text: str, *, add_special_tokens: bool) -> Int32Array:
        """Ids of `text`, int32 [n]; text that spells a special token becomes that token, as everywhere in the field.

        With `add_special_tokens`, BOS and the like stand where the tokenizer's post-processor, or else the model, wants them.
        """
        assert self._tokenizer is not None, "check_text comes first"
        # encode_batch_fast releases the GIL and skips offsets; encode does neither.
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids = np.array(encoding.ids, dtype=np.int32)
        if add_special_tokens and self._bos is not None and (not len(ids) or ids[0] != self._bos):
            ids = np.concatenate([np.array([self._bos], dtype=np.int32), ids])
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids`, by the tokenizer itself."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens) if self._tokenizer else ""

    def check_ids(self, ids: Int32Array, param: str) -> None:
        """Refuse ids outside the vocabulary. Raises InvalidRequest."""
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise InvalidRequest(
                f"{param} holds token {int(outside[0])}, but the vocabulary has {self.vocab_size} tokens", param=param
            )
