"""Outputs of several steps as one delivery."""

from specray.engine.async_engine import OutputBuffer
from specray.outputs import FinishReason, RequestOutput, RequestUsage, TokenLogprob

INTERVAL_S = 0.02


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def output(request_id: str, tokens: list[int], so_far: int, end: FinishReason | None = None) -> RequestOutput:
    """Output of a request that has `so_far` tokens with this one."""
    logprobs = [TokenLogprob(token, -1.0, []) for token in tokens]
    text = "".join(map(str, tokens))
    return RequestOutput(request_id, tokens, text, logprobs, end, None, None, RequestUsage(3, 0, so_far, 0, 0, 0, 0))


def test_first_tokens_and_ends_are_delivered_at_once() -> None:
    buffer = OutputBuffer(INTERVAL_S, Clock())
    first, end = output("a", [1, 2], 2), output("a", [3], 3, FinishReason.LENGTH)
    assert buffer.add([first]) == [first]
    assert buffer.add([end]) == [end]
    assert buffer.add([]) == []


def test_other_tokens_are_held_for_the_interval_and_merged() -> None:
    clock = Clock()
    buffer = OutputBuffer(INTERVAL_S, clock)
    buffer.add([output("a", [1], 1)])
    assert buffer.add([output("a", [2, 3], 3)]) == []
    clock.now += INTERVAL_S / 2
    assert buffer.add([output("a", [4], 4)]) == []
    clock.now += INTERVAL_S
    assert buffer.add([output("a", [5], 5)]) == [output("a", [2, 3, 4, 5], 5)]


def test_what_is_held_leaves_with_an_end_of_another_request() -> None:
    buffer = OutputBuffer(INTERVAL_S, Clock())
    buffer.add([output("a", [1], 1), output("b", [7], 1)])
    assert buffer.add([output("a", [2], 2), output("b", [8], 2)]) == []
    end = output("b", [9], 3, FinishReason.STOP)
    assert buffer.add([end]) == [output("a", [2], 2), output("b", [8, 9], 3, FinishReason.STOP)]


def test_an_interval_of_zero_delivers_every_step() -> None:
    buffer = OutputBuffer(0.0, Clock())
    for count in range(1, 4):
        assert buffer.add([output("a", [count], count)]) == [output("a", [count], count)]
