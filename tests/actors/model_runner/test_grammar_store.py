"""Grammars are built beside the steps; whatever that does to the backend is told, and kept by size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from fakes.word_grammar import Panic, WordGrammar, grammar
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.model_runner.grammar_store import GrammarStore
from radixcast.actors.model_runner.side_thread import SideThread
from radixcast.protocols.errors import RequestError, StartupError
from radixcast.protocols.grammar import GRAMMAR_MISSING, GrammarSpec
from radixcast.protocols.internal import GrammarReady


class WordBuilder:
    """Builds the language of one word, except for texts that tell it to fail."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def build(self, spec: GrammarSpec) -> WordGrammar:
        assert self.gate.wait(20)
        self.built.append(spec.text)
        if spec.text == "panic":
            raise Panic("told to")
        if spec.text == "bug":
            raise KeyError("bug")
        if spec.text == "wrong":
            raise GrammarError("no such keyword", code="invalid_schema", param="/properties")
        return grammar([spec.text.encode()])


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text)


@pytest.fixture
def builder() -> Iterator[WordBuilder]:
    made = WordBuilder()
    yield made
    made.gate.set()


def prepare(store: GrammarStore, text: str) -> GrammarReady:
    """Prepare, and wait for the answer."""
    answers: list[GrammarReady] = []
    done = threading.Event()

    def ready(answer: GrammarReady) -> None:
        answers.append(answer)
        done.set()

    store.prepare(spec(text), ready)
    assert done.wait(20)
    (answer,) = answers
    assert answer.key == spec(text).key
    return answer


def test_built_once_and_kept(builder: WordBuilder) -> None:
    store = GrammarStore(lambda: builder)
    first = prepare(store, "abc")
    assert first.error is None
    assert first.seconds > 0
    assert prepare(store, "abc").seconds == 0
    assert builder.built == ["abc"]
    assert store.get(spec("abc").key) is store.get(spec("abc").key)
    assert store.nbytes == 100


def test_asked_for_twice_while_it_is_built(builder: WordBuilder) -> None:
    store, answers, done = GrammarStore(lambda: builder), list[GrammarReady](), threading.Semaphore(0)
    builder.gate.clear()

    def ready(answer: GrammarReady) -> None:
        answers.append(answer)
        done.release()

    for _ in range(3):
        store.prepare(spec("abc"), ready)
    assert answers == []
    builder.gate.set()
    assert all(done.acquire(timeout=20) for _ in range(3))
    assert [a.seconds > 0 for a in answers] == [True, False, False]
    assert builder.built == ["abc"]


@pytest.mark.parametrize(("text", "status", "code"), [("wrong", 400, "invalid_schema"), ("bug", 500, "grammar_failed")])
def test_failures_are_told(builder: WordBuilder, text: str, status: int, code: str) -> None:
    error = prepare(GrammarStore(lambda: builder), text).error
    assert error is not None
    assert (error.status, error.code) == (status, code)


def test_a_panic_ends_nothing(builder: WordBuilder) -> None:
    store = GrammarStore(lambda: builder)
    error = prepare(store, "panic").error
    assert error is not None
    assert error.status == 500
    assert prepare(store, "abc").error is None


def test_the_least_recently_used_go_first(builder: WordBuilder) -> None:
    store = GrammarStore(lambda: builder, max_bytes=250)
    for text in ("a", "b"):
        prepare(store, text)
    store.get(spec("a").key)
    prepare(store, "c")
    store.get(spec("a").key)
    with pytest.raises(RequestError) as missing:
        store.get(spec("b").key)
    assert missing.value.info.code == GRAMMAR_MISSING
    assert prepare(store, "b").error is None


def test_the_builder_is_made_when_first_needed_and_again_when_that_failed(builder: WordBuilder) -> None:
    makes: list[Callable[[], WordBuilder]] = []

    def make() -> WordBuilder:
        makes.append(make)
        if len(makes) < 3:
            raise StartupError("no tokenizer")
        return builder

    store = GrammarStore(make)
    assert not makes
    store.warm_up()
    error = prepare(store, "abc").error
    assert error is not None
    assert error.status == 500
    assert prepare(store, "abc").error is None
    assert prepare(store, "abcd").error is None
    assert len(makes) == 3


def test_a_side_thread_survives_its_jobs() -> None:
    thread = SideThread("test")

    def fail() -> None:
        raise Panic("told to")

    failed, fine = thread.submit(fail), thread.submit(lambda: 7)
    assert isinstance(failed.exception(timeout=20), Panic)
    assert fine.result(timeout=20) == 7
