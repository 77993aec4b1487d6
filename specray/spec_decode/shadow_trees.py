"""Trees that are not verified but compared with the text: how many of their tokens the target would have accepted.

With coupled verification the target accepts the path of a tree that its own next tokens follow, so the generated text
shows which of its tokens would have been accepted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specray.spec_decode.draft_tree import ROOT, DraftTree, TreeLists
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.tree_edits import limited


class Compared(NamedTuple):
    """Counts over trees whose accepted path is known."""

    num_trees: int
    num_drafts: int  # nodes, the roots not counted
    num_accepted: int


class ShadowTrees:
    """One drafter's trees that wait for the text after their roots, by slot."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[int, TreeLists]]] = {}  # with the position of the root

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
                self._waiting.setdefault(request.slot, []).append((request.end, cut))

    def compare(self, context: ProposeContext) -> Compared:
        """Compare trees with the text that is known by now. Trees whose text is still too short keep waiting."""
        counts = Compared(0, 0, 0)
        for slot in [slot for slot in self._waiting if slot in context.table.states]:
            token_ids, later = context.table.states[slot].token_ids, []
            for root, tree in self._waiting[slot]:
                num_accepted, is_known = accepted_path(tree, token_ids[root + 1 :])
                if is_known:
                    new = (1, len(tree.tokens) - 1, num_accepted)
                    counts = Compared(*(a + b for a, b in zip(counts, new, strict=True)))
                else:
                    later.append((root, tree))
            if later:
                self._waiting[slot] = later
            else:
                del self._waiting[slot]
        return counts

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._waiting.pop(slot, None)


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
