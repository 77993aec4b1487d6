"""`specray load`: sends load to a running server and prints how its requests ended."""

import argparse
import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict
from http import HTTPStatus
from math import inf
from pathlib import Path
from typing import Any

from specray.bench.exchange import exchange, request_bytes
from specray.bench.ledger import Ending, Outcome
from specray.bench.open_loop import GAUGES, Load, Report, at_quantile, idle_after
from specray.bench.open_loop import run as run_load
from specray.bench.plots import can_plot, save_load_plot
from specray.bench.prompts import load_prompts
from specray.cli.arguments import (
    KEY_VARIABLE,
    add_api_key,
    add_number,
    add_url,
    number_above_0,
    number_from_0,
    positive,
    share,
)
from specray.errors import ConfigError
from specray.tables import format_table

HELP = (
    "Send requests to a running server at a fixed rate, whether it keeps up or not, and print how each of them ended, "
    "with latencies. Exit status 1 if a request failed or all were refused. A refusal with Retry-After is no failure, "
    "nor is a request that this command cut."
)
SHOWN = 5  # kinds of failures that are printed
QUANTILES = (50, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_url(parser)
    add_number(parser, "--rate", number_above_0, 1.0, "conversations per second", "R")
    add_number(parser, "--seconds", number_above_0, 10.0, "duration", "S")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="JSON Lines with turns, prompt or messages, used in this order, again and again (default: a built-in set)",
    )
    prompts.add_argument("--prompt", metavar="TEXT", help="one prompt for all requests")
    add_number(parser, "--turns", positive, 1, "turns per conversation")
    add(
        "--endpoint",
        choices=("chat", "completions"),
        default="chat",
        help="/v1/chat/completions, or /v1/completions, which needs no chat template (default: %(default)s)",
    )
    add("--model", metavar="NAME", help="name of the model in each request (default: none)")
    add_number(parser, "--max-tokens", positive, 32, "tokens per answer")
    add("--ignore-eos", action="store_true", help="ignore end tokens: every answer has --max-tokens tokens")
    add("--temperature", type=number_from_0, default=1.0, help="sampling temperature (default: %(default)s)")
    add("--whole", action="store_true", help="ask for one JSON body instead of a stream")
    add_number(parser, "--timeout", number_above_0, 60.0, "time limit per request", "S")
    add_number(parser, "--cut", share, 0.0, "share of requests, 0 to 1, that disconnect at a random byte", "SHARE")
    add_number(parser, "--slow", share, 0.0, "share of requests, 0 to 1, that read one byte per second", "SHARE")
    add("--seed", type=int, default=0, help="seed of arrivals and cuts (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write all figures and each request to FILE")
    add("--plot", type=Path, metavar="FILE", help="also draw latencies to FILE, a PNG; needs matplotlib")
    add_api_key(parser)


def run(options: argparse.Namespace) -> int:
    if options.plot is not None and not can_plot():
        raise ConfigError("--plot needs matplotlib; run `pip install 'specray[train]'`")
    report, idle_s = asyncio.run(_run(_load(options)))
    print(table(report))
    if latencies := report.latencies():
        print(f"\n{latency_table(latencies)}")
    if idle_s is not None:
        print("\nidle again:", "no" if idle_s == inf else f"after {idle_s:.1f} s")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in vars(options).items() if name not in ("run", "api_key")}
        document = {**to_json(report), "settings": settings}
        options.json.write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
    if options.plot is not None:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        save_load_plot(options.plot, list(report.ledger.endings.values()), latencies)
    if report.was_interrupted:
        raise KeyboardInterrupt
    if problem := failure(report):
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problem else 0


def failure(report: Report) -> str:
    """Why this load is no success; empty if it is one."""
    ledger = report.ledger
    failed = ledger.of(Outcome.ERROR) + ledger.of(Outcome.BROKEN)
    if failed:
        kinds = Counter(map(_failure_kind, failed)).most_common()
        listed = [f"{count} x {kind}" for kind, count in kinds[:SHOWN]] + ["…"] * (len(kinds) > SHOWN)
        return f"{len(failed)} of {ledger.num_begun} requests failed: {'; '.join(listed)}"
    if not ledger.num_begun:
        return "no request was sent; raise --seconds or --rate"
    if ledger.count(Outcome.REFUSED) == ledger.num_begun:
        return f"the server refused all {ledger.num_begun} requests: {ledger.of(Outcome.REFUSED)[0].detail}"
    return ""


def table(report: Report) -> str:
    ledger = report.ledger
    counts = [(str(outcome), str(ledger.count(outcome))) for outcome in Outcome]
    statuses = [(f"status {status or 'none'}", str(n)) for status, n in sorted(_by_number(ledger.statuses()).items())]
    refusals = [(f"refusal p{q}", f"{report.refusal_s(q / 100) * 1000:.0f} ms") for q in (50, 99)]
    rows = [("sent", str(ledger.num_begun)), *counts, *statuses, *(refusals if ledger.count(Outcome.REFUSED) else [])]
    return format_table(("requests", "number"), [*rows, ("goodput", f"{report.goodput:.1f} tokens/s")], 1)


def latency_table(latencies: dict[str, list[float]]) -> str:
    rows = [
        (name, str(len(times)), *(f"{1000 * at_quantile(times, q / 100):.1f}" for q in QUANTILES))
        for name, times in latencies.items()
    ]
    return format_table(("latency, ms", "of", *(f"p{q}" for q in QUANTILES)), rows, 1)


def to_json(report: Report) -> dict[str, Any]:
    """All figures; times in seconds."""
    ledger, latencies = report.ledger, report.latencies()
    return {
        "requests": {"sent": ledger.num_begun} | {str(outcome): ledger.count(outcome) for outcome in Outcome},
        "statuses": {str(status or "none"): n for status, n in ledger.statuses().items()},
        "failure": failure(report),
        "seconds": report.seconds,
        "tokens_per_s": report.goodput,
        "latency_s": {
            name: {f"p{q}": at_quantile(times, q / 100) for q in QUANTILES} for name, times in latencies.items()
        },
        "each": [{"request": name, **asdict(ending)} for name, ending in ledger.endings.items()],
    }


def _load(options: argparse.Namespace) -> Load:
    prompts = [(options.prompt,)] if options.prompt else [prompt.turns for prompt in load_prompts(options.dataset)]
    body = {"temperature": options.temperature, "ignore_eos": options.ignore_eos}
    return Load(
        url=options.url,
        rate=options.rate,
        seconds=options.seconds,
        max_tokens=options.max_tokens,
        prompts=[turns[: options.turns] for turns in prompts],
        stream=not options.whole,
        timeout_s=options.timeout,
        cut_share=options.cut,
        slow_share=options.slow,
        key=options.api_key,
        seed=options.seed,
        is_chat=options.endpoint == "chat",
        options=body | ({"model": options.model} if options.model else {}),
    )


async def _run(load: Load) -> tuple[Report, float | None]:
    """The report, and the seconds until the server was idle; None if it does not say whether it is."""
    asked = await exchange(f"{load.url}/metrics", request_bytes(f"{load.url}/metrics", key=load.key), load.timeout_s)
    if asked.status is None:
        raise ConfigError(f"no server answers at {load.url} ({asked.error}); start one, or correct --url")
    if asked.status == HTTPStatus.UNAUTHORIZED:
        raise ConfigError(f"{load.url} requires a key; set {KEY_VARIABLE} or --api-key to a valid one")
    report = await run_load(load, progress=True)
    says_whether_idle = GAUGES[0].encode() in asked.body
    return report, await idle_after(load.url, load.key) if says_whether_idle and not report.was_interrupted else None


def _failure_kind(ending: Ending) -> str:
    return f"{'no status' if ending.status is None else f'status {ending.status}'}: {ending.detail}"


def _by_number(statuses: dict[int | None, int]) -> dict[int, int]:
    return {status or 0: count for status, count in statuses.items()}
