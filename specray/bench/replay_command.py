"""Options of `specray replay`. Imports no torch, so that `--help` is quick."""

import argparse
from pathlib import Path

from specray.bench.command import engine_config, variant_names
from specray.bench.tune_command import batch_sizes
from specray.cli.arguments import positive

HELP = (
    "Compute what other drafters would have had accepted on requests that a server has logged (server.request_log): a "
    "seed's text is the same with any drafter, so the target computes each text once and samples nothing. Speeds "
    "follow from the costs of steps, which are measured on this machine for a few seconds."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("logs", nargs="+", type=Path, metavar="LOG", help="files that server.request_log wrote")
    add(
        "--arms",
        type=variant_names,
        required=True,
        metavar="A,B",
        help="drafting methods as in `specray bench`: eagle3:6-3-8,ngram:8,corpus:NAME; plain decoding is always shown",
    )
    add("--config", type=Path, metavar="FILE", help="Serve configuration, or YAML with engine options, of the server")
    add("--model", help="target model, overrides --config: embedded name, folder, .gguf file or hub name")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="data type, overrides --config")
    add("--limit", type=positive, metavar="N", help="replay the first N requests only")
    sizes = "concurrent requests for which speeds are predicted (default: %(default)s)"
    add("--batch-sizes", type=batch_sizes, default="1,8", metavar="A,B", help=sizes)
    add("--json", type=Path, metavar="FILE", help="also write all figures, each step's included, to FILE")
    add("--plot", type=Path, metavar="FILE", help="also draw the predicted speeds over plain decoding's, as PNG")


def run(options: argparse.Namespace) -> int:
    config = engine_config(options.config, max(options.batch_sizes), model=options.model, dtype=options.dtype)
    from specray.bench.replay import run_and_report  # imports torch, which takes seconds

    run_and_report(options, config)
    return 0
