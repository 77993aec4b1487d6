"""Draft trees under a grammar: forbidden drafts are cut, and forced tokens are drafted without a drafter.

Where the grammar determines the next text (`": "` after a JSON key), its tokens are almost certainly the target's. The
text alone does not determine the tokens, so these are drafts like any other and the verifier decides.
"""

import math
import time

import numpy as np
import torch
from torch import Tensor

from specray.spec_decode.draft_tree import NONE, ROOT, TreeLists
from specray.step import DraftLimit
from specray.structured_output.compiler import GrammarMatcher
from specray.structured_output.forced_text import ForcedText

_MAX_DRAFTING_S = 0.02  # CPU time of a step for the drafts of one request; a tree may stay smaller, at no other cost


def constrained(
    matcher: GrammarMatcher, drafts: TreeLists, limit: DraftLimit, num_words: int, forced: ForcedText
) -> tuple[TreeLists, Tensor]:
    """(a tree within `limit`, the tokens allowed at its nodes: bits int32 [nodes, num_words]).

    The tree has the tokens that are forced after its root, then the drafts that the grammar allows, then the tokens
    that are forced after its leaves. The matcher, which is at the root, stays there.
    """
    tree = GrammarTree(matcher, drafts.tokens[ROOT], limit, num_words, _MAX_DRAFTING_S)
    tree.add_forced(ROOT, forced)
    tree.add_drafts(drafts)
    for leaf in tree.leaves():
        tree.add_forced(leaf, forced)
    return without_dead_ends(*tree.finish())


def added_nodes(tree: TreeLists, drafts: TreeLists) -> list[int]:
    """Nodes of a tree of `constrained` that the drafter's tree does not have."""
    edges = zip(tree.parents[1:], tree.tokens[1:], strict=True)
    children = {edge: node for node, edge in enumerate(edges, start=1)}
    places = [ROOT]
    for token, parent in zip(drafts.tokens[1:], drafts.parents[1:], strict=True):
        places.append(children.get((places[parent], token), NONE))
    return sorted(set(range(1, len(tree.tokens))).difference(places))


def without_dead_ends(tree: TreeLists, bits: Tensor) -> tuple[TreeLists, Tensor]:
    """The tree without drafts after which no token is allowed: the vocabulary cannot spell what must follow.

    A walk could not choose a token there. Without the draft, the walk ends at its parent with that token as the bonus.
    """
    alive = bits.any(1).tolist()
    kept = [node for node in range(len(alive)) if node == ROOT or alive[node]]
    places = {node: place for place, node in enumerate(kept)} | {NONE: NONE}  # no draft is below a dead end
    tokens, parents = [tree.tokens[node] for node in kept], [places[tree.parents[node]] for node in kept]
    return TreeLists(tokens, parents), bits[kept]


def allowed_tokens(matcher: GrammarMatcher, drafts: TreeLists, num_words: int) -> Tensor:
    """The tokens allowed at the nodes of a tree that stays as it is, as above; all of them below a forbidden draft."""
    count = len(drafts.tokens)
    tree = GrammarTree(matcher, drafts.tokens[ROOT], DraftLimit(count, count), num_words, math.inf)
    places = tree.add_drafts(drafts)
    _, known = tree.finish()
    bits = torch.full((count, num_words), -1, dtype=torch.int32)
    for node, place in enumerate(places):
        if place is not None:
            bits[node] = known[place]
    return bits


class GrammarTree:
    """A tree whose nodes the grammar allows. The matcher moves along it; `finish` returns it to the root."""

    def __init__(self, matcher: GrammarMatcher, root: int, limit: DraftLimit, num_words: int, max_s: float) -> None:
        """Nodes are added for `max_s` of CPU time."""
        self._deadline = time.thread_time() + max_s
        self._matcher = matcher
        self._limit = limit
        self._tokens, self._parents, self._depths = [root], [NONE], [0]
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        self._ended: set[int] = set()  # nodes of end tokens, below which there is nothing
        self._path = [ROOT]  # nodes from the root to where the matcher is
        self._bits = torch.full((1 + limit.num_tokens, num_words), -1, dtype=torch.int32)
        self._words = self._bits.numpy().view(np.uint32)
        self._fill(ROOT)

    def add(self, parent: int, token: int) -> int | None:
        """The child of `parent` with this token; None if it is forbidden or beyond a limit."""
        known = self._children.get((parent, token))
        if known is not None:
            return known
        is_full = len(self._tokens) > self._limit.num_tokens or self._depths[parent] >= self._limit.num_steps
        if is_full or parent in self._ended or not self._allows(parent, token):
            return None
        is_late = time.thread_time() > self._deadline
        if is_late or not self._move(parent) or not self._matcher.accept(token):
            return None  # a limit is exceeded
        node = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._children[parent, token] = node
        self._path.append(node)
        self._fill(node)
        return node

    def add_drafts(self, drafts: TreeLists) -> list[int | None]:
        """Add a drafter's tree; its nodes' places here, None for those that are not added."""
        places: list[int | None] = [ROOT]
        for token, parent in zip(drafts.tokens[1:], drafts.parents[1:], strict=True):
            above = places[parent]
            places.append(None if above is None else self.add(above, token))
        return places

    def add_forced(self, node: int, forced: ForcedText) -> None:
        """Add the tokens that the grammar determines after `node`, and the end tokens if it is complete there."""
        if node in self._ended or time.thread_time() > self._deadline or not self._move(node):
            return
        space = min(self._limit.num_tokens + 1 - len(self._tokens), self._limit.num_steps - self._depths[node])
        for token in forced.tokens(self._matcher, self._bits[node], space):
            child = self.add(node, token)
            if child is None:
                return
            node = child
        ends = [token for token in sorted(self._matcher.end_tokens) if self._allows(node, token)]
        if ends and len(ends) == int(np.bitwise_count(self._words[node]).sum()):
            for token in ends:
                self.add(node, token)

    def leaves(self) -> list[int]:
        """Nodes without children, as of now."""
        parents = set(self._parents)
        return [node for node in range(len(self._tokens)) if node not in parents]

    def finish(self) -> tuple[TreeLists, Tensor]:
        """The tree and its bits."""
        self._move(ROOT)
        return TreeLists(self._tokens, self._parents), self._bits[: len(self._tokens)]

    def _allows(self, node: int, token: int) -> bool:
        return bool(self._words[node, token >> 5] >> (token & 31) & 1)

    def _fill(self, node: int) -> None:
        """The bits of the node where the matcher is. After an end token, nothing is forbidden."""
        if self._matcher.has_ended:
            self._ended.add(node)
        else:
            self._matcher.fill(self._bits[node])

    def _is_failed_draft(self) -> bool:
        """Whether a draft exceeded a limit, and not the root, whose error stays."""
        return self._matcher.error is not None and bool(self._words[ROOT].any())

    def _move(self, node: int) -> bool:
        """Bring the matcher to a node; False if that exceeds a limit, and then it is above the node."""
        wanted = [node]
        while wanted[-1] != ROOT:
            wanted.append(self._parents[wanted[-1]])
        wanted.reverse()
        shared = 0
        while shared < min(len(wanted), len(self._path)) and wanted[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path) or self._is_failed_draft():
            self._matcher.rollback(len(self._path) - shared)
        del self._path[shared:]
        for step in wanted[shared:]:
            if not self._matcher.accept(self._tokens[step]):
                return False
            self._path.append(step)
        return True
