"""Routes of vLLM and SGLang: tokenizing, aborting, caches and health; hosts and origins."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from specray.server.access.host_check import is_allowed
from tests.support.scripted_server import END, TEXT, Serve, Server, byte_tokenizer

LONG = {"prompt": "abc", "max_tokens": 120, "ignore_eos": True}
ALICE, BOB, ROOT = "a" * 32, "b" * 32, "r" * 32


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Options of a server with two clients and an operator."""
    files = {"api_key_file": f"alice {ALICE}\nbob {BOB}\n", "admin_key_file": f"root {ROOT}\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return {name: str(tmp_path / name) for name in files}


async def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_text_survives_tokenize_and_detokenize(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            one = await post(server, "/tokenize", {"prompt": TEXT, "return_token_strs": True})
            assert one["tokens"] == byte_tokenizer().encode(TEXT)
            assert (one["count"], one["max_model_len"]) == (len(one["tokens"]), 512)
            assert len(one["token_strs"]) == one["count"]
            assert await post(server, "/detokenize", {"tokens": one["tokens"]}) == {"prompt": TEXT, "text": TEXT}
            two = await post(server, "/tokenize", {"prompt": ["a", "bcd"]})
            assert two["count"] == [1, 3]
            assert (await post(server, "/detokenize", {"tokens": two["tokens"]}))["text"] == ["a", "bcd"]

    asyncio.run(scenario())


def test_detokenize_shows_special_tokens_where_vllm_does(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            tokens = [*byte_tokenizer().encode("a"), byte_tokenizer().convert_tokens_to_ids(END)]
            assert await post(server, "/detokenize", {"tokens": tokens}) == {"prompt": "a" + END, "text": "a"}
            for skips, text in ((True, "a"), (False, "a" + END)):
                body = {"tokens": tokens, "skip_special_tokens": skips}
                assert await post(server, "/detokenize", body) == {"prompt": text, "text": text}

    asyncio.run(scenario())


def test_a_chat_is_tokenized_as_it_is_answered(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            messages = [{"role": "user", "content": "hi"}]
            counted = await post(server, "/tokenize", {"messages": messages})
            answered = await post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
            assert counted["count"] == answered["usage"]["prompt_tokens"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": "a", "abort_all": True}, "rid"),
    ],
)
def test_invalid_bodies_name_the_field(serve: Serve, path: str, body: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        async with serve() as server:
            response = await server.http.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param

    asyncio.run(scenario())


def test_health_generate_runs_a_step_and_is_not_counted(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            before = server.ranks.num_steps
            assert (await server.http.get("/health_generate")).status_code == 200
            assert server.ranks.num_steps > before
            assert (
                'specray_generation_tokens_total{replica="replica-1"} 0.0' in (await server.http.get("/metrics")).text
            )
            assert (await server.http.get("/version")).json()["version"]

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/health", "/livez", "/ping"])
def test_probes_answer_get_and_head_or_post(serve: Serve, path: str) -> None:
    async def scenario() -> None:
        async with serve() as server:
            other = await (server.http.post(path) if path == "/ping" else server.http.head(path))
            assert other.status_code == (await server.http.get(path)).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("named", ["rid", "id", "all"])
def test_only_the_clients_own_requests_are_aborted(serve: Serve, keys: dict[str, str], named: str) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02, server=keys) as server:
            bodies = [(ALICE, {"rid": "mine"}), (ALICE, {"rid": "other"}), (BOB, {"rid": "mine"})]
            if named == "id":
                bodies = [(ALICE, {}), *bodies[1:]]
            requests = [
                asyncio.create_task(server.http.post("/v1/completions", json=LONG | body, headers=bearing(key)))
                for key, body in bodies
            ]
            await server.until(lambda: len(server.router._engine._engine.requests.by_id) == 3)
            specs = [request.spec for request in server.router._engine._engine.requests.by_id.values()]
            name = next(spec.name for spec in specs if spec.tenant == "alice" and spec.name != "other")
            assert name.startswith("cmpl-") is (named == "id")
            abort = {"abort_all": True} if named == "all" else {"rid": name}
            assert (await server.http.post("/abort_request", json=abort, headers=bearing(ALICE))).status_code == 200
            replies = [response.json() for response in await asyncio.gather(*requests)]
            reasons = [reply["choices"][0]["finish_reason"] for reply in replies]
            assert reasons == ["abort", "abort" if named == "all" else "length", "length"]
            assert 0 < replies[0]["usage"]["completion_tokens"] < 120
            if named == "id":
                assert replies[0]["id"] == name

    asyncio.run(scenario())


def test_the_cache_is_flushed_by_the_operator_only(serve: Serve, keys: dict[str, str]) -> None:
    async def scenario() -> None:
        async with serve(server=keys) as server:
            body = {"prompt": "a" * 64, "max_tokens": 1}

            async def num_cached() -> int:
                response = await server.http.post("/v1/completions", json=body, headers=bearing(ALICE))
                cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                return cached

            assert [await num_cached(), await num_cached()] == [0, 48]
            for key, status in ((ALICE, 403), ("x" * 32, 401)):
                assert (await server.http.post("/flush_cache", headers=bearing(key))).status_code == status
            flushed = await server.http.post("/flush_cache", headers=bearing(ROOT))
            assert flushed.json() == {"replicas": ["replica-1"]}
            assert await num_cached() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("host", "is_good"),
    [
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("10.1.2.3", True),
        ("localhost:8000", True),
        ("specray:8000", True),
        ("serve.default.svc.cluster.local", True),
        ("my.example.org", True),
        ("MY.example.ORG.:80", True),
        ("evil.example.org", False),
        ("127.0.0.1.evil.org", False),
        ("localhost.evil.org:8000", False),
        ("evil.org:80@127.0.0.1", False),
        ("[::1].evil.org", False),
        ("[localhost]", False),
        ("[127.0.0.1]", False),
        ("[fe80::1%25eth0]", False),
        ("127.0.0.1:1@evil", False),
        ("127.0.0.1:80:80", False),
        ("127.0.0.1..", False),
        ("127.0.0.1:http", False),
        ("127.0.0.1/x", False),
        ("127.0.0.1, evil.org", False),
        ("localhost\t", False),
        ("localhost\\evil", False),
        ("l\xf6calhost", False),
        ("[::1]", True),
        ("[::ffff:10.1.2.3]:80", True),
        ("my_host:8000", True),
        ("localhost:", True),
    ],
)
def test_hosts_that_a_stranger_can_own_are_refused(host: str, is_good: bool) -> None:
    assert is_allowed(host, {"my.example.org"}) is is_good


def test_a_server_without_keys_checks_the_host(serve: Serve, keys: dict[str, str]) -> None:
    async def status(host: str, **options: Any) -> int:
        async with serve(server=options) as server:
            return (await server.http.get("/v1/models", headers={"host": host})).status_code

    async def scenario() -> None:
        assert await status("evil.example.org") == 403
        assert await status("localhost") == 200
        assert await status("evil.example.org", allowed_hosts=["evil.example.org"]) == 200
        assert await status("evil.example.org", allowed_hosts=["*"]) == 200
        assert await status("evil.example.org", api_key_file=keys["api_key_file"]) == 401

    asyncio.run(scenario())


def test_pages_of_the_configured_origins_may_call_the_api(serve: Serve, keys: dict[str, str]) -> None:
    async def scenario() -> None:
        origin, stranger = "https://chat.example.org", "https://evil.example.org"
        async with serve(server=keys | {"cors_origins": [origin]}) as server:
            asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
            for page, is_open in ((origin, True), (stranger, False)):
                preflight = await server.http.options("/v1/completions", headers={"origin": page, **asked})
                assert (preflight.status_code == 200) is is_open
                reply = await server.http.get("/v1/models", headers={"origin": page, **bearing(ALICE)})
                assert reply.headers.get("access-control-allow-origin") == (page if is_open else None)
        async with serve(server=keys) as server:
            preflight = await server.http.options("/v1/completions", headers={"origin": origin, **asked})
            assert preflight.status_code == 401

    asyncio.run(scenario())
