"""Trees that are not verified but compared with the text: how many of their tokens the target would have accepted.

With coupled verification the target accepts the path of a tree that its own next tokens follow, so the generated text
shows which of its tokens would have been accepted. The same text shows how many the tree had that was verified in its
place, so the two are compared tree by tree (see `PairedGain`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specray.spec_decode.draft_tree import ROOT, DraftTree, TreeLists
from specray.spec_decode.pending_trees import limited
from specray.spec_decode.propose_context import DraftRequest, ProposeContext


class Compared(NamedTuple):
    """Counts over trees whose accepted path is known."""

    num_trees: int
    num_drafts: int  # nodes, the roots not counted
    num_accepted: int
    # Of requests that ended since, over the trees in whose place another drafter's was verified:
    num_requests: int = 0
    num_pairs: int = 0
    gain: int = 0  # accepted drafts, less those of the verified trees
    gain_squares: int = 0  # sum of the squares of each request's gain


@dataclass(slots=True)
class _Waiting:
    """A tree whose accepted path is not known yet."""

    root: int  # position
    tree: TreeLists
    num_verified: int | None = None  # accepted drafts of the tree that was verified in its place, once known


class ShadowTrees:
    """One drafter's trees that wait for the text after their roots, by slot."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[_Waiting]] = {}
        self._gains: dict[int, list[int]] = {}  # of the pairs of each running request
        self._ended: list[list[int]] = []  # the same of requests that have ended

    def keep(self, requests: Sequence[DraftRequest], tree: DraftTree) -> None:
        """Trees of `requests`, in their order; copied to the host.

        What would not be verified, because of a request's limit, does not count. A tree without drafts does, where
        drafts are allowed: the verified drafters' steps without drafts count too.
        """
        tree = limited(tree, [request.draft_limit for request in requests])
        scores = torch.ones(tree.tokens.shape) if tree.scores is None else tree.scores
        for request, lists, known in zip(requests, tree.to_lists(), scores.tolist(), strict=True):
            limit, num_nodes = request.draft_limit, len(lists.tokens)
            num_likely = max(1, sum(score >= limit.min_score for score in known[:num_nodes]))
            size = min(1 + limit.num_tokens, num_likely)
            cut = TreeLists(lists.tokens[:size], lists.parents[:size])
            if limit.num_tokens and cut.tokens:
                self._waiting.setdefault(request.slot, []).append(_Waiting(request.end, cut))

    def compare(self, context: ProposeContext) -> Compared:
        """Compare trees with the text that is known by now. Trees whose text is still too short keep waiting."""
        num_trees = num_drafts = accepted = 0
        now = {request.slot: request for request in context.requests + context.unfinished}
        for slot in [slot for slot in self._waiting if slot in context.table.states]:
            token_ids, waiting = context.table.states[slot].token_ids, self._waiting.pop(slot)
            # A step without the drafter's knowledge may lie between: then nobody knows what the one after the tree did.
            if (request := now.get(slot)) is not None and request.start == waiting[-1].root:
                waiting[-1].num_verified = request.end - request.start - 1
            for each in waiting:
                num_accepted, is_known = accepted_path(each.tree, token_ids[each.root + 1 :])
                if not is_known:
                    self._waiting.setdefault(slot, []).append(each)
                    continue
                num_trees, num_drafts = num_trees + 1, num_drafts + len(each.tree.tokens) - 1
                accepted += num_accepted
                if each.num_verified is not None:
                    self._gains.setdefault(slot, []).append(num_accepted - each.num_verified)
        ended, self._ended = self._ended, []
        gains = [sum(each) for each in ended]
        num_pairs, squares = sum(map(len, ended)), sum(gain * gain for gain in gains)
        return Compared(num_trees, num_drafts, accepted, len(ended), num_pairs, sum(gains), squares)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._waiting.pop(slot, None)
            if gains := self._gains.pop(slot, None):
                self._ended.append(gains)


def accepted_path(tree: TreeLists, text: Sequence[int]) -> tuple[int, bool]:
    """(nodes on the path of `text` from the root, whether more text cannot make it longer)."""
    node, depth = ROOT, 0
    while True:
        children = [child for child, parent in enumerate(tree.parents) if parent == node]
        if not children or depth == len(text):
            return depth, not children
        node = next((child for child in children if tree.tokens[child] == text[depth]), ROOT)
        if node == ROOT:
            return depth, True
        depth += 1
