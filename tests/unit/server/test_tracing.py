"""Traces: their spans, what becomes part of them, and the way to a collector."""

import asyncio
import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import specray.server.service
from cluster.cli import serve
from specray.engine.engine_request import EngineRequest
from specray.outputs import RequestTimes
from specray.sampling_params import SamplingParams
from specray.server.monitoring.tracing import EXPORTER, Tracer
from tests.support.scripted_server import Serve, Server
from tests.support.serve_file import SERVE_CONFIG

ENDPOINT = "http://127.0.0.1:4318/v1/traces"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 20, "seed": 1}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What the servers of this test export."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(specray.server.service, "make_tracer", lambda _: Tracer(provider))
    return exporter


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def traceparent(flags: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}", "x-request-id": "mine-1"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_continues_the_clients_trace(serve: Serve, spans: InMemorySpanExporter, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(speculative={"algorithm": "NGRAM"}) as server:
            reply = await server.http.post(
                "/v1/chat/completions", json=CHAT | {"stream": stream}, headers=traceparent("01")
            )
            assert reply.status_code == 200

    asyncio.run(scenario())
    [request] = named(spans, "POST /v1/chat/completions")
    [queue], [prefill], [decode] = (named(spans, name) for name in ("queue", "prefill", "decode"))
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT_ID
    for span in (queue, prefill, decode):
        assert span.parent == request.context
    moments = [queue.start_time, queue.end_time, prefill.start_time, prefill.end_time, decode.start_time]
    assert moments[1] == moments[2]
    assert moments[3] == moments[4]
    ordered = [request.start_time, *moments, decode.end_time, request.end_time]
    assert ordered == sorted(ordered)
    attributes = dict(request.attributes or {})
    assert attributes["http.response.status_code"] == 200
    assert attributes["http.request.header.x-request-id"] == ("mine-1",)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.usage.output_tokens"] == 20
    assert attributes["gen_ai.request.max_tokens"] == 20
    decoded = dict(decode.attributes or {})
    assert str(decoded["gen_ai.request.id"]).startswith(str(attributes["gen_ai.response.id"]))
    # Two drafts of each tree are accepted: 20 tokens are 3 of the prompt's step, and 6 steps of up to 3.
    assert decoded["specray.num_steps"] == 6
    assert decoded["specray.num_draft_tokens"] >= decoded["specray.num_accepted_tokens"] > 0
    steps, accepted = decoded["specray.num_steps"], decoded["specray.num_accepted_tokens"]
    assert decoded["specray.accept_length"] == (accepted + steps) / steps
    assert "secret" not in "".join(span.to_json() for span in spans.get_finished_spans())


def test_each_choice_has_its_own_phases(serve: Serve, spans: InMemorySpanExporter) -> None:
    async def scenario() -> None:
        async with serve() as server:
            body = {"model": "toy", "prompt": ["a", "b"], "n": 2, "max_tokens": 4}
            assert (await server.http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(scenario())
    [request] = named(spans, "POST /v1/completions")
    assert (request.attributes or {})["gen_ai.usage.output_tokens"] == 16
    ids = {str((span.attributes or {})["gen_ai.request.id"])[-2:] for span in named(spans, "decode")}
    assert ids == {"-0", "-1", "-2", "-3"}


def test_refused_requests_and_probes(serve: Serve, spans: InMemorySpanExporter) -> None:
    async def scenario() -> None:
        async with serve() as server:
            assert (await server.http.get("/health")).status_code == 200
            assert (await server.http.post("/v1/completions", json={"prompt": 1.5})).status_code == 400
            assert (await server.http.post("/nowhere/secret", json={})).status_code == 404

    asyncio.run(scenario())
    refused, unknown = spans.get_finished_spans()
    assert (refused.name, (refused.attributes or {})["http.response.status_code"]) == ("POST /v1/completions", 400)
    assert (unknown.name, (unknown.attributes or {})["http.response.status_code"]) == ("POST unknown", 404)


def test_a_broken_stream_is_an_error(serve: Serve, spans: InMemorySpanExporter) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.01) as server:
            body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True, "timeout": 0.1}
            reply = await server.http.post("/v1/completions", json=body)
            assert (reply.status_code, '"error"' in reply.text) == (200, True)

    asyncio.run(scenario())
    [request] = named(spans, "POST /v1/completions")
    assert request.status.status_code is StatusCode.ERROR


def test_unsampled_requests_cost_the_engine_nothing(
    serve: Serve, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def scenario() -> None:
        async with serve() as server:
            submit = server.router_pool.submit

            async def seen(requests: list[EngineRequest], *rest: Any) -> Any:
                asked.extend(request.reports_times for request in requests)
                return await submit(requests, *rest)

            monkeypatch.setattr(server.router_pool, "submit", seen)
            for flags in ("00", "01"):
                await server.http.post("/v1/chat/completions", json=CHAT, headers=traceparent(flags))

    asyncio.run(scenario())
    assert asked == [False, True]
    assert len(spans.get_finished_spans()) == 4


def test_an_engine_reports_times_only_to_those_who_ask(serve: Serve) -> None:
    async def times(server: Server, reports_times: bool) -> list[RequestTimes | None]:
        params = SamplingParams(max_tokens=5, seed=1)
        request = EngineRequest(f"r-{reports_times}", [1, 2], params, reports_times=reports_times)
        stream = await server.router_pool.submit([request], 10.0)
        return [output.times async for _, output in stream.outputs()]

    async def scenario() -> None:
        async with serve() as server:
            assert not any(await times(server, False))
            *before, last = await times(server, True)
            assert not any(before)
            assert last is not None
            moments = [moment for moment in last if moment is not None]
            assert len(moments) == len(last)
            assert moments == sorted(moments)

    asyncio.run(scenario())


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector's URL, and what it has received."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    server.server_close()


def test_spans_reach_a_collector(serve: Serve, collector: tuple[str, list[Any]]) -> None:
    pytest.importorskip(EXPORTER)
    endpoint, received = collector

    async def scenario() -> None:
        async with serve(server={"otlp_traces_endpoint": endpoint}) as server:
            await server.http.post("/v1/chat/completions", json=CHAT)
            await server.service.close()

    asyncio.run(scenario())
    [resource] = [spans for message in received for spans in message.resource_spans]
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert names == {"POST /v1/chat/completions", "queue", "prefill", "decode"}
    assert [item.value.string_value for item in resource.resource.attributes if item.key == "service.name"] == [
        "specray"
    ]


def test_check_names_the_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(SERVE_CONFIG.replace("request_timeout_s: 60", f'otlp_traces_endpoint: "{ENDPOINT}"'))
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    assert serve.check([str(file)]) == 2
    assert "install specray[otel]" in capsys.readouterr().err
