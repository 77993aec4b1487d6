"""How many drafts the requests of a step may have: by their own limits, and by what a budget finds worth verifying."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from specray.config import MAX_TREE_NODES
from specray.engine.draft_budget import DraftBudget, Drafting
from specray.engine.request import Request
from specray.step import DraftLimit

MAX_PRIORITY = 2  # beyond it, or below its negative, a priority changes no weight
MAX_FORCED_DRAFTS = 8  # tokens that a grammar may add to a drafter's tree


class DraftLimits:
    """Limits the trees of a step's requests. `max_draft_tokens` is that of the drafter; 0: there is none."""

    def __init__(self, budget: DraftBudget, max_draft_tokens: int, context_length: int) -> None:
        self.budget = budget
        self.max_draft_tokens = max_draft_tokens
        self._context_length = context_length

    def of_step(self, work: Sequence[tuple[Request, int]]) -> tuple[list[DraftLimit], bool]:
        """(limits for each request, whether the drafter is called after the step).

        `work` are the requests, each with its number of known tokens to compute.
        """
        sampling = [(request, count) for request, count in work if count == request.num_pending_tokens]
        weights = draft_weights([(request.spec.tenant, request.spec.priority) for request, _ in sampling])
        requests = [
            Drafting(
                self.most(request),
                request.acceptance,
                not request.has_grammar,
                num_tokens > 1,
                weight,
                is_compared=request.drafter is not None and bool(request.drafter.shadow),
            )
            for (request, num_tokens), weight in zip(sampling, weights, strict=True)
        ]
        chosen = self.budget.shares(requests, len(work) - len(requests))
        # A prompt is read although its own request takes no drafts: others may share it.
        needs_drafter = any(
            0 not in r.spec.draft_limit[:2] or (num_tokens > 1 and r.shares_prefix) for r, num_tokens in work
        )
        runs_drafter = chosen.runs_drafter and needs_drafter
        if not runs_drafter:
            for request, num_tokens in work:
                request.acceptance.num_missed_tokens += num_tokens
        shares = zip(sampling, chosen.num_drafts, chosen.min_scores or [0.0] * len(requests), strict=True)
        chosen_of = {request: (num_drafts, min_score) for (request, _), num_drafts, min_score in shares}
        limits = []
        for request, _ in work:
            num_drafts, min_score = chosen_of.get(request, (0, 0.0))
            limits.append(DraftLimit(num_drafts, request.spec.draft_limit.num_steps, min_score))
        return limits, runs_drafter

    def most(self, request: Request) -> int:
        """The largest tree that may be verified for a request after this step."""
        limit, most = request.spec.draft_limit, self.max_draft_tokens
        if request.drafter is not None:
            most = min(most, request.drafter.max_draft_tokens)
        if most and request.has_grammar:
            most = min(most + MAX_FORCED_DRAFTS, MAX_TREE_NODES - 1)
        # A model has no positions after the context; planned drafts may take all that is left.
        most = min(most, request.max_useful_drafts, self._context_length - request.most_tokens, limit.num_tokens)
        return max(0, most) if limit.num_steps else 0


def draft_weights(requests: Sequence[tuple[str, int]]) -> list[float]:
    """How much the drafts of each request (tenant, priority) count: half as much for each step of its priority.

    The mean of each tenant is 1, so that a priority gains it nothing against others.
    """
    weights = [2.0 ** -max(-MAX_PRIORITY, min(MAX_PRIORITY, priority)) for _, priority in requests]
    if len(set(weights)) < 2:
        return [1.0] * len(weights)
    of_tenant = defaultdict(list)
    for (tenant, _), weight in zip(requests, weights, strict=True):
        of_tenant[tenant].append(weight)
    means = {tenant: fmean(own) for tenant, own in of_tenant.items()}
    return [weight / means[tenant] for (tenant, _), weight in zip(requests, weights, strict=True)]
