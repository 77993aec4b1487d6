"""Grammars are compiled in forks that limits of CPU time, wall time and memory end."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec
from specray.structured_output import compile_check
from specray.structured_output.compile_check import CheckRequest, end_fork, serve, start_fork

SPEC = GrammarSpec("regex", "a+")
Compile = Callable[[GrammarSpec], object]


def spin(_: GrammarSpec) -> object:
    while True:
        pass


def sleep(_: GrammarSpec) -> object:
    return time.sleep(60)


def fill_memory(_: GrammarSpec) -> object:
    return [bytearray(1 << 20) for _ in range(4000)]  # more than earlier tests have freed and left to this process


def refuse(_: GrammarSpec) -> object:
    raise InvalidRequestError("the regex is wrong", "grammar")


@pytest.mark.parametrize(
    ("compile_grammar", "error"),
    [
        (lambda _: None, None),
        (refuse, "the regex is wrong"),
        (spin, "s or 128 MiB to compile"),
        (fill_memory, "s or 128 MiB to compile"),
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), "s or 128 MiB to compile"),
    ],
    ids=["fine", "malformed", "slow", "large", "crash"],
)
def test_limits_end_a_fork(compile_grammar: Compile, error: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_check, "MAX_CPU_S", 5.0 if compile_grammar is fill_memory else 0.05)
    fork = start_fork(CheckRequest(7, SPEC), compile_grammar)
    reply = end_fork(fork)
    assert reply.number == 7
    assert reply.error is None if error is None else error in str(reply.error)


def test_requests_run_at_the_same_time_until_the_input_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for something is ended by the wall clock, and does not hold up the next."""
    monkeypatch.setattr(compile_check, "MAX_S", 0.5)
    (source, requests), (replies, sink) = os.pipe(), os.pipe()
    thread = threading.Thread(target=serve, args=(source, sink, lambda spec: sleep(spec) if spec.text == "z" else None))
    thread.start()
    for number, text in enumerate("za"):
        os.write(requests, json.dumps((number, GrammarSpec("regex", text))).encode() + b"\n")
    with os.fdopen(replies, encoding="utf-8") as lines:
        first, second = (json.loads(lines.readline()) for _ in range(2))
        os.close(requests)
        thread.join(60)
        assert not thread.is_alive()
        os.close(sink)
    assert first == [1, None]
    assert second[0] == 0
    assert "the regex of 1 characters takes more than" in second[1]
