"""What the target is asked to make training data, and how: the options, without anything heavy to import."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from specray.cli.arguments import positive
from specray.config import EMBEDDED_MODEL


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The same options over the same folder go on where they stopped; more `self_prompts` may be asked for later."""

    folder: Path
    model: str
    prompts: tuple[Path, ...]
    samples: int  # answers to each prompt of the files
    self_prompts: int  # prompts the target writes itself
    max_tokens: int
    concurrency: int  # requests under way in each process
    generators: int  # processes
    seed: int
    dtype: str
    max_bad_rows: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> "AnswerOptions":
        return cls(
            options.answers,
            options.model,
            tuple(options.prompts),
            options.samples,
            options.self_prompts,
            options.answer_tokens,
            options.answer_concurrency,
            options.generators,
            options.answer_seed,
            options.answer_dtype,
            options.max_bad_rows,
        )


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "answers", "what the target is asked; without --prompts and --self-prompts, the folder is taken as it is"
    )
    add = group.add_argument
    add(
        "--answers",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="where the target's answers and features are kept, 5 KB a token for a hidden size of 576; a run that was "
        "stopped goes on, and another process may be adding to it",
    )
    add("--model", default=EMBEDDED_MODEL, help="the target: name, folder or hub name (default: %(default)s)")
    add(
        "--prompts",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="JSON Lines with turns, messages or prompt; never an evaluation set",
    )
    add("--samples", type=positive, default=4, metavar="N", help="answers to each prompt (default: %(default)s)")
    add(
        "--self-prompts",
        type=int,
        default=0,
        metavar="N",
        help="prompts the target writes itself, given the header of a user turn (default: %(default)s)",
    )
    add("--answer-tokens", type=positive, default=256, metavar="N", help="longest answer (default: %(default)s)")
    add(
        "--answer-concurrency",
        type=positive,
        default=64,
        metavar="N",
        help="requests under way in each process (default: %(default)s)",
    )
    add(
        "--generators",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that share the work, one core each at best; 1 on a GPU (default: %(default)s)",
    )
    add("--answer-seed", type=int, default=0, metavar="N", help="of all answers (default: %(default)s)")
    add(
        "--answer-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the target while it answers (default: %(default)s)",
    )
    add(
        "--max-bad-rows",
        type=int,
        default=10,
        metavar="N",
        help="unusable rows of a prompt file that are skipped before it is refused (default: %(default)s)",
    )
