"""The tokenizer: what can be refused is refused here, and what leaves is admissible.

::

    clients ──► Generate, Abort, Tokenize, Detokenize, Control       Submit, AbortOf, ControlOf ──► scheduler
            ◄── Welcome, Refused, TokenizeReply, …                   SubmitRefused, ControlDone, Capacity ◄──

Short texts are tokenised at once; long ones and chat templates run in a few threads, and constraints are proved to compile in
a process of their own, so the mailbox never waits for one. An Abort that overtakes its request there is remembered with the
request. Knows nothing of the KV cache, of other requests, or of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from radixcast.actors.actor import Actor, Bind, Dial
from radixcast.actors.grammar.prover import Prover
from radixcast.actors.setup import CLIENT_PREFIX, SCHEDULER, TOKENIZER, NodeSetup
from radixcast.actors.tokenizer.admission import Admission, prompt_ids
from radixcast.actors.tokenizer.chat_template import ChatTemplate
from radixcast.actors.tokenizer.constraints import grammar_of, named
from radixcast.actors.tokenizer.loading import load_tokenizer
from radixcast.actors.tokenizer.text_encoder import TextEncoder
from radixcast.protocols import limits
from radixcast.protocols.buffers import Int32Array, pack_ids, unpack_ids
from radixcast.protocols.errors import ErrorInfo, InternalError, InvalidRequest, Overloaded, RequestAborted, RequestError
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.internal import (
    AbortOf,
    Capacity,
    ControlDone,
    ControlOf,
    NodeState,
    SchedulerToTokenizer,
    SubmitRefused,
)
from radixcast.protocols.public import (
    Abort,
    Chat,
    ClientToTokenizer,
    Control,
    ControlReply,
    Detokenize,
    DetokenizeReply,
    Generate,
    Refused,
    Tokenize,
    TokenizeReply,
    Welcome,
)
from radixcast.protocols.sampling import SamplingParams

SHORT_CHARS = 4096
"""Texts up to this are tokenised in the mailbox (about a millisecond)."""
THREADS = 2
"""Threads for long texts, and as many for templates."""
MAX_JOBS = 1024
"""Requests in threads or waiting for one; more get 503."""
MAX_JOB_CHARS = 64 << 20
"""Characters of those requests."""

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    """A request whose prompt is being made in a thread, or whose grammar is being proved."""

    client: str
    message: Generate | Tokenize
    chars: int
    aborted: bool = False


class TokenizerActor(Actor):
    """See the module."""

    name = TOKENIZER
    binds = (Bind("public_in", inboxes={CLIENT_PREFIX: ClientToTokenizer}),)
    dials = (Dial(SCHEDULER, "scheduler", SchedulerToTokenizer),)

    def __init__(self, setup: NodeSetup, epoch: int) -> None:
        super().__init__(setup, epoch)
        self._encoder = TextEncoder(None, self.model)
        self._admission = Admission(self.model, self._encoder, random_seed=self.args.random_seed)
        self._template: ChatTemplate | None = None
        self._clients: set[str] = set()
        self._jobs: set[_Job] = set()
        self._job_chars = 0
        self._draining = False
        self._prover = Prover(self.model, self.args, setup.run_dir)
        self._texts = ThreadPoolExecutor(THREADS, "tokenize")
        self._templates = ThreadPoolExecutor(THREADS, "template")
        self._refused = 0
        self._submitted = 0

    async def start(self) -> None:
        """Load the tokenizer and compile the chat template. Raises StartupError."""
        model = self.model
        self._encoder = encoder = TextEncoder(load_tokenizer(model), model)
        self._admission = Admission(model, encoder, random_seed=self.args.random_seed)
        if model.chat_template is not None:
            self._template = ChatTemplate(
                model.chat_template,
                bos_token=model.bos_token,
                eos_token=model.eos_token,
                pad_token=model.pad_token,
                max_chars=encoder.max_chars,
            )

    async def drain(self, seconds: float) -> None:
        """Let prompts in threads go on to the scheduler; new requests are refused."""
        self._draining = True
        while self._jobs:  # noqa: ASYNC110 - once, at the end
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """End the threads and the process that proves grammars; what runs in them is forgotten."""
        await self._prover.close()
        self._texts.shutdown(wait=False, cancel_futures=True)
        self._templates.shutdown(wait=False, cancel_futures=True)

    # -- requests

    def on_Generate(self, message: Generate, peer: str) -> None:
        """Validate, tokenise, submit; or refuse."""
        if self._draining:
            raise Overloaded("the server is shutting down", retry_after=1.0)
        self._admission.check(message)
        if message.sampling.constraint:
            self._start_job(_Job(peer, message, _chars(message)))
        elif message.input_ids is not None:
            self._submit(message, peer, prompt_ids(message, self._encoder))
        elif message.text is not None and len(message.text) <= SHORT_CHARS:
            self._submit(message, peer, self._encoder.encode(message.text, add_special_tokens=message.add_special_tokens))
        else:
            self._start_job(_Job(peer, message, _chars(message)))

    def _submit(self, message: Generate, client: str, prompt: Int32Array, grammar: GrammarSpec | None = None) -> None:
        submit = self._admission.submit(message, client, prompt, grammar)
        if not self.send(SCHEDULER, submit):
            raise Overloaded("the scheduler can't take requests now", retry_after=1.0)
        self._submitted += 1

    def on_Abort(self, message: Abort, peer: str) -> None:
        """Stop requests: those in threads here, all others at the scheduler, which remembers ids it does not know yet."""
        here = 0
        for job in self._jobs:
            generate = job.message
            if not isinstance(generate, Generate) or job.aborted:
                continue
            alone = generate.rid == message.rid and generate.group in ("", generate.rid)
            named = generate.rid == message.rid or (generate.group == message.rid and not message.exact)
            if message.all or named:
                job.aborted = True
                here += alone or (named and message.exact)
                self._refuse(generate, job.client, RequestAborted(message.reason or "the request was aborted").info)
        if not here or message.all:
            there = AbortOf(rid=message.rid, all=message.all, reason=message.reason, client=peer, exact=message.exact)
            self.send(SCHEDULER, there)

    def on_Tokenize(self, message: Tokenize, peer: str) -> None:
        """Ids of texts or of a conversation."""
        if len(message.texts) > limits.MAX_BATCH:
            raise InvalidRequest(f"{len(message.texts)} texts, at most {limits.MAX_BATCH}", param="prompt")
        if message.chat is not None and message.texts:
            raise InvalidRequest("give texts or a conversation, not both", param="messages")
        for text in message.texts or [""]:
            self._encoder.check_text(text, "prompt")
        job = _Job(peer, message, _chars(message))
        if message.chat is None and job.chars <= SHORT_CHARS:
            self.send(peer, self._tokenized(message))
        else:
            self._start_job(job)

    def on_Detokenize(self, message: Detokenize, peer: str) -> None:
        """Texts of id lists."""
        if not self._encoder.has_text:
            raise InvalidRequest("this model has no tokenizer", param="tokens")
        if len(message.ids) > limits.MAX_BATCH:
            raise InvalidRequest(f"{len(message.ids)} lists, at most {limits.MAX_BATCH}", param="tokens")
        texts = []
        for data in message.ids:
            if len(data) % 4:
                raise InvalidRequest(f"tokens must be little-endian int32, got {len(data)} bytes", param="tokens")
            ids = unpack_ids(data)
            self._encoder.check_ids(ids, "tokens")
            texts.append(self._encoder.decode(ids.tolist(), skip_special_tokens=message.skip_special_tokens))
        self.send(peer, DetokenizeReply(id=message.id, texts=texts))

    def on_Control(self, message: Control, peer: str) -> None:
        """Passed on to the scheduler."""
        if not self.send(SCHEDULER, ControlOf(client=peer, id=message.id, what=message.what)):
            raise Overloaded("the scheduler can't be reached now", retry_after=1.0)

    # -- what runs in threads

    def _start_job(self, job: _Job) -> None:
        if len(self._jobs) >= MAX_JOBS or self._job_chars + job.chars > MAX_JOB_CHARS:
            raise Overloaded("too many long prompts are being tokenised", retry_after=1.0)
        self._jobs.add(job)
        self._job_chars += job.chars
        self.spawn(self._run_job(job), "tokenize")

    async def _run_job(self, job: _Job) -> None:
        """The prompt of one request, then its way on. Whatever goes wrong is this request's."""
        try:
            if isinstance(job.message, Tokenize):
                self.send(job.client, await self._tokenized_later(job.message))
            else:
                prompt = await self._prompt_later(job.message)
                grammar = None if job.aborted else await self._proved(job.message.sampling)
                if not job.aborted:
                    self._submit(job.message, job.client, prompt, grammar)
        except Exception as error:  # the border of one request: told to its client, the actor goes on
            if not job.aborted:
                await self.on_error(error, job.message, job.client)
        finally:
            self._jobs.discard(job)
            self._job_chars -= job.chars
            self.progress += 1

    async def _proved(self, sampling: SamplingParams) -> GrammarSpec | None:
        """The request's grammar, once it is known to compile. Raises GrammarError, Overloaded."""
        grammar = grammar_of(sampling, self.args)
        if grammar is not None:
            try:
                await self._prover.prove(grammar)
            except RequestError as error:
                raise named(error.info, sampling).to_exception() from None
        return grammar

    async def _prompt_later(self, message: Generate) -> Int32Array:
        if message.input_ids is not None:
            return prompt_ids(message, self._encoder)
        if message.chat is not None:
            return await self._encode_later(await self._render_later(message.chat), False)
        return await self._encode_later(message.text or "", message.add_special_tokens)

    async def _tokenized_later(self, message: Tokenize) -> TokenizeReply:
        if message.chat is not None:
            ids = await self._encode_later(await self._render_later(message.chat), False)
            return TokenizeReply(id=message.id, ids=[pack_ids(ids)])
        return await self._in_thread(self._texts, lambda: self._tokenized(message))

    def _tokenized(self, message: Tokenize) -> TokenizeReply:
        ids = [pack_ids(self._encoder.encode(text, add_special_tokens=message.add_special_tokens)) for text in message.texts]
        return TokenizeReply(id=message.id, ids=ids)

    async def _encode_later(self, text: str, add_special_tokens: bool) -> Int32Array:
        if len(text) <= SHORT_CHARS:
            return self._encoder.encode(text, add_special_tokens=add_special_tokens)
        return await self._in_thread(self._texts, lambda: self._encoder.encode(text, add_special_tokens=add_special_tokens))

    async def _render_later(self, chat: Chat) -> str:
        template = self._template
        if template is None:
            raise InvalidRequest("this model has no chat template: start the server with --chat-template", param="messages")
        text = self._in_thread(self._templates, lambda: template.render(chat))
        try:
            # A template that writes stops itself at the limit; this catches one that loops without writing.
            return await asyncio.wait_for(text, 2 * limits.MAX_TEMPLATE_SECONDS)
        except TimeoutError:
            raise InvalidRequest("the chat template does not end with this conversation", param="messages") from None

    @staticmethod
    async def _in_thread(pool: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, function)

    # -- refusals

    async def on_error(self, error: Exception, message: msgspec.Struct, peer: str) -> None:
        """A handler raised: its client is told."""
        if isinstance(error, RequestError):
            info = error.info
        else:
            self.log.error("failed at %s from %s", type(message).__name__, peer, exc_info=error)
            info = InternalError(f"the tokenizer failed: {type(error).__name__}").info
        if isinstance(message, Generate):
            self._refuse(message, peer, info)
        elif isinstance(message, Tokenize):
            self.send(peer, TokenizeReply(id=message.id, error=info))
        elif isinstance(message, Detokenize):
            self.send(peer, DetokenizeReply(id=message.id, error=info))
        elif isinstance(message, Control):
            self.send(peer, ControlReply(id=message.id, ok=False, message=info.message))

    def _refuse(self, message: Generate, client: str, info: ErrorInfo) -> None:
        self._refused += 1
        self.send(client, Refused(rid=message.rid, attempt=message.attempt, error=info))

    # -- from the scheduler and the supervisor

    def on_SubmitRefused(self, message: SubmitRefused, peer: str) -> None:
        """The scheduler has no room for a request."""
        self._refused += 1
        self.send(message.client, Refused(rid=message.rid, attempt=message.attempt, error=message.error))

    def on_ControlDone(self, message: ControlDone, peer: str) -> None:
        """The answer to a Control."""
        reply = ControlReply(id=message.id, ok=message.ok, message=message.message, stats=message.stats)
        self.send(message.client, reply)

    def on_Capacity(self, message: Capacity, peer: str) -> None:
        """The runner is ready; clients hear what it holds."""
        self._admission.set_capacity(message)
        for client in self._clients:
            self._welcome(client)

    async def on_NodeState(self, message: NodeState, peer: str) -> None:
        """No new requests while the node drains."""
        self._draining = message.state in ("draining", "stopping")

    # -- links

    def on_link_up(self, peer: str) -> None:
        """A client came."""
        if peer.startswith(CLIENT_PREFIX):
            self._clients.add(peer)
            self._welcome(peer)

    def on_link_down(self, peer: str, reason: str) -> None:
        """A client went: what it had in threads is not submitted any more."""
        if peer.startswith(CLIENT_PREFIX):
            self._clients.discard(peer)
            for job in self._jobs:
                job.aborted = job.aborted or job.client == peer

    def _welcome(self, client: str) -> None:
        model = self.model
        self.send(
            client,
            Welcome(
                output_endpoint=self.setup.endpoints.public_out,
                model=self.args.served_model_name or model.name,
                context_length=self._admission.context_length,
                vocab_size=model.config.vocab_size,
                max_total_tokens=self._admission.max_total_tokens,
                eos_token_ids=model.eos_token_ids,
                weight_version=model.weight_version,
                has_chat_template=model.chat_template is not None and model.tokenizer_file is not None,
                sampling_defaults=model.sampling_defaults,
                random_seed=self.args.random_seed,
            ),
        )

    @property
    def busy(self) -> bool:
        """Whether prompts are being made."""
        return bool(self._jobs)

    def stats(self) -> dict[str, float]:
        """Prompts in threads, and what became of requests since start."""
        return {
            "jobs": len(self._jobs),
            "submitted_total": self._submitted,
            "refused_total": self._refused,
            **self._prover.stats(),
        }


def _chars(message: Generate | Tokenize) -> int:
    """About how much text a job works on."""
    if isinstance(message, Tokenize):
        texts = sum(map(len, message.texts))
    else:
        texts = len(message.text or "") + len(message.input_ids or b"") + _grammar_chars(message.sampling)
    return texts + (sum(len(str(m.get("content", ""))) for m in message.chat.messages) if message.chat else 0)


def _grammar_chars(sampling: SamplingParams) -> int:
    texts = (sampling.regex, sampling.json_schema, sampling.ebnf, sampling.structural_tag, *sampling.choices)
    return sum(len(text) for text in texts if text)
