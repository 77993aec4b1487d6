"""The whole path through Ray Serve: the openai client, limits, counters, and lost processes."""

import json
import os
import signal
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specray.errors import ConfigError
from tests.cluster.conftest import LONG
from tests.support.processes import own_processes, wait_until

MESSAGES: Any = [{"role": "user", "content": "Say something, é 🎉."}]


@pytest.fixture(scope="module")
def client(app: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0)


def samples(app: Any) -> dict[str, float]:
    """Samples of a metric, summed over replicas."""
    families = text_string_to_metric_families(app.http.get("/metrics").text)
    found = Counter[str]()
    for sample in (sample for family in families for sample in family.samples):
        labels = [value for name, value in sample.labels.items() if name != "replica"]
        found["".join([sample.name, *labels])] += sample.value  # type: ignore[assignment]
    return dict(found)


def wait_until_idle(app: Any) -> None:
    """Until nothing runs, waits or holds KV blocks."""
    gauges = ("specray_num_requests_running", "specray_num_requests_waiting", "specray_kv_cache_usage_perc")
    wait_until(lambda: not any(map(samples(app).__getitem__, gauges)))


def test_stream_equals_whole(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "seed": 3, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**options, top_logprobs=2)
    texts, logprobs, finished = ["", ""], [[], []], {}  # type: ignore[var-annotated]
    usage = None
    for chunk in client.chat.completions.create(
        **options, top_logprobs=2, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += (choice.logprobs and choice.logprobs.content) or []
            if choice.finish_reason:
                finished[choice.index] = choice.finish_reason
    assert [choice.message.content for choice in whole.choices] == texts
    assert [choice.finish_reason for choice in whole.choices] == [finished[0], finished[1]]
    for choice, streamed in zip(whole.choices, logprobs, strict=True):
        assert choice.logprobs is not None
        assert [e.bytes for e in choice.logprobs.content or []] == [e.bytes for e in streamed]
        assert [e.logprob for e in choice.logprobs.content or []] == pytest.approx(
            [e.logprob for e in streamed], abs=1e-3
        )
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_trace_of_drafts_crosses_all_processes(app: Any) -> None:
    body = {"prompt": "Once", "max_tokens": 40, "seed": 3, "ignore_eos": True}
    plain = app.http.post("/v1/completions", json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}, "speculative": {"trace": True}}
    reply = app.http.post("/v1/completions", json=body | options)
    chunks = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n")[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    traces = [choice["trace"] for choice in choices if "trace" in choice]
    assert "".join(choice["text"] for choice in choices) == plain["choices"][0]["text"]
    assert "".join(token["text"] for trace in traces for token in trace["tokens"]) == plain["choices"][0]["text"]
    steps, counts = [step for trace in traces for step in trace["steps"]], chunks[-1]["usage"]["speculative"]
    assert len(steps) == 1 + counts["verify_steps"]
    in_last_step = body["max_tokens"] - steps[-1]["index"] - 1  # the end of the answer may cut what it accepted
    assert len(steps[-1]["accepted"]) >= in_last_step
    assert sum(len(step["accepted"]) for step in steps[:-1]) + in_last_step == counts["accepted_tokens"]


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (openai.BadRequestError, {"temperature": 101}),
        (openai.BadRequestError, {"n": 200}),
        (openai.BadRequestError, {"max_tokens": 100_000}),
        (openai.NotFoundError, {"model": "other"}),
    ],
)
def test_errors_map_to_the_clients_exceptions(client: openai.OpenAI, error: type[Exception], options: Any) -> None:
    with pytest.raises(error):
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | options)


def test_prompts_are_scored_by_remote_ranks(app: Any) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1}
    [choice] = app.http.post("/v1/completions", json=body).json()["choices"]
    first, *scores = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert len(scores) == len(choice["logprobs"]["tokens"]) - 1 > 0
    assert all(score < 0 for score in scores)
    assert choice["text"].endswith("Once upon a time")


def test_a_request_is_aborted_by_its_name(app: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(app.http.post, "/v1/completions", json=LONG | {"rid": "mine"})
        while not samples(app)["specray_num_requests_running"]:
            time.sleep(0.01)
        assert app.http.post("/abort_request", json={"rid": "mine"}).status_code == 200
        [choice] = running.result().json()["choices"]
    assert choice["finish_reason"] == "abort"


def test_structured_output_matches_its_schema(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 3}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "colours", "schema": schema, "strict": True}}
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "n": 4, "seed": 5}
    reply = client.chat.completions.create(**options, response_format=wanted)
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert {*json.loads(choice.message.content or "")} <= {"red", "blue"}
    wanted["json_schema"]["schema"] = schema | {"uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="'uniqueItems' is not supported"):
        client.chat.completions.create(**options, response_format=wanted)


def test_routes_and_bodies_that_are_not_served(app: Any) -> None:
    replies = {
        404: app.http.get("/v2"),
        405: app.http.get("/v1/completions"),
        413: app.http.post("/v1/completions", content=iter([b"x" * 2**20] * 3)),
    }
    for status, reply in replies.items():
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_excess_requests_get_429(app: Any) -> None:
    with ThreadPoolExecutor(12) as pool:
        body = LONG | {"max_tokens": 300}
        replies = list(pool.map(lambda _: app.http.post("/v1/completions", json=body), range(12)))
    statuses = [reply.status_code for reply in replies]
    assert set(statuses) == {200, 429}
    assert all(reply.headers["retry-after"] for reply in replies if reply.status_code == 429)
    assert len({reply.json()["choices"][0]["text"] for reply in replies if reply.status_code == 200}) == 1


@pytest.mark.parametrize("headers", [{}, {"x-request-disconnect-disabled": "1"}])
@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_its_slots_and_blocks(app: Any, stream: bool, headers: dict[str, str]) -> None:
    before = samples(app)["specray_request_finished_totalabort"] if stream is False else None
    try:
        with app.http.stream(
            "POST", "/v1/completions", json=LONG | {"stream": stream}, headers=headers, timeout=0.5
        ) as reply:
            next(reply.iter_lines())
    except httpx.ReadTimeout:
        pass
    wait_until_idle(app)
    assert samples(app)["specray_request_finished_totalabort"] > (before or 0)


def test_counters_match_the_replies(app: Any) -> None:
    wait_until_idle(app)
    before = samples(app)
    usages = [app.complete("a b a b a b", max_tokens=30, temperature=0, n=2)["usage"] for _ in range(3)]
    after = samples(app)
    pairs = {
        "specray_generation_tokens_total": lambda u: u["completion_tokens"],
        "specray_verify_steps_total": lambda u: u["speculative"]["verify_steps"],
        "specray_spec_decode_num_draft_tokens_total": lambda u: u["speculative"]["draft_tokens"],
    }
    for name, count in pairs.items():
        assert after[name] - before[name] == sum(map(count, usages)), name


def test_requests_survive_a_lost_rank(app: Any) -> None:
    """There is one engine: its requests wait for the next one and continue there."""
    expected = app.complete(**LONG)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(app.complete, **LONG)
        stream = pool.submit(app.http.post, "/v1/completions", json=LONG | {"stream": True})
        time.sleep(0.5)
        for process in own_processes("ray::TargetActor"):
            os.kill(process, signal.SIGKILL)
        assert whole.result()["choices"][0]["text"] == expected["choices"][0]["text"]
        assert whole.result()["usage"]["completion_tokens"] == LONG["max_tokens"]
        *events, done = stream.result().text.strip().split("\n\n")
        assert done == "data: [DONE]"
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
        assert "".join(texts) == expected["choices"][0]["text"]


def test_an_application_is_not_built_on_a_port_that_another_server_shares(app: Any) -> None:
    """Serve's proxy shares its port with any server that allows it, such as another Serve's."""
    from cluster.app import build
    from cluster.config import AppConfig

    port = app.http.base_url.port
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", port))
        other.listen(0)
        with pytest.raises(ConfigError, match=rf"port={port} is already used by process {os.getpid()} "):
            build(AppConfig(device="cpu"))
