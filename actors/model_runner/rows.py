"""Row: what one opened row is besides numbers in the tables' arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixcast.protocols.buffers import Int32Array, unpack_ids
from radixcast.protocols.errors import ContextLengthExceeded, InternalError, InvalidRequest
from radixcast.protocols.internal import END_EOS, END_STOP_ID, RowOpen
from radixcast.protocols.sampling import SamplingParams


@dataclass(frozen=True, eq=False)
class Row:
    """One life of a row slot. A slot that is opened again gets another Row, so identity tells lives apart."""

    sampling: SamplingParams
    prompt_length: int
    token_ids: Int32Array
    """Prompt and output known when it was opened."""
    kv_slots: Int32Array
    end_reasons: dict[int, int]
    """EOS or stop id -> END_EOS or END_STOP_ID."""
    end_ids: npt.NDArray[np.int64]
    """Those of `end_reasons` that are in the vocabulary: masked before min_position."""
    bias_ids: npt.NDArray[np.int64]
    bias_values: npt.NDArray[np.float32]
    top_logprobs: int
    asked_ids: npt.NDArray[np.int64]
    """Tokens whose logprobs are reported at every reported position."""
    grammar: str
    """Key of the grammar that the output must match; '' for none."""

    @property
    def penalised(self) -> bool:
        """Whether logits depend on which tokens the row already has."""
        p = self.sampling
        return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0

    @property
    def adjusted(self) -> bool:
        """Whether logits change before masks and the draw, also beyond min_position."""
        return self.penalised or len(self.bias_ids) > 0


def make_row(opening: RowOpen, *, vocab_size: int, context_length: int, total_tokens: int) -> Row:
    """Check a RowOpen and prepare it.

    Raises a RequestError for what only this row suffers from: ids or slots out of range, no token, too many of them.
    """
    prompt, output = unpack_ids(opening.prompt_ids), unpack_ids(opening.output_ids)
    token_ids = np.concatenate((prompt, output)) if len(output) else prompt
    kv_slots = unpack_ids(opening.kv_slots)
    if not len(token_ids):
        raise InvalidRequest("the prompt has no token", param="prompt")
    if len(token_ids) > context_length:
        raise ContextLengthExceeded(f"{len(token_ids)} tokens, but the runner's rows hold {context_length}")
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise InvalidRequest(f"token ids must be in [0, {vocab_size})", param="input_ids")
    if len(kv_slots) > len(token_ids):
        raise InternalError(f"{len(kv_slots)} KV slots for {len(token_ids)} tokens")
    if len(kv_slots) and not (kv_slots.min() >= 0 and kv_slots.max() < total_tokens):
        raise InternalError(f"KV slot out of range [0, {total_tokens})")
    reasons = dict.fromkeys(opening.stop_ids, END_STOP_ID) | dict.fromkeys(opening.eos_ids, END_EOS)
    bias = {i: v for i, v in (opening.sampling.logit_bias or {}).items() if 0 <= i < vocab_size}
    asked = np.array(opening.logprob_token_ids, np.int64)
    if len(asked) and not (asked.min() >= 0 and asked.max() < vocab_size):
        raise InvalidRequest(f"token_ids_logprob must be in [0, {vocab_size})", param="token_ids_logprob")
    return Row(
        sampling=opening.sampling,
        prompt_length=len(prompt),
        token_ids=token_ids,
        kv_slots=kv_slots,
        end_reasons=reasons,
        end_ids=np.array([i for i in reasons if 0 <= i < vocab_size], np.int64),
        bias_ids=np.array(list(bias), np.int64),
        bias_values=np.array(list(bias.values()), np.float32),
        top_logprobs=min(opening.top_logprobs, vocab_size),
        asked_ids=asked,
        grammar=opening.grammar,
    )
