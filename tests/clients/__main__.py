"""`make clients`: install the clients, serve the embedded model, run every client's scenarios, print one table."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.environments import InstallError
from cluster.config import AppConfig
from specray.config import EMBEDDED_MODEL
from tests.clients.environments import CLIENTS, Environment, environment_of
from tests.clients.run import Report, slowness, use
from tests.support.local_server import local_server, served

BUILD = Path(__file__).parents[2] / "build" / "clients"
KEY = "sk-clients-0123456789abcdef"
NAME = "smollm2"  # of the served model


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    failures: dict[str, str] = {}
    environments = _environments(options.clients, failures)
    if options.install_only:
        return int(bool(failures))
    reports: dict[str, Report] = {}
    with (
        tempfile.TemporaryDirectory(prefix="specray-clients-") as folder,
        served(lambda: local_server(config(Path(folder)))) as (url, _),
    ):
        for name, environment in environments.items():
            _say(f"running {name}")
            reports[name] = use(CLIENTS[name], environment, url, KEY, slowness(url, KEY))
            _say(failures_of(name, reports[name]))
    print(table(reports, failures))
    return int(bool(failures) or any(report.failures or not report.outcomes for report in reports.values()))


def config(folder: Path) -> AppConfig:
    """The embedded model with one key. Speculation and the engine's options are the defaults of `specray serve`."""
    keys = folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"clients {KEY}\n", encoding="ascii")
    return AppConfig(
        model=EMBEDDED_MODEL,
        device="cpu",
        context_length=8192,  # the agents' instructions and tools take most of it
        max_total_tokens=32768,
        speculative={"algorithm": "NGRAM"},  # type: ignore[arg-type]
        # The model may write until the context is full, and llm-comply sends no limit.
        server={"api_key_file": str(keys), "served_model_name": NAME, "default_max_tokens": 1536},  # type: ignore[arg-type]
    )


def table(reports: dict[str, Report], failures: dict[str, str]) -> str:
    """One row for each client."""
    rows = [("client", "version", "scenarios passed")]
    for name, report in reports.items():
        num_passed = len(report.outcomes) - len(report.failures)
        rows.append((name, report.version, f"{num_passed} of {len(report.outcomes)}"))
    rows += [(name, "-", f"not installed: {reason}") for name, reason in failures.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    num_whole = sum(bool(report.outcomes) and not report.failures for report in reports.values())
    return "\n".join([*lines, f"{num_whole} of {len(reports) + len(failures)} clients pass all of their scenarios"])


def failures_of(name: str, report: Report) -> str:
    return "\n".join(f"{name}: {failed.name} failed:\n{failed.error}" for failed in report.failures)


def _environments(names: Sequence[str], failures: dict[str, str]) -> dict[str, Environment]:
    environments = {}
    for name in names:
        try:
            environments[name] = environment_of(CLIENTS[name], BUILD, _say)
        except InstallError as error:
            failures[name] = str(error)
            _say(f"{name} could not be installed: {error}")
    return environments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument(
        "clients", nargs="*", default=[*CLIENTS], type=_client, metavar="CLIENT", help=f"of: {', '.join(CLIENTS)}"
    )
    parser.add_argument("--install-only", action="store_true", help="make the environments and run nothing")
    return parser


def _client(name: str) -> str:
    if name not in CLIENTS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(CLIENTS)}")
    return name


def _say(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
