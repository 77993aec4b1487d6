"""The worker's side of the protocol: JSON lines on standard input and output. Imports only the standard library.

A worker first writes {"version", "notes"}. Each request {"prompts", "max_tokens"} has one reply: {"seconds", "ttft",
"tokens"} or {"error"}. The end of standard input ends the worker.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import IO, Any, NamedTuple

CONTEXT_LENGTH = 2048


class Options(NamedTuple):
    """How a worker sets up its engine; its only argument, as JSON."""

    model: str  # a folder in Hugging Face layout
    gguf: str  # the quantised file
    mode: str  # the worker's own names
    threads: int
    max_batch: int


class Answer(NamedTuple):
    """Greedy answers to one batch, end-of-sequence tokens ignored."""

    seconds: float  # from submission to the last token
    ttft: float  # from submission to the first token of the batch
    tokens: list[list[int]]


class Engine(NamedTuple):
    """A loaded engine. `answer(prompts, max_tokens)` runs all prompts at once and reuses nothing of earlier batches."""

    version: str
    notes: str
    answer: Callable[[list[list[int]], int], Answer]


def serve(load: Callable[[Options], Engine]) -> None:
    """Load the engine and answer requests until standard input ends."""
    replies = _take_stdout()
    engine = load(Options(**json.loads(sys.argv[1])))
    _send(replies, {"version": engine.version, "notes": engine.notes})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply: dict[str, Any] = engine.answer(request["prompts"], request["max_tokens"])._asdict()
        except Exception as error:  # whatever the engine raises is the answer to this request
            reply = {"error": f"{type(error).__name__}: {error}"}
        _send(replies, reply)


def _take_stdout() -> IO[str]:
    """Keep standard output for replies. What libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _send(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
