"""The trace of the request that is being handled, for code that runs with and without OpenTelemetry's packages.

`tracing` makes traces, and is imported only if they are wanted.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from importlib import import_module
from typing import Protocol

from specray.errors import ConfigError
from specray.outputs import RequestOutput
from specray.server.choices import PreparedPrompt

PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


class Trace(Protocol):
    """See `tracing.RequestTrace`."""

    def describe(self, model: str, response_id: str, prompts: Sequence[PreparedPrompt]) -> None: ...

    def add_choice(self, output: RequestOutput) -> None: ...

    def fail(self, error: BaseException) -> None: ...


CURRENT_TRACE: ContextVar[Trace | None] = ContextVar("current_trace", default=None)  # None: it is not recorded


def check_tracing_packages(endpoint: str | None) -> None:
    """ConfigError if traces are to be sent to `endpoint` and a package for it is missing."""
    for module in PACKAGES if endpoint is not None else ():
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"server.otlp_traces_endpoint={endpoint!r} needs OpenTelemetry's SDK and its OTLP exporter ({error}); "
                "install specray[otel], or leave the option out"
            ) from None
