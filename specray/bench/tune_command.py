"""Options of `specray tune`. Imports no torch, so that `--help` is quick."""

import argparse
import re
from pathlib import Path

from specray.bench.command import DEFAULT_DRAFTER, add_target_and_sampling, engine_config
from specray.cli.arguments import add_number, positive

HELP = (
    "Find the draft tree that is fastest on this machine, by measuring: plain decoding and all candidates take turns, "
    "the slower half of the candidates is dropped after each round, and the best one is written as YAML. With --replay "
    "the accept lengths are those of logged requests, and only the costs of steps are measured."
)
POOL_TOKENS = 4096  # less than for `specray bench`, because many variants are loaded at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="Serve configuration, or YAML with engine options, to tune")
    add(
        "--method",
        metavar="METHOD",
        help=f"METHOD[@HEAD][+MAP] as in bench (default: --config's, else {DEFAULT_DRAFTER})",
    )
    add(
        "--batch-sizes",
        type=batch_sizes,
        default="1,8",
        metavar="A,B",
        help="concurrent requests; the best tree has the highest mean over these sizes (default: %(default)s)",
    )
    add(
        "--candidates",
        type=candidates,
        metavar="A,B",
        help="trees as STEPS-TOPK-N, or numbers of nodes N (default: a list from small to large)",
    )
    add(
        "--replay",
        nargs="+",
        type=Path,
        default=(),
        metavar="LOG",
        help="find the best tree for the requests in files that server.request_log wrote, in one round without prompts",
    )
    add_number(parser, "--rounds", positive, 3, "rounds, each with other prompts")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON Lines of prompts that are not used for evaluation (default: the built-in chat prompts)",
    )
    add(
        "--limit",
        type=positive,
        metavar="N",
        help="prompts per round, at least two for each concurrent request (default: 6); of a log the first N requests "
        "(default: all)",
    )
    add_target_and_sampling(parser, max_tokens=96)
    add(
        "--out",
        type=Path,
        default=Path("tune"),
        metavar="FOLDER",
        help="folder for tune.json, tune.png and speculative.yaml (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    most = max(options.batch_sizes)
    config = engine_config(options.config, most, POOL_TOKENS, model=options.model, dtype=options.dtype)
    from specray.bench.tune import run_and_report  # imports torch, which takes seconds

    run_and_report(options, config)
    return 0


def batch_sizes(text: str) -> list[int]:
    sizes = [positive(part.strip()) for part in text.split(",")]
    if len(set(sizes)) != len(sizes):
        raise argparse.ArgumentTypeError(f"{text!r} names a batch size twice")
    return sizes


def candidates(text: str) -> list[str]:
    trees = [part.strip() for part in text.split(",")]
    wrong = [tree for tree in trees if not re.fullmatch(r"\d+(-\d+-\d+)?", tree)]
    if wrong or len(set(trees)) != len(trees):
        what = f"{wrong[0]!r} is neither N nodes nor STEPS-TOPK-N" if wrong else f"{text!r} names a tree twice"
        raise argparse.ArgumentTypeError(f"{what}; give trees such as 4-2-8,5-4-16")
    return trees
