"""The tokenizer: what can be refused is refused here, and what leaves is admissible.

::

    clients ──► Generate, Abort, Tokenize, Detokenize, Control       Submit, AbortOf, ControlOf ──► scheduler
            ◄── Welcome, Refused, TokenizeReply, …                   SubmitRefused, ControlDone, Capacity ◄──

Short texts are tokenised at once; long ones and chat templates run in a few threads, and constraints are proved to compile in
a process of their own, so the mailbox never waits for one. This is the one place where an Abort can overtake its request: it
stops those in threads and goes on to the scheduler for the others. Knows nothing of the KV cache, of other requests, or of
HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from radixcast.actors.actor import Actor, Bind, Dial
from radixcast.actors.backlog import Backlog
from radixcast.actors.grammar.prover import Prover
from radixcast.actors.setup import CLIENT_PREFIX, SCHEDULER, TOKENIZER, NodeSetup
from radixcast.actors.tokenizer.admission import Admission, prompt_ids
from radixcast.actors.tokenizer.chat_template import ChatTemplate
from radixcast.actors.tokenizer.constraints import grammar_of, named
from radixcast.actors.tokenizer.jobs import Job, chars_of
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
MAX_WAITING = 4096
"""Messages that may wait for a busy scheduler before new requests get 503."""

T = TypeVar("T")


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
        self._backlog = Backlog(self.send)
        self._scheduler_away = False
        self._jobs: set[Job] = set()
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
        self._drop_older(message, peer)
        if message.sampling.constraint:
            self._start_job(Job(peer, message, chars_of(message)))
        elif message.input_ids is not None:
            self._submit(message, peer, prompt_ids(message, self._encoder))
        elif message.text is not None and len(message.text) <= SHORT_CHARS:
            self._submit(message, peer, self._encoder.encode(message.text, add_special_tokens=message.add_special_tokens))
        else:
            self._start_job(Job(peer, message, chars_of(message)))

    def _submit(self, message: Generate, client: str, prompt: Int32Array, grammar: GrammarSpec | None = None) -> None:
        submit = self._admission.submit(message, client, prompt, grammar)
        self._check_scheduler()
        self._backlog.say(SCHEDULER, submit)
        self._submitted += 1

    def _check_scheduler(self) -> None:
        if self._scheduler_away or self._backlog.waiting(SCHEDULER) >= MAX_WAITING:
            raise Overloaded("the scheduler can't take requests now", retry_after=1.0)

    def _drop_older(self, message: Generate, client: str) -> None:
        """A higher attempt replaces what is still in a thread: nobody waits for an answer to that any more."""
        for job in self._jobs if message.attempt else ():
            older = job.message
            if isinstance(older, Generate) and (job.client, older.rid) == (client, message.rid):
                job.aborted = job.aborted or older.attempt < message.attempt

    def on_Abort(self, message: Abort, peer: str) -> None:
        """Stop the client's requests: those in threads here, all others at the scheduler, which has got them before this."""
        for job in self._jobs:
            generate = job.message
            if not isinstance(generate, Generate) or job.aborted or job.client != peer:
                continue
            if message.names(generate.rid, generate.group):
                job.aborted = True
                self._refuse(generate, peer, RequestAborted(message.reason or "the request was aborted").info)
        if not self._scheduler_away:  # else it has nothing, or clients say it again when they hear that it is back
            abort = AbortOf(rid=message.rid, all=message.all, reason=message.reason, client=peer, exact=message.exact)
            self._backlog.say(SCHEDULER, abort)

    def on_Tokenize(self, message: Tokenize, peer: str) -> None:
        """Ids of texts or of a conversation."""
        if len(message.texts) > limits.MAX_BATCH:
            raise InvalidRequest(f"{len(message.texts)} texts, at most {limits.MAX_BATCH}", param="prompt")
        if message.chat is not None and message.texts:
            raise InvalidRequest("give texts or a conversation, not both", param="messages")
        for text in message.texts or [""]:
            self._encoder.check_text(text, "prompt")
        job = Job(peer, message, chars_of(message))
        if message.chat is None and job.chars <= SHORT_CHARS:
            self._reply(peer, self._tokenized(message))
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
        self._reply(peer, DetokenizeReply(id=message.id, texts=texts))

    def on_Control(self, message: Control, peer: str) -> None:
        """Passed on to the scheduler."""
        self._check_scheduler()
        self._backlog.say(SCHEDULER, ControlOf(client=peer, id=message.id, what=message.what))

    # -- what runs in threads

    def _start_job(self, job: Job) -> None:
        if len(self._jobs) >= MAX_JOBS or self._job_chars + job.chars > MAX_JOB_CHARS:
            raise Overloaded("too many long prompts are being tokenised", retry_after=1.0)
        self._jobs.add(job)
        self._job_chars += job.chars
        self.spawn(self._run_job(job), "tokenize")

    async def _run_job(self, job: Job) -> None:
        """The prompt of one request, then its way on. Whatever goes wrong is this request's."""
        try:
            if isinstance(job.message, Tokenize):
                self._reply(job.client, await self._tokenized_later(job.message))
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
        grammar = grammar_of(sampling, self.args, self._admission.context_length)
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
            self._reply(peer, TokenizeReply(id=message.id, error=info))
        elif isinstance(message, Detokenize):
            self._reply(peer, DetokenizeReply(id=message.id, error=info))
        elif isinstance(message, Control):
            self._reply(peer, ControlReply(id=message.id, ok=False, message=info.message))

    def _reply(self, client: str, message: msgspec.Struct) -> None:
        """Tell a client; while its window is full the message waits, and with its link it is gone."""
        if client in self._clients:
            self._backlog.say(client, message)
        else:
            self.send(client, message)

    def _refuse(self, message: Generate, client: str, info: ErrorInfo) -> None:
        self._refused += 1
        self._reply(client, Refused(rid=message.rid, attempt=message.attempt, error=info))

    # -- from the scheduler and the supervisor

    def on_SubmitRefused(self, message: SubmitRefused, peer: str) -> None:
        """The scheduler has no room for a request."""
        self._refused += 1
        self._reply(message.client, Refused(rid=message.rid, attempt=message.attempt, error=message.error))

    def on_ControlDone(self, message: ControlDone, peer: str) -> None:
        """The answer to a Control."""
        reply = ControlReply(id=message.id, ok=message.ok, message=message.message, stats=message.stats)
        self._reply(message.client, reply)

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
        """A client came, or the scheduler."""
        if peer.startswith(CLIENT_PREFIX):
            self._clients.add(peer)
            self._welcome(peer)
        elif peer == SCHEDULER:
            self._scheduler_away = False

    def on_link_down(self, peer: str, reason: str) -> None:
        """A client went: what it had in threads is not submitted any more. Or the scheduler, and what waited for it."""
        self._backlog.forget(peer)
        if peer.startswith(CLIENT_PREFIX):
            self._clients.discard(peer)
            for job in self._jobs:
                job.aborted = job.aborted or job.client == peer
        elif peer == SCHEDULER:
            self._scheduler_away = True

    def on_writable(self, peer: str) -> None:
        """A full window has room again."""
        self._backlog.flush(peer)

    def _welcome(self, client: str) -> None:
        model = self.model
        self._reply(
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
