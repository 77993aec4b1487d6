"""Sets the gauge `specray_acceptance_collapsed` while the target hardly ever accepts a drafter's drafts."""

import logging

from specray.engine.stats import EngineStats

NUM_TREES = 256  # of one drafter, verified between two checks
COLLAPSED_BELOW = 1.1  # accept length below which a tree gains less than its verification costs
RECOVERED_FROM = 1.2
COLLAPSED = "specray_acceptance_collapsed"
logger = logging.getLogger(__name__)


def is_collapsed(accept_length: float, was_collapsed: bool) -> bool:
    """Whether an average accept length, bonus token included, is too low for drafting to gain time."""
    return accept_length < (RECOVERED_FROM if was_collapsed else COLLAPSED_BELOW)


class AcceptanceAlarm:
    """Checks each window of NUM_TREES verified trees of one drafter.

    Trees of requests with a grammar, which changes acceptance, count only where no others of the drafter come between.
    Tokens that the grammar added to them are not the drafter's, and drafts that it forbids are no part of them.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        # By drafter and whether there is a grammar: accepted tokens of each tree of the window.
        self._accepted: dict[tuple[str, bool], list[int]] = {}

    def reset(self) -> None:
        """Start new windows, because a drafter has become another one or is used for other requests."""
        self._accepted.clear()
        series = self._stats.labelled[COLLAPSED]
        series.update(dict.fromkeys(series, 0))

    def count_tree(self, drafter: str, num_accepted: int, has_grammar: bool) -> None:
        """Count a verified tree with drafts. A change of the alarm is logged once."""
        accepted = self._accepted.setdefault((drafter, has_grammar), [])
        accepted.append(num_accepted)
        if not has_grammar:
            self._accepted.pop((drafter, True), None)
        if len(accepted) < NUM_TREES:
            return
        accept_length = 1 + sum(accepted) / NUM_TREES
        accepted.clear()
        series = self._stats.labelled[COLLAPSED]
        was_collapsed = bool(series.get(drafter))
        is_so = is_collapsed(accept_length, was_collapsed)
        series[drafter] = float(is_so)
        if is_so != was_collapsed:
            what = "hardly ever accepted and slow decoding down" if is_so else "accepted again"
            logger.warning("drafts of %s are %s: accept length %.2f", drafter, what, accept_length)
