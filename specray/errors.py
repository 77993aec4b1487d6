"""Errors that callers can act on, with their HTTP status. Messages contain the value, the reason and the fix."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple


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


class Overflow(NamedTuple):
    """Tokens of a request that needs more than a server allows."""

    num_prompt_tokens: int  # a lower bound
    max_tokens: int
    max_length: int  # limit of prompt and output together


class ContextLengthError(InvalidRequestError):
    """A prompt that does not fit, alone or with the output that is asked for.

    Agents recognize the code, or the first words of the message, and shorten the conversation.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, param: str | None = None, overflow: Overflow | None = None) -> None:
        super().__init__(message, param)
        self.overflow = overflow

    @classmethod
    def of(cls, overflow: Overflow) -> "ContextLengthError":
        num_prompt, max_tokens, max_length = overflow
        message = (
            f"This model's maximum context length is {max_length} tokens. However, you requested "
            f"{num_prompt + max_tokens} tokens ({num_prompt} in the prompt, {max_tokens} as max_tokens); "
            "shorten the prompt or lower max_tokens"
        )
        return cls(message, "prompt" if num_prompt >= max_length else "max_tokens", overflow)


class QueueFullError(SpecRayError):
    """The waiting queue is full; the request was not accepted and can be sent again."""

    status = 429


class PoisonRequestError(SpecRayError):
    """Engines have stopped while they computed this request; no other one gets it."""

    code = "poison_request"


class EngineDeadError(SpecRayError):
    """The engine has stopped because a rank died or the step loop failed."""

    status = 503


def is_fault(error: BaseException) -> bool:
    """Whether it is a fault of a library or of ours: an Exception, or a panic of a Rust library, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name: "; did you mean X?", or empty if none of `known` is similar."""
    close = get_close_matches(name, known, 1, cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Names for a message: the first `most`, and an ellipsis if there are more."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
