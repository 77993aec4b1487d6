"""Errors a caller can act on. Each message says the value seen, why it cannot work, and the fix.

What lives here: the classes and the HTTP status each means. Not here: any formatting for a wire.
"""


class SpecRayError(Exception):
    """Base of all named errors; `status` is the HTTP status a server answers with."""

    status = 500


class ConfigError(SpecRayError, ValueError):
    """A configuration that cannot work; raised at load, before anything starts."""


class InvalidRequestError(SpecRayError, ValueError):
    """A request that can never be served; `param` names the field at fault, where one is."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(SpecRayError):
    """The waiting queue is at its limit; the request was not accepted and may be sent again."""

    status = 429


class EngineDeadError(SpecRayError):
    """The engine stopped (a rank died or the step loop failed); no request can be served."""

    status = 503
