"""ServerArgs: checked once, frozen by this list, silent about secrets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from radixcast.protocols.errors import StartupError
from radixcast.protocols.server_args import ServerArgs, check


def test_defaults_pass() -> None:
    check(ServerArgs())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("page_size", 0),
        ("mem_fraction_static", 0.0),
        ("mem_fraction_static", 1.5),
        ("context_length", 1),
        ("max_total_tokens", 1),
        ("max_running_requests", 0),
        ("max_queued_requests", -1),
        ("max_prefill_tokens", 0),
        ("chunked_prefill_size", 0),
        ("chunked_prefill_size", -2),
        ("schedule_conservativeness", 0.0),
        ("shutdown_timeout", -1.0),
        ("max_connections", 0),
        ("zmq_endpoint", "inproc://x"),
    ],
)
def test_ranges_name_the_flag(field: str, value: Any) -> None:
    with pytest.raises(StartupError, match="--" + field.replace("_", "-")):
        check(ServerArgs(**{field: value}))


def test_secrets_are_masked_everywhere() -> None:
    args = ServerArgs(api_key="sesame", admin_api_key="mellon")
    shown = repr(args) + str(args) + str(args.public())
    assert "sesame" not in shown
    assert "mellon" not in shown
    assert args.public()["api_key"] == "***"
    assert ServerArgs().public()["api_key"] is None


def test_travels_whole() -> None:
    args = ServerArgs(api_key="k", max_total_tokens=5, schedule_policy="lpm")
    assert msgspec.json.decode(msgspec.json.encode(args), type=ServerArgs) == args


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"prot": 5}', type=ServerArgs)


def test_public_is_plain_data_with_every_field() -> None:
    assert set(ServerArgs().public()) == set(ServerArgs.__struct_fields__)
    assert ServerArgs().radix_cache
    assert not ServerArgs(disable_radix_cache=True).radix_cache
