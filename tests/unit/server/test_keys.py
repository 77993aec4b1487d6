"""API keys: which routes require one, and the isolation of tenants."""

import asyncio
import hmac
import time
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from random import Random
from statistics import mean, variance
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from specray.engine.request_log import read_log
from specray.errors import ConfigError
from specray.server.access.auth import FLUSH_CACHE, PROBES, RequireKey
from specray.server.access.keys import KeyRing
from specray.tenants import tenant_scoped
from tests.support.scripted_server import Serve, Server

ALICE, BOB, NEXT = "a" * 32, "b" * 32, "c" * 32
PROMPT = "a prompt that fills several blocks of sixteen tokens"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write(tmp_path, f"# clients\n\nalice {ALICE}\nbob {BOB}\nalice {NEXT}\n")


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_an_owner_may_have_several_keys(key_file: Path) -> None:
    keys = KeyRing.read(str(key_file), "server.api_key_file")
    owners = [keys.owner(key.encode()) for key in (ALICE, BOB, NEXT, "d" * 32, "", ALICE[:-1], ALICE + "a")]
    assert owners == ["alice", "bob", "alice", None, None, None, None]


def test_only_tenants_that_agreed_are_logged(key_file: Path, tmp_path: Path, serve: Serve) -> None:
    log = {"request_log": str(tmp_path / "log"), "request_log_tenants": ["alice"]}

    async def scenario() -> str:
        async with serve(server={"api_key_file": str(key_file), **log}) as server:
            replies = [await complete(server, key) for key in (BOB, NEXT)]
            assert replies[0].json()["choices"] == replies[1].json()["choices"]
            await server.until(lambda: (tmp_path / "log/engine-0.jsonl").stat().st_size > 0)
            name: str = replies[1].json()["id"]
            return name

    name = asyncio.run(scenario())
    (logged,) = read_log(tmp_path / "log/engine-0.jsonl")
    assert (logged.tenant, logged.params.seed) == ("alice", 5)
    assert logged.request_id.startswith(name)
    assert logged.num_output_tokens == len(logged.output_token_ids) == 4


async def complete(server: Server, key: str) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, "seed": 5, "ignore_eos": True}
    return await server.http.post("/v1/completions", json=body, headers=bearing(key))


def test_a_lookup_compares_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, compared = KeyRing([(f"n{i}", f"{i}" * 20) for i in range(5)]), []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(len(a)) or compare(a, b))
    for key in (b"0" * 20, b"4" * 20, b"wrong"):
        keys.owner(key)
    assert compared == [32] * 15


def test_the_time_of_a_lookup_does_not_depend_on_how_much_of_a_key_is_right() -> None:
    """Lookups of a key that is wrong in its first character, or only in its last, in random order.

    A difference shows in each of three rounds. Another process may make one in a round.
    """
    key = "k" * 32
    keys = KeyRing([("alice", key), *((f"n{index}", f"{index:032}") for index in range(4))])
    wrong = {"first": b"x" + key[1:].encode(), "last": key[:-1].encode() + b"x"}
    assert any(abs(difference(keys, wrong, Random(number))) < 4.5 for number in range(3))


def difference(keys: KeyRing, wrong: Mapping[str, bytes], random: Random) -> float:
    """Welch's t between the times of 10,000 lookups of each of two wrong keys."""
    times: dict[str, list[int]] = {name: [] for name in wrong}
    order = [name for name in wrong for _ in range(10_000)]
    random.shuffle(order)
    for name in order:
        begin = time.perf_counter_ns()
        assert keys.owner(wrong[name]) is None
        times[name].append(time.perf_counter_ns() - begin)
    return welch_t(times["first"], times["last"])


def welch_t(first: Sequence[float], second: Sequence[float]) -> float:
    """Welch's t of two samples, without the slowest tenth of both, which other processes made slow.

    0 if their means differ by less than 2 %: two objects in memory may, and ten thousand samples can show it.
    """
    bound = sorted([*first, *second])[int(0.9 * (len(first) + len(second)))]
    samples = [[value for value in sample if value <= bound] for sample in (first, second)]
    spread = sum(variance(sample) / len(sample) for sample in samples)
    difference = mean(samples[0]) - mean(samples[1])
    return difference / sqrt(spread) if abs(difference) > 0.02 * mean(samples[0]) else 0.0


def test_a_comparison_that_ends_early_is_seen_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""

    def early(known: bytes, given: bytes) -> bool:
        return all(a == b for a, b in zip(known, given, strict=True))

    monkeypatch.setattr("specray.server.access.keys._digest", lambda key: key)
    monkeypatch.setattr(hmac, "compare_digest", early)
    with pytest.raises(AssertionError):
        test_the_time_of_a_lookup_does_not_depend_on_how_much_of_a_key_is_right()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key"),
        ("# alice " + ALICE, "has no key"),
        (f"alice {ALICE} x", "line 1 has 3 words"),
        (ALICE, "line 1 has 1 words"),
        (f"\nal/ice {ALICE}", "line 2: the name"),
        ("alice short", "has 5 characters"),
        (f"alice {ALICE}\nbob {ALICE}", "a key twice"),
        (f"alice {ALICE}é", "other than ASCII"),
    ],
)
def test_an_invalid_key_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        KeyRing.read(str(write(tmp_path, text)), "server.api_key_file")
    assert ALICE not in str(caught.value)


def test_a_world_readable_or_missing_key_file_is_rejected(tmp_path: Path, key_file: Path) -> None:
    key_file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod o-rwx"):
        KeyRing.read(str(key_file), "server.api_key_file")
    with pytest.raises(ConfigError, match=r"server.api_key_file=.*No such file"):
        KeyRing.read(str(tmp_path / "none"), "server.api_key_file")


WRONG_KEYS: list[dict[str, str]] = [
    {},
    bearing("d" * 32),
    {"authorization": f"Basic {ALICE}"},
    {"x-api-key": "d" * 32},
    {"x-api-key": f"Bearer {ALICE}"},
    {"authorization": f"Basic {ALICE}", "x-api-key": ALICE},
]


def test_every_route_except_probes_requires_a_key(serve: Serve, key_file: Path) -> None:
    async def scenario() -> None:
        async with serve(server={"api_key_file": str(key_file)}) as server:
            for method, path in routes(server.app):
                open_ = path in PROBES
                for headers in WRONG_KEYS:
                    reply = await server.http.request(method, path, headers=headers)
                    assert (reply.status_code != 401) is open_, (method, path, headers)
                    if not open_:
                        assert "invalid API key" in reply.json()["error"]["message"]
                        assert reply.headers["www-authenticate"] == "Bearer"
                for headers in ({"authorization": f"bearer {BOB}"}, {"x-api-key": BOB}):
                    right = await server.http.request(method, path, headers=headers)
                    assert (right.status_code == 403) is (path == FLUSH_CACHE), (method, path)  # an admin route

    asyncio.run(scenario())


def routes(app: FastAPI) -> list[tuple[str, str]]:
    paths: dict[str, Any] = app.openapi()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [*found, ("GET", "/openapi.json"), ("GET", "/not/there"), ("OPTIONS", "/v1/completions")]


TRICKS = [
    "//livez",
    "/livez/",
    "/livez/..",
    "/livez/../v1/models",
    "/v1/models/../../livez",
    "/LIVEZ",
    "/livez%2f..",
    "/livez;",
    "/livez\x00",
    "/livez?x",
    "/livez#",
    " /livez",
    "/livez ",
    "livez",
    "",
    "/",
    "*",
    "http://h/livez",
    "/x/livez",
    "/v1/models",
    "//v1/models",
    "/./v1/models",
    "/metrics",
    "/metrics/",
]


@pytest.mark.parametrize("host", ["test", "test/livez?", "x/livez#", "test, livez"])
@pytest.mark.parametrize("path", TRICKS)
def test_no_spelling_of_a_path_or_host_bypasses_authentication(path: str, host: str) -> None:
    passed: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        passed.append(scope["path"])

    assert statuses(RequireKey(inner, KeyRing([("alice", ALICE)])), path, host) == [401]
    assert not passed


def statuses(app: Any, path: str, host: str, **scope: Any) -> list[int]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    request = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", host.encode())], **scope}
    asyncio.run(app(request, receive, send))
    return [message["status"] for message in sent if message["type"] == "http.response.start"]


@pytest.mark.parametrize(("path", "is_open"), [("/app/livez", True), ("/app/v1/models", False), ("/appx/livez", False)])
def test_the_same_routes_are_open_below_a_root_path(path: str, is_open: bool) -> None:
    passed: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        passed.append(scope["path"])

    statuses(RequireKey(inner, KeyRing([("alice", ALICE)])), path, "test", root_path="/app")
    assert bool(passed) is is_open


@pytest.mark.parametrize("keys", [None, KeyRing([("alice", ALICE)])])
def test_admin_routes_require_an_admin_key(keys: KeyRing | None) -> None:
    passed: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        passed.append(scope["state"]["tenant"])

    admins = KeyRing([("root", BOB)])
    for admin_keys, key in ((None, ALICE), (None, BOB), (admins, ALICE), (admins, BOB)):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        statuses(RequireKey(inner, keys, admin_keys), "/admin/drafter", "test", headers=headers)
    assert passed == ["root"]


@pytest.mark.parametrize("path", ["/admin/drafter", FLUSH_CACHE])
def test_a_server_without_admin_keys_says_so(path: str) -> None:
    app = RequireKey(FastAPI(), None)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(path)

    reply = asyncio.run(ask())
    assert reply.status_code == 403
    assert "server.admin_key_file" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/admin/drafter", ALICE, 403),  # a client's key
        ("/admin/drafter", NEXT, 401),
        ("/v1/models", BOB, 403),  # an operator's
        ("/v1/models", NEXT, 401),
    ],
)
def test_a_key_of_the_other_kind_gets_403_with_the_reason(path: str, key: str, status: int) -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None: ...

    guarded = RequireKey(inner, KeyRing([("alice", ALICE)]), KeyRing([("root", BOB)]))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://test") as client:
            return await client.get(path, headers=bearing(key))

    reply = asyncio.run(ask())
    reason = {401: "missing or invalid API key", 403: "this key"}
    assert reply.status_code == status
    assert reply.json()["error"]["message"].startswith(reason[status])


def test_two_authorization_headers_are_rejected() -> None:
    app = RequireKey(FastAPI(), KeyRing([("alice", ALICE)]))
    headers = [(b"authorization", f"Bearer {key}".encode()) for key in ("d" * 32, ALICE)]
    assert statuses(app, "/v1/models", "test", headers=headers) == [401]


def test_open_metrics_require_no_key(serve: Serve, key_file: Path) -> None:
    async def scenario() -> None:
        async with serve(server={"api_key_file": str(key_file), "open_metrics": True}) as server:
            assert (await server.http.get("/metrics")).status_code == 200
            assert (await server.http.get("/v1/models")).status_code == 401

    asyncio.run(scenario())


def test_the_key_is_checked_before_the_body_is_read(serve: Serve, key_file: Path) -> None:
    async def scenario() -> None:
        async with serve(server={"api_key_file": str(key_file), "max_body_bytes": 1024}) as server:
            assert (await server.http.post("/v1/completions", content=b"x" * 4096)).status_code == 401

    asyncio.run(scenario())


def test_cached_prefixes_are_not_shared_between_tenants(serve: Serve, key_file: Path) -> None:
    async def cached(server: Server, key: str, **options: Any) -> int:
        body = {"prompt": PROMPT, "max_tokens": 2, **options}
        reply = await server.http.post("/v1/completions", json=body, headers=bearing(key))
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def scenario() -> None:
        async with serve(server={"api_key_file": str(key_file)}) as server:
            assert await cached(server, ALICE) == 0
            assert await cached(server, BOB) == 0
            assert await cached(server, BOB, cache_salt="alice\n") == 0
            assert await cached(server, ALICE, cache_salt="s") == 0
            assert await cached(server, BOB, cache_salt="s") == 0
            assert await cached(server, ALICE) == await cached(server, NEXT) == await cached(server, BOB) == 48

    asyncio.run(scenario())


def test_tenant_scoped_texts_never_collide() -> None:
    names, texts = ["", "a", "ab", "b"], ["", "a", "b", "\n", "a\n", "b\na", "ab"]
    assert len({tenant_scoped(name, text) for name in names for text in texts}) == len(names) * len(texts)


def test_one_tenants_burst_does_not_block_another_tenant(serve: Serve, key_file: Path) -> None:
    body = {"prompt": "hi", "max_tokens": 60, "ignore_eos": True}

    async def scenario() -> None:
        options = {"max_running_requests": 1, "max_queued_requests": 4}
        async with serve(step_s=0.03, server={"api_key_file": str(key_file)}, **options) as server:

            def ask(key: str) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(server.http.post("/v1/completions", json=body, headers=bearing(key)))

            first = ask(ALICE)
            await server.until(lambda: server.ranks.num_steps > 1)
            flood = [ask(key) for key in [ALICE] * 8 + [NEXT]]
            await asyncio.sleep(0.05)
            other = ask(BOB)
            replies = await asyncio.gather(first, *flood, other)
            assert [reply.status_code for reply in replies].count(429) == 7  # one runs, two wait
            assert replies[-1].status_code == 200
            assert all(reply.headers["retry-after"] for reply in replies if reply.status_code == 429)

    asyncio.run(scenario())
