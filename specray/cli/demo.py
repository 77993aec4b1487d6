"""`make demo`: serve the embedded model with and without speculation, and compare the answers to some questions.

Runs `specray serve` as a child process. The exit status is 1 if anything fails.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specray.cli.chat import Answer, ServerError, connect, first_model, stream_answer
from specray.cli.local_server import LocalServer
from specray.errors import SpecRayError
from specray.tables import format_table

if TYPE_CHECKING:
    from openai import OpenAI

CONFIGS = Path(__file__).parents[2] / "configs"
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


@dataclass(frozen=True, slots=True)
class Round:
    """The answers of one server, in the order of QUESTIONS."""

    name: str
    answers: list[Answer]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        rounds = [
            run_round("with speculation (EAGLE-3)", CONFIGS / "eagle3.yaml", options, show=True),
            run_round("without speculation", CONFIGS / "plain.yaml", options, show=False),
        ]
    except (SpecRayError, OSError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo interrupted; the server is stopped", file=sys.stderr)
        return 130
    print(report(rounds))
    return 0


def run_round(name: str, config: Path, options: argparse.Namespace, show: bool) -> Round:
    """Serve `config`, ask the questions and stop the server; with `show`, print the answers."""
    print(f"\n== {name}: specray serve configs/{config.name}", flush=True)
    with LocalServer(config, options.port) as server:
        seconds = server.wait_until_ready(options.timeout, tick=Waiting())
        print(f"{_line_start()}ready at {server.url} after {seconds:.0f} s   ", flush=True)
        client = connect(server.url)
        model = first_model(client)
        _ask(client, model, WARM_UP, options.max_tokens, show=False)
        answers = [_ask(client, model, question, options.max_tokens, show) for question in QUESTIONS.values()]
        print("stopping the server", flush=True)
    return Round(name, answers)


def report(rounds: Sequence[Round]) -> str:
    """The comparison as text, from the rounds with and without speculation."""
    fast, plain = rounds
    rows = [
        _row(title, *pair) for title, pair in zip(QUESTIONS, zip(fast.answers, plain.answers, strict=True), strict=True)
    ]
    header = ("question", "tokens", "plain tokens/s", "EAGLE-3 tokens/s", "speed-up", "accept length", "identical")
    return f"\n{format_table(header, rows)}\n\n{_conclusion(fast.answers, plain.answers)}"


def _row(title: str, fast: Answer, plain: Answer) -> list[str]:
    return [
        title,
        str(fast.num_tokens),
        f"{plain.tokens_per_s:.1f}",
        f"{fast.tokens_per_s:.1f}",
        f"{fast.tokens_per_s / plain.tokens_per_s:.2f}",
        f"{fast.accept_length or 1:.2f}",
        "yes" if fast.text == plain.text else "no",
    ]


def _conclusion(fast: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """One line about all answers. A few answers are too few for a measurement; see `make bench`."""
    speed_up = sum(answer.seconds for answer in plain) / sum(answer.seconds for answer in fast)
    different = [title for title, one, other in zip(QUESTIONS, fast, plain, strict=True) if one.text != other.text]
    if not different:
        return (
            f"Speculative decoding gave the same {len(fast)} answers, character for character, "
            f"{speed_up:.2f} times as fast."
        )
    return (
        f"{speed_up:.2f} times as fast, but other texts ({', '.join(different)}): without the CPU kernels, rounding "
        "can decide between two tokens that are almost equally likely. With `dtype: float32` in both configurations "
        "the texts are identical."
    )


def _ask(client: "OpenAI", model: str, question: str, max_tokens: int, show: bool) -> Answer:
    answer = Answer()
    messages = [{"role": "user", "content": question}]
    if show:
        print(f"\n> {question}\n", flush=True)
    for piece in stream_answer(client, answer, model=model, messages=messages, temperature=0, max_tokens=max_tokens):
        if show:
            print(piece, end="", flush=True)
    if not answer.text.strip() or not answer.num_tokens:
        raise ServerError(f"the answer to {question!r} is empty or has no usage: {answer}")
    if show:
        print(f"\n\n[{answer.summary()}]", flush=True)
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
        "python -m specray.cli.demo",
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
