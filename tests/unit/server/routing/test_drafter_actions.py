"""Several drafters over HTTP: requests pick one, a failover keeps it, and an operator adds, promotes and drops them."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

import specray.server.routing.client
from specray.config import SpeculativeConfig
from specray.engine.drafter_selection.text_kind import TextKind
from specray.errors import ConfigError
from specray.server.routes.drafter_actions import changed_group, parse_action
from tests.support.scripted_server import Serve, Server

KEY = "the-operators-key"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
LONG, SHORT = ({"name": name, "algorithm": "NGRAM", "num_draft_tokens": n} for name, n in (("long", 6), ("short", 3)))
NEW = {"name": "new", "algorithm": "NGRAM", "num_draft_tokens": 4}
BOTH: dict[str, Any] = {"drafters": [LONG, SHORT]}


@pytest.fixture
def admin(tmp_path: Path) -> dict[str, Any]:
    keys = tmp_path / "admin-keys"
    keys.write_text(f"operator {KEY}\n")
    keys.chmod(0o600)
    return {"server": {"admin_key_file": str(keys)}}


async def act(server: Server, **action: Any) -> httpx.Response:
    return await server.http.post("/admin/drafter", json=action, headers=AUTHORIZED)


async def drafters_of(server: Server, reply: httpx.Response) -> dict[str, Any]:
    """The first replica's report of its drafters; all replicas agree."""
    assert reply.status_code == 200, reply.text
    reports = [report["drafters"] for report in reply.json()["replicas"].values()]
    assert len(reports) == len(server.replicas)
    assert all(report.keys() == reports[0].keys() for report in reports)
    return dict(reports[0])


async def complete(server: Server, **speculative: Any) -> list[str]:
    """The drafters that the reply names."""
    body = {"prompt": "hi", "max_tokens": 5, "seed": 1, "speculative": speculative}
    reply = await server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["usage"]["speculative"]["drafters"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 9, "seed": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 5}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 9, "seed": 5}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 9, "sampling_seed": 5}}),
    ],
)
def test_every_route_takes_the_name_of_a_drafter(serve: Serve, path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(speculative=BOTH) as server:
            counts = server.router._engine._engine.stats.labelled["specray_drafter_requests_total"]
            for number, options in enumerate(({"drafter": "short"}, {"drafter": "short", "num_draft_tokens": 2})):
                reply = await server.http.post(path, json=body | {"speculative": options})
                assert reply.status_code == 200, reply.text
                assert counts["short"] == number + 1
            reply = await server.http.post(path, json=body | {"speculative": {"drafter": "other"}})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "speculative.drafter"
            assert "use one of long, short" in reply.json()["error"]["message"]

    asyncio.run(scenario())


def test_an_algorithm_picks_the_first_drafter_that_has_it(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(speculative=BOTH) as server:
            assert await complete(server, algorithm="NGRAM") == ["long"]
            capabilities = (await server.http.get("/v1/speculation/capabilities")).json()
            assert capabilities["drafters"] == {"long": "NGRAM", "short": "NGRAM"}
            assert capabilities["request_limits"]["drafter"] == ["long", "short"]
            off = {"prompt": "hi", "max_tokens": 5, "speculative": {"drafter": "none"}}
            reply = await server.http.post("/v1/completions", json=off)
            assert "enabled=false turns drafting off" in reply.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_server_with_one_drafter_has_no_names(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(speculative={"algorithm": "NGRAM"}) as server:
            body = {"prompt": "hi", "max_tokens": 5, "speculative": {"drafter": "ngram"}}
            reply = await server.http.post("/v1/completions", json=body)
            assert reply.status_code == 400
            assert "single drafter" in reply.json()["error"]["message"]
            usage = (await server.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5})).json()["usage"]
            assert "drafters" not in usage["speculative"]

    asyncio.run(scenario())


@pytest.mark.parametrize("asked", [{}, {"drafter": "short"}])
def test_a_failover_keeps_the_drafter(serve: Serve, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specray.server.routing.client, "HEARTBEAT_TIMEOUT_S", 1.2)

    async def scenario() -> None:
        async with serve(step_s=0.01, num_replicas=2, speculative=BOTH) as server:
            for replica in server.replicas:  # the engines have learnt different things, so each would choose its own
                selector = replica.router._engine._engine.drafter.selector
                assert selector is not None
                better = "long" if replica is server.replicas[0] else "short"
                for name in ("long", "short"):
                    for kind in TextKind:
                        selector._bandit.observe("", kind, name, 4096, 1.0 if name == better else 99.0)
            body = {"prompt": "hi", "max_tokens": 200, "seed": 1, "speculative": asked}
            answer = asyncio.create_task(server.http.post("/v1/completions", json=body))
            await server.until(lambda: any(replica.ranks.num_steps > 5 for replica in server.replicas))
            first = next(replica for replica in server.replicas if replica.router._connections.num_requests)
            [chosen] = [
                request.drafter for request in first.router._engine._engine.requests.by_id.values() if request.drafter
            ]
            first.kill()
            usage = (await answer).json()["usage"]["speculative"]
            assert usage["drafters"] == [chosen.name]
            assert server.router_pool.num_failovers == 1

    asyncio.run(scenario())


def test_a_drafter_is_added_promoted_and_dropped_on_every_engine(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, num_replicas=2, speculative=BOTH) as server:
            added = await drafters_of(server, await act(server, action="add", drafter=NEW, shadow_share=0.5))
            assert list(added) == ["long", "short", "new"]
            assert (added["new"]["is_shadow"], added["new"]["is_default"]) == (True, False)
            assert [len(replica.ranks.drafter.loaded) for replica in server.replicas] == [1, 1]
            assert await complete(server, drafter="new") == ["new"], "a shadow is used if it is named"
            assert await complete(server) != ["new"]

            promoted = await drafters_of(server, await act(server, action="promote", name="new"))
            assert (promoted["new"]["is_shadow"], promoted["new"]["is_default"]) == (False, True)
            assert [len(replica.ranks.drafter.loaded) for replica in server.replicas] == [1, 1], "nothing is loaded"
            assert [await complete(server) for _ in range(3)] == [["new"]] * 3

            await server.add_replica()  # an engine that starts later
            latest = server.router_pool.drafter_rollout.speculative
            await server.until(lambda: server.replicas[2].ranks.drafter.state.speculative == latest)
            await server.until(lambda: server.num_connected == 3)

            dropped = await drafters_of(server, await act(server, action="drop", name="new"))
            assert list(dropped) == ["long", "short"]
            assert await complete(server) != ["new"]

    asyncio.run(scenario())


def test_running_requests_outlive_their_drafter(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, step_s=0.01, speculative=BOTH) as server:
            body = {"prompt": "hi", "max_tokens": 150, "seed": 1, "speculative": {"drafter": "short"}}
            answer = asyncio.create_task(server.http.post("/v1/completions", json=body))
            await server.until(lambda: server.ranks.num_steps > 5)
            await drafters_of(server, await act(server, action="drop", name="short"))
            reply = (await answer).json()
            assert reply["choices"][0]["finish_reason"] == "length"
            again = await server.http.post("/v1/completions", json=body)
            assert again.status_code == 400

    asyncio.run(scenario())


def test_a_single_drafter_becomes_one_of_several(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, speculative={"algorithm": "NGRAM", "num_draft_tokens": 3}) as server:
            assert list(await drafters_of(server, await act(server, action="add", drafter=NEW))) == ["ngram", "new"]
            assert server.ranks.drafter.state.speculative.members["ngram"].num_draft_tokens == 3
            assert await complete(server, drafter="ngram") == ["ngram"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"action": "remove", "name": "long"}, "action"),
        ({"action": "drop"}, "name is required"),
        (
            {"action": "drop", "name": "other"},
            "name='other' is not a drafter of this server; choose one of long, short",
        ),
        ({"action": "promote", "name": "other"}, "choose one of long, short"),
        ({"action": "promote", "name": "long", "share": 1}, "share"),
        ({"action": "add", "drafter": LONG}, "two of them are named 'long'"),
        ({"action": "add", "drafter": {"name": "new"}}, "algorithm"),
        ({"action": "add", "drafter": {**NEW, "depth": 3}}, "depth"),
        ({"action": "add", "drafter": NEW, "shadow_share": 2.0}, "share=2.0"),
        ({"action": "add", "drafter": {"name": "new", "algorithm": "antigravity:Drafter"}}, "imports no code"),
        ({"action": "shadow", "name": "long", "share": 0}, "share=0"),
    ],
)
def test_invalid_actions_change_nothing(
    serve: Serve, admin: dict[str, Any], action: dict[str, Any], message: str
) -> None:
    async def scenario() -> None:
        async with serve(**admin, speculative=BOTH) as server:
            reply = await act(server, **action)
            assert reply.status_code == 400, reply.text
            assert message in reply.json()["error"]["message"]
            assert server.ranks.drafter.loaded == []
            assert server.router_pool.drafter_rollout.speculative == SpeculativeConfig(**BOTH)

    asyncio.run(scenario())


def test_a_drafter_that_does_not_load_is_not_added_anywhere(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, num_replicas=2, speculative=BOTH) as server:
            wanted = SpeculativeConfig.model_validate({"drafters": [LONG, SHORT, NEW]})
            server.replicas[1].ranks.drafter.refused[wanted] = ConfigError("another model's head")
            reply = await act(server, action="add", drafter=NEW)
            assert (reply.status_code, reply.json()["error"]["message"]) == (400, "another model's head")
            await server.until(lambda: server.replicas[0].ranks.drafter.state.speculative.drafter_name == "long+short")

    asyncio.run(scenario())


def group_after(now: dict[str, Any], **action: Any) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate(
        changed_group(SpeculativeConfig.model_validate(now), parse_action(action), {})
    )


def test_what_refers_to_a_dropped_drafter_goes_with_it() -> None:
    now = BOTH | {"default_drafter": "short", "shadow": {"drafter": "long"}, "budget": "auto"}
    three = now | {"drafters": [LONG, SHORT, NEW]}
    assert group_after(three, action="drop", name="short").default_drafter is None
    without_shadow = group_after(three, action="drop", name="long")
    assert without_shadow.shadow.drafter is None
    assert (without_shadow.default_drafter, without_shadow.budget) == ("short", "auto")


def test_promoting_null_lets_the_bandit_choose_again() -> None:
    assert group_after(BOTH | {"default_drafter": "short"}, action="promote", name=None).default_drafter is None


def test_the_shadow_of_loaded_drafters_starts_and_ends() -> None:
    started = group_after(BOTH, action="shadow", name="short", share=0.2)
    assert (started.shadow.drafter, started.shadow.share) == ("short", 0.2)
    ended = group_after(BOTH | {"shadow": {"drafter": "short"}}, action="shadow", name=None)
    assert ended.shadow.drafter is None


def test_a_drafter_is_added_while_drafting_is_off(serve: Serve, admin: dict[str, Any]) -> None:
    """The options that are not a drafter's own are those of the configuration: an action cannot name them."""

    async def scenario() -> None:
        configured = {**BOTH, "verification": "rejection", "max_step_draft_tokens": 9}
        async with serve(**admin, speculative=configured) as server:
            off = {"algorithm": None}
            assert (await server.http.post("/admin/drafter", json=off, headers=AUTHORIZED)).status_code == 200
            assert list(await drafters_of(server, await act(server, action="add", drafter=NEW))) == ["new"]
            speculative = server.ranks.drafter.state.speculative
            assert (speculative.verification, speculative.max_step_draft_tokens) == ("rejection", 9)

    asyncio.run(scenario())


def test_nothing_is_promoted_or_shadowed_while_drafting_is_off(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, speculative={**BOTH, "verification": "rejection"}) as server:
            off = {"algorithm": None}
            assert (await server.http.post("/admin/drafter", json=off, headers=AUTHORIZED)).status_code == 200
            for action in ("promote", "shadow"):
                assert (await act(server, action=action, name=None)).status_code == 200
            assert not server.ranks.drafter.state.speculative.has_drafter

    asyncio.run(scenario())


def test_the_first_drafter_is_the_default_and_no_shadow() -> None:
    """It takes over the requests of one that is dropped."""
    three = {"drafters": [LONG, SHORT, NEW]}
    members = SpeculativeConfig.model_validate(
        {**three, "shadow": {"drafter": "long"}, "default_drafter": "new"}
    ).members
    assert list(members) == ["new", "short", "long"]
    assert list(SpeculativeConfig.model_validate(three).members) == ["long", "short", "new"]


def test_a_body_of_nothing_but_brackets_is_refused(serve: Serve, admin: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serve(**admin, speculative=BOTH) as server:
            reply = await server.http.post("/admin/drafter", content="[" * 100_000, headers=AUTHORIZED)
            assert reply.status_code == 400

    asyncio.run(scenario())
