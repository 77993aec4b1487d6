"""OpenTelemetry traces of requests, for `server.otlp_traces_endpoint`.

A POST request has one span in the ingress, which continues the client's trace (its header `traceparent`). Each choice
adds the spans `queue`, `prefill` and `decode` below it, from the times that the engine reports with its last output.
So engines need no tracing of their own, and without an endpoint nothing is recorded.

Attributes have OpenTelemetry's names for HTTP and generative AI where they exist, vLLM's for the request id, and else
begin with `specray.`. Texts and keys are never part of a trace.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from importlib import import_module

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specray.errors import ConfigError
from specray.outputs import FinishReason, RequestOutput
from specray.server.choices import PreparedPrompt

SERVICE = "specray"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
MAX_ID_LENGTH = 128  # of X-Request-Id
OPERATIONS = {"/v1/completions": "text_completion", "/generate": "text_completion"}  # by route; else "chat"

Attribute = str | int | float | Sequence[str]


def check_exporter(endpoint: str | None) -> None:
    """ConfigError if traces are to be sent to `endpoint` and the package that sends them is missing."""
    if endpoint is None:
        return
    try:
        import_module(EXPORTER)
    except ImportError as error:
        raise ConfigError(
            f"server.otlp_traces_endpoint={endpoint!r} needs OpenTelemetry's OTLP exporter ({error}); install "
            "specray[otel], or leave the option out"
        ) from None


def exporting_to(endpoint: str) -> TracerProvider:
    """A provider that sends spans in batches, from a thread of its own. OTEL_* variables apply, as for any program."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Tracer:
    """Makes the traces of one ingress replica."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, headers: Headers) -> "RequestTrace":
        """Begin the trace of a request with these headers."""
        parent = self._propagator.extract(headers)
        return RequestTrace(self._tracer, self._tracer.start_span("POST", parent, SpanKind.SERVER))

    def close(self) -> None:
        """Send what is left. Waits for the collector, up to its timeout."""
        self._provider.shutdown()


class RequestTrace:
    """The spans of one HTTP request."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span)
        self._finish_reasons: list[str] = []
        self._num_output_tokens = 0

    @property
    def is_recorded(self) -> bool:
        """Whether the trace was sampled."""
        return self._span.is_recording()

    def describe(self, model: str, response_id: str, prompts: Sequence[PreparedPrompt]) -> None:
        """Add what is known once a request is prepared."""
        params = prompts[0].params
        attributes: dict[str, Attribute | None] = {
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": response_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.choice.count": sum(prompt.params.n for prompt in prompts),
            "gen_ai.usage.input_tokens": sum(len(prompt.token_ids) for prompt in prompts),
        }
        self._span.set_attributes(_without_none(attributes))

    def add_choice(self, output: RequestOutput) -> None:
        """Add the spans of a choice from its last output, whose usage is that of all engines that worked on it."""
        times, usage = output.times, output.usage
        assert times is not None
        assert output.finish_reason is not None
        self._finish_reasons.append(output.finish_reason.value)
        self._num_output_tokens += usage.num_completion_tokens
        name: dict[str, Attribute] = {"gen_ai.request.id": output.request_id}
        self._add("queue", times.arrived, times.started or times.ended, name)
        if times.started is None:
            return
        prompt: dict[str, Attribute] = {
            "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
        }
        self._add("prefill", times.started, times.first_token or times.ended, name | prompt)
        if times.first_token is None:
            return
        steps = usage.num_verify_steps
        decoded: dict[str, Attribute | None] = {
            "gen_ai.usage.output_tokens": usage.num_completion_tokens,
            "gen_ai.response.finish_reasons": [output.finish_reason.value],
            "specray.num_steps": steps,
            "specray.num_draft_tokens": usage.num_draft_tokens,
            "specray.num_accepted_tokens": usage.num_accepted,
            "specray.accept_length": (usage.num_accepted + steps) / steps if steps else None,
            "specray.num_preemptions": usage.num_preemptions,
        }
        self._add("decode", times.first_token, times.ended, name | _without_none(decoded))

    def fail(self, error: BaseException) -> None:
        """Record why the reply ends before it is complete."""
        self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))

    def end(self, route: str, status: int | None, request_id: str | None) -> None:
        """End the request's span. `status` is None if the client left before the reply."""
        attributes: dict[str, Attribute | None] = {
            "http.request.method": "POST",
            "http.route": route,
            "http.response.status_code": status,
            "gen_ai.operation.name": OPERATIONS.get(route, "chat"),
        }
        if request_id is not None:
            attributes["http.request.header.x-request-id"] = [request_id[:MAX_ID_LENGTH]]
        if self._finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = self._finish_reasons
            attributes["gen_ai.usage.output_tokens"] = self._num_output_tokens
        self._span.update_name(f"POST {route}")
        self._span.set_attributes(_without_none(attributes))
        if status is None:
            self._span.set_status(Status(StatusCode.ERROR, "the client left before the reply"))
        elif status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def _add(self, name: str, start_ns: int, end_ns: int, attributes: dict[str, Attribute]) -> None:
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=start_ns)
        if attributes.get("gen_ai.response.finish_reasons") == [FinishReason.ERROR.value]:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)


# That of the request that is being handled; None: it is not recorded.
CURRENT_TRACE: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)


class TraceRequests:
    """Middleware around all others: a trace for each POST request, refused ones included."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        status: int | None = None

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        headers = Headers(scope=scope)
        request_trace = self._tracer.start(headers)
        token = CURRENT_TRACE.set(request_trace if request_trace.is_recorded else None)
        try:
            await self.app(scope, receive, watched_send)
        finally:
            CURRENT_TRACE.reset(token)
            route = getattr(scope.get("route"), "path", "unknown")  # of FastAPI; unknown paths have none
            request_trace.end(route, status, headers.get("x-request-id"))


def _without_none(attributes: dict[str, Attribute | None]) -> dict[str, Attribute]:
    return {name: value for name, value in attributes.items() if value is not None}
