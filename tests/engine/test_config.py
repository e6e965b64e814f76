"""Flags, config file, environment and keyword arguments: one struct, one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixcast.config import FIELDS, UsageError, from_kwargs, parse_args
from radixcast.protocols.server_args import ServerArgs


def parse(*words: str, **environ: str) -> ServerArgs:
    """A command line -> ServerArgs."""
    return parse_args(words, environ)


def wrong(*words: str, **environ: str) -> str:
    """The one line that a wrong command line gives."""
    with pytest.raises(UsageError) as error:
        parse_args(words, environ)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nothing_given_is_the_default() -> None:
    assert parse() == ServerArgs()


def test_flags_aliases_prefixes_and_last_wins() -> None:
    args = parse(
        "--model", "m", "--max-total=99", "--disable-radix-cache", "--radix-cache-redundancy", "4", "--port", "1", "--port", "2"
    )
    assert (args.model_path, args.max_total_tokens, args.page_size, args.port) == ("m", 99, 4, 2)
    assert not args.radix_cache
    assert parse("--chunked-prefill-size", "-1").chunked_prefill_size == -1
    assert parse("--mem-fraction-static", "0.5").mem_fraction_static == 0.5
    assert parse("--enable-radix-cache").radix_cache


def test_every_flag_of_the_product_is_there() -> None:
    flags = {"--" + f.name.replace("_", "-") for f in FIELDS} | {alias for f in FIELDS for alias in f.flag.aliases}
    wanted = (
        "--model-path --tokenizer-path --served-model-name --host --port --zmq-endpoint --log-level --dtype --quantization "
        "--device --context-length --mem-fraction-static --max-total-tokens --max-running-requests --max-queued-requests "
        "--max-prefill-tokens --chunked-prefill-size --schedule-policy --schedule-conservativeness --enable-radix-cache "
        "--disable-radix-cache --page-size --radix-cache-redundancy --radix-eviction-policy --disable-overlap-schedule "
        "--random-seed --chat-template --api-key --admin-api-key --enable-priority-scheduling"
    )
    assert set(wanted.split()) <= flags
    assert all(f.flag.help for f in FIELDS)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--max-total-tokns", "5"], "unknown flag --max-total-tokns; did you mean --max-total-tokens?"),
        (["--zzz"], "unknown flag --zzz"),
        (["--tokenizer-pth=x"], "unknown flag --tokenizer-pth; did you mean --tokenizer-path?"),
        (["serve"], "unexpected word 'serve' (flags start with --)"),
        (["--dtype", "flot16"], "'float16'?"),
        (["--schedule-policy", "lmp"], "not one of fcfs, lpm, dfs-weight, lof, random"),
        (["--port", "x"], "'x' is not an integer"),
        (["--port", "1e3"], "'1e3' is not an integer"),
        (["--port", "70000"], "--port must be in [0, 65535], got 70000"),
        (["--shutdown-timeout", "nan"], "'nan' is not a number"),
        (["--page-size", "0"], "--page-size must be >= 1"),
        (["--zmq-endpoint", "udp://x"], "--zmq-endpoint must be"),
        (["--port"], "--port: expected one argument"),
        (["--max", "3"], "ambiguous option: --max could match"),
        (["--disable-radix-cache=1"], "ignored explicit argument '1'"),
    ],
)
def test_wrong_lines(words: list[str], line: str) -> None:
    assert line in wrong(*words)


def test_a_key_is_never_shown() -> None:
    args = parse("--api-key", "sesame", RADIXCAST_ADMIN_API_KEY="open")
    assert (args.api_key, args.admin_api_key) == ("sesame", "open")
    assert "sesame" not in repr(args)
    assert "open" not in repr(args)
    assert "sesame" not in wrong("--api-keys=sesame")


@pytest.mark.parametrize(
    ("name", "write"), [("c.json", json.dumps), ("c.yaml", lambda d: "\n".join(f"{k}: {v}" for k, v in d.items()))]
)
def test_config_file_and_precedence(tmp_path: Path, name: str, write: Any) -> None:
    path = tmp_path / name
    path.write_text(write({"port": 5, "max-total-tokens": 64, "schedule_policy": "lpm", "model": "m", "api_key": "file"}))
    args = parse("--port", "6", "--config", str(path), RADIXCAST_API_KEY="environment")
    assert (args.port, args.max_total_tokens, args.schedule_policy, args.model_path) == (6, 64, "lpm", "m")
    assert args.api_key == "environment"
    assert parse("--config", str(path), "--api-key", "line", RADIXCAST_API_KEY="environment").api_key == "line"


def test_empty_config_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# nothing\n")
    assert parse("--config", str(path)) == ServerArgs()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("prt: 5", "unknown key 'prt'; did you mean port?"),
        ("port: five", "port: Expected `int`, got `str`"),
        ("port: true", "port: Expected `int`, got `bool`"),
        ("dtype: float8", "(one of auto, float32, bfloat16, float16"),
        ("disable_radix_cache: 'yes'", "disable_radix_cache: Expected `bool`"),
        ("port: 5\nmodel: a\nmodel-path: b", "'model-path' is given twice"),
        ("port: 99999", "--port must be in"),
        ("[1, 2]", "must hold a mapping"),
        ("a: [", "--config"),
        ("!!python/object/apply:os.system ['true']", "--config"),
    ],
)
def test_wrong_config_files(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert line in wrong("--config", str(path))


def test_config_file_that_can_not_be_read(tmp_path: Path) -> None:
    assert "No such file" in wrong("--config", str(tmp_path / "none.yaml"))
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in wrong("--config", str(tmp_path / "b.yaml"))
    (tmp_path / "b.json").write_text("{")
    assert "b.json" in wrong("--config", str(tmp_path / "b.json"))


def test_keyword_arguments() -> None:
    assert from_kwargs(model="m", max_total_tokens=5, mem_fraction_static=1).model_path == "m"
    with pytest.raises(UsageError, match="did you mean max_total_tokens"):
        from_kwargs(max_total_token=5)
    with pytest.raises(UsageError, match="max_total_tokens"):
        from_kwargs(max_total_tokens="5")
    with pytest.raises(UsageError, match="page-size"):
        from_kwargs(page_size=0)


def test_help_names_every_flag_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{f.name.replace('_', '-')}" in text for f in FIELDS)
    for title in ("model:", "network:", "scheduling:", "memory and radix cache:"):
        assert title in text


def by_type(field: Any) -> st.SearchStrategy[Any]:
    """Values of a field as a user may give them."""
    kind = field.type
    if isinstance(kind, msgspec.inspect.BoolType):
        return st.booleans()
    if isinstance(kind, msgspec.inspect.IntType):
        return st.integers(-(10**9), 10**9)
    if isinstance(kind, msgspec.inspect.FloatType):
        return st.floats(allow_nan=False, allow_infinity=False, width=32)
    if isinstance(kind, msgspec.inspect.LiteralType):
        return st.sampled_from(sorted(kind.values, key=str))
    return st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=8)


@given(st.data())
def test_line_and_keywords_agree(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(FIELDS), max_size=4, unique_by=lambda f: f.name))
    values = {f.name: data.draw(by_type(f)) for f in chosen}
    words = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not False:
            words.append(f"{flag}={value}")
    kept = {k: v for k, v in values.items() if v is not False}
    try:
        expected = from_kwargs(**kept)
    except UsageError:
        with pytest.raises(UsageError):
            parse(*words)
    else:
        assert parse(*words) == expected
