"""`specray status`: a live table of a server's replicas, from /metrics, /readyz and /server_info.

`specray.metrics` defines the metrics; `specray dashboard` plots them over time.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from textwrap import fill
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request

from prometheus_client.parser import text_string_to_metric_families

from specray.cli.arguments import KEY_VARIABLE, add_api_key, add_url
from specray.cli.chat import ServerError
from specray.cli.local_server import OPENER
from specray.tables import format_table

HELP = "Show load, speed, acceptance, cache use and faults of a running server's replicas, until Ctrl-C."
TIMEOUT_S = 5.0
CLEAR = "\x1b[H\x1b[J"  # cursor home, clear the screen
WIDTH = 100
LOAD = ("replica", "drafter", "last token", "running", "queued", "tokens/s", "KV used", "cache hits")
DRAFTS = ("replica", "ranks", "accept len", "overall", "speedup", "faults", "preempted")

Json = dict[str, Any]
Counts = Mapping[str, float]  # of one replica: metric -> its sum over all labels


class ServerStatus(NamedTuple):
    """What a server reports at one time."""

    at: float  # seconds on any clock
    is_ready: bool
    info: Json  # empty while no engine is connected
    counts: dict[str, Counts]  # each replica's
    drafters: dict[str, str]


class ReplicaStatus(NamedTuple):
    """One replica. Rates are since the previous update; None if they are undefined."""

    replica: str
    rank_nodes: list[str]  # address of each rank's node; empty if not reported
    drafter: str
    since_token_s: float | None
    num_running: int
    num_waiting: int
    tokens_per_s: float
    accept_length: float | None
    accept_length_overall: float | None
    speedup_overall: float | None  # over plain decoding, measured; None until steps without drafts were
    kv_usage: float
    cache_hit_rate: float | None
    num_late_drafts: int  # steps that did not wait for their drafts
    num_draft_faults: int
    drafter_absence: str  # why it decodes without its drafter at present; empty if it does not
    num_preemptions: int
    lacks_cpu_kernels: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    add_api_key(parser)
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="time between updates (default: %(default)s)"
    )
    parser.add_argument(
        "--once", action="store_true", help="print one table and exit, with status 1 if the server is not ready"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON per update instead of a table")


def run(options: argparse.Namespace) -> int:
    """Run the command. ServerError if the server does not answer at first; later it is polled until it does."""
    before = read_status(options.url, options.api_key, time.monotonic)
    while True:
        time.sleep(options.interval)
        try:
            now = read_status(options.url, options.api_key, time.monotonic)
        except ServerError as error:
            if options.once:
                raise
            print(f"{_start()}{error}", flush=True)
            continue
        show = as_json if options.json else as_text
        print(f"{'' if options.json or options.once else _start()}{show(options.url, before, now)}", flush=True)
        if options.once:
            return 0 if now.is_ready else 1
        before = now


def read_status(url: str, key: str | None, clock: Callable[[], float]) -> ServerStatus:
    """Query the server. ServerError if it does not answer."""
    is_ready = _get(url, "/readyz", key) is not None
    metrics, info = _get(url, "/metrics", key), _get(url, "/server_info", key)
    counts, drafters = read_metrics(metrics or "")
    return ServerStatus(clock(), is_ready, json.loads(info) if info else {}, counts, drafters)


def read_metrics(text: str) -> tuple[dict[str, Counts], dict[str, str]]:
    """(counts, drafting method) by replica, from Prometheus' text format."""
    counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    drafters: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            replica = sample.labels.get("replica")
            if replica is None:
                continue
            counts[replica][sample.name] += sample.value
            if sample.name == "specray_drafter_info" and sample.value:
                drafters[replica] = sample.labels["drafter"]
    return dict(counts), drafters


def replica_statuses(before: ServerStatus, now: ServerStatus) -> list[ReplicaStatus]:
    """The replicas in `now`. Rates of one that is not in `before` are since its start."""
    return [
        _replica_status(name, before.counts.get(name, {}), counts, before, now)
        for name, counts in sorted(now.counts.items())
    ]


def as_text(url: str, before: ServerStatus, now: ServerStatus) -> str:
    """A headline, tables of the replicas' load and of their ranks and drafts, and what makes replicas slow."""
    headline = fill(_headline(url, now), WIDTH, break_on_hyphens=False)
    rows = replica_statuses(before, now)
    if not rows:
        return headline
    tables = (format_table(LOAD, [*map(_load, rows)]), format_table(DRAFTS, [*map(_drafts, rows)]))
    losses = [fill(f"{row.replica} {loss}", WIDTH) for row in rows for loss in _losses(row)]
    return "\n\n".join([headline, *tables, *losses])


def as_json(url: str, before: ServerStatus, now: ServerStatus) -> str:
    """The server's and its replicas' status as one line of JSON."""
    facts = {"url": url, "ready": now.is_ready, "failovers": now.info.get("num_failovers")}
    return json.dumps(facts | {"replicas": [row._asdict() for row in replica_statuses(before, now)]})


def _replica_status(name: str, old: Counts, new: Counts, before: ServerStatus, now: ServerStatus) -> ReplicaStatus:
    def increase(metric: str) -> float:
        return new.get(metric, 0.0) - old.get(metric, 0.0)

    accepted, steps = "specray_spec_decode_num_accepted_tokens_total", "specray_verify_steps_total"
    hits, queries = "specray_prefix_cache_hits_total", "specray_prefix_cache_queries_total"
    return ReplicaStatus(
        replica=name,
        rank_nodes=now.info.get("rank_nodes", {}).get(name, []),
        drafter=now.drafters.get(name, "?"),
        since_token_s=now.info.get("since_token_s", {}).get(name),
        num_running=int(new["specray_num_requests_running"]),
        num_waiting=int(new["specray_num_requests_waiting"]),
        tokens_per_s=increase("specray_generation_tokens_total") / (now.at - before.at),
        accept_length=_accept_length(increase(accepted), increase(steps)),
        accept_length_overall=_accept_length(new[accepted], new[steps]),
        speedup_overall=_share(
            new.get("specray_drafted_plain_seconds_total", 0.0), new.get("specray_drafted_seconds_total", 0.0)
        ),
        kv_usage=new["specray_kv_cache_usage_perc"],
        cache_hit_rate=_share(new[hits], new[queries]),
        num_late_drafts=int(new.get("specray_late_drafts_total", 0)),
        num_draft_faults=int(new["specray_draft_faults_total"]),
        drafter_absence=now.info.get("absent_drafters", {}).get(name, ""),
        num_preemptions=int(new["specray_num_preemptions_total"]),
        lacks_cpu_kernels=bool(new["specray_cpu_kernels_absent"]),
    )


def _losses(row: ReplicaStatus) -> list[str]:
    """Why a replica is slower than it could be."""
    kernels = ["computes without the CPU kernels, several times slower; its log says why"]
    drafts = [f"decodes without drafts: {row.drafter_absence}"]
    return (kernels if row.lacks_cpu_kernels else []) + (drafts if row.drafter_absence else [])


def _accept_length(accepted: float, steps: float) -> float | None:
    """Tokens per verify step, with the bonus token."""
    return 1 + accepted / steps if steps else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _headline(url: str, now: ServerStatus) -> str:
    info = now.info
    state = "ready" if now.is_ready else "NOT READY: no engine has generated a token in the last seconds"
    if not info:
        return f"{url}: {state}; no engine is connected"
    engines = f"{len(now.counts)} {'engine' if len(now.counts) == 1 else 'engines'} with tp_size {info['tp_size']}"
    names = "+".join(drafter["name"] for drafter in info.get("speculative_drafters", ()))
    drafts = names or info["speculative_algorithm"] or "no speculation"
    where = f", drafters {info['draft']['placement']}" if drafts != "no speculation" else ""
    return f"{url}: {state}; {info['model']}, {drafts}{where}, {engines}, {info.get('num_failovers', 0)} failovers"


def _load(row: ReplicaStatus) -> list[str]:
    return [
        row.replica,
        f"{row.drafter} (absent)" if row.drafter_absence else row.drafter,
        _or_dash(row.since_token_s, "{:.1f} s ago"),
        str(row.num_running),
        str(row.num_waiting),
        f"{row.tokens_per_s:.1f}",
        f"{row.kv_usage:.0%}",
        _or_dash(row.cache_hit_rate, "{:.0%}"),
    ]


def _drafts(row: ReplicaStatus) -> list[str]:
    return [
        row.replica,
        _ranks(row.rank_nodes),
        _or_dash(row.accept_length, "{:.2f}"),
        _or_dash(row.accept_length_overall, "{:.2f}"),
        _or_dash(row.speedup_overall, "{:.2f}"),
        str(row.num_draft_faults),
        str(row.num_preemptions),
    ]


def _ranks(nodes: list[str]) -> str:
    """Ranks by node: 0, 1 on 10.0.0.1; 2, 3 on 10.0.0.2"""
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        ranks[node].append(str(rank))
    return "; ".join(f"{', '.join(there)} on {node}" for node, there in ranks.items()) or "-"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _start() -> str:
    return CLEAR if sys.stdout.isatty() else "\n"


def _get(url: str, path: str, key: str | None) -> str | None:
    """Body of a GET request; None for an HTTP error. ServerError if the server cannot be reached or refuses the key."""
    request = Request(url.rstrip("/") + path, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with OPENER.open(request, timeout=TIMEOUT_S) as reply:
            body: bytes = reply.read()
        return body.decode()
    except HTTPError as error:
        if error.code in (401, 403):
            raise ServerError(f"{url} refuses {path}; set {KEY_VARIABLE} or --api-key to a valid key") from None
        return None
    except (URLError, OSError) as error:
        raise ServerError(f"no server answers at {url} ({error}); start one with `specray serve`") from None
