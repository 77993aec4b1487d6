"""`specray load`: sends load to a running server and prints how its requests ended."""

import argparse
import asyncio
from http import HTTPStatus
from math import inf

from specray.bench.exchange import exchange, request_bytes
from specray.bench.ledger import Outcome
from specray.bench.open_loop import Load, Report, idle_after, run
from specray.cli.arguments import KEY_VARIABLE, add_api_key, number_above_0, positive, share
from specray.errors import ConfigError
from specray.tables import format_table

HELP = (
    "Send requests to a running server at a fixed rate, whether it keeps up or not, and print how each of them ended. "
    "Exit status 1 if a request was neither completed, refused, ended with an error nor cut by this command."
)
SHOWN = 10  # violations that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="URL of the server, without a path (default: %(default)s)")
    add("--rate", type=number_above_0, default=1.0, metavar="R", help="requests per second (default: %(default)s)")
    add("--seconds", type=number_above_0, default=10.0, metavar="S", help="duration (default: %(default)s)")
    add("--max-tokens", type=positive, default=32, metavar="N", help="tokens per answer (default: %(default)s)")
    add("--prompt", default="Once upon a time", help="prompt of all requests (default: %(default)s)")
    add("--whole", action="store_true", help="ask for one JSON body instead of a stream")
    add(
        "--timeout",
        type=number_above_0,
        default=60.0,
        metavar="S",
        help="time limit per request (default: %(default)s)",
    )
    add(
        "--cut",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of requests, 0 to 1, that disconnect at a random byte (default: %(default)s)",
    )
    add(
        "--slow",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of requests, 0 to 1, that read one byte per second (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="seed of arrivals and cuts (default: %(default)s)")
    add_api_key(parser)


def run_command(options: argparse.Namespace) -> int:
    load = Load(
        options.url.rstrip("/"),
        options.rate,
        options.seconds,
        options.max_tokens,
        options.prompt,
        not options.whole,
        options.timeout,
        options.cut,
        options.slow,
        options.api_key,
        options.seed,
    )
    report, idle_s = asyncio.run(_run(load))
    print(table(report))
    print("idle again:", "no" if idle_s == inf else f"after {idle_s:.1f} s")
    violations = report.ledger.violations()
    for violation in violations[:SHOWN]:
        print(f"  {violation}")
    return 1 if violations else 0


def table(report: Report) -> str:
    ledger = report.ledger
    counts = [(str(outcome), str(ledger.count(outcome))) for outcome in Outcome]
    statuses = [(f"status {status or 'none'}", str(n)) for status, n in sorted(_by_number(ledger.statuses()).items())]
    refusals = [(f"refusal p{q}", f"{report.refusal_s(q / 100) * 1000:.0f} ms") for q in (50, 99)]
    rows = [("sent", str(ledger.num_begun)), *counts, *statuses, *(refusals if ledger.count(Outcome.REFUSED) else [])]
    return format_table(("requests", "number"), [*rows, ("goodput", f"{report.goodput:.1f} tokens/s")], 1)


async def _run(load: Load) -> tuple[Report, float]:
    asked = await exchange(f"{load.url}/metrics", request_bytes(f"{load.url}/metrics", key=load.key), load.timeout_s)
    if asked.status == HTTPStatus.UNAUTHORIZED:
        raise ConfigError(f"{load.url} requires a key; set {KEY_VARIABLE} or --api-key to a valid one")
    report = await run(load)
    return report, await idle_after(load.url, load.key)


def _by_number(statuses: dict[int | None, int]) -> dict[int, int]:
    return {status or 0: count for status, count in statuses.items()}
