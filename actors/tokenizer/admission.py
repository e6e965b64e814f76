"""What makes a request admissible: every rule that needs the model but no tensors, and the Submit that comes of it. No I/O.

    check(generate)                    all that can be told before tokenising
    submit(generate, client, prompt)   lengths and ids, and the resolved request

Both raise RequestError with the field's name. What leaves here can only be refused by the scheduler for want of room.
"""

from __future__ import annotations

import secrets

import msgspec

from radixcast.actors.detokenizer.stop_regex import stop_regex
from radixcast.actors.tokenizer.text_encoder import TextEncoder
from radixcast.protocols import limits
from radixcast.protocols.buffers import Int32Array, pack_ids, unpack_ids
from radixcast.protocols.errors import ContextLengthExceeded, InvalidRequest
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.internal import Capacity, Submit
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.public import Generate
from radixcast.protocols.sampling import SamplingParams, check, check_vocabulary

_INT32 = 1 << 31
_SEED_BITS = 63


class Admission:
    """The rules for one model."""

    def __init__(self, model: ModelSpec, encoder: TextEncoder, *, random_seed: int | None = None) -> None:
        """`random_seed`: for requests that bring none; None draws one each time."""
        self._model = model
        self._encoder = encoder
        self._random_seed = random_seed
        self.context_length = model.context_length
        self.max_total_tokens = 0
        """Tokens in the KV pool; 0 while unknown."""

    def set_capacity(self, capacity: Capacity) -> None:
        """The runner's sizes have become known."""
        self.max_total_tokens = capacity.total_tokens
        if capacity.context_length:
            self.context_length = min(self._model.context_length, capacity.context_length)

    def check(self, generate: Generate) -> None:
        """All rules that don't need the prompt's ids. Raises InvalidRequest."""
        _check_names(generate)
        self._check_prompt_form(generate)
        sampling = generate.sampling
        check(sampling)
        check_vocabulary(sampling, self._encoder.vocab_size)
        if sampling.n != 1:
            raise InvalidRequest("n must be 1 on the wire: send one Generate for each choice", param="sampling_params.n")
        self._check_text_features(sampling)
        self._check_constraint(sampling)
        self._check_logprobs(generate)

    def submit(self, generate: Generate, client: str, prompt: Int32Array, grammar: GrammarSpec | None = None) -> Submit:
        """The admissible request; `grammar` has been proved. Raises InvalidRequest, ContextLengthExceeded."""
        output = _ids(generate.output_ids, "output_ids")
        self._encoder.check_ids(output, "output_ids")
        param = _prompt_param(generate)
        if not len(prompt):
            raise InvalidRequest("the prompt is empty: it must hold at least one token", param=param)
        length = len(prompt)
        if length >= self.context_length:
            raise ContextLengthExceeded(
                f"The input ({length} tokens) is longer than the model's context length ({self.context_length} tokens) allows; "
                f"at most {self.context_length - 1} tokens fit.",
                param=param,
            )
        start = generate.logprob_start
        if start > length:
            raise InvalidRequest(f"logprob_start ({start}) is beyond the prompt's {length} tokens", param="logprob_start")
        sampling = self._resolve(generate.sampling, length, generate.clip)
        ignore = sampling.ignore_eos
        eos = () if ignore else self._model.eos_token_ids
        return Submit(
            client=client,
            rid=generate.rid,
            attempt=generate.attempt,
            group=generate.group or generate.rid,
            choice=generate.choice,
            prompt_ids=pack_ids(prompt),
            output_ids=generate.output_ids,
            sampling=sampling,
            eos_ids=eos,
            stop_ids=() if ignore else tuple(t for t in sampling.stop_token_ids if t not in eos),
            stream=generate.stream,
            logprobs=generate.logprobs,
            logprob_start=-1 if start == length else start,
            top_logprobs=generate.top_logprobs,
            logprob_token_ids=generate.logprob_token_ids,
            priority=generate.priority,
            namespace=namespace("", generate.cache_salt, self._model.weight_version),
            program=generate.program,
            depth=generate.depth,
            return_prompt_ids=generate.return_prompt_ids,
            return_text_in_logprobs=generate.return_text_in_logprobs,
            grammar=grammar,
            clip=generate.clip or generate.sampling.max_new_tokens is None,
        )

    def _resolve(self, sampling: SamplingParams, prompt_length: int, clip: bool) -> SamplingParams:
        """Seed drawn, max_new_tokens a number that fits; one that nobody asked for (`clip`, or None) is made to fit."""
        most = self.context_length - prompt_length
        wanted = sampling.max_new_tokens
        if wanted is None or clip:
            pool = self.max_total_tokens - prompt_length if self.max_total_tokens else most
            wanted = max(1, min(most if wanted is None else wanted, most, pool))
            if sampling.min_new_tokens > wanted:
                raise ContextLengthExceeded(
                    f"min_new_tokens ({sampling.min_new_tokens}) is more than the {wanted} tokens left behind the input "
                    f"({prompt_length} tokens)",
                    param="sampling_params.min_new_tokens",
                )
        elif wanted > most:
            raise ContextLengthExceeded(
                f"The model's context length is {self.context_length} tokens, but {prompt_length + wanted} were asked for "
                f"({prompt_length} in the input, {wanted} to generate). Shorten the input or ask for fewer tokens.",
                param="sampling_params.max_new_tokens",
            )
        seed = sampling.seed
        if seed is None:
            seed = self._random_seed if self._random_seed is not None else secrets.randbits(_SEED_BITS)
        return msgspec.structs.replace(sampling, max_new_tokens=wanted, seed=seed)

    def _check_prompt_form(self, generate: Generate) -> None:
        given = [name for name in ("text", "input_ids", "chat") if getattr(generate, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise InvalidRequest(
                f"exactly one of text, input_ids and chat must be given, got {got}", param=(given or ["text"])[-1]
            )
        if generate.text is not None:
            self._encoder.check_text(generate.text, "text")
        elif generate.chat is not None:
            self._encoder.check_text("", "messages")
            if self._model.chat_template is None:
                raise InvalidRequest("this model has no chat template: start the server with --chat-template", param="messages")

    def _check_text_features(self, sampling: SamplingParams) -> None:
        if not self._encoder.has_text and (sampling.stop or sampling.stop_regex):
            name = "stop" if sampling.stop else "stop_regex"
            raise InvalidRequest(f"{name} needs text, but this model has no tokenizer", param=f"sampling_params.{name}")
        if sampling.stop_regex:
            stop_regex(sampling.stop_regex)  # refuses what the detokenizer could not match

    def _check_constraint(self, sampling: SamplingParams) -> None:
        """What a constraint says is proved later, in a process of its own."""
        if sampling.constraint and not self._encoder.has_text:
            name = sampling.constraint
            raise InvalidRequest(f"{name} needs text, but this model has no tokenizer", param=f"sampling_params.{name}")

    def _check_logprobs(self, generate: Generate) -> None:
        _need(generate.logprob_start >= -1, "logprob_start", ">= -1", generate.logprob_start)
        most = limits.MAX_TOP_LOGPROBS_NATIVE
        _need(0 <= generate.top_logprobs <= most, "top_logprobs", f"in [0, {most}]", generate.top_logprobs)
        ids, most = generate.logprob_token_ids, limits.MAX_LOGPROB_TOKEN_IDS
        _need(len(ids) <= most, "logprob_token_ids", f"at most {most} ids", f"{len(ids)} ids")
        for token in ids:
            _need(0 <= token < self._encoder.vocab_size, "logprob_token_ids", f"in [0, {self._encoder.vocab_size})", token)
        size = self._encoder.vocab_size
        _need(generate.top_logprobs <= size, "top_logprobs", f"at most the vocabulary's {size}", generate.top_logprobs)


def prompt_ids(generate: Generate, encoder: TextEncoder) -> Int32Array:
    """The ids of a request that brings its own. Raises InvalidRequest."""
    ids = _ids(generate.input_ids or b"", "input_ids")
    encoder.check_ids(ids, "input_ids")
    return ids


def namespace(adapter: str, salt: str, weight_version: str) -> str:
    """The cache namespace: each part with its length in front, so no two different triples look the same."""
    return "".join(f"{len(part)}:{part}" for part in (adapter, salt, weight_version))


def _check_names(generate: Generate) -> None:
    for field, optional in (("rid", False), ("group", True), ("program", True)):
        value = getattr(generate, field)
        ok = (bool(value) or optional) and len(value) <= limits.MAX_RID_CHARS and value.isprintable()
        _need(ok, field, f"1 to {limits.MAX_RID_CHARS} printable characters", _clip(value))
    salt = generate.cache_salt
    _need(
        len(salt) <= limits.MAX_CACHE_SALT_CHARS, "cache_salt", f"at most {limits.MAX_CACHE_SALT_CHARS} characters", len(salt)
    )
    _need(0 <= generate.attempt < _INT32, "attempt", f"in [0, {_INT32})", generate.attempt)
    _need(0 <= generate.choice < limits.MAX_N, "choice", f"in [0, {limits.MAX_N})", generate.choice)
    _need(-_INT32 <= generate.priority < _INT32, "priority", "a 32-bit integer", generate.priority)
    _need(0 <= generate.depth < _INT32, "depth", f"in [0, {_INT32})", generate.depth)


def _prompt_param(generate: Generate) -> str:
    if generate.chat is not None:
        return "messages"
    return "text" if generate.text is not None else "input_ids"


def _ids(data: bytes, param: str) -> Int32Array:
    try:
        return unpack_ids(data)
    except ValueError:
        raise InvalidRequest(f"{param} must be little-endian int32, got {len(data)} bytes", param=param) from None


def _need(ok: bool, field: str, rule: str, got: object) -> None:
    if not ok:
        raise InvalidRequest(f"{field} must be {rule}, got {got}", param=field)


def _clip(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
