"""One tree from several sources: the drafter's tree, n-grams of three kinds of text, and a predicted output.

The trees are merged by path (`tree_merge`); the most probable nodes are verified. Each source has one calibration,
which counts how often the text followed its nodes, verified or not. It depends on texts and scores that are equal on
all ranks, so all ranks build equal trees. The scores of merged trees are calibrated probabilities, from which
`draft_budget` chooses how many nodes to verify.

The drafter sees every step, but proposes nothing where the other sources are so probable that its tree would not pay.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from specray.config import SpeculativeConfig
from specray.spec_decode.corpus import open_corpora
from specray.spec_decode.draft_tree import ROOT, DraftTree, TreeLists
from specray.spec_decode.drafter import Drafter
from specray.spec_decode.ngram import NgramDrafter
from specray.spec_decode.ngram_rules import merged_rules
from specray.spec_decode.ngram_tree import ngram_prior
from specray.spec_decode.proposal_sources import PREDICTION, NgramSource, Source
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.tree_edits import replace_trees
from specray.spec_decode.tree_merge import Calibration, FollowedShare, Proposal, Rate, ScoredLists, merge
from specray.step import WARM_UP_SALT

DRAFTER = "drafter"
GROWTH_COST = 0.15  # a step's additional time for the drafter's trees, by heads of the configurations in configs/
_FIRST_GAIN = 2.0  # tokens that a tree of the drafter brings before any was seen
_GAIN_FORGOTTEN = 1024  # steps without the drafter's trees, after which they are expected to bring as many again
MEMORY_TREES = 64  # of the drafter, for what one usually brings
# Lower ends of the classes of a node's probability, given its parent. Nodes without one are classified by depth.
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_MIDDLES = (0.01, 0.035, 0.075, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.935, 0.985)
_WITHOUT_SCORE = len(EDGES)  # and one more for each level
_DEEPEST = _WITHOUT_SCORE + 16


@dataclass(slots=True)
class _RunningRequest:
    """What is known of a running request."""

    followed: defaultdict[str, FollowedShare] = field(default_factory=lambda: defaultdict(FollowedShare))  # by source
    proposals: list[Proposal] = field(default_factory=list)  # whose text is not known yet
    num_known: int = 0  # tokens up to their roots


class MergedDrafter:
    """Drafter that merges the trees of `drafter` with those of `source`."""

    def __init__(self, drafter: Drafter, source: Source, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.aux_hidden_state_layers = drafter.aux_hidden_state_layers
        self.reads_next_token = drafter.reads_next_token
        self.drafter = drafter
        self._source = source
        self._calibrations: dict[tuple[str, bool], Calibration] = {}  # by source and whether requests are sampled
        self._requests: dict[int, _RunningRequest] = {}  # by slot
        self._usual_gain = _FIRST_GAIN  # tokens that a tree of the drafter is expected to bring
        self._gives_scores = True

    def propose(self, context: ProposeContext) -> DraftTree:
        states = [context.table.states[request.slot] for request in context.requests]
        for request in context.requests + context.unfinished:
            self._learn(context.table.states[request.slot])
        proposals = {place: self._proposals(state) for place, state in enumerate(states) if self._covers(state)}
        if not proposals:
            return self.drafter.propose(context)
        must_draft = len(proposals) < len(states) or not all(proposals.values())
        others = {} if must_draft else proposals
        merged = {place: self._merged(context, place, found) for place, found in others.items()}
        if must_draft or any(map(self._pays, merged.values())):
            tree = self.drafter.propose(context)
            self._gives_scores |= tree.scores is not None
            drafted = _proposals_of(tree)
            proposals = {place: [*found, drafted[place]] for place, found in proposals.items() if place in drafted}
            merged = {place: self._merged(context, place, found) for place, found in proposals.items()}
        else:
            self._usual_gain += (_FIRST_GAIN - self._usual_gain) / _GAIN_FORGOTTEN  # later texts may be others
            everything = context.requests + context.unfinished
            self.drafter.propose(replace(context, requests=[], unfinished=everything, replay=None))
            tree = DraftTree.roots(context.roots())
        for place, found in proposals.items():
            if found and states[place].cache_salt != WARM_UP_SALT:
                self._count_gain(found[-1], states[place])
            known = self._requests[states[place].slot]
            known.proposals, known.num_known = found, len(states[place].token_ids)
        return _replaced(tree, merged, self._gives_scores)

    def release(self, slots: Sequence[int]) -> None:
        self.drafter.release(slots)
        self._source.release(slots)
        for slot in slots:
            self._requests.pop(slot, None)

    def _covers(self, state: RequestState) -> bool:  # noqa: ARG002
        """Whether a request has merged trees, or those of `drafter` alone."""
        return True

    def _proposals(self, state: RequestState) -> list[Proposal]:
        """Those of the source for a request."""
        self._requests.setdefault(state.slot, _RunningRequest())
        return self._source.propose(state, partial(self._rate_of, state), self.max_draft_tokens)

    def _merged(self, context: ProposeContext, place: int, proposals: Sequence[Proposal]) -> ScoredLists:
        request = context.requests[place]
        state = context.table.states[request.slot]
        parts = [(proposal, self._rate_of(state, proposal.source)) for proposal in proposals]
        most = min(self.max_draft_tokens, request.draft_limit.num_tokens)
        return merge(parts, state.token_ids[-1], most, request.draft_limit.num_steps)

    def _pays(self, others: ScoredLists) -> bool:
        """Whether the drafter's tree would pay beside that of the other sources, whose first nodes may fail."""
        sure = sum(score for score, parent in zip(others.scores, others.tree.parents, strict=True) if parent == ROOT)
        return (1 - sure) * self._usual_gain > GROWTH_COST * sum(others.scores)

    def _count_gain(self, proposal: Proposal, state: RequestState) -> None:
        if proposal.source == DRAFTER:
            size = len(proposal.evidence)
            alone = merge([(proposal, self._rate_of(state, DRAFTER))], ROOT, size, size)
            self._usual_gain += (sum(alone.scores) - 1 - self._usual_gain) / MEMORY_TREES

    def _learn(self, state: RequestState) -> None:
        """Compare a request's last trees with the text that followed."""
        known = self._requests.get(state.slot)
        if known is None or state.cache_salt == WARM_UP_SALT or not (text := state.token_ids[known.num_known :]):
            return
        for proposal in known.proposals:
            share = known.followed[proposal.source]
            self._calibration(state, proposal.source).observe(proposal, text, share)
        known.proposals = []

    def _rate_of(self, state: RequestState, source: str) -> Rate:
        return self._calibration(state, source).rate_of(self._requests[state.slot].followed[source])

    def _calibration(self, state: RequestState, source: str) -> Calibration:
        key = source, state.sampling.is_sampled
        if key not in self._calibrations:
            self._calibrations[key] = Calibration(_PRIORS.get(source, ngram_prior))
        return self._calibrations[key]


def _proposals_of(tree: DraftTree) -> dict[int, Proposal]:
    """The drafter's trees by their places; none where its logits are not finite."""
    scores = [None] * len(tree.num_nodes) if tree.scores is None else tree.scores.tolist()
    rows = enumerate(zip(tree.to_lists(), scores, strict=True))
    return {place: Proposal(DRAFTER, lists, _evidence(lists, known)) for place, (lists, known) in rows if lists.tokens}


def _evidence(tree: TreeLists, scores: Sequence[float] | None) -> list[int]:
    """Classes of a drafter's nodes: by their probability given the parent, or by depth where it is not known."""
    evidence = [_WITHOUT_SCORE]
    for node, parent in enumerate(tree.parents[1:], start=1):
        if scores is None:
            evidence.append(min(_DEEPEST, evidence[parent] + 1))
        else:
            evidence.append(bisect_right(EDGES, scores[node] / max(scores[parent], 1e-9)) - 1)
    return evidence


def _replaced(tree: DraftTree, merged: Mapping[int, ScoredLists], gives_scores: bool) -> DraftTree:
    """`tree` with the merged trees at their places."""
    if not merged:
        return tree
    device = tree.tokens.device
    trees = DraftTree.from_lists([each.tree for each in merged.values()], device)
    if gives_scores:
        width = trees.tokens.shape[1]
        padded = [each.scores + [0.0] * (width - len(each.scores)) for each in merged.values()]
        trees = trees._replace(scores=torch.tensor(padded, device=device))
    return replace_trees(tree, torch.tensor(list(merged), device=device), trees)


_PRIORS: dict[str, Rate] = {
    DRAFTER: lambda evidence: 0.6 if evidence >= _WITHOUT_SCORE else _MIDDLES[evidence],
    PREDICTION: lambda evidence: 0.9,  # noqa: ARG005
}


def with_ngrams(drafter: Drafter, config: SpeculativeConfig, folder: Path) -> Drafter:
    """`drafter`, merged with n-grams if `merged_draft_tokens` is set; `folder` has the target's tokenizer."""
    if config.merged_draft_tokens is None:
        return drafter
    rules = merged_rules(config)
    ngrams = NgramDrafter(rules, open_corpora(config, folder))
    return MergedDrafter(drafter, NgramSource(ngrams), rules.max_draft_tokens)
