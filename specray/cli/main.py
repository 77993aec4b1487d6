"""The program `specray`: parses arguments, runs a command and prints errors in one line.

Exit status: 0 success, 1 the command found a failure, 2 invalid input, 130 interrupted, 141 nobody reads the output.
"""

import argparse
import os
import select
import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from specray import __version__
from specray.errors import SpecRayError

# Commands of the package `cluster`, which this package does not import.
CLUSTER_COMMANDS = {"serve": "cluster.cli.supervise:main", "check": "cluster.cli.serve:check"}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in CLUSTER_COMMANDS:
            status: int = resolve_name(CLUSTER_COMMANDS[arguments[0]])(arguments[1:])
            return status
        options, unknown = build_parser().parse_known_args(arguments)
        if unknown:  # `parse_args` would print the usage of `specray`, which has none of the command's flags
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        exit_status: int = options.run(options)
        sys.stdout.flush()
    except (SpecRayError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 141
        print(f"error: {_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return exit_status


def _words(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as in `specray status --once | head -1`."""
    output = select.poll()
    output.register(sys.stdout, 0)  # reports errors only
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
    return True


def build_parser() -> argparse.ArgumentParser:
    # Imported here, where Ctrl-C is handled.
    from specray.bench import command as bench
    from specray.bench import load_command as load
    from specray.bench import replay_command as replay
    from specray.bench import tune_command as tune
    from specray.cli import chat, corpus, status
    from specray.dashboard import command as dashboard
    from specray.train import command as train

    parser = argparse.ArgumentParser("specray", description="Speculative decoding for large language models.")
    parser.add_argument("--version", action="version", version=f"specray {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    for name, module, help in (
        ("chat", chat, "chat with a running server"),
        ("bench", bench, "compare drafting methods on this machine"),
        ("load", load, "run a load test against a server"),
        ("tune", tune, "find the fastest draft tree size on this machine"),
        ("replay", replay, "compute how other drafters would do on logged requests"),
        ("train", train, "train a draft head or model, or make a token map"),
        ("corpus", corpus, "make a corpus of texts to draft from"),
        ("dashboard", dashboard, "write the Grafana dashboard, or plot it from live data"),
        ("status", status, "monitor a running server"),
    ):
        command = commands.add_parser(name, help=help, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)

    # Only for `specray --help`: `main` runs these commands before it parses arguments.
    commands.add_parser("serve", help="serve a model on Ray")
    commands.add_parser("check", help="validate a configuration and print the resources it needs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
