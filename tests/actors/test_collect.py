"""Pieces cut, repeated and merged anyhow join to the same output; a missing one shows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixcast.actors.collect import (
    LOWEST_LOGPROB,
    Collector,
    DeltaGap,
    Journal,
    choice_rid,
    cut_logprobs,
    join_logprobs,
    logprob_positions,
    merge_deltas,
)
from radixcast.protocols.buffers import pack_floats, pack_ids
from radixcast.protocols.public import Finish, Logprobs, TextDelta, Usage


def logprobs(first: int, count: int, top: int = 2, asked: int = 1) -> Logprobs:
    """Positions first … first + count - 1, every number distinct."""
    ids = range(first, first + count)
    return Logprobs(
        values=pack_floats([-i / 4 for i in ids]),
        ids=pack_ids(list(ids)),
        top_n=top,
        top_values=pack_floats([-i - t / 8 for i in ids for t in range(top)]),
        top_ids=pack_ids([1000 * i + t for i in ids for t in range(top)]),
        asked_values=pack_floats([-i - 0.5 for i in ids for _ in range(asked)]),
        token_texts=[f"t{i}" for i in ids],
        top_texts=[f"t{i}.{t}" for i in ids for t in range(top)],
        token_bytes=[f"t{i}".encode() for i in ids],
        top_bytes=[b"" for i in ids for t in range(top)],
    )


@st.composite
def cut_output(draw: st.DrawFn) -> tuple[list[TextDelta], str, int]:
    """An output cut into pieces, its text and its token count; text runs behind the tokens."""
    tokens = draw(st.integers(0, 12))
    text = draw(st.text(min_size=0, max_size=12))
    pieces = draw(st.integers(1, 5))
    token_cuts = [*sorted(draw(st.lists(st.integers(0, tokens), min_size=pieces - 1, max_size=pieces - 1))), tokens]
    text_cuts = [*sorted(draw(st.lists(st.integers(0, len(text)), min_size=pieces - 1, max_size=pieces - 1))), len(text)]
    deltas, t0, c0 = [], 0, 0
    for i, (t1, c1) in enumerate(zip(token_cuts, text_cuts, strict=True)):
        deltas.append(
            TextDelta(
                rid="r",
                token_offset=t0,
                token_ids=pack_ids(list(range(t0, t1))),
                text_offset=c0,
                text=text[c0:c1],
                logprobs=logprobs(t0, t1 - t0) if t1 > t0 else None,
                prompt_logprobs=logprobs(50, 3) if i == 0 else None,
                prompt_ids=pack_ids([5, 6]) if i == 0 else None,
                usage=Usage(prompt_tokens=2, completion_tokens=t1, cached_tokens=1),
                finish=Finish(reason="stop", matched="x") if i == pieces - 1 else None,
            )
        )
        t0, c0 = t1, c1
    return deltas, text, tokens


def check_whole(collector: Collector, text: str, tokens: int) -> None:
    output = collector.output()
    assert collector.ended
    assert (output.text, output.token_ids, output.prompt_ids) == (text, list(range(tokens)), [5, 6])
    assert output.logprobs == (logprobs(0, tokens) if tokens else None)
    assert output.prompt_logprobs == logprobs(50, 3)
    assert output.usage == Usage(prompt_tokens=2, completion_tokens=tokens, cached_tokens=1)
    assert output.finish == Finish(reason="stop", matched="x")


@given(cut_output())
def test_pieces_join(case: tuple[list[TextDelta], str, int]) -> None:
    deltas, text, tokens = case
    collector = Collector()
    for delta in deltas:
        collector.feed(delta)
    check_whole(collector, text, tokens)


@given(cut_output(), st.data())
def test_repeats_are_dropped_and_gaps_show(case: tuple[list[TextDelta], str, int], data: st.DataObject) -> None:
    deltas, text, tokens = case
    collector, held = Collector(), 0
    while not collector.ended:
        index = data.draw(st.integers(0, len(deltas) - 1)) if data.draw(st.booleans()) else held
        before = collector.output()
        try:
            collector.feed(deltas[index])
        except DeltaGap:
            assert index > held
            assert collector.output() == before
        else:
            held = max(held, index + 1)
    assert collector.feed(deltas[-1]) is None
    # skipping an empty piece is no gap
    assert [collector.output().text, collector.output().token_ids] == [text, list(range(tokens))]


@given(cut_output(), st.data())
def test_merged_pieces_say_the_same(case: tuple[list[TextDelta], str, int], data: st.DataObject) -> None:
    deltas, text, tokens = case
    collector = Collector()
    while deltas:
        count = data.draw(st.integers(1, len(deltas)))
        collector.feed(merge_deltas(deltas[:count]))
        deltas = deltas[count:]
    check_whole(collector, text, tokens)


@given(cut_output(), st.integers(0, 4))
def test_a_later_attempt_overlaps(case: tuple[list[TextDelta], str, int], keep: int) -> None:
    """A piece that starts before what is held is cut: tokens, text and logprobs."""
    deltas, text, tokens = case
    collector = Collector()
    for delta in deltas[: min(keep, len(deltas) - 1)]:
        collector.feed(delta)
    collector.feed(merge_deltas(deltas))
    check_whole(collector, text, tokens)


def test_gap_in_text_alone_shows() -> None:
    journal = Journal()
    with pytest.raises(DeltaGap, match="character 3"):
        journal.accept(TextDelta(rid="r", text_offset=3, text="x"))
    assert journal.token_count == journal.text_length == 0


def test_piece_without_news_is_none() -> None:
    collector = Collector()
    piece = TextDelta(rid="r", token_ids=pack_ids([1]), text="a")
    assert collector.feed(piece) is piece
    assert collector.feed(piece) is None
    assert collector.output().usage.completion_tokens == 1


def test_output_so_far_counts_what_is_held() -> None:
    collector = Collector()
    usage = Usage(prompt_tokens=9, completion_tokens=0)
    collector.feed(TextDelta(rid="r", token_ids=pack_ids([1, 2]), text="a", usage=usage))
    assert collector.output().usage == Usage(prompt_tokens=9, completion_tokens=2)
    assert collector.output().finish is None


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 2), st.data())
def test_logprobs_cut_and_join(count: int, top: int, asked: int, data: st.DataObject) -> None:
    whole = logprobs(3, count, top, asked)
    at = data.draw(st.integers(1, count))
    head = logprobs(3, at, top, asked)
    tail = cut_logprobs(whole, at)
    assert join_logprobs([head, tail]) == whole
    assert join_logprobs([whole]) is whole
    assert join_logprobs([]) is None
    rows = list(logprob_positions(whole))
    assert [r.token.token_id for r in rows] == list(range(3, 3 + count))
    assert all(len(r.top) == top and len(r.asked) == asked for r in rows)
    assert rows[0].token.text == "t3"
    if top:
        assert rows[0].top[0].token_id == 3000


def test_no_number_that_json_lacks() -> None:
    row = next(
        logprob_positions(
            Logprobs(
                values=pack_floats([math.nan]),
                ids=pack_ids([7]),
                top_n=2,
                top_values=pack_floats([-math.inf, math.nan]),
                top_ids=pack_ids([8, 9]),
                asked_values=pack_floats([math.nan]),
            )
        )
    )
    assert row.token.logprob is None
    assert [(e.token_id, e.logprob) for e in row.top] == [(8, LOWEST_LOGPROB)]
    assert row.asked == [None]


def test_choice_rid() -> None:
    assert [choice_rid("r", c) for c in range(3)] == ["r", "r_1", "r_2"]
