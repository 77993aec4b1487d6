"""Choices that are tried out although others are known to be better.

A choice that is never made is never measured, so steps without drafts, or with more or fewer, are tried from time to
time, for a few steps each.
"""

from enum import Enum

from specray.engine.step_times import size_class

# At first the steps between two trials double from trial to trial. A trial without drafts costs less than one with.
FIRST_TRIAL_STEP, STEPS_BETWEEN_TRIALS, STEPS_BETWEEN_TRIALS_OF_DRAFTS = 24, 192, 384
TRIAL_STEPS = 4  # the first shows little: its trees were drafted under the limits of the step before


class Trial(Enum):
    """What is tried out instead of the best known choice."""

    NO_DRAFTS = "no drafts"
    MORE_DRAFTS = "more drafts"  # by a quarter, to find the next bend of the costs
    FEWER_DRAFTS = "fewer drafts"  # the same
    TWICE_THE_DRAFTS = "twice the drafts"

    def drafts(self, best: int) -> int:
        """Those of a request, instead of its best known number."""
        if self is Trial.NO_DRAFTS:
            return 0
        if self is Trial.FEWER_DRAFTS:
            return max(min(1, best), best * 3 // 4)
        return best * (5 if self is Trial.MORE_DRAFTS else 8) // 4 + 1


class Trials:
    """The trial that goes on, and a schedule of trials for each size of a batch."""

    def __init__(self) -> None:
        self._schedules: dict[int, TrialSchedule] = {}  # by the batch's size, in powers of two
        self._trial: Trial | None = None
        self._steps_left = 0

    def next(self, num_requests: int, *, drafts: bool) -> Trial | None:
        """The trial of the next step, None outside of trials. `drafts` is whether the best known choice drafts."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            schedule = self._schedules.setdefault(size_class(num_requests), TrialSchedule())
            self._trial = schedule.next(drafts=drafts)
            self._steps_left = 0 if self._trial is None else TRIAL_STEPS
        return self._trial


class TrialSchedule:
    """When to try what, counted in steps outside of trials."""

    def __init__(self) -> None:
        self._num_trials = 0
        self._steps_left = self._distance = FIRST_TRIAL_STEP

    def next(self, *, drafts: bool) -> Trial | None:
        """The trial that begins now; `drafts` is whether the best known choice drafts."""
        self._steps_left -= 1
        if self._steps_left > 0:
            return None
        most = STEPS_BETWEEN_TRIALS if drafts else STEPS_BETWEEN_TRIALS_OF_DRAFTS
        self._steps_left = self._distance = min(2 * self._distance, most)
        with_drafts = (Trial.NO_DRAFTS, Trial.MORE_DRAFTS, Trial.FEWER_DRAFTS, Trial.TWICE_THE_DRAFTS)
        order = with_drafts if drafts else (Trial.MORE_DRAFTS,)
        self._num_trials += 1
        return order[(self._num_trials - 1) % len(order)]
