"""When drafts are not worth making: an alarm that rises while the target hardly ever accepts one.

Not here: counting (`specray.metrics` has the counts, and the gauge that shows the alarm).
"""

import logging

from specray.metrics import EngineStats

NUM_TREES = 256  # with drafts, between two judgements
COLLAPSED_BELOW = 1.1  # accept length; no tree costs so little that it pays for itself here
RECOVERED_FROM = 1.2

DRAFTS = "specray_spec_decode_num_drafts_total"
ACCEPTED = "specray_spec_decode_num_accepted_tokens_total"
COLLAPSED = "specray_acceptance_collapsed"

logger = logging.getLogger(__name__)


def is_collapsed(accept_length: float, was_collapsed: bool) -> bool:
    """Whether trees that were accepted to this length on average, bonus included, are in vain."""
    return accept_length < (RECOVERED_FROM if was_collapsed else COLLAPSED_BELOW)


class AcceptanceAlarm:
    """Judges every NUM_TREES verified trees by themselves; a new drafter has a clean record."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self.reset()

    def reset(self) -> None:
        """Forget what was seen: another drafter drafts from now on."""
        self._since = self._counts()
        self._stats.set(COLLAPSED, 0)

    def judge(self) -> None:
        """Look at the counts after a step; a change is logged once."""
        trees, accepted = (now - then for now, then in zip(self._counts(), self._since, strict=True))
        if trees < NUM_TREES:
            return
        self._since = self._counts()
        was_collapsed = bool(self._stats.values[COLLAPSED])
        is_so = is_collapsed(1 + accepted / trees, was_collapsed)
        if is_so != was_collapsed:
            self._stats.set(COLLAPSED, float(is_so))
            what = "hardly ever accepted and slow decoding down" if is_so else "accepted again"
            logger.warning("drafts are %s: accept length %.2f over %d trees", what, 1 + accepted / trees, trees)

    def _counts(self) -> tuple[float, float]:
        return self._stats.values[DRAFTS], self._stats.values[ACCEPTED]
