"""A process that checks whether grammars compile within limits; `specray.server.grammar_check` starts it.

A grammar may take minutes or gigabytes to compile, and llguidance cannot be interrupted. Each is therefore compiled in
a fork of this process, which is killed when it exceeds a limit. Requests and replies are lines of JSON on standard
input and output; the first line out says that the process is ready. It ends when its input does.
"""

import json
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec
from specray.models.tokenizer import load_tokenizer
from specray.structured_output.compiler import GrammarCompiler

MAX_CPU_S = 1.5
MAX_GRAMMAR_BYTES = 128 << 20  # that a fork may take beyond what it begins with
MAX_S = 20.0  # of wall time: even a fourteenth of a core gives a grammar its CPU time
MAX_MESSAGE = 1000  # characters
_CHUNK = 1 << 16

Compile = Callable[[GrammarSpec], object]


class CheckRequest(NamedTuple):
    number: int
    spec: GrammarSpec


class CheckReply(NamedTuple):
    number: int
    error: str | None  # what to tell the client; None: the grammar can be compiled


class Fork(NamedTuple):
    """A process that compiles one grammar."""

    request: CheckRequest
    pid: int
    output: int  # file descriptor of its error, a blank line for none; nothing comes if a limit ends it
    deadline: float


def main() -> None:
    """Arguments: the model's folder, the width of its logits and its end tokens."""
    folder, vocab_size, *eos_token_ids = sys.argv[1:]
    tokenizer = load_tokenizer(Path(folder))
    compiler = GrammarCompiler(tokenizer, int(vocab_size), [int(token) for token in eos_token_ids])
    print("ready", flush=True)
    serve(sys.stdin.fileno(), sys.stdout.fileno(), compiler.compile)


def serve(source: int, sink: int, compile_grammar: Compile) -> None:
    """Answer requests until `source` ends. They run at the same time."""
    forks: dict[int, Fork] = {}
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            wait = min((fork.deadline - now for fork in forks.values()), default=None)
            ready = {key.fd for key, _ in selector.select(None if wait is None else max(0.0, wait))}
            if source in ready:
                data = os.read(source, _CHUNK)
                if not data:
                    return
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    number, spec = json.loads(line)
                    fork = start_fork(CheckRequest(number, GrammarSpec(*spec)), compile_grammar)
                    forks[fork.output] = fork
                    selector.register(fork.output, selectors.EVENT_READ)
            for fork in list(forks.values()):
                if fork.output in ready or fork.deadline <= time.monotonic():
                    selector.unregister(fork.output)
                    del forks[fork.output]
                    os.write(sink, json.dumps(end_fork(fork)).encode() + b"\n")


def start_fork(request: CheckRequest, compile_grammar: Compile) -> Fork:
    """Compile in a new process, under limits of CPU time and memory."""
    output, errors = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(output)
            _limit_resources()
            os.write(errors, _error_of(request.spec, compile_grammar)[:MAX_MESSAGE].encode() or b"\n")
        finally:
            os._exit(0)
    os.close(errors)
    return Fork(request, pid, output, time.monotonic() + MAX_S)


def end_fork(fork: Fork) -> CheckReply:
    """The outcome of a fork that has answered, was ended by a limit, or is late."""
    if fork.deadline <= time.monotonic():
        os.kill(fork.pid, signal.SIGKILL)
    message = os.read(fork.output, _CHUNK)
    os.close(fork.output)
    os.waitpid(fork.pid, 0)
    if not message:
        return CheckReply(fork.request.number, _too_large(fork.request.spec))
    return CheckReply(fork.request.number, message.decode().strip() or None)


def _too_large(spec: GrammarSpec) -> str:
    return (
        f"the {spec.kind} of {len(spec.text)} characters takes more than {MAX_CPU_S:g} s or "
        f"{MAX_GRAMMAR_BYTES >> 20} MiB to compile, more than one request may use; simplify it (fewer alternatives, "
        "smaller bounds of lengths and repetitions)"
    )


def _limit_resources() -> None:
    """End this process after MAX_CPU_S, or when it needs MAX_GRAMMAR_BYTES more than now."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings are about the client's text
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_GRAMMAR_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)


def _error_of(spec: GrammarSpec, compile_grammar: Compile) -> str:
    """What to tell the client; empty if the grammar can be compiled."""
    try:
        compile_grammar(spec)
    except InvalidRequestError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
