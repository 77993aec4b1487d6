"""The trace of the request that is being handled. `tracing` makes traces, and is imported only if they are wanted."""

from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING

from specray.errors import ConfigError

if TYPE_CHECKING:
    from cluster.api.tracing import RequestTrace, Tracer

CURRENT_TRACE: ContextVar["RequestTrace | None"] = ContextVar("current_trace", default=None)
PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


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


def make_tracer(endpoint: str | None) -> "Tracer | None":
    """The tracer of an ingress replica; None without an endpoint. ConfigError if a package is missing."""
    if endpoint is None:
        return None
    check_tracing_packages(endpoint)
    from cluster.api.tracing import Tracer, exporting_to

    return Tracer(exporting_to(endpoint))
