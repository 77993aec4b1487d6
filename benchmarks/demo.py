"""`make demo`: serve the embedded model, ask some questions with and without speculation, and compare the answers.

Runs `specray serve` as a child process. The exit status is 1 if anything fails.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.local_server import LocalServer
from specray.cli.chat import ServerError, StreamedAnswer, connect, first_model, stream_answer
from specray.errors import SpecRayError
from specray.tables import format_table

if TYPE_CHECKING:
    from openai import OpenAI

CONFIG = Path(__file__).parents[1] / "configs" / "eagle3.yaml"
QUESTIONS = {
    "capitals": "List 3 countries and their capitals.",
    "advice": "Give me five tips for sleeping better.",
    "code": "Write a Python function that returns the sum of the squares of a list of numbers.",
    "copying": "Repeat the following text exactly:\n\nThe harbour of Lindhaven opens at six in the morning. The first "
    "ferry leaves for the northern islands at half past six, and the second one follows at eight. Tickets are sold in "
    "the grey building next to the lighthouse.",
}
WARM_UP = "Say hello."
MAX_TOKENS = 150
LOG_SECONDS = 10


class Pair(NamedTuple):
    """Two answers to one question."""

    speculative: StreamedAnswer
    plain: StreamedAnswer


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        pairs = run(options)
    except (SpecRayError, OSError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo interrupted; the server is stopped", file=sys.stderr)
        return 130
    print(report(pairs))
    return 0


def run(options: argparse.Namespace) -> list[Pair]:
    """The answers to QUESTIONS, in order. Those with speculation are printed as they arrive.

    The answer with speculation comes first, so that the prefix cache can only help the plain one.
    """
    print(f"== specray serve configs/{CONFIG.name}", flush=True)
    with LocalServer(CONFIG, options.port) as server:
        seconds = server.wait_until_ready(options.timeout, tick=Waiting())
        print(f"{_line_start()}ready at {server.url} after {seconds:.0f} s   ", flush=True)
        client = connect(server.url)
        model = first_model(client)
        for speculate in (True, False):
            _ask(client, model, WARM_UP, options.max_tokens, speculate)
        pairs = []
        for question in QUESTIONS.values():
            print(f"\n> {question}\n", flush=True)
            fast = _ask(client, model, question, options.max_tokens, show=True)
            print(f"\n\n[with speculation: {fast.summary()}]", flush=True)
            plain = _ask(client, model, question, options.max_tokens, speculate=False)
            print(f"[without:          {plain.num_tokens} tokens, {plain.tokens_per_s:.1f} tokens/s]", flush=True)
            pairs.append(Pair(fast, plain))
        print("\nstopping the server", flush=True)
    return pairs


def report(pairs: Sequence[Pair]) -> str:
    """The comparison as text."""
    rows = [_row(title, *pair) for title, pair in zip(QUESTIONS, pairs, strict=True)]
    header = ("question", "tokens", "plain tokens/s", "EAGLE-3 tokens/s", "speed-up", "accept length", "identical")
    return f"\n{format_table(header, rows)}\n\n{_conclusion(pairs)}"


def _row(title: str, fast: StreamedAnswer, plain: StreamedAnswer) -> list[str]:
    return [
        title,
        str(fast.num_tokens),
        f"{plain.tokens_per_s:.1f}",
        f"{fast.tokens_per_s:.1f}",
        f"{fast.tokens_per_s / plain.tokens_per_s:.2f}",
        f"{fast.accept_length or 1:.2f}",
        "yes" if fast.text == plain.text else "no",
    ]


def _conclusion(pairs: Sequence[Pair]) -> str:
    """One line about all answers. A few answers are too few for a measurement; see `make bench`."""
    speed_up = sum(pair.plain.seconds for pair in pairs) / sum(pair.speculative.seconds for pair in pairs)
    different = [title for title, (one, other) in zip(QUESTIONS, pairs, strict=True) if one.text != other.text]
    if not different:
        return (
            f"Speculative decoding gave the same {len(pairs)} answers, character for character, "
            f"{speed_up:.2f} times as fast."
        )
    return (
        f"{speed_up:.2f} times as fast, but other texts ({', '.join(different)}): without the CPU kernels, rounding "
        f"can decide between two tokens that are almost equally likely. With `dtype: float32` in configs/{CONFIG.name} "
        "the texts are identical."
    )


def _ask(
    client: "OpenAI", model: str, question: str, max_tokens: int, speculate: bool = True, *, show: bool = False
) -> StreamedAnswer:
    """The complete answer; with `show`, it is printed as it arrives."""
    answer = StreamedAnswer()
    messages = [{"role": "user", "content": question}]
    options = {} if speculate else {"extra_body": {"speculative": {"enabled": False}}}
    for piece in stream_answer(
        client, answer, model=model, messages=messages, temperature=0, max_tokens=max_tokens, **options
    ):
        if show:
            print(piece, end="", flush=True)
    if not answer.text.strip() or not answer.num_tokens:
        raise ServerError(f"the answer to {question!r} is empty or has no usage: {answer}")
    return answer


class Waiting:
    """Prints the waiting time: one updated line in a terminal, otherwise a line every LOG_SECONDS."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, seconds: float) -> None:
        if sys.stdout.isatty():
            print(f"{_line_start()}waiting for the server: {seconds:.0f} s ", end="", flush=True)
        elif seconds >= self._next:
            self._next = seconds + LOG_SECONDS
            print(f"waiting for the server: {seconds:.0f} s", flush=True)


def _line_start() -> str:
    return "\r" if sys.stdout.isatty() else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.demo",
        description="Serve a small chat model and ask it some questions, with and without speculation.",
    )
    parser.add_argument("--port", type=int, help="port of the API (default: that of the configuration, 8000)")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help="longest answer (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="maximum time to start (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
