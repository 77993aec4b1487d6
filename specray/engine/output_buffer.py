"""Collects the outputs of several steps into one delivery.

Between the step loop and a client lie several processes, each of which spends more on a message than on its tokens. At
hundreds of steps per second they would take the cores that the next step needs.
"""

from collections.abc import Callable, Iterable

from specray.outputs import RequestOutput, merge_outputs


class OutputBuffer:
    """Holds outputs for at most `interval_s` seconds. A request's first token and its end are never held."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._held: dict[str, RequestOutput] = {}  # by request ID, in order of arrival
        self._due = clock()

    def add(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Add a step's outputs. Returns what is to be delivered now: everything held, or nothing."""
        is_urgent = False
        for output in outputs:
            held = self._held.get(output.request_id)
            self._held[output.request_id] = output if held is None else merge_outputs(held, output)
            is_urgent |= output.finish_reason is not None or _has_first_token(output)
        if not self._held or not (is_urgent or self._clock() >= self._due):
            return []
        self._due = self._clock() + self._interval_s
        ready, self._held = list(self._held.values()), {}
        return ready


def _has_first_token(output: RequestOutput) -> bool:
    return 0 < output.usage.num_completion_tokens == len(output.token_ids)
