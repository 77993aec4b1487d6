"""The budget of steps in CUDA graphs, whose costs are measured before the first request.

Graphs pad a step to the smallest bucket with room for all its nodes, so a step costs what its bucket does. All requests
get equally many drafts, as many as the bucket with the most tokens per second has. Scores are not requested, because
the host would have to cut trees by them, and a step could not begin before the outcome of the last one.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import exp

from specray.engine.draft_budget.acceptance import NUM_FIRST_TREES, RequestAcceptance
from specray.engine.draft_budget.budget import DRAFTER_OFF_AFTER, DRAFTING_MARGIN, DraftBudget, Drafting, Shares
from specray.engine.draft_budget.by_place import NodeAcceptance
from specray.engine.draft_budget.costs import CLIP, PACE_MEMORY, Curve, StepShape
from specray.engine.draft_budget.static import PlainSteps, shares_by_weight
from specray.step import BucketSeconds

FORGET_AFTER = 1024  # such steps after which the acceptance is forgotten, because other requests may accept more
START_WEIGHT = 16.0  # of a cost that was measured at the start, in steps


class BucketCosts:
    """Seconds of a step by the captured sizes that it fits in, drafting included."""

    def __init__(self, buckets: Sequence[BucketSeconds]) -> None:
        points: dict[int, list[tuple[int, float, float]]] = {}
        for bucket in buckets:
            points.setdefault(bucket.num_requests, []).append((bucket.num_nodes, bucket.seconds, START_WEIGHT))
        self._curves = {num_requests: Curve(found) for num_requests, found in sorted(points.items())}
        self._num_nodes = {num_requests: sorted(nodes for nodes, *_ in found) for num_requests, found in points.items()}
        self.has_drafts = any(bucket.draft for bucket in buckets)  # whether a step's costs include drafting
        self._pace = 1.0  # a step's time in proportion to the start's, when no request had any context

    def choices(self, num_requests: int) -> list[int]:
        """Numbers of drafts that fill the nodes of a bucket; 0 is the first."""
        return [nodes - 1 for nodes in self._num_nodes[self._rows(num_requests)]]

    def seconds(self, num_requests: int, num_drafts: int) -> float:
        """The expected time of a step in which each tree has so many drafts."""
        curve, nodes, more = self._bucket(num_requests, num_drafts)
        return float(self._pace * more * curve.at(nodes))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step: what its bucket costs beside others, and how slow all have become."""
        # Trees may differ, and the number of all nodes counts: equal trees of the mean size have as many.
        drafts = max(min(1, shape.most_drafts), -(-shape.num_drafts // shape.num_requests))
        curve, nodes, more = self._bucket(shape.num_requests, drafts)
        usual = self.seconds(shape.num_requests, drafts)
        deviation = seconds / usual
        counted = CLIP / max(CLIP, deviation)
        curve.observe(nodes, counted * seconds / (self._pace * more))
        self._pace *= exp((counted * deviation - 1) / PACE_MEMORY)

    def _rows(self, num_requests: int) -> int:
        return next((rows for rows in self._curves if rows >= num_requests), max(self._curves))

    def _bucket(self, num_requests: int, num_drafts: int) -> tuple[Curve, int, float]:
        """(seconds by nodes, the nodes of the bucket, how many times its requests there are)."""
        rows = self._rows(num_requests)
        buckets = self._num_nodes[rows]
        nodes = next((nodes for nodes in buckets if nodes > num_drafts), buckets[-1])
        return self._curves[rows], nodes, max(1.0, num_requests / rows)


class GraphBudget(DraftBudget):
    """DraftBudget by BucketCosts; until they are known, trees are whole. `plain_share` of the steps have no drafts."""

    def __init__(self, max_step_draft_tokens: int | None, plain_share: float = 0.0) -> None:
        self._most = max_step_draft_tokens
        self._plain = PlainSteps(plain_share)
        self._costs: BucketCosts | None = None
        self._nodes: dict[str, NodeAcceptance] = {}  # by the name of one of several drafters
        self._num_without_drafts = 0  # steps in a row

    def record_bucket_seconds(self, buckets: Sequence[BucketSeconds]) -> None:
        self._costs = BucketCosts(buckets) if buckets else None

    def shares(self, requests: Sequence[Drafting], num_reading: int = 0) -> Shares:
        if not any(request.most for request in requests):  # says nothing about drafts, which nobody may have
            return Shares([0] * len(requests), self._runs_drafter(requests, num_reading))
        if self._plain.next_is_plain():
            return Shares([0] * len(requests))
        wanted = [request.most if request.acceptance.is_caught_up else 0 for request in requests]
        most = self._best(requests, wanted)
        pairs = zip(requests, wanted, strict=True)
        wanted = [count if request.is_compared else min(most, count) for request, count in pairs]
        self._num_without_drafts = 0 if any(wanted) else self._num_without_drafts + 1
        if self._num_without_drafts >= FORGET_AFTER:
            self._nodes.clear()
        if self._most is not None:
            wanted = shares_by_weight(wanted, [request.weight for request in requests], self._most)
        return Shares(wanted, self._runs_drafter(requests, num_reading))

    def record_tree(
        self,
        request: RequestAcceptance,
        num_drafts: int,
        accepted_nodes: Sequence[int],
        scores: Sequence[float] = (),  # noqa: ARG002
    ) -> None:
        if num_drafts:
            self._nodes.setdefault(request.drafter, NodeAcceptance()).record_tree(request, num_drafts, accepted_nodes)
        else:
            request.fade()

    def record_step(self, shape: StepShape, target_seconds: float, rest_seconds: float | None) -> None:
        if self._costs is not None and rest_seconds is not None:
            self._costs.observe(shape, target_seconds + rest_seconds)

    def _runs_drafter(self, requests: Sequence[Drafting], num_reading: int) -> bool:
        """Whether it drafted lately, costs nothing here, or has to read prompts whose requests will get drafts."""
        if self._num_without_drafts <= DRAFTER_OFF_AFTER or self._costs is None or not self._costs.has_drafts:
            return True
        if not num_reading and not any(request.is_reading for request in requests):
            return False
        most = max((request.most for request in requests), default=0)
        together = [*requests, *[Drafting(most, RequestAcceptance())] * num_reading]
        return self._best(together, [request.most for request in together]) > 0

    def _best(self, requests: Sequence[Drafting], wanted: Sequence[int]) -> int:
        """Drafts of each request, of which request i can have `wanted[i]`, that make the most tokens per second."""
        most, count = max(wanted, default=0), len(requests)
        if self._costs is None or self._is_learning(requests):
            return most
        gains = {name: nodes.gains(most) for name, nodes in self._nodes.items()}
        usual = NodeAcceptance().gains(most)
        brought = [0.0] * most  # tokens by the drafts at each place
        for request, number in zip(requests, wanted, strict=True):
            own = request.acceptance.gains(gains.get(request.acceptance.drafter, usual)[:number])
            for place, gain in enumerate(own):
                brought[place] += gain
        tokens = list(accumulate(brought, initial=float(count)))  # of the step, by the drafts of each request
        best, fastest = 0, count / self._costs.seconds(count, 0)
        for choice in self._costs.choices(count)[1:]:
            number = min(choice, most)
            rate = tokens[number] / (DRAFTING_MARGIN * self._costs.seconds(count, number))
            if rate > fastest:
                best, fastest = number, rate
        return best

    def _is_learning(self, requests: Sequence[Drafting]) -> bool:
        """Whether too little is known of the drafters of all these requests, whose trees show more."""
        shown = [request for request in requests if request.is_recorded and request.acceptance.is_representative]
        names = {request.acceptance.drafter for request in shown if request.most}
        return bool(names) and all(
            name not in self._nodes or self._nodes[name].num_trees < NUM_FIRST_TREES for name in names
        )
