"""Draft trees under a grammar: forbidden drafts are cut, and forced tokens are drafted without a drafter.

Where the grammar determines the next text (`": "` after a JSON key), its tokens are almost certainly the target's. The
text alone does not determine the tokens, so these are drafts like any other and the verifier decides.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
import xgrammar
from tokenizers import Tokenizer
from torch import Tensor

from specray.spec_decode.draft_tree import NONE, ROOT, TreeLists
from specray.step import DraftLimit

Encode = Callable[[str], list[int]]


def encoder_of(tokenizer: Tokenizer) -> Encode:
    """Encodes text that continues other text: without special tokens, and without a space that SentencePiece adds."""
    mark = "\n" if tokenizer.encode("a", add_special_tokens=False).tokens[:1] == ["▁a"] else ""
    num_marked = len(tokenizer.encode(mark, add_special_tokens=False).ids)

    @lru_cache(maxsize=4096)
    def encode(text: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(mark + text, add_special_tokens=False).ids
        return token_ids[num_marked:]

    return encode


def constrained(
    matcher: xgrammar.GrammarMatcher, drafts: TreeLists, limit: DraftLimit, vocabulary: Tensor, encode: Encode
) -> tuple[TreeLists, Tensor]:
    """(a tree within `limit`, the tokens allowed at its nodes: bits int32 [nodes, words]).

    `vocabulary` int32 [words] are the tokens of which the grammar allows some. The tree has the tokens that are forced
    after its root, then the drafts that the grammar allows, then the tokens that are forced after its leaves. The
    matcher, which is at the root, stays there.
    """
    tree = GrammarTree(matcher, drafts.tokens[ROOT], limit, vocabulary)
    tree.add_forced(ROOT, encode)
    tree.add_drafts(drafts)
    for leaf in tree.leaves():
        tree.add_forced(leaf, encode)
    return without_dead_ends(*tree.finish())


def without_dead_ends(tree: TreeLists, bits: Tensor) -> tuple[TreeLists, Tensor]:
    """The tree without drafts after which no token is allowed: the vocabulary cannot spell what must follow.

    A walk could not choose a token there. Without the draft, the walk ends at its parent with that token as the bonus.
    """
    alive = bits.any(1).tolist()
    kept = [node for node in range(len(alive)) if node == ROOT or alive[node]]
    places = {node: place for place, node in enumerate(kept)} | {NONE: NONE}  # no draft is below a dead end
    tokens, parents = [tree.tokens[node] for node in kept], [places[tree.parents[node]] for node in kept]
    return TreeLists(tokens, parents), bits[kept]


def allowed_tokens(matcher: xgrammar.GrammarMatcher, drafts: TreeLists, vocabulary: Tensor) -> Tensor:
    """The tokens allowed at the nodes of a tree that stays as it is, as above; all of them below a forbidden draft."""
    count = len(drafts.tokens)
    tree = GrammarTree(matcher, drafts.tokens[ROOT], DraftLimit(count, count), vocabulary)
    places = tree.add_drafts(drafts)
    _, known = tree.finish()
    bits = vocabulary.repeat(count, 1)
    for node, place in enumerate(places):
        if place is not None:
            bits[node] = known[place]
    return bits


class GrammarTree:
    """A tree whose nodes the grammar allows. The matcher moves along it; `finish` returns it to the root."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, root: int, limit: DraftLimit, vocabulary: Tensor) -> None:
        self._matcher = matcher
        self._limit = limit
        self._tokens, self._parents, self._depths = [root], [NONE], [0]
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        self._ended: set[int] = set()  # nodes of end tokens, below which there is nothing
        self._path = [ROOT]  # nodes from the root to where the matcher is
        self._vocabulary = vocabulary
        self._bits = torch.full((1 + limit.num_tokens, len(vocabulary)), -1, dtype=torch.int32)
        self._words = self._bits.numpy().view(np.uint32)
        self._fill(ROOT)

    def add(self, parent: int, token: int) -> int | None:
        """The child of `parent` with this token; None if it is forbidden or beyond the limit."""
        known = self._children.get((parent, token))
        if known is not None:
            return known
        is_full = len(self._tokens) > self._limit.num_tokens or self._depths[parent] >= self._limit.num_steps
        if is_full or parent in self._ended or not self._allows(parent, token):
            return None
        self._move(parent)
        is_accepted = self._matcher.accept_token(token)
        assert is_accepted, (parent, token)
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

    def add_forced(self, node: int, encode: Encode) -> None:
        """Add the tokens that the grammar determines after `node`, and the end tokens if it is complete there."""
        if node in self._ended:
            return
        self._move(node)
        for token in encode(self._forced_text()):
            child = self.add(node, token)
            if child is None:
                return
            node = child
        self._move(node)
        if self._matcher.is_completed():
            ends = [token for token in self._matcher.stop_token_ids if self._allows(node, token)]
            if len(ends) == int(np.bitwise_count(self._words[node]).sum()):
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

    def _forced_text(self) -> str:
        """The text that the grammar determines after the node where the matcher is."""
        try:
            return self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:
            return ""  # the node ends within a character, so what follows is not text

    def _allows(self, node: int, token: int) -> bool:
        return bool(self._words[node, token >> 5] >> (token & 31) & 1)

    def _fill(self, node: int) -> None:
        """The bits of the node where the matcher is. After an end token, nothing is forbidden."""
        if self._matcher.is_terminated():
            self._ended.add(node)
        else:
            self._matcher.fill_next_token_bitmask(self._bits, node)
            self._bits[node] &= self._vocabulary

    def _move(self, node: int) -> None:
        wanted = [node]
        while wanted[-1] != ROOT:
            wanted.append(self._parents[wanted[-1]])
        wanted.reverse()
        shared = 0
        while shared < min(len(wanted), len(self._path)) and wanted[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        for step in wanted[shared:]:
            self._matcher.accept_token(self._tokens[step])
        self._path = wanted
