"""The simulator of many ingresses and engines, and what it shows of the real routing between them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from benchmarks.fleet.__main__ import ACCEPTED, NUM_DRAFTS, Load, simulate
from benchmarks.fleet.cluster import TIMEOUT_S, SimulatedCluster
from benchmarks.fleet.costs import StepCosts, measured_costs
from benchmarks.fleet.engine import Hardware
from benchmarks.fleet.traffic import Traffic
from benchmarks.fleet.virtual_time import run
from specray.engine.executor import Capacity
from specray.server.config import ServingConfig
from specray.server.routing.client import HEARTBEAT_TIMEOUT_S, LATE_ITEM_S

COSTS = StepCosts(0.005, 0.00003)


def cluster_of(num_engines: int, num_ingresses: int, **routing: Any) -> SimulatedCluster:
    config = ServingConfig.model_validate({"model": "toy", "page_size": 64, "routing": routing})
    return SimulatedCluster(
        config, Hardware(COSTS, Capacity(512, 0, 4096, 2**40, [2]), 0.0), num_engines, num_ingresses
    )


def in_cluster(
    scenario: Callable[[SimulatedCluster], Coroutine[Any, Any, None]], *sizes: int, **routing: Any
) -> SimulatedCluster:
    """Run a scenario in a simulated cluster that is connected, in virtual time."""

    async def simulation() -> SimulatedCluster:
        simulated = cluster_of(*sizes, **routing)
        await simulated.start()
        await scenario(simulated)
        await simulated.close()
        return simulated

    return run(simulation())


def test_time_jumps_to_the_next_timer() -> None:
    async def sleep() -> float:
        await asyncio.gather(*(asyncio.sleep(seconds) for seconds in (5.0, 3600.0)))
        return asyncio.get_running_loop().time()

    assert run(sleep()) == 3600.0


def test_ten_engines_serve_hot_prefixes_from_their_caches() -> None:
    measured = simulate("hot prefixes", 10, Load(4.0, 2.0))
    assert measured.hits > 0.7
    assert (measured.failed, measured.tries, measured.num_streams) == (0.0, 1.0, 20)
    assert COSTS.constant < measured.p99_s < 0.5


def test_steps_cost_what_was_measured() -> None:
    costs = measured_costs()
    plain, chain = costs.constant + costs.per_row, costs.constant + 64 * (NUM_DRAFTS + 1) * costs.per_row
    assert 0.003 < plain < 0.008  # 4.3 ms were measured
    assert 0.009 < chain < 0.016  # 11.9 ms
    assert 2.8 < sum(ACCEPTED**depth for depth in range(NUM_DRAFTS + 1)) < 3.0  # 2.9 tokens a step


def test_a_request_waits_for_one_dead_engine_at_most() -> None:
    """The next engine is chosen when the first one has not answered and is silent, among those that still send."""
    dead_at = 0.0

    async def scenario(simulated: SimulatedCluster) -> None:
        nonlocal dead_at
        sending = asyncio.create_task(simulated.send(Traffic(100.0, 8, 128, 64, 4), 3.0))
        await asyncio.sleep(1.0)
        dead_at = asyncio.get_running_loop().time()
        for replica_id in sorted(simulated.listed)[:6]:
            simulated.engines[replica_id].is_silent = True
        await sending

    simulated = in_cluster(scenario, 12, 2)
    assert {each.status for each in simulated.outcomes} == {200}
    seconds = [(each.arrived, each.first_token_s or TIMEOUT_S) for each in simulated.outcomes]
    assert max(waited for arrived, waited in seconds if arrived > dead_at) < 2 * LATE_ITEM_S
    assert max(waited for _, waited in seconds) < HEARTBEAT_TIMEOUT_S + 1.0  # also if the engine had answered
    assert sum(waited > 1.0 for _, waited in seconds) < 30  # of those sent to dead engines
    assert simulated.num_submits < 1.2 * len(simulated.outcomes)  # no storm of retries


def test_every_ingress_reaches_engines_that_it_has_no_stream_to() -> None:
    async def scenario(simulated: SimulatedCluster) -> None:
        assert simulated.num_streams == 16
        for ingress in simulated.ingresses:
            assert len(ingress.rank_nodes) < 8
            assert set(await ingress.stats()) == simulated.listed
            assert await ingress.flush_caches() == sorted(simulated.listed)

    in_cluster(scenario, 8, 4, engines_per_ingress=2)


def test_an_engine_that_others_are_connected_to_does_not_count_as_ended() -> None:
    """It may have been silent only for a while, in which this ingress had streams to more engines."""

    async def scenario(simulated: SimulatedCluster) -> None:
        ingress = simulated.ingresses[0]
        own = set(ingress.rank_nodes)
        assert own < ingress.running == simulated.listed
        silent = min(own)
        simulated.engines[silent].is_silent = True
        await asyncio.sleep(HEARTBEAT_TIMEOUT_S + 1.0)
        assert simulated.listed - ingress.running == {silent}

    in_cluster(scenario, 8, 4, engines_per_ingress=2)


def test_an_ingress_without_live_engines_of_its_own_uses_others() -> None:
    async def scenario(simulated: SimulatedCluster) -> None:
        own = set(simulated.ingresses[0].rank_nodes)
        for replica_id in own:
            simulated.engines[replica_id].is_silent = True
        await asyncio.sleep(6.0)
        assert set(simulated.ingresses[0].rank_nodes) - own
        await simulated.send(Traffic(20.0, 4, 256, 64, 8), 2.0)

    simulated = in_cluster(scenario, 12, 4, engines_per_ingress=2)
    assert {each.status for each in simulated.outcomes} == {200}


def test_a_rollout_loses_no_request() -> None:
    async def scenario(simulated: SimulatedCluster) -> None:
        sending = asyncio.create_task(simulated.send(Traffic(20.0, 4, 256, 64, 4), 4.0))
        await simulated.roll_out(2)
        await sending

    simulated = in_cluster(scenario, 6, 2)
    assert {each.status for each in simulated.outcomes} == {200}
    assert len(simulated.engines) == 12
