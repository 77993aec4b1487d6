"""What gpt-oss's chat template expects, where it differs from other templates.

It shows one call of a message, takes a result as that of the last call, and has instructions in the first message only.
It drops the reasoning before an answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specray.errors import InvalidRequestError

Json = dict[str, Any]

_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}  # the nearest ones that the model knows


def as_turns(messages: Sequence[Json]) -> Iterator[Json]:
    """`messages` with one call in each, and its results behind it."""
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        if "tool_calls" not in message:
            yield message
            continue
        results: list[Json] = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        # Beside a call, the template refuses both.
        reasoning = "\n".join(filter(None, (message.get("reasoning_content"), message["content"])))
        for call in message["tool_calls"]:
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            yield turn | ({"reasoning_content": reasoning} if reasoning else {})
            yield from (result for result in results if result["tool_call_id"] == call["id"])
            results = [result for result in results if result["tool_call_id"] != call["id"]]
            reasoning = ""
        yield from results


def template_variables(variables: Mapping[str, Any]) -> Json:
    """The request's variables. InvalidRequestError for an effort that the model does not have."""
    effort = variables.get("reasoning_effort")
    if effort == "none":
        raise InvalidRequestError(
            "reasoning_effort='none': this model always reasons; send low, medium or high", "reasoning_effort"
        )
    return dict(variables) | ({"reasoning_effort": _EFFORTS[effort]} if effort in _EFFORTS else {})
