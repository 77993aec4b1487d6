"""The budget that generates the most tokens per second under the costs and acceptance measured so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specray.engine.draft_budget.acceptance import (
    MAX_MISSED_TOKENS,
    NUM_FIRST_TREES,
    RequestAcceptance,
    ScoreAcceptance,
    ScoredTree,
    best_cut,
    factor_together,
)
from specray.engine.draft_budget.budget import DRAFTER_OFF_AFTER, DRAFTING_MARGIN, DraftBudget, Drafting, Shares
from specray.engine.draft_budget.by_place import Floats, NodeAcceptance, allocate
from specray.engine.draft_budget.costs import StepCosts, StepShape
from specray.engine.draft_budget.static import shares_by_weight
from specray.engine.draft_budget.trials import TRIAL_STEPS, Trial, Trials

MOST_STEP_DRAFTS = 1024  # without a configured limit
STEPS_PER_SAVE, FIRST_SAVES = 1024, (64, 256)  # of the costs, in steps that were timed
STEPS_PER_UPDATE = 16  # of what was learnt from trees; every step, it would take as long as all other choices
# Steps without drafts after which the measured acceptance of a draft model is forgotten: other requests may accept more
# than those that turned it off, and only new drafts can show that. The number doubles while drafts do not pay.
FORGET_AFTER, FORGET_AFTER_MOST = 1024, 8192
TREES_OF_ONE_REQUEST = 8  # when a draft model is tried again, because one request may be unlike the others
LEAST_SCORE = 1e-6  # asks for scores, and keeps every node
# Added for requests that a draft model has not read, by their share: they continue without drafts, so drafts of all pay
# only when others have taken their place. Without it, drafts that hardly pay are turned off and on all the time.
MISSED_MARGIN = 0.08


class LastBest(NamedTuple):
    """The best choice for the requests of the last step."""

    requests: list[Drafting]
    are_caught_up: list[bool]  # RequestAcceptance.is_caught_up of each request
    num_drafts: list[int]
    min_scores: list[float]


@dataclass(slots=True)
class Disuse:
    """Steps in a row in which requests of a draft model had no drafts, and after how many it is tried again."""

    num_steps: int = 0
    limit: int = FORGET_AFTER

    @property
    def is_tried_anew(self) -> bool:
        return self.limit > FORGET_AFTER


class AutoBudget(DraftBudget):
    """DraftBudget that learns while it serves. `keep` is called with the costs from time to time."""

    def __init__(
        self,
        max_step_draft_tokens: int | None,
        costs: StepCosts | None = None,
        keep: Callable[[StepCosts], object] = lambda costs: None,  # noqa: ARG005
    ) -> None:
        self._most = max_step_draft_tokens or MOST_STEP_DRAFTS
        self._costs = costs or StepCosts()
        self._keep = keep
        self._nodes: dict[str, NodeAcceptance] = {}  # by the name of one of several drafters
        self._scores: dict[str, ScoreAcceptance] = {}  # by drafter; only of draft models, which know their scores
        self._new_trees: dict[str, list[tuple[RequestAcceptance, ScoredTree]]] = {}  # not counted in _scores yet
        self._cuts: dict[tuple[str, int, int], tuple[int, float]] = {}  # the best, by arguments of `_best_cut`
        self._last_best: LastBest | None = None
        self._num_steps = 0
        self._trials = Trials()
        self._num_without_drafts = 0  # steps in a row
        self._disuse: dict[str, Disuse] = {}  # like _scores
        self._num_timed = 0

    def shares(self, requests: Sequence[Drafting], num_reading: int = 0) -> Shares:
        if not any(request.most for request in requests):  # says nothing about drafts, which nobody may have
            return Shares([0] * len(requests), self._runs_drafter(len(requests), num_reading))
        if self._num_steps % STEPS_PER_UPDATE == 0:
            self._count_new_trees()
            self._cuts.clear()
            self._last_best = None
        self._num_steps += 1
        weights = [request.weight for request in requests]
        unknown = {request.acceptance.drafter for request in requests if self._is_among_first_trees(request)}
        if unknown and all(request.acceptance.drafter in unknown for request in requests):
            everything = [LEAST_SCORE] * len(requests)
            whole = [self._whole_tree(request) for request in requests]
            return Shares(shares_by_weight(whole, weights, self._most), min_scores=everything)
        num_drafts, min_scores = self._best(requests)
        for place, request in enumerate(requests):
            if request.acceptance.drafter in unknown or request.is_compared:
                num_drafts[place], min_scores[place] = self._whole_tree(request), LEAST_SCORE
        num_drafts = shares_by_weight(num_drafts, weights, self._most)
        self._num_without_drafts = 0 if any(num_drafts) else self._num_without_drafts + 1
        self._forget_unused(requests, num_drafts)
        trial = self._trials.next(len(requests), drafts=any(num_drafts))
        if trial is Trial.NO_DRAFTS:
            # Calling the drafter does not change the target's time, and later drafts need what it reads meanwhile.
            # Steps that read prompts are not timed.
            is_reading = num_reading > 0 or any(request.is_reading for request in requests)
            runs_drafter = is_reading or self._costs.knows_rest_without_drafts(len(requests))
            runs_drafter |= any(_would_fall_behind(request.acceptance) for request in requests)
            return Shares([0] * len(requests), runs_drafter=runs_drafter)
        if trial is not None:
            tried = map(trial.drafts, num_drafts)
            wanted = [min(request.most, count) for request, count in zip(requests, tried, strict=True)]
            return Shares(shares_by_weight(wanted, weights, self._most), min_scores=min_scores)
        return Shares(num_drafts, self._runs_drafter(len(requests), num_reading), min_scores)

    def _runs_drafter(self, num_requests: int, num_reading: int) -> bool:
        """Whether it drafted lately, or has to read prompts whose requests will get drafts."""
        if self._num_without_drafts <= DRAFTER_OFF_AFTER:
            return True
        together, margin = num_requests + num_reading, DRAFTING_MARGIN + MISSED_MARGIN
        return num_reading > 0 and any(
            acceptance.num_trees < NUM_FIRST_TREES or self._best_cut(name, together, together, margin)[0]
            for name, acceptance in self._scores.items()
        )

    def _forget_unused(self, requests: Sequence[Drafting], num_drafts: Sequence[int]) -> None:
        """Forget the acceptance of draft models that have not drafted for long; the next requests measure it again."""
        for name, acceptance in self._scores.items():
            counts = [
                count
                for request, count in zip(requests, num_drafts, strict=True)
                if request.most and request.acceptance.drafter == name
            ]
            disuse = self._disuse.setdefault(name, Disuse())
            if any(counts):
                is_chosen = acceptance.num_trees >= NUM_FIRST_TREES
                self._disuse[name] = Disuse(limit=FORGET_AFTER if is_chosen else disuse.limit)
            elif counts:
                disuse.num_steps += 1
            if disuse.num_steps >= disuse.limit:
                self._disuse[name] = Disuse(limit=min(2 * disuse.limit, FORGET_AFTER_MOST))
                self._scores[name] = ScoreAcceptance()
                self._new_trees.pop(name, None)
                self._cuts.clear()
                self._last_best = None

    def record_tree(
        self, request: RequestAcceptance, num_drafts: int, accepted_nodes: Sequence[int], scores: Sequence[float] = ()
    ) -> None:
        # Beside a draft model's trees, those of drafters without scores have scores of 1.
        has_scores = request.drafter in self._scores or any(score < 1.0 for score in scores)
        if has_scores and not request.is_caught_up:  # says nothing about the drafter, but that it knows scores
            self._scores.setdefault(request.drafter, ScoreAcceptance())
            return
        if has_scores and scores:
            request.num_trees += 1
            trees = self._new_trees.setdefault(request.drafter, [])
            trees.append((request, ScoredTree(scores, num_drafts, accepted_nodes)))
        elif num_drafts:
            self._nodes.setdefault(request.drafter, NodeAcceptance()).record_tree(request, num_drafts, accepted_nodes)
        else:
            request.fade()

    def _count_new_trees(self) -> None:
        """Learn from the trees of the last steps, all at once."""
        for name, trees in self._new_trees.items():
            acceptance = self._scores.setdefault(name, ScoreAcceptance())
            expected = acceptance.expected([tree for _, tree in trees])
            for (request, tree), count in zip(trees, expected, strict=True):
                request.add(len(tree.accepted_nodes), count)
            acceptance.observe([tree for request, tree in trees if not request.is_new_to_drafter])
        self._new_trees.clear()

    def record_step(self, shape: StepShape, target_seconds: float, rest_seconds: float | None) -> None:
        self._costs.observe(shape, target_seconds, rest_seconds)
        self._num_timed += 1
        if self._num_timed % STEPS_PER_SAVE == 0 or self._num_timed in FIRST_SAVES:
            self._keep(self._costs)

    def _best(self, requests: Sequence[Drafting]) -> tuple[list[int], list[float]]:
        """(drafts, least scores) of each request: by scores where those of its drafter are known, by place otherwise.

        What is learnt about scores counts from the next update on: until then the same requests get the same.
        """
        are_caught_up = [request.acceptance.is_caught_up for request in requests]
        last = self._last_best
        if last and last.requests == requests and last.are_caught_up == are_caught_up:
            return list(last.num_drafts), list(last.min_scores)
        # Requests that their draft model has not read count among those that draft: others will take their place.
        own: dict[str, list[RequestAcceptance]] = {name: [] for name in self._scores}
        for request in requests:
            if request.most and request.acceptance.drafter in own:
                own[request.acceptance.drafter].append(request.acceptance)
        factors = {name: factor_together(drafting) for name, drafting in own.items()}
        cuts = {
            name: self._best_cut(name, len(requests), len(own[name]), _margin(own[name]), factors[name]) for name in own
        }
        num_drafts, min_scores = [0] * len(requests), [LEAST_SCORE] * len(requests)
        by_place = []
        for place, request in enumerate(requests):
            cut = cuts.get(request.acceptance.drafter)
            # Nothing is known of a draft model while it has drafted only for requests that it has not read.
            if cut is None or not self._scores[request.acceptance.drafter].num_trees:
                by_place.append(place)
                continue
            score = cut[1] * factors[request.acceptance.drafter] / (request.acceptance.factor * request.weight)
            if are_caught_up[place] and score < 1.0:  # no node has a higher one
                num_drafts[place] = min(request.most, round(cut[0] * request.weight))
            min_scores[place] = max(LEAST_SCORE, score)
        if by_place:
            chosen = self._best_by_place([requests[place] for place in by_place], len(requests), num_drafts)
            for place, count in zip(by_place, chosen, strict=True):
                num_drafts[place] = count
        else:  # those learn from every tree
            self._last_best = LastBest(list(requests), are_caught_up, list(num_drafts), list(min_scores))
        return num_drafts, min_scores

    def _best_cut(
        self, name: str, num_requests: int, num_drafting: int, margin: float, factor: float = 1.0
    ) -> tuple[int, float]:
        """See `best_cut`. Margin and factor are those of the first of STEPS_PER_UPDATE steps."""
        key = (name, num_requests, num_drafting)
        if key not in self._cuts:
            acceptance = self._scores[name]
            self._cuts[key] = best_cut(acceptance, num_requests, num_drafting, self._most, self._costs, margin, factor)
        return self._cuts[key]

    def _best_by_place(self, requests: Sequence[Drafting], num_all: int, others: Sequence[int]) -> list[int]:
        """Drafts without regard to scores, in a step of `num_all` requests; `others` are the drafts so far."""
        most = max(request.most for request in requests)
        names = {request.acceptance.drafter for request in requests}
        usual = {name: self._nodes.get(name, NodeAcceptance()).gains(most) for name in names}
        gains = [
            [
                request.weight * gain
                for gain in request.acceptance.gains(usual[request.acceptance.drafter][: self._whole_tree(request)])
            ]
            for request in requests
        ]
        first, deepest = sum(others), max(others)

        def step_seconds(num_drafts: Floats, most_drafts: Floats) -> Floats:
            rest = self._costs.rest(num_all, np.maximum(most_drafts, deepest))
            seconds = self._costs.target(num_all + first + num_drafts) + rest
            return np.where(num_drafts > 0, DRAFTING_MARGIN * seconds, seconds)

        return allocate(gains, step_seconds, self._most, num_others=num_all - len(requests))

    def _whole_tree(self, request: Drafting) -> int:
        """Drafts of a request before enough is known of its drafter; none by a draft model that has not read it."""
        return 0 if request.acceptance.drafter in self._scores and not request.acceptance.is_caught_up else request.most

    def _is_among_first_trees(self, request: Drafting) -> bool:
        """Whether too few trees were seen of its drafter, and its own would count."""
        if not request.most or not request.is_recorded or not request.acceptance.is_representative:
            return False
        drafter = request.acceptance.drafter
        is_tried_anew = drafter in self._disuse and self._disuse[drafter].is_tried_anew
        if is_tried_anew and request.acceptance.num_trees >= TREES_OF_ONE_REQUEST:
            return False
        known = self._scores.get(drafter) or self._nodes.get(drafter)
        return known is None or known.num_trees < NUM_FIRST_TREES


def _margin(requests: Sequence[RequestAcceptance]) -> float:
    """How many times its measured time a step with drafts counts as."""
    num_behind = sum(not request.is_caught_up for request in requests)
    return DRAFTING_MARGIN + MISSED_MARGIN * num_behind / max(1, len(requests))


def _would_fall_behind(request: RequestAcceptance) -> bool:
    """Whether a draft model that misses the steps of a trial has missed too much of the request then."""
    return request.is_caught_up and request.num_missed_tokens + TRIAL_STEPS > MAX_MISSED_TOKENS
