"""Who may do what: a walk over the whole route table, and the doors that stand without a key."""

from __future__ import annotations

import pytest

from fakes.gateway_app import Http, serving
from radixcast.actors.gateway.auth import Guard, Level, is_loopback
from radixcast.actors.gateway.routes import ROUTES
from radixcast.protocols.errors import Forbidden, Unauthorized
from radixcast.protocols.server_args import ServerArgs

API, ADMIN = {"Authorization": "Bearer k1"}, {"Authorization": "Bearer k2"}
OPEN_PATHS = {"/", "/health", "/healthz", "/livez", "/ready", "/readyz", "/metrics"}
ADMIN_PATHS = {"/flush_cache", "/abort_request"}


async def statuses(http: Http, headers: dict[str, str]) -> dict[str, set[int]]:
    """Path -> statuses over its methods."""
    found: dict[str, set[int]] = {}
    for route in ROUTES:
        for method in route.methods:
            path = route.pattern.replace("{id}", "tiny")
            found.setdefault(path, set()).add((await http.request(method, path, headers=headers)).status)
    return found


async def test_the_table_without_a_valid_key() -> None:
    wrong = [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer k"},
        {"Authorization": "Basic k1"},
        {"Authorization": "k1"},
    ]
    async with serving(api_key="k1", admin_api_key="k2") as http:
        for headers in wrong:
            for path, found in (await statuses(http, headers)).items():
                assert (found == {401}) == (path not in OPEN_PATHS), path
        unmatched = await http.get("/no/such/route")
        wrong_method = await http.request("DELETE", "/v1/models")
        odd = await http.get("//v1/models")
    assert unmatched.status == wrong_method.status == odd.status == 401
    assert unmatched.headers["www-authenticate"] == "Bearer"
    assert unmatched.error["code"] == "invalid_api_key"


async def test_the_table_with_keys() -> None:
    async with serving(api_key="k1", admin_api_key="k2") as http:
        by_key, by_admin = await statuses(http, API), await statuses(http, ADMIN)
    for path, found in by_key.items():
        assert (found == {403}) == (path in ADMIN_PATHS), path
        assert 401 not in found
    assert all(not found & {401, 403} for found in by_admin.values())


async def test_one_key_opens_both() -> None:
    async with serving(api_key="k1") as http:
        assert all(not found & {401, 403} for found in (await statuses(http, API)).values())
        assert (await http.post("/flush_cache", {})).status == 401
        lower = {"Authorization": "bearer k1"}
        assert (await http.get("/v1/models", headers=lower)).status == 200


async def test_an_admin_key_alone_leaves_normal_routes_open() -> None:
    async with serving(admin_api_key="k2") as http:
        found = await statuses(http, {})
    assert {path for path, s in found.items() if s == {401}} == ADMIN_PATHS


async def test_keys_never_show() -> None:
    async with serving(api_key="k1-very-secret", admin_api_key="k2-very-secret") as http:
        for path in ("/server_info", "/get_server_info", "/model_info", "/metrics"):
            answer = await http.get(path, headers={"Authorization": "Bearer k1-very-secret"})
            assert answer.status == 200
            assert b"very-secret" not in answer.body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:30000", "192.168.1.4", "localhost.evil.example", "127.0.0.1.nip.io"]
)
async def test_a_foreign_host_is_refused_without_a_key(host: str) -> None:
    async with serving() as http:
        for path in ("/v1/models", "/metrics", "/health"):
            answer = await http.get(path, headers={"Host": host})
            assert answer.status == 403
            assert answer.error["code"] == "foreign_host"
    async with serving(api_key="k1") as http:
        assert (await http.get("/v1/models", headers={"Host": host, **API})).status == 200


async def test_a_foreign_origin_is_refused_without_a_key() -> None:
    async with serving() as http:
        for origin in ("https://evil.example", "null", "file://", "http://localhost.evil.example"):
            answer = await http.post("/v1/completions", {"prompt": "x"}, headers={"Origin": origin})
            assert answer.error["code"] == "foreign_origin"
        for origin in ("http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]"):
            assert (await http.post("/v1/completions", {"prompt": "x"}, headers={"Origin": origin})).status == 200
        image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
        assert (await http.get("/flush_cache", headers=image)).error["code"] == "foreign_origin"
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert (await http.get("/", headers=link)).status == 200
        for host in ("localhost", "localhost:1", "[::1]:30000", "127.0.0.1", "0.0.0.0:30000"):
            assert (await http.get("/v1/models", headers={"Host": host})).status == 200


def test_beyond_loopback_without_a_key_admin_is_closed() -> None:
    guard = Guard(ServerArgs(host="0.0.0.0"))
    guard.check(Level.OPEN, {})
    guard.check(Level.NORMAL, {"Host": "gpu-7.example"})
    with pytest.raises(Forbidden):
        guard.check(Level.ADMIN, {})
    guard = Guard(ServerArgs(host="0.0.0.0", api_key="k"))
    guard.check(Level.ADMIN, {"Authorization": "Bearer k"})
    with pytest.raises(Unauthorized):
        guard.check(Level.ADMIN, {})


def test_an_empty_bearer_never_matches() -> None:
    guard = Guard(ServerArgs(api_key="k"))
    for value in ("", "Bearer", "Bearer ", "Bearer \x00", "Bearer é"):
        with pytest.raises(Unauthorized):
            guard.check(Level.NORMAL, {"Authorization": value})


def test_loopback_names() -> None:
    assert all(is_loopback(h) for h in ("localhost", "LOCALHOST.", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "a.localhost"))
    assert not any(is_loopback(h) for h in ("0.0.0.0", "::", "example.org", "", "localhost.org", "1.2.3.4", "127.0.0.1.nip.io"))
