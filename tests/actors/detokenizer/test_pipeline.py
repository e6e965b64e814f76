"""TextPipeline and Output: the same text, tokens and finish however the tokens are cut into steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fakes.byte_tokenizer import EOS_ID, IM_END_ID, byte_tokenizer, ids_of
from radixcast.actors.detokenizer.output import ABORT, Output
from radixcast.actors.detokenizer.pipeline import TextPipeline
from radixcast.actors.detokenizer.token_table import TokenTable
from radixcast.protocols.buffers import pack_floats, pack_ids, unpack_floats, unpack_ids
from radixcast.protocols.errors import RequestAborted
from radixcast.protocols.internal import END_EOS, END_LENGTH, END_STOP_ID, DeltaEnd, DeltaLogprobs, Open
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.public import Finish, Logprobs, TextDelta
from radixcast.protocols.sampling import SamplingParams

TABLE = TokenTable(byte_tokenizer())
LENGTH = DeltaEnd(handle=1, reason=END_LENGTH)


def opened(sampling: SamplingParams | None = None, **changes: object) -> Open:
    values: dict[str, object] = {
        "handle": 1,
        "client": "client:a",
        "rid": "r",
        "attempt": 0,
        "choice": 0,
        "prompt_tail": b"",
        "output_ids": b"",
        "sampling": sampling or SamplingParams(),
        "prompt_tokens": 3,
    }
    return Open(**(values | changes))  # type: ignore[arg-type]


def play(sampling: SamplingParams, steps: list[list[int]], end: DeltaEnd | None = LENGTH) -> list[TextDelta]:
    """Every delta of one output, sent after every step; the end comes with the last step."""
    output = Output(opened(sampling), TABLE)
    deltas = []
    for number, ids in enumerate(steps, 1):
        output.take(ids, end=end if number == len(steps) else None)
        if output.waiting:
            deltas.append(output.delta())
            output.sent(deltas[-1])
        if output.finish:
            break
    return deltas


def whole(deltas: list[TextDelta]) -> tuple[str, bytes, Finish | None, int]:
    """Joined text and ids, finish and completion tokens; offsets are checked on the way."""
    tokens, chars = 0, 0
    for delta in deltas:
        assert (delta.token_offset, delta.text_offset) == (tokens, chars)
        tokens += len(delta.token_ids) // 4
        chars += len(delta.text)
        assert not any(0xD800 <= ord(c) < 0xE000 for c in delta.text)
    last = deltas[-1]
    assert last.usage
    assert last.usage.completion_tokens == tokens
    return "".join(d.text for d in deltas), b"".join(d.token_ids for d in deltas), last.finish, tokens


def steps_of(ids: list[int], data: st.DataObject) -> list[list[int]]:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(ids) - 1)))))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True) if b > a] or [[]]


stop_params = st.builds(
    SamplingParams,
    stop=st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3).map(tuple),
    stop_regex=st.lists(st.sampled_from(["a{1,2}b", "é.", "[ ]b|ba"]), max_size=2, unique=True).map(tuple),
    no_stop_trim=st.booleans(),
    skip_special_tokens=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(
    sampling=stop_params,
    ids=st.lists(st.sampled_from([*b"aab bb", *"é".encode(), *"😀".encode(), EOS_ID, IM_END_ID]), max_size=24),
    end=st.sampled_from([LENGTH, DeltaEnd(handle=1, reason=ABORT), "stop"]),
    data=st.data(),
)
def test_cutting_into_steps_changes_nothing(
    sampling: SamplingParams, ids: list[int], end: DeltaEnd | str, data: st.DataObject
) -> None:
    if isinstance(end, str):
        ids = [*ids, EOS_ID]
        end = DeltaEnd(handle=1, reason=END_EOS, token=EOS_ID)
    plain = whole(play(sampling, [ids], end))
    assert whole(play(sampling, steps_of(ids, data), end)) == plain
    assert whole(play(sampling, [[i] for i in ids] or [[]], end)) == plain


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, TABLE.size - 1), max_size=30), skip=st.booleans())
def test_without_stops_the_text_is_the_tokenizers(ids: list[int], skip: bool) -> None:
    text, tokens, finish, count = whole(play(SamplingParams(skip_special_tokens=skip), [[i] for i in ids] or [[]]))
    assert text == TABLE.decode(ids, skip)
    assert unpack_ids(tokens).tolist() == ids
    assert (finish, count) == (Finish(reason="length"), len(ids))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("cut", range(1, 12))
def test_stop_string_cut_anywhere(keep: bool, cut: int) -> None:
    ids = ids_of("one\n\nUser: two")
    sampling = SamplingParams(stop=("\n\nUser:",), no_stop_trim=keep)
    text, _, finish, count = whole(play(sampling, [ids[:cut], ids[cut:]]))
    assert text == ("one\n\nUser:" if keep else "one")
    assert finish == Finish(reason="stop", matched="\n\nUser:")
    assert count == len("one\n\nUser:")


def test_held_text_is_shown_when_it_is_no_stop() -> None:
    pipeline = TextPipeline(TABLE, SamplingParams(stop=("abc",)))
    assert pipeline.feed(ids_of("xab")) == "x"
    assert pipeline.feed(ids_of("d")) == "abd"
    assert pipeline.feed(ids_of("ab")) == ""
    assert pipeline.end() == "ab"


@pytest.mark.parametrize(
    ("sampling", "shown"),
    [
        (SamplingParams(), "hi"),
        (SamplingParams(skip_special_tokens=False), "hi"),
        (SamplingParams(no_stop_trim=True), "hi"),
        (SamplingParams(no_stop_trim=True, skip_special_tokens=False), "hi<|eos|>"),
    ],
)
def test_eos_counts_but_is_not_shown(sampling: SamplingParams, shown: str) -> None:
    end = DeltaEnd(handle=1, reason=END_EOS, token=EOS_ID)
    text, ids, finish, count = whole(play(sampling, [ids_of("h"), [*ids_of("i"), EOS_ID]], end))
    assert (text, count) == (shown, 3)
    assert finish == Finish(reason="stop", matched=EOS_ID)
    assert unpack_ids(ids).tolist()[-1] == EOS_ID


def test_stop_id_text_is_shown_only_untrimmed() -> None:
    end = DeltaEnd(handle=1, reason=END_STOP_ID, token=ord("!"))
    assert whole(play(SamplingParams(), [ids_of("hi!")], end))[0] == "hi"
    assert whole(play(SamplingParams(no_stop_trim=True), [ids_of("hi!")], end))[0] == "hi!"


def test_earlier_text_end_beats_the_token_end_of_the_same_step() -> None:
    end = DeltaEnd(handle=1, reason=END_EOS, token=EOS_ID)
    text, _, finish, count = whole(play(SamplingParams(stop=("b",)), [[*ids_of("abcd"), EOS_ID]], end))
    assert (text, count, finish) == ("a", 2, Finish(reason="stop", matched="b"))


def test_nothing_asked_nothing_said() -> None:
    text, ids, finish, count = whole(play(SamplingParams(max_new_tokens=0), [[]]))
    assert (text, ids, count, finish) == ("", b"", 0, Finish(reason="length"))


def logprobs_of(ids: list[int], top_n: int = 2) -> Logprobs:
    return Logprobs(
        values=pack_floats([-float(i) for i in ids]),
        ids=pack_ids(ids),
        top_n=top_n,
        top_values=pack_floats([-float(i) - k for i in ids for k in range(top_n)]),
        top_ids=pack_ids([i + k for i in ids for k in range(top_n)]),
        asked_values=pack_floats([float(i) for i in ids for _ in range(3)]),
    )


def test_logprobs_end_where_the_text_ends() -> None:
    output = Output(opened(SamplingParams(stop=("c",)), return_text_in_logprobs=True), TABLE)
    prompt = Logprobs(values=pack_floats([math.nan, -1.0]), ids=pack_ids([80, 81]))
    output.take([], DeltaLogprobs(handle=1, prompt=prompt))
    assert not output.waiting, "the prompt's logprobs come with the first piece"
    output.take(ids_of("a"), DeltaLogprobs(handle=1, output=logprobs_of(ids_of("a"))))
    output.take(ids_of("bcd"), DeltaLogprobs(handle=1, output=logprobs_of(ids_of("bcd"))))
    delta = output.delta()
    assert delta.prompt_logprobs
    assert delta.prompt_logprobs.token_texts == ["P", "Q"]
    assert delta.logprobs
    assert unpack_ids(delta.logprobs.ids).tolist() == ids_of("abc") == unpack_ids(delta.token_ids).tolist()
    assert delta.logprobs.token_texts == ["a", "b", "c"]
    assert delta.logprobs.top_texts == ["a", "b", "b", "c", "c", "d"]
    assert delta.logprobs.top_bytes == [t.encode() for t in delta.logprobs.top_texts]
    assert len(unpack_floats(delta.logprobs.asked_values)) == 9
    output.sent(delta)
    assert output.delta().logprobs is None
    assert output.delta().prompt_logprobs is None


@settings(max_examples=150, deadline=None)
@given(sampling=stop_params, ids=st.lists(st.sampled_from([*b"aab b", *"é".encode()]), max_size=16), data=st.data())
def test_a_later_life_goes_on_where_the_earlier_stopped(sampling: SamplingParams, ids: list[int], data: st.DataObject) -> None:
    """Deltas of an earlier life up to any step, then those of a life opened with its tokens: together the whole."""
    plain = whole(play(sampling, [[i] for i in ids] or [[]]))
    seen = data.draw(st.integers(0, len(ids)))
    first = play(sampling, [[i] for i in ids[:seen]] or [[]], None)
    if first and first[-1].finish:
        return
    output = Output(opened(sampling, output_ids=pack_ids(ids[:seen])), TABLE)
    output.take(ids[seen:], end=LENGTH)
    assert whole([*first, output.delta()]) == plain


def test_an_earlier_life_that_had_ended_ends_at_once() -> None:
    output = Output(opened(SamplingParams(stop=("b",)), output_ids=pack_ids(ids_of("abc"))), TABLE)
    delta = output.delta()
    assert delta.finish == Finish(reason="stop", matched="b")
    assert (delta.token_offset, delta.token_ids, delta.text, output.position) == (2, b"", "", 2)


def test_cut_off_shows_what_was_held() -> None:
    output = Output(opened(SamplingParams(stop=("abc",))), TABLE)
    output.take(ids_of("xab"))
    output.cut_off(Finish(reason="abort", error=RequestAborted("gone").info))
    assert output.delta().text == "xab"
    output.take(ids_of("c"))
    assert output.position == 3, "nothing is taken after the end"


def test_merging_makes_one_delta_for_any_number_of_steps() -> None:
    output = Output(opened(prompt_ids=pack_ids([1, 2, 3])), TABLE)
    for i in ids_of("slow reader"):
        output.take([i])
    delta = output.delta()
    assert (delta.text, delta.prompt_ids) == ("slow reader", pack_ids([1, 2, 3]))
    output.sent(delta)
    output.take(ids_of("!"), end=LENGTH)
    assert (output.delta().text, output.delta().prompt_ids) == ("!", None)


def test_smollm2_stop_over_real_tokens(smollm2_spec: ModelSpec) -> None:
    """Every stop of a real text, one token a step and all at once: same text, tokens and finish."""
    tokenizer = Tokenizer.from_file(str(smollm2_spec.tokenizer_file))
    table = TokenTable(tokenizer, smollm2_spec.config.vocab_size)
    text = "The café's menu:\n\n1. 你好 tea 👨‍👩‍👧\n2. naïve cake — it's good."
    ids = tokenizer.encode(text).ids
    for start in range(len(text) - 4):
        stop = text[start : start + 4]
        results = []
        for steps in ([ids], [[i] for i in ids]):
            pipeline = TextPipeline(table, SamplingParams(stop=(stop,)))
            shown = "".join(pipeline.feed(step) for step in steps) + pipeline.end()
            results.append((shown, pipeline.tokens, pipeline.match and pipeline.match.what))
        assert results[0] == results[1]
        assert results[0][0] == text[: text.index(stop)]
        shorter = tokenizer.decode(ids[: results[0][1] - 1])
        assert stop not in shorter, "the token that completes the match is the last that counts"
        assert stop in tokenizer.decode(ids[: results[0][1]])
