"""Errors in the shape of Anthropic's API, for the routes below `PREFIX`."""

from typing import Any

from starlette.types import Scope

from specray.errors import Overflow

PREFIX = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# The tool runner of Anthropic's SDK reads this, and then sends whole conversations instead of the ID of a stored one.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def is_anthropic_route(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")).startswith(PREFIX)


def anthropic_error(status: int, message: str, param: str | None, overflow: Overflow | None) -> dict[str, Any]:
    """The body of an error reply, also the data of an error event. `param` is the field at fault."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if overflow is not None:
        message = _overflow_message(overflow)
    details = {"details": _NO_THREADS} if param == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": None}


def _overflow_message(overflow: Overflow) -> str:
    """Anthropic's wording: Claude Code recognizes it and shortens the conversation or lowers max_tokens."""
    num_prompt, max_tokens, max_length = overflow
    if num_prompt >= max_length:
        return f"prompt is too long: {num_prompt} tokens > {max_length} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt} + {max_tokens} > {max_length}, decrease "
        "input length or `max_tokens` and try again"
    )
