"""Errors that callers can act on, with their HTTP status. Messages contain the value, the reason and the fix."""


class SpecRayError(Exception):
    """Base class; `status` is the HTTP status of the reply."""

    status = 500


class ConfigError(SpecRayError, ValueError):
    """An invalid configuration; raised when it is loaded."""


class InvalidRequestError(SpecRayError, ValueError):
    """A request that can never be served; `param` is the invalid field, if there is one."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(SpecRayError):
    """The waiting queue is full; the request was not accepted and can be sent again."""

    status = 429


class PoisonRequestError(SpecRayError):
    """Engines have stopped while they computed this request; no other one gets it."""

    code = "poison_request"


class EngineDeadError(SpecRayError):
    """The engine has stopped because a rank died or the step loop failed."""

    status = 503
