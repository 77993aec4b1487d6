"""`make demo`: serve the embedded model with and without speculation, and compare the answers to two questions.

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
QUESTION = "List 3 countries and their capitals."
PASSAGE = (
    "The harbour of Lindhaven opens at six in the morning. The first ferry leaves for the northern islands at half "
    "past six, and the second one follows at eight. Tickets are sold in the grey building next to the lighthouse."
)
QUESTIONS = {"open question": QUESTION, "copying a text": f"Repeat the following text exactly:\n\n{PASSAGE}"}
WARM_UP = "Say hello."
MAX_TOKENS = 96
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
            run_round("speculation on (EAGLE-3)", CONFIGS / "eagle3.yaml", options, show=True),
            run_round("speculation off", CONFIGS / "plain.yaml", options, show=False),
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
        _ask(client, model, WARM_UP, show=False)
        answers = [_ask(client, model, question, show) for question in QUESTIONS.values()]
        print("stopping the server", flush=True)
    return Round(name, answers)


def report(rounds: Sequence[Round]) -> str:
    """The comparison as text. The first round is that with speculation."""
    rows = [
        [title, result.name, f"{answer.accept_length or 1:.2f}", f"{answer.tokens_per_s:.1f}", str(answer.num_tokens)]
        for column, title in enumerate(QUESTIONS)
        for result in rounds
        for answer in [result.answers[column]]
    ]
    table = format_table(("question", "decoding", "accept length", "tokens/s", "tokens"), rows)
    return f"\n{table}\n\n{_speeds(rounds)}\n{_output(rounds)}"


def _speeds(rounds: Sequence[Round]) -> str:
    """One line per question. A single answer is no measurement; `make bench` is."""
    with_, without = rounds[0], rounds[-1]
    return "\n".join(
        f"{title}: {fast.tokens_per_s:.1f} tokens/s with speculation, {slow.tokens_per_s:.1f} without: "
        f"{fast.tokens_per_s / slow.tokens_per_s:.2f} times plain decoding."
        for title, fast, slow in zip(QUESTIONS, with_.answers, without.answers, strict=True)
    )


def _output(rounds: Sequence[Round]) -> str:
    """Whether the rounds gave the same texts."""
    different = [
        title for column, title in enumerate(QUESTIONS) if len({result.answers[column].text for result in rounds}) > 1
    ]
    if not different:
        return "Both servers gave identical texts."
    return (
        f"The texts differ ({', '.join(different)}): in bfloat16, rounding can decide between two tokens "
        "that are almost equally likely. With `dtype: float32` in both configurations the texts are identical."
    )


def _ask(client: "OpenAI", model: str, question: str, show: bool) -> Answer:
    answer = Answer()
    messages = [{"role": "user", "content": question}]
    if show:
        print(f"\n> {question}\n", flush=True)
    for piece in stream_answer(client, answer, model=model, messages=messages, temperature=0, max_tokens=MAX_TOKENS):
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
        description="Serve a small chat model and ask it two questions, with and without speculation.",
    )
    parser.add_argument("--port", type=int, help="port of the API (default: that of the configuration, 8000)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="maximum time to start (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
