"""A shadow that is proven better gets the requests, and gives them back when acceptance collapses."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import cluster.engine.router
import specray.server.routing.promotion
from cluster.config import AppConfig
from specray.config import SpeculativeConfig
from specray.engine.drafter_selection.paired_gain import PairedGain
from specray.engine.drafter_selection.selector import PAIRED
from specray.server.errors import ApiError
from specray.server.routes.drafter_actions import changed_group, parse_action
from specray.server.routing.promotion import decide, swapped
from tests.support.scripted_server import Serve, Server

OLD, NEW = ({"name": name, "algorithm": "NGRAM", "num_draft_tokens": n} for name, n in (("old", 6), ("new", 4)))
OTHER = {"name": "other", "algorithm": "NGRAM", "num_draft_tokens": 3}
SHADOWED = SpeculativeConfig.model_validate(
    {"drafters": [OLD, NEW], "shadow": {"drafter": "new", "share": 0.5, "promotes": True}}
)
BETTER, WORSE = PairedGain(60, 600, 120.0, 400.0), PairedGain(60, 600, -120.0, 400.0)


def report(gain: PairedGain, collapsed: str = "") -> dict[str, Any]:
    """An engine's: `collapsed` names the drafter whose drafts are hardly ever accepted."""
    drafters = {
        name: {"shadow_gain": gain._asdict(), "acceptance_collapsed": name == collapsed} for name in ("old", "new")
    }
    return {"acceptance_collapsed": bool(collapsed), "drafters": drafters}


def in_use(config: SpeculativeConfig) -> tuple[str | None, str | None, bool]:
    return config.default_drafter, config.shadow.drafter, config.shadow.promotes


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report(BETTER)], ("new", "old", True)),
        ([report(WORSE)], (None, "new", True)),
        ([report(PairedGain())], (None, "new", True)),
        ([], (None, "new", True)),
        ([report(BETTER), report(WORSE), report(WORSE)], (None, "new", True)),
        ([report(PairedGain(30, 300, 60.0, 200.0))] * 2, ("new", "old", True)),  # each has too few alone
        ([report(WORSE), report(WORSE, collapsed="old")], (None, "new", True)),  # nothing was promoted
        ([{"acceptance_collapsed": False}], (None, "new", True)),  # an engine that has another drafter
    ],
)
def test_the_sums_of_all_engines_decide(reports: list[dict[str, Any]], expected: tuple[str, str, bool]) -> None:
    after, reason = decide(SHADOWED, {str(number): each for number, each in enumerate(reports)})
    assert in_use(after) == expected
    assert bool(reason) == (after != SHADOWED)
    assert after.members.keys() == SHADOWED.members.keys()
    assert after.shadow.share == 0.5


@pytest.mark.parametrize("collapsed", ["", "old", "new"])
def test_only_its_own_collapse_takes_a_promoted_drafter_back(collapsed: str) -> None:
    promoted = swapped(SHADOWED, promotes=True)
    after, reason = decide(promoted, {"0": report(PairedGain()), "1": report(PairedGain(), collapsed)})
    assert in_use(after) == (("old", "new", False) if collapsed == "new" else ("new", "old", True))
    assert bool(reason) == (collapsed == "new")


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(specray.server.routing.promotion, "INTERVAL_S", 0.05)
    monkeypatch.setattr(cluster.engine.router, "PROBE_AFTER_S", 0.05)  # each step publishes the counters
    monkeypatch.setattr(cluster.engine.router, "HEARTBEAT_INTERVAL_S", 0.05)
    keys = tmp_path / "admin-keys"
    keys.write_text("operator the-operators-key\n")
    keys.chmod(0o600)
    return {"server": {"admin_key_file": str(keys)}, "speculative": SHADOWED}


def test_engines_get_the_better_drafter_and_the_former_one_back(serve: Serve, options: dict[str, Any]) -> None:
    def note(server: Server, name: str, gain: PairedGain) -> None:
        for replica in server.replicas:
            stats = replica.router._engine._engine.stats
            for metric, value in zip(PAIRED, gain, strict=True):
                stats.labelled[metric][name] = value

    async def scenario() -> None:
        async with serve(**options, num_replicas=2) as server:
            rollout = server.router_pool.drafter_rollout
            for replica in server.replicas:
                replica.ranks.drafter.keep(SHADOWED)
            note(server, "new", WORSE)
            await asyncio.sleep(0.3)
            assert in_use(rollout.speculative) == (None, "new", True)
            note(server, "new", BETTER)
            await server.until(lambda: in_use(rollout.speculative) == ("new", "old", True), 30.0)
            drafters = [replica.ranks.drafter for replica in server.replicas]
            of_all = [("new", "old", True)] * 2  # one engine after the other
            await server.until(lambda: [in_use(drafter.state.speculative) for drafter in drafters] == of_all, 30.0)
            counts = [replica.router._engine._engine.stats.labelled for replica in server.replicas]
            await server.until(
                lambda: not any(each for labelled in counts for each in labelled[PAIRED[0]].values()), 30.0
            )
            stats = server.replicas[1].router._engine._engine.stats
            stats.add_labelled("specray_acceptance_collapsed", "new")
            await server.until(lambda: in_use(rollout.speculative) == ("old", "new", False), 30.0)
            note(server, "new", BETTER)
            await asyncio.sleep(0.3)
            assert in_use(rollout.speculative) == ("old", "new", False), "an operator has to look"
            assert all(replica.ranks.drafter.loaded == [] for replica in server.replicas), "nothing was loaded again"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"server": {}}, "needs server.admin_key_file"),
        ({"speculative": {"drafters": [OLD, NEW], "shadow": {"promotes": True}}}, "without shadow.drafter"),
        ({"draft": {"placement": "inline"}}, "cannot be replaced"),
        ({"speculative": {"drafters": [OLD, NEW, OTHER], "shadow": {"drafter": "new", "promotes": True}}}, "several"),
    ],
)
def test_a_promotion_that_cannot_work_is_refused(changes: dict[str, Any], reason: str, options: dict[str, Any]) -> None:
    AppConfig.model_validate(options | {"speculative": SHADOWED.model_dump()})
    with pytest.raises(ValidationError, match=reason):
        AppConfig.model_validate(options | {"speculative": SHADOWED.model_dump()} | changes)


def test_a_drafter_is_promoted_only_from_the_shadow() -> None:
    action = parse_action({"action": "add", "drafter": OTHER, "promotes": True})
    with pytest.raises(ApiError, match="promotes has no effect without shadow_share"):
        changed_group(SHADOWED, action, {})
