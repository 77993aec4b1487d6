"""The command `specray`: reads arguments, runs a command, turns errors into one line and an exit status.

Exit status: 0 done, 1 the command found a failure, 2 wrong input, 130 interrupted. Not here: what commands do.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from specray import __version__, chat
from specray.bench import command as bench
from specray.bench import tune_command as tune
from specray.dashboard import command as dashboard
from specray.errors import SpecRayError
from specray.train import command as train


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except (SpecRayError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("specray", description="Speculative decoding for large language models.")
    parser.add_argument("--version", action="version", version=f"specray {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    chatting = commands.add_parser("chat", help="talk to a running server", description=chat.HELP)
    chat.add_arguments(chatting)
    chatting.set_defaults(run=chat.run)

    benching = commands.add_parser("bench", help="compare drafting methods on this machine", description=bench.HELP)
    bench.add_arguments(benching)
    benching.set_defaults(run=bench.run)

    tuning = commands.add_parser("tune", help="find the fastest draft tree on this machine", description=tune.HELP)
    tune.add_arguments(tuning)
    tuning.set_defaults(run=tune.run)

    training = commands.add_parser("train", help="make a draft head or a token map", description=train.HELP)
    train.add_arguments(training)
    training.set_defaults(run=train.run)

    watching = commands.add_parser(
        "dashboard", help="write the Grafana dashboard, or draw it from live data", description=dashboard.HELP
    )
    dashboard.add_arguments(watching)
    watching.set_defaults(run=dashboard.run)

    checking = commands.add_parser(
        "check",
        help="check a configuration for `serve run`",
        description="Name every mistake in a Serve configuration.",
    )
    checking.add_argument("file", metavar="FILE", help="a YAML file for `serve run`, such as configs/eagle3.yaml")
    checking.add_argument("--model", action="store_true", help="also find the model's files, downloading if need be")
    checking.set_defaults(run=check)
    return parser


def check(options: argparse.Namespace) -> int:
    """A process of its own, because the engine's package does not import the cluster's."""
    arguments = [options.file, *(["--model"] if options.model else [])]
    return subprocess.run([sys.executable, "-m", "cluster.check", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
