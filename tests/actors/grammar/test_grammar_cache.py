"""Compiled grammars by content: bounded, one compilation at a time, errors remembered only where they would come again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from fakes.clock import ManualClock
from radixcast.actors.grammar.cache import ErrorMemory, GrammarCache
from radixcast.actors.grammar.interface import GrammarError
from radixcast.protocols.errors import ErrorInfo, Overloaded


def failing(code: str, calls: list[str]) -> Callable[[], int]:
    def make() -> int:
        calls.append(code)
        raise GrammarError("no", code=code)

    return make


def test_the_least_recently_used_go_first() -> None:
    cache = GrammarCache[int](size=lambda value: value, max_bytes=10)
    for name, value in (("a", 4), ("b", 4), ("c", 2)):
        assert cache.get(name, lambda value=value: value) == value  # type: ignore[misc]
    assert cache.peek("a") == 4
    cache.get("d", lambda: 3)
    assert cache.peek("b") is None
    assert [cache.peek(name) for name in "acd"] == [4, 2, 3]
    assert (cache.nbytes, len(cache)) == (9, 3)


def test_what_is_larger_than_the_cache_is_returned_and_not_kept() -> None:
    cache = GrammarCache[int](size=lambda value: value, max_bytes=10)
    cache.get("a", lambda: 5)
    assert cache.get("big", lambda: 11) == 11
    assert cache.peek("big") is None
    assert cache.peek("a") == 5


def test_one_compilation_a_key_at_a_time() -> None:
    cache = GrammarCache[int](size=lambda value: 1)
    began, go = threading.Event(), threading.Event()
    made: list[int] = []

    def make() -> int:
        began.set()
        go.wait(10)
        made.append(1)
        return 7

    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(cache.get("k", make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert began.wait(10)
    assert cache.get("other", lambda: 1) == 1
    go.set()
    for thread in threads:
        thread.join(10)
    assert results == [7] * 4
    assert made == [1]


def test_deterministic_errors_are_remembered_for_a_while() -> None:
    clock = ManualClock()
    cache = GrammarCache[int](size=lambda value: 1, errors=ErrorMemory(ttl=60.0, clock=clock))
    calls: list[str] = []
    for _ in range(3):
        with pytest.raises(GrammarError) as caught:
            cache.get("k", failing("invalid_schema", calls))
        assert caught.value.info.code == "invalid_schema"
    assert len(calls) == 1
    clock.advance(61.0)
    with pytest.raises(GrammarError):
        cache.get("k", failing("invalid_schema", calls))
    assert len(calls) == 2


def test_time_outs_are_never_remembered_nor_other_exceptions() -> None:
    cache = GrammarCache[int](size=lambda value: 1)
    calls: list[str] = []
    for _ in range(2):
        with pytest.raises(GrammarError):
            cache.get("k", failing("grammar_timeout", calls))
    assert len(calls) == 2

    def broken() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get("k", broken)
    assert cache.get("k", lambda: 5) == 5


def test_remembered_errors_are_bounded() -> None:
    memory = ErrorMemory(limit=3, ttl=60.0, clock=ManualClock())
    for number in range(10):
        memory.put(str(number), ErrorInfo("no", code="invalid_regex"))
    memory.put("full", Overloaded("later").info)
    assert len(memory) == 3
    assert memory.get("6") is None
    assert memory.get("9") is not None
    assert memory.get("full") is None
