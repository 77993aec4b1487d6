"""Replaces one engine's drafter while it serves. `specray.server.routing.rollout` does so for all engines."""

import threading
from typing import Any

from cluster.engine.supervisor import DrafterState, DrafterSupervisor
from specray.config import SpeculativeConfig
from specray.engine.async_engine import AsyncEngine
from specray.engine.drafter_selection.paired_gain import PairedGain
from specray.engine.drafter_selection.selector import PAIRED
from specray.errors import ConfigError, SpecRayError
from specray.metrics import Snapshot
from specray.server.routing.messages import DesiredDrafter, Refusal

NOT_LOADED = 409  # HTTP status: a valid request that failed now


class DrafterReconciler:
    """Applies desired drafters one at a time. `apply` is thread-safe; it blocks during a load."""

    def __init__(
        self, configured: SpeculativeConfig, max_draft_tokens: int, supervisor: DrafterSupervisor, planner: AsyncEngine
    ) -> None:
        self.desired = DesiredDrafter(0, configured)
        self._configured = configured
        self.max_draft_tokens = max_draft_tokens
        self._supervisor = supervisor
        self._planner = planner
        self._applying = threading.Lock()

    def apply(self, desired: DesiredDrafter) -> Refusal | None:
        """Apply a desired drafter unless a later one has been applied.

        Returns a refusal if it cannot be loaded, or is a change of another one than there is.
        """
        with self._applying:
            if desired.set_at == self.desired.set_at:
                return None
            if desired.made_from is not None and desired.made_from < self.desired.set_at:
                return Refusal(
                    409, "another change of the drafters came first; repeat this one if it is still wanted", None
                )
            if desired.set_at < self.desired.set_at:
                return None
            if desired.speculative != self.desired.speculative:
                try:
                    self._replace(desired.speculative)
                except SpecRayError as error:
                    return Refusal(400 if isinstance(error, ConfigError) else NOT_LOADED, str(error), None)
            self.desired = desired
            return None

    def _replace(self, speculative: SpeculativeConfig) -> None:
        self._configured.check_successor(speculative)
        if speculative.drafters and speculative.members == self.desired.speculative.members:
            self._supervisor.keep(speculative)  # only which of them requests get has changed
        else:
            self.max_draft_tokens = self._supervisor.replace(speculative).max_draft_tokens
        self._planner.draft_with(speculative, self.max_draft_tokens)


def drafter_report(state: DrafterState, accept_length: float | None, snapshot: Snapshot) -> dict[str, Any]:
    """The report of one engine's drafter for `GET /admin/drafter`."""
    collapsed = snapshot["specray_acceptance_collapsed"]
    assert isinstance(collapsed, dict)
    return {
        "state": state.state,
        "speculative": state.speculative.model_dump(),
        "loading": state.loading.model_dump() if state.loading is not None else None,
        "accept_length": accept_length,
        "acceptance_collapsed": any(collapsed.values()),
        "restarts": state.num_restarts,
        "faults": snapshot["specray_draft_faults_total"],
        "late_drafts": snapshot["specray_late_drafts_total"],
        **({"drafters": _reports(state.speculative, snapshot)} if state.speculative.drafters else {}),
    }


def _reports(speculative: SpeculativeConfig, snapshot: Snapshot) -> dict[str, Any]:
    """What each of several drafters has done since the engine started."""

    def count(metric: str, name: str) -> float:
        series = snapshot[metric]
        assert isinstance(series, dict), metric
        return series.get(name, 0.0)

    def accept_length(kind: str, trees: str, name: str) -> float | None:
        num_trees = count(trees, name)
        return 1 + count(f"specray_{kind}_accepted_tokens_total", name) / num_trees if num_trees else None

    return {
        drafter.name: {
            "algorithm": drafter.algorithm,
            "is_default": drafter.name == speculative.default_drafter,
            "is_shadow": drafter.name == speculative.shadow.drafter,
            "requests": count("specray_drafter_requests_total", drafter.name),
            "accept_length": accept_length("drafter", "specray_drafter_verify_steps_total", drafter.name),
            "acceptance_collapsed": bool(count("specray_acceptance_collapsed", drafter.name)),
            "shadow_accept_length": accept_length("shadow", "specray_shadow_trees_total", drafter.name),
            "shadow_gain": (gain := PairedGain(*(count(metric, drafter.name) for metric in PAIRED)))._asdict(),
            "shadow_gain_interval": gain.interval,
        }
        for drafter in speculative.drafters
    }
