"""The HTTP API over a real engine and scripted ranks: event order, errors, cancellation, metrics."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import specray.server.routing.router_pool
from specray.errors import EngineDeadError
from specray.metrics import METRICS
from tests.support.scripted_server import TEXT, Serve, Server

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 11}
LONG = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}


def data_lines(text: str) -> list[Any]:
    assert all(line == "" or line.startswith("data: ") for line in text.split("\n"))
    bodies = [line.removeprefix("data: ") for line in text.split("\n") if line]
    return [body if body == "[DONE]" else json.loads(body) for body in bodies]


def assert_error(response: httpx.Response, status: int, **fields: Any) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert {name: error[name] for name in fields} == fields
    assert "/" not in error["message"].replace("Content-Type: application/json", "") or status in (404, 405)


def test_chat_stream_events_are_in_openais_order(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            body = CHAT | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
            reply = await server.http.post("/v1/chat/completions", json=body)
            assert reply.headers["content-type"].startswith("text/event-stream")
            *chunks, done = data_lines(reply.text)
            assert done == "[DONE]"
            assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"], c["seed"]) for c in chunks}) == 1
            assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
            assert [c["choices"][0]["delta"]["role"] for c in chunks[:2]] == ["assistant", "assistant"]
            assert all("role" not in c["choices"][0]["delta"] for c in chunks[2:-1])
            finishes = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["finish_reason"]]
            assert sorted(choice["index"] for choice in finishes) == [0, 1]
            assert all(choice["delta"] == {} and choice["finish_reason"] == "length" for choice in finishes)
            assert all(c["usage"] is None for c in chunks[:-1])
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"]["completion_tokens"] == 80

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", CHAT | {"stop": ["fox, é 🎉"]}),
        ("/v1/completions", {"prompt": ["a", "bc"], "n": 2, "max_tokens": 26, "logprobs": 1}),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 23}),
    ],
)
def test_concatenated_chunks_equal_the_complete_reply(serve: Serve, path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(disable_radix_cache=True) as server:
            whole = (await server.http.post(path, json=body)).json()
            extra = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = data_lines((await server.http.post(path, json=body | extra)).text)[:-1]
            assert chunks[-1]["usage"] == whole["usage"]
            for choice in whole["choices"]:
                parts = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
                assert joined_text(parts) == choice.get("text", choice.get("message", {}).get("content"))
                assert joined_logprobs(parts) == choice["logprobs"]
                assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]]
                assert "\ufffd" not in joined_text(parts)[:20]

    asyncio.run(scenario())


def joined_text(parts: list[Any]) -> str:
    return "".join(p["text"] if "text" in p else p["delta"].get("content", "") for p in parts)


def joined_logprobs(parts: list[Any]) -> Any:
    joined: dict[str, Any] | None = None
    for logprobs in (p["logprobs"] for p in parts if p["logprobs"] is not None):
        joined = {k: (joined or {}).get(k, []) + v if isinstance(v, list) else v for k, v in logprobs.items()}
    return joined


def test_usage_counts_a_prompt_once_and_reports_speculation(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            reply = (await server.http.post("/v1/completions", json={"prompt": "abcd", "n": 2, "max_tokens": 9})).json()
            usage = reply["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 18, 22)
            assert usage["completion_tokens_details"] == {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 8,
                "rejected_prediction_tokens": 0,
            }
            assert usage["speculative"] == {  # two steps per choice after its first token
                "verify_steps": 4,
                "draft_tokens": 8,
                "accepted_tokens": 8,
                "accept_length": 3.0,
                "accept_histogram": [0, 0, 4],
                "acceptance_per_depth": [1.0, 1.0],
                "undrafted_steps": {},
                "lossy": False,
            }

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"])
def test_seed_minus_one_is_a_random_seed_that_the_reply_reports(serve: Serve, path: str) -> None:
    body: dict[str, Any] = {
        "/v1/chat/completions": {"messages": CHAT["messages"], "seed": -1},
        "/v1/completions": {"prompt": "hi", "seed": -1},
        "/v1/responses": {"input": "hi", "seed": -1, "store": False},
        "/generate": {"text": "hi", "sampling_params": {"sampling_seed": -1}},
    }[path]

    async def scenario() -> None:
        async with serve() as server:
            replies = [(await server.http.post(path, json=body)).json() for _ in range(3)]
            seeds = {reply.get("seed", reply.get("meta_info", {}).get("seed")) for reply in replies}
            assert len(seeds) == 3
            assert not seeds & {-1, None}

    asyncio.run(scenario())


def test_stop_reason_names_what_the_request_stops_at_and_not_the_end_token(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            end, dot = server.ranks.tokenizer.eos_token_id, server.ranks.tokenizer.encode(".")[0]
            server.ranks.script = [*server.ranks.tokenizer.encode("One. "), end]
            for stop_token_ids, stop_reason, matched in (([dot], dot, dot), ([], None, end), ([end], end, end)):
                body = {"max_tokens": 9, "stop_token_ids": stop_token_ids}
                chat = CHAT | body
                for path, request in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "a"} | body)):
                    [choice] = (await server.http.post(path, json=request)).json()["choices"]
                    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_reason)
                own = {"max_new_tokens": 9, "stop_token_ids": stop_token_ids}
                reply = (await server.http.post("/generate", json={"text": "a", "sampling_params": own})).json()
                assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}

    asyncio.run(scenario())


@pytest.mark.parametrize("option", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_stop_token_is_part_of_the_text_on_request(serve: Serve, option: str) -> None:
    async def scenario() -> None:
        async with serve() as server:
            server.ranks.script = server.ranks.tokenizer.encode("One. Two.")
            body = {"prompt": "a", "max_tokens": 9, "stop_token_ids": server.ranks.tokenizer.encode("."), option: True}
            [choice] = (await server.http.post("/v1/completions", json=body)).json()["choices"]
            assert choice["text"] == "One."

    asyncio.run(scenario())


def test_seeds_are_returned_and_the_fingerprint_is_stable(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            body = CHAT | {"n": 2}
            first, second = [(await server.http.post("/v1/chat/completions", json=body)).json() for _ in range(2)]
            assert first["seed"] == second["seed"] == first["choices"][0]["seed"] == 11
            assert first["choices"][1]["seed"] not in (11, None)
            assert first["system_fingerprint"] == second["system_fingerprint"]
            unseeded = (await server.http.post("/v1/completions", json={"prompt": "a"})).json()
            assert isinstance(unseeded["seed"], int)

    asyncio.run(scenario())


def test_logprobs_are_finite_and_have_text_and_bytes(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            body = CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 24}
            choice = (await server.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
            content = choice["logprobs"]["content"]
            assert len(content) == 24
            assert bytes(b for entry in content for b in entry["bytes"]).decode("utf-8", "ignore") == TEXT[:23]
            assert [len(entry["top_logprobs"]) for entry in content] == [2] * 24
            assert min(top["logprob"] for entry in content for top in entry["top_logprobs"]) == -9999.0

    asyncio.run(scenario())


def test_generate_replies_have_sglangs_shape(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            body = {"text": "a", "sampling_params": {"max_new_tokens": 9, "stop": ["brown"]}, "return_logprob": True}
            reply = (await server.http.post("/generate", json=body)).json()
            assert reply["text"] == TEXT[:9]
            meta = reply["meta_info"]
            assert meta["finish_reason"] == {"type": "length", "length": 9}
            assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
            events = data_lines((await server.http.post("/generate", json=body | {"stream": True})).text)
            assert events[-1] == "[DONE]"
            assert events[-2]["text"] == reply["text"]
            batch = (await server.http.post("/generate", json={"text": ["a", "b"]})).json()
            assert len(batch) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("served", [None, "tiny"])
def test_a_request_may_use_any_name_of_the_model(serve: Serve, served: str | None) -> None:
    async def scenario() -> None:
        async with serve(server={"served_model_name": served}) as server:
            name = (await server.http.get("/v1/models")).json()["data"][0]["id"]
            assert served in (None, name)
            path = (await server.http.get("/get_model_info")).json()["model_path"]
            for asked in (name, path, "default", None):
                reply = await server.http.post("/v1/completions", json={"prompt": "a", "model": asked})
                assert reply.status_code == 200, reply.text
                assert reply.json()["model"] == name

    asyncio.run(scenario())


def test_several_names_are_served_and_the_first_is_shown(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(server={"served_model_name": ["one", "two"]}) as server:
            models = (await server.http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in models] == ["one", "two"]
            assert {model["root"] for model in models} == {"toy"}
            for name in ("one", "two"):
                reply = await server.http.post("/v1/completions", json={"prompt": "a", "model": name})
                assert (reply.status_code, reply.json()["model"]) == (200, "one")

    asyncio.run(scenario())


def test_any_model_name_is_answered_with_the_option(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(server={"any_model_name": True}) as server:
            for path, body in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"})):
                assert (await server.http.post(path, json=body | {"model": "gpt-4"})).status_code == 200
        async with serve() as server:
            refused = await server.http.post("/generate", json={"text": "a", "model": "gpt-4"})
            assert_error(refused, 404, code="model_not_found")

    asyncio.run(scenario())


def test_openapi_names_the_content_types_that_are_sent(serve: Serve) -> None:
    generating = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "a"}, "/generate": {"text": "a"}}

    async def scenario() -> None:
        async with serve() as server:
            paths = (await server.http.get("/openapi.json")).json()["paths"]
            for path, body in generating.items():
                declared = paths[path]["post"]["responses"]["200"]["content"]
                for stream in (False, True):
                    reply = await server.http.post(path, json=body | {"stream": stream})
                    assert reply.headers["content-type"].partition(";")[0] in declared
            for path in ("/metrics", "/health", "/load", "/v1/models"):
                declared = paths[path]["get"]["responses"]["200"]["content"]
                assert list(declared) == [(await server.http.get(path)).headers["content-type"].partition(";")[0]]

    asyncio.run(scenario())


def test_the_load_is_the_number_of_requests(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as server:
            assert (await server.http.get("/load")).json() == {"server_load": 0}
            running = [asyncio.create_task(server.http.post("/v1/completions", json=LONG)) for _ in range(2)]
            loads = set()
            while not all(task.done() for task in running):
                loads.add((await server.http.get("/load")).json()["server_load"])
            assert 2 in loads

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "fields"),
    [
        ("GET", "/nothing", {}, 404, {"code": "not_found"}),
        ("GET", "/v1/models/other", {}, 404, {"code": "model_not_found", "param": "model"}),
        ("POST", "/v1/completions", {"json": {"prompt": "a", "model": "other"}}, 404, {"code": "model_not_found"}),
        ("GET", "/v1/completions", {}, 405, {"code": "method_not_allowed"}),
        ("POST", "/v1/completions", {"json": {"prompt": "a", "temperature": -1}}, 400, {"param": "temperature"}),
        ("POST", "/v1/completions", {"json": {"prompt": "a", "logit_bias": {"9999": 1}}}, 400, {"param": "logit_bias"}),
        ("POST", "/v1/completions", {"json": {"prompt": "a", "logit_bias": {"1": 5, "01": 3}}}, 400, {}),
        ("POST", "/v1/completions", {"json": {"prompt": "a", "logit_bias": {"\u0661": 5}}}, 400, {}),
        ("POST", "/v1/completions", {"json": {"prompt": [300]}}, 400, {"param": "prompt"}),
        ("POST", "/v1/completions", {"json": {"prompt": "a", "max_tokens": 5000}}, 400, {"param": "max_tokens"}),
        ("POST", "/v1/completions", {"json": {"prompt": ""}}, 400, {"param": "prompt"}),
        ("POST", "/v1/completions", {"json": ["prompt"]}, 400, {"param": None}),
        ("POST", "/v1/completions", {"content": b"{}"}, 400, {"param": None}),
        ("POST", "/v1/completions", {"json": {"prompt": "a" * 5000}}, 413, {"code": "body_too_large"}),
    ],
)
def test_errors_have_openais_shape(
    serve: Serve, method: str, path: str, options: dict[str, Any], status: int, fields: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with serve(server={"max_body_bytes": 4096}) as server:
            assert_error(await server.http.request(method, path, **options), status, **fields)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt":', "JSON"),
        (b"[" * 3000, "nested too deeply"),
        (b'{"prompt":"\\ud800"}', "unpaired surrogate"),
        (b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", "too many digits"),
        (b"\xff\xfe", "JSON"),
        (b'{"prompt":"\xff"}', "not text in UTF-8"),
        (gzip.compress(b'{"prompt":"a"}', mtime=0), "without compression"),
    ],
)
def test_malformed_bodies_are_400_with_a_reason(serve: Serve, body: bytes, reason: str) -> None:
    async def scenario() -> None:
        async with serve() as server:
            headers = {"content-type": "application/json"}
            reply = await server.http.post("/v1/completions", content=body, headers=headers)
            assert_error(reply, 400)
            assert reason in reply.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_chunked_body_is_read_up_to_the_limit(serve: Serve) -> None:
    sent = []

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            sent.append(1)
            yield b"x" * 1024

    async def scenario() -> None:
        async with serve(server={"max_body_bytes": 4096}) as server:
            assert_error(await server.http.post("/v1/completions", content=endless()), 413)

    asyncio.run(scenario())
    assert len(sent) <= 6


def test_unknown_fields_are_listed_in_a_header(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            reply = await server.http.post("/v1/completions", json={"prompt": "a", "user": "x", "né\r\nw": 1})
            assert reply.headers["x-specray-ignored-fields"] == "user, n\\xe9\\r\\nw"

    asyncio.run(scenario())


def test_503_until_a_router_is_connected(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specray.server.routing.router_pool, "OPENING_S", 0.1)

    async def scenario() -> None:
        async with serve(connect=False) as server:
            for reply in (
                await server.http.get("/health"),
                await server.http.post("/v1/chat/completions", json=CHAT),
                await server.http.post("/generate", json={"text": "a"}),
            ):
                assert_error(reply, 503)
                assert int(reply.headers["retry-after"]) > 0
            assert (await server.http.get("/v1/models")).status_code == 200
            server.router_pool.start()
            await server.until(lambda: server.router_pool.info is not None)
            assert (await server.http.get("/health")).status_code == 200

    asyncio.run(scenario())


def test_a_full_queue_is_429_and_admits_no_choice(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02, max_running_requests=1, max_queued_requests=1) as server:
            first = asyncio.create_task(server.http.post("/v1/completions", json=LONG | {"max_tokens": 60}))
            await server.until(lambda: server.ranks.num_steps > 0)
            refused = await server.http.post("/v1/completions", json=LONG | {"n": 4})
            assert_error(refused, 429, code="queue_full")
            assert refused.headers["retry-after"] == "1"
            assert (await first).status_code == 200
            assert (await server.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_is_504_and_aborts_the_request(serve: Serve, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02, server={"request_timeout_s": 0.2}) as server:
            reply = await server.http.post("/v1/completions", json=LONG | {"stream": stream, "timeout": 500.0})
            if stream:
                assert data_lines(reply.text)[-1]["error"]["code"] == "timeout"
            else:
                assert_error(reply, 504, code="timeout")
            await assert_idle(server)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_the_request_within_two_steps(serve: Serve, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.2) as server:
            request = asyncio.create_task(server.http.post("/v1/completions", json=LONG | {"stream": stream}))
            await server.until(lambda: server.ranks.num_steps > 2)
            request.cancel()
            before = server.ranks.num_steps
            await asyncio.sleep(1.0)
            assert server.ranks.num_steps - before <= 2
            await assert_idle(server)

    asyncio.run(scenario())


async def assert_idle(server: Server) -> None:
    scheduler = server.router._engine._engine.scheduler
    await server.until(lambda: not scheduler.running and not scheduler.waiting)
    await server.until(lambda: scheduler.pool.num_free + scheduler.cache.num_cached == scheduler.pool.num_usable)
    await server.until(lambda: server.router._connections.num_requests == 0)


def test_a_dead_engine_ends_every_request_with_an_error(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02, server={"failover_s": 0.3}) as server:
            posts = [server.http.post("/v1/completions", json=LONG | {"stream": s}) for s in (False, True)]
            replies = asyncio.gather(*posts)
            await server.until(lambda: server.ranks.num_steps > 2)
            server.ranks.broken = "rank 1 died in /secret/place"
            whole, stream = await replies
            assert_error(whole, 503, code="service_unavailable")
            last = data_lines(stream.text)[-1]
            assert last["error"]["code"] == "service_unavailable"
            assert "secret" not in whole.text + stream.text
            assert_error(await server.http.get("/health"), 503)
            with pytest.raises(EngineDeadError, match="rank 1 died"):
                await server.router.check_health()
            await server.until(lambda: server.exit_statuses == [1])

    asyncio.run(scenario())


def test_requests_of_an_ingress_without_a_lease_are_aborted(serve: Serve) -> None:
    async def scenario() -> None:
        options = {"lease_s": 1.0, "metrics_interval_s": 0.1}
        async with serve(step_s=0.05, server=options) as server:
            request = asyncio.create_task(server.http.post("/v1/completions", json=LONG))
            await server.until(lambda: server.ranks.num_steps > 2)
            await server.router_pool.close()
            await assert_idle(server)
            request.cancel()

    asyncio.run(scenario())


def test_metrics_are_valid_and_agree_with_usage(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            body = {"prompt": "abc", "max_tokens": 30}
            usage = (await server.http.post("/v1/completions", json=body)).json()["usage"]
            text = (await server.http.get("/metrics")).text
            found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            samples = {sample.name: sample.value for sample in found if set(sample.labels) == {"replica"}}
            assert samples["specray_generation_tokens_total"] == usage["completion_tokens"] == 30
            assert samples["specray_prompt_tokens_total"] == 3
            assert samples["specray_verify_steps_total"] == usage["speculative"]["verify_steps"]
            assert samples["specray_e2e_request_latency_seconds_count"] == 1
            names = {family.name for family in text_string_to_metric_families(text)}
            assert names == {metric.name.removesuffix("_total") for metric in METRICS}

    asyncio.run(scenario())


def test_server_info_reports_options_and_state(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(page_size=8) as server:
            info = (await server.http.get("/server_info")).json()
            assert (info["page_size"], info["speculative_algorithm"], info["max_total_num_tokens"]) == (8, None, 512)
            assert info["draft_mps"] == "off"
            model = (await server.http.get("/get_model_info")).json()
            assert (model["model_path"], model["is_generation"]) == ("toy", True)
            assert not info["server"].keys() & {"api_key_file", "admin_key_file", "request_log", "request_log_tenants"}

    asyncio.run(scenario())


def test_the_schema_is_published(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            schema = (await server.http.get("/openapi.json")).json()
            for path, methods in schema["paths"].items():
                for operation in methods.values():
                    assert {"200", "4XX", "5XX"} == operation["responses"].keys(), path
            assert {"/v1/chat/completions", "/v1/completions", "/generate", "/health"} <= set(schema["paths"])
            for path in ("/docs", "/redoc"):  # these pages would load scripts from elsewhere
                assert (await server.http.get(path)).status_code == 404

    asyncio.run(scenario())
