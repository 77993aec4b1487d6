"""An alarm for drafts that the target hardly ever accepts, shown by the gauge `specray_acceptance_collapsed`."""

import logging

from specray.engine.stats import EngineStats

NUM_TREES = 256  # verified trees between two checks
COLLAPSED_BELOW = 1.1  # accept length below which a tree gains less than its verification costs
RECOVERED_FROM = 1.2

DRAFTS = "specray_spec_decode_num_drafts_total"
ACCEPTED = "specray_spec_decode_num_accepted_tokens_total"
COLLAPSED = "specray_acceptance_collapsed"

logger = logging.getLogger(__name__)


def is_collapsed(accept_length: float, was_collapsed: bool) -> bool:
    """Whether an average accept length, bonus token included, is too low for drafting to gain time."""
    return accept_length < (RECOVERED_FROM if was_collapsed else COLLAPSED_BELOW)


class AcceptanceAlarm:
    """Checks each window of NUM_TREES verified trees."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self.reset()

    def reset(self) -> None:
        """Start a new window, for a new drafter."""
        self._since = self._counts()
        self._stats.set(COLLAPSED, 0)

    def check(self) -> None:
        """Check the counts; a change is logged once."""
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
