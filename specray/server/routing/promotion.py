"""Promotes a shadow drafter that is proven to be better, and takes it back when its acceptance collapses.

Runs with `speculative.shadow.promotes`. A promotion and its reversal are one operation, which swaps the shadow and the
drafter in use. All state is in the `speculative` options, so any ingress can perform it, also one that starts later.
"""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from specray.config import SpeculativeConfig, with_values
from specray.engine.drafter_selection.paired_gain import PairedGain
from specray.errors import ConfigError, SpecRayError
from specray.server import OPERATOR_LOG
from specray.server.routing.rollout import DrafterRollout

INTERVAL_S = 2.0  # between two evaluations of the engines' reports

logger = logging.getLogger(OPERATOR_LOG)


async def promote_shadows(rollout: DrafterRollout) -> None:
    """Evaluate the engines' reports every INTERVAL_S, and swap drafters when `decide` says so. Never returns."""
    while True:
        await asyncio.sleep(INTERVAL_S)
        now = rollout.speculative
        if not now.shadow.promotes or now.shadow.drafter is None:
            continue
        try:
            after, reason = decide(now, await rollout.report())
            if after != now:
                await rollout.change(partial(_if_unchanged, now, after))
                logger.warning("new requests get the drafter %s: %s", after.default_drafter, reason)
        except SpecRayError as error:  # no engine answers, or another ingress was first
            logger.info("the shadow drafter was not promoted: %s", error)
        except Exception:  # an error of the cluster ends no task that others rely on
            logger.exception("checking whether to promote the shadow drafter failed")


def _if_unchanged(seen: SpeculativeConfig, after: SpeculativeConfig, latest: SpeculativeConfig) -> SpeculativeConfig:
    """`after`. Raises ConfigError if somebody has changed the drafters meanwhile."""
    if latest != seen:
        raise ConfigError("the drafters were changed meanwhile")
    return after


def decide(now: SpeculativeConfig, reports: Mapping[str, Mapping[str, Any]]) -> tuple[SpeculativeConfig, str]:
    """(options from now on, why they changed). `reports` are the engines' of `GET /admin/drafter`.

    After a collapse nothing is promoted any more: an operator has to look.
    """
    shadow = now.shadow.drafter
    assert shadow is not None
    known = [report["drafters"] for report in reports.values() if shadow in report.get("drafters", ())]
    gain = PairedGain.of(PairedGain(**drafters[shadow]["shadow_gain"]) for drafters in known)
    if (bounds := gain.interval) is not None and bounds[0] > 0:
        low, high = bounds
        reason = (
            f"its accept length is {low:.2f} to {high:.2f} longer, by {gain.num_requests:.0f} requests in its shadow"
        )
        return swapped(now, promotes=True), reason
    promoted = now.default_drafter
    if now.shadow.is_former and any(
        drafters[promoted].get("acceptance_collapsed") for drafters in known if promoted in drafters
    ):
        return swapped(now, promotes=False), f"the acceptance of {promoted} has collapsed"
    return now, ""


def swapped(now: SpeculativeConfig, *, promotes: bool) -> SpeculativeConfig:
    """The shadow and the drafter in use change places."""
    names = [drafter.name for drafter in now.drafters if drafter.name != now.shadow.drafter]
    former = now.default_drafter or names[0]
    shadow = with_values(now.shadow, drafter=former, promotes=promotes, is_former=promotes)
    return with_values(now, default_drafter=now.shadow.drafter, shadow=shadow)
