"""Replacing drafters while serving: access, rejected options, and convergence of all engines."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import specray.server.routing.rollout
from specray.config import SpeculativeConfig
from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.draft_budget.budget import Drafting
from specray.engine.draft_budget.static import StaticBudget
from specray.errors import ConfigError, EngineDeadError
from specray.server.routing.client import RouterClient, RouterLostError
from specray.server.routing.messages import DesiredDrafter
from specray.server.routing.rollout import DrafterRollout
from specray.server.routing.router_pool import RouterPool
from specray.server.tasks import Tasks
from tests.support.scripted_server import Serve, Server

KEY = "the-operators-key"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
NGRAM = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=6)
SMALL = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=3)
OFF = SpeculativeConfig()


@pytest.fixture
def admin(tmp_path: Path) -> dict[str, Any]:
    """Options of a server with an admin key."""
    keys = tmp_path / "admin-keys"
    keys.write_text(f"operator {KEY}\n")
    keys.chmod(0o600)
    return {"server": {"admin_key_file": str(keys)}}


async def replace(server: Server, options: SpeculativeConfig | Any) -> httpx.Response:
    body = options.model_dump() if isinstance(options, SpeculativeConfig) else options
    return await server.http.post("/admin/drafter", json=body, headers=AUTHORIZED)


def loaded(server: Server) -> list[list[SpeculativeConfig]]:
    return [replica.ranks.drafter.loaded for replica in server.replicas]


def test_all_engines_load_the_new_drafter(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, num_replicas=3, speculative=SMALL) as server:
            reply = await replace(server, NGRAM)
            reports = reply.json()["replicas"]
            assert set(reports) == {replica.replica_id for replica in server.replicas}
            for report in reports.values():
                assert report["state"] == "ready"
                assert report["speculative"] == NGRAM.model_dump(mode="json")
                assert (report["restarts"], report["acceptance_collapsed"]) == (0, False)
                assert report["faults"]["gone"] == 0
            again = await server.http.get("/admin/drafter", headers=AUTHORIZED)
            assert again.json() == reply.json()
            assert loaded(server) == [[NGRAM]] * 3
            assert (await replace(server, {"algorithm": None})).json()["replicas"]["replica-1"]["state"] == "off"

    asyncio.run(scenario())


def test_the_engine_plans_for_the_new_drafter(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin) as server:
            await replace(server, NGRAM.model_copy(update={"max_step_draft_tokens": 9}))
            await server.until(
                lambda: server.router_pool.info is not None and server.router_pool.info.max_draft_tokens == 5
            )
            await server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
            info = (await server.http.get("/server_info")).json()
            assert (info["max_draft_tokens"], info["speculative_num_draft_tokens"]) == (5, 6)
            assert info["internal_states"][0]["specray_drafter_info"] == {"none": 0, "NGRAM": 1}
            scheduler = server.router._engine._engine.scheduler
            assert scheduler.drafts.max_draft_tokens == 5
            assert isinstance(scheduler.drafts.budget, StaticBudget)
            assert sum(scheduler.drafts.budget.shares([Drafting(5, RequestAcceptance())] * 4).num_drafts) == 9

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ConfigError("the head is another model's"), EngineDeadError("out of memory")])
def test_a_drafter_that_one_engine_refuses_is_rolled_back_everywhere(
    serve: Serve, admin: dict[str, Any], error: Any
) -> None:
    async def scenario() -> None:
        async with serve(**admin, num_replicas=3, speculative=SMALL) as server:
            server.replicas[2].ranks.drafter.refused[NGRAM] = error
            reply = await replace(server, NGRAM)
            assert reply.status_code == (400 if isinstance(error, ConfigError) else 409)
            assert reply.json()["error"]["message"] == str(error)
            await server.until(lambda: loaded(server) == [[NGRAM, SMALL]] * 2 + [[]])
            assert server.router_pool.drafter_rollout.speculative == SMALL

    asyncio.run(scenario())


def test_a_drafter_that_the_first_engine_refuses_is_not_loaded_elsewhere(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, num_replicas=3, speculative=SMALL) as server:
            server.replicas[0].ranks.drafter.refused[NGRAM] = ConfigError("no")
            assert (await replace(server, NGRAM)).status_code == 400
            await asyncio.sleep(0.3)
            assert loaded(server) == [[], [], []]

    asyncio.run(scenario())


def test_an_engine_that_starts_later_loads_the_new_drafter(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, speculative=SMALL) as server:
            await replace(server, NGRAM)
            await server.add_replica()
            await server.until(lambda: loaded(server) == [[NGRAM], [NGRAM]])

    asyncio.run(scenario())


def test_other_ingresses_learn_the_new_drafter(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, speculative=SMALL) as server:
            other = RouterPool(server, server.router_pool._config)
            other.start()
            await replace(server, NGRAM)
            await server.until(lambda: other.drafter_rollout.speculative == NGRAM)
            await server.router_pool.close()
            await server.add_replica()
            await server.until(lambda: loaded(server) == [[NGRAM], [NGRAM]])
            await other.drafter_rollout.replace(OFF)
            assert loaded(server) == [[NGRAM, OFF], [NGRAM, OFF]]
            await other.close()

    asyncio.run(scenario())


def test_a_lost_engine_does_not_block_the_others(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, num_replicas=3, speculative=SMALL) as server:
            server.replicas[1].is_dead = True
            assert (await replace(server, NGRAM)).status_code == 200
            assert loaded(server) == [[NGRAM], [], [NGRAM]]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("{", "not valid JSON"),
        ("[]", "algorithm"),
        ("{}", "null turns drafting off"),
        ('{"algorithm": 3}', "speculative.algorithm=3"),
        ('{"algorithm": null, "num_steps": 3}', "has no effect"),
        ('{"algorithm": "NGRAM", "num_draft_tokens": 1}', "num_draft_tokens=1"),
        ('{"algorithm": "NGRAM", "depth": 1}', "speculative.depth"),
        ('{"algorithm": "NGRAM", "num_draft_tokens": 100}', "max_total_tokens"),
        ('{"algorithm": "antigravity:Drafter"}', "imports no code"),
    ],
)
def test_invalid_options_are_rejected_before_anything_is_loaded(
    serve: Serve, admin: dict[str, Any], body: str, part: str
) -> None:
    async def scenario() -> None:
        async with serve(**admin, max_total_tokens=64) as server:
            reply = await server.http.post("/admin/drafter", content=body, headers=AUTHORIZED)
            assert reply.status_code == 400
            assert part in reply.json()["error"]["message"]
            assert loaded(server) == [[]]
            assert "antigravity" not in sys.modules

    asyncio.run(scenario())


def test_an_inline_drafter_cannot_be_replaced(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, draft={"placement": "inline"}) as server:
            for reply in (await replace(server, NGRAM), await server.http.get("/admin/drafter", headers=AUTHORIZED)):
                assert reply.status_code == 409
                assert "draft.placement=inline" in reply.json()["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer unknown-key"}])
def test_replacing_requires_an_admin_key(serve: Serve, admin: dict[str, Any], headers: dict[str, str]) -> None:
    async def scenario() -> None:
        async with serve(**admin) as server:
            replies = [
                await server.http.post("/admin/drafter", json=NGRAM.model_dump(), headers=headers),
                await server.http.get("/admin/drafter", headers=headers),
            ]
            assert [reply.status_code for reply in replies] == [401, 401]
            assert loaded(server) == [[]]

    asyncio.run(scenario())


def test_admin_routes_are_closed_without_admin_keys(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            reply = await replace(server, NGRAM)
            assert reply.status_code == 403
            assert loaded(server) == [[]]

    asyncio.run(scenario())


def test_only_the_present_connection_of_an_engine_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specray.server.routing.rollout, "RETRY_S", 0.01)
    monkeypatch.setattr(specray.server.routing.rollout, "LONGEST_RETRY_S", 0.01)

    class Client:
        info = object()

        def __init__(self, replica_id: str, set_at: int) -> None:
            self.replica_id, self.desired, self.num_asked = replica_id, DesiredDrafter(set_at, SMALL), 0

        async def apply(self, _desired: DesiredDrafter) -> None:
            self.num_asked += 1
            raise RouterLostError("the connection is closed")

    async def scenario() -> None:
        old, new = Client("late", 1), Client("late", 1)
        clients: dict[str, Any] = {"early": Client("early", 2), "late": old}
        tasks = Tasks()
        rollout = DrafterRollout(SMALL, clients, lambda: [], tasks)
        rollout.propagate()
        await asyncio.sleep(0.05)
        clients["late"] = new
        rollout.propagate()
        await asyncio.sleep(0.05)
        asked = old.num_asked
        assert asked > 0
        await asyncio.sleep(0.1)
        assert old.num_asked == asked
        assert new.num_asked > 1
        await tasks.close()

    asyncio.run(scenario())


def test_an_engine_that_fails_to_load_the_new_drafter_is_asked_again(
    serve: Serve, admin: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specray.server.routing.rollout, "RETRY_S", 0.01)

    async def scenario() -> None:
        async with serve(**admin, speculative=SMALL) as server:
            await replace(server, NGRAM)
            apply, failures = RouterClient.apply, iter([EngineDeadError("out of memory")])

            async def failing_once(client: RouterClient, desired: DesiredDrafter) -> None:
                for error in failures:
                    raise RouterLostError(str(error))
                await apply(client, desired)

            monkeypatch.setattr(RouterClient, "apply", failing_once)
            await server.add_replica()
            await server.until(lambda: loaded(server) == [[NGRAM], [NGRAM]])

    asyncio.run(scenario())
