"""`python -m benchmarks.fleet`: hot prefixes, a lost rack, a new version and a burst on simulated engines.

Every request has one of a few prefixes of 2,048 tokens and 256 tokens of its own, and gets 48 tokens. Figures are those
of virtual time; the machine that simulates does not matter.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.fleet import virtual_time
from benchmarks.fleet.cluster import Outcome, SimulatedCluster
from benchmarks.fleet.costs import MACHINE, measured_costs
from benchmarks.fleet.engine import Hardware
from benchmarks.fleet.traffic import Burst, Traffic
from cluster.config import AutoscalingOptions
from specray.cli.arguments import positive
from specray.engine.executor import Capacity
from specray.server import OPERATOR_LOG
from specray.server.config import ServingConfig
from specray.tables import format_table

TABLE = f"Simulated ingresses and engines, an 8B model's steps on an {MACHINE}"
KV_TOKENS = 262_144  # of an engine
NUM_DRAFTS, ACCEPTED = 3, 0.79  # a chain whose steps bring 2.9 tokens, as measured
# Shares of the time: requests that arrive after the first one are measured, something happens at the second one, and
# requests that arrive in the third one after it are compared with those before.
WARM, EVENT, DURING = 0.35, 0.6, 0.25
ENGINES_PER_INGRESS, MOST_INGRESSES = 16, 64
ENGINES_PER_PREFIX, LEAST_PREFIXES = 20, 8


class Load(NamedTuple):
    """How much is asked for how long."""

    requests_per_s: float  # of each engine at the start
    seconds: float


class Measured(NamedTuple):
    """What a scenario shows."""

    p99_s: float  # seconds until the first token, of all requests
    p99_ratio: float  # of requests during the event / before it
    hits: float  # cached prompt tokens / those of one cache for all engines that forgets nothing
    tries: float  # submissions to engines / requests
    failed: float  # share of requests that were refused or ended with an error
    num_streams: int  # before the event
    num_engines: int  # at the end

    def results(self, row: str, commit: str) -> list[results.Result]:
        """A row of the documentation's table."""
        cells: tuple[tuple[str, float, str, float | None, bool], ...] = (
            ("streams", self.num_streams, "{:,.0f}", None, False),
            ("first token, p99, ms", self.p99_s * 1000, "{:.0f}", None, False),
            ("p99 during / before", self.p99_ratio, "{:.2f}", 2.0 if row.startswith("rack") else None, True),
            ("cache hits / best", self.hits, "{:.2f}", 0.9, False),
            ("sent / requests", self.tries, "{:.3f}", None, False),
            ("failed", self.failed, "{:.2%}", None, False),
            ("engines at the end", self.num_engines, "{:,.0f}", None, False),
        )
        return [
            results.Result(
                table=TABLE, row=row, column=column, value=value, form=form, goal=goal, at_most=at_most, commit=commit
            )
            for column, value, form, goal, at_most in cells
        ]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    logging.getLogger(OPERATOR_LOG).setLevel(logging.CRITICAL)  # thousands of connections
    found: list[list[results.Result]] = []
    for name in options.scenarios:
        measured = simulate(name, options.engines, Load(options.rate, options.seconds))
        found.append(measured.results(f"{name}, {options.engines:,} engines", results.commit_here()))
        print(*(f"{result.column} {result.form.format(result.value)}" for result in found[-1]), sep=", ", flush=True)
    headers = ("scenario", *(result.column for result in found[0]))
    rows = [[row[0].row, *(result.form.format(result.value) for result in row)] for row in found]
    print(format_table(headers, rows))
    if options.save:
        print(f"saved in {results.save(None, [result for row in found for result in row])}")
    return 0


def simulate(name: str, num_engines: int, load: Load, seed: int = 0) -> Measured:
    """Run one scenario of SCENARIOS."""
    return virtual_time.run(_simulate(SCENARIOS[name], num_engines, load, seed))


async def _simulate(scenario: "Scenario", num_engines: int, load: Load, seed: int) -> Measured:
    config = ServingConfig.model_validate(
        {
            "model": "simulated",
            "page_size": 64,
            "max_running_requests": 64,
            "max_queued_requests": 256,
            "speculative": {"algorithm": "EAGLE3", "num_draft_tokens": NUM_DRAFTS + 1, "draft_model_path": "head"},
        }
    )
    capacity = Capacity(KV_TOKENS // config.page_size, NUM_DRAFTS, 32_768, 2**40, [2], max_plans=1)
    num_ingresses = min(MOST_INGRESSES, max(2, num_engines // ENGINES_PER_INGRESS))
    simulated = SimulatedCluster(
        config, Hardware(measured_costs(), capacity, ACCEPTED), num_engines, num_ingresses, seed=seed
    )
    await simulated.start()
    begun, num_streams = asyncio.get_running_loop().time(), simulated.num_streams
    event_at = begun + EVENT * load.seconds
    burst = Burst(event_at, event_at + DURING * load.seconds, scenario.burst)
    requests_per_s = load.requests_per_s * num_engines
    traffic = Traffic(requests_per_s, max(LEAST_PREFIXES, num_engines // ENGINES_PER_PREFIX), burst=burst, seed=seed)
    sending = asyncio.create_task(simulated.send(traffic, load.seconds))
    await asyncio.sleep(EVENT * load.seconds)
    happening = asyncio.create_task(scenario.event(simulated))
    await sending
    happening.cancel()
    await simulated.close()
    warm_at, over_at = begun + WARM * load.seconds, event_at + DURING * load.seconds
    outcomes = simulated.outcomes
    before = [each for each in outcomes if warm_at <= each.arrived < event_at]
    during = [each for each in outcomes if event_at <= each.arrived < over_at]
    served = [each for each in outcomes if each.first_token_s is not None]
    return Measured(
        _p99(outcomes),
        _p99(during) / _p99(before),
        sum(each.num_cached for each in served) / max(1, sum(each.most_cached for each in served)),
        simulated.num_submits / len(outcomes),
        1 - len([each for each in outcomes if each.status == 200]) / len(outcomes),
        num_streams,
        len(simulated.listed),
    )


def _p99(outcomes: Sequence[Outcome]) -> float:
    times = sorted(each.first_token_s for each in outcomes if each.first_token_s is not None)
    return times[int(0.99 * len(times))]


class Scenario(NamedTuple):
    """What happens, in addition to requests."""

    event: Callable[[SimulatedCluster], Coroutine[Any, Any, None]]
    burst: float = 1.0  # factor of the requests while it happens


async def _nothing(simulated: SimulatedCluster) -> None:
    """No event."""


SCENARIOS = {
    "hot prefixes": Scenario(_nothing),
    "rack lost": Scenario(SimulatedCluster.lose_rack),
    "rollout": Scenario(lambda simulated: simulated.roll_out(max(1, len(simulated.listed) // 8))),
    "burst": Scenario(
        lambda simulated: simulated.autoscale(AutoscalingOptions(enabled=True, max_replicas=1024)), burst=3.0
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--engines", type=positive, default=100, help="at the start (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per engine and second (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of virtual time (default: %(default)s)")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--save", action="store_true", help="save the figures in benchmarks/results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
