"""Drafters that are right, wrong or absurd on purpose: no draft may ever change a text.

Each draws a tree from the request's true continuation, which a plain run has told it.
"""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree
from specray.spec_decode.drafter import DraftRow, ProposeContext

# (last known token, what the target will say next, random) -> a tree below that token
Draw = Callable[[int, list[int], Random], RowTree]

MAX_DRAFTS = 12
VOCAB_SIZE = 64  # of the toy; ids below it exist in every model


class ScriptedDrafter:
    """A Drafter that draws each tree with `draw`; `texts` are all requests' finished sequences, prompts included."""

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_next_token = False

    def __init__(self, draw: Draw, texts: Sequence[Sequence[int]] = (), max_draft_tokens: int = MAX_DRAFTS) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.num_proposed = 0
        self._draw = draw
        self._texts = [list(text) for text in texts]
        self._random = Random(0)

    def propose(self, context: ProposeContext) -> DraftTree:
        trees = [self._draw(row.token_ids[-1], self._future(row), self._random) for row in context.rows]
        self.num_proposed += sum(len(tree.tokens) - 1 for tree in trees)
        return DraftTree.of(trees)

    def release(self, slots: Sequence[int]) -> None:
        pass

    def _future(self, row: DraftRow) -> list[int]:
        known = len(row.token_ids)
        return next((text[known:] for text in self._texts if text[:known] == row.token_ids), [])


def draft_row(slot: int, token_ids: list[int], num_prompt_tokens: int = 0, cache_salt: str = "") -> DraftRow:
    """What a drafter that keeps to tokens needs to know of a row."""
    end = len(token_ids) - 1
    return DraftRow(slot, token_ids, num_prompt_tokens, cache_salt, 0, end, np.arange(end), seed=0, temperature=0.0)


def chain(root: int, tokens: Sequence[int]) -> RowTree:
    return RowTree([root, *tokens], [NONE, *range(len(tokens))])


def draw_right(root: int, future: list[int], random: Random) -> RowTree:  # noqa: ARG001
    """Always accepted: as deep as the limit allows."""
    return chain(root, future[:MAX_DRAFTS])


def draw_half_right(root: int, future: list[int], random: Random) -> RowTree:
    """Right up to a random depth, wrong below it."""
    cut = random.randint(0, 4)
    return chain(root, future[:cut] + _others(future[cut : cut + 3], random))


def draw_wrong(root: int, future: list[int], random: Random) -> RowTree:
    """A tree in which every token is wrong."""
    tree = draw_random(root, future, random)
    allowed = [t for t in range(VOCAB_SIZE) if t not in future]
    return RowTree([root] + [random.choice(allowed or [0]) for _ in tree.tokens[1:]], tree.parents)


def draw_random(root: int, future: list[int], random: Random) -> RowTree:  # noqa: ARG001
    """Any shape, any tokens."""
    size = random.randint(0, MAX_DRAFTS)
    return RowTree(
        [root] + [random.randrange(VOCAB_SIZE) for _ in range(size)],
        [NONE] + [random.randint(0, i) for i in range(size)],
    )


def draw_empty(root: int, future: list[int], random: Random) -> RowTree:  # noqa: ARG001
    return chain(root, [])


def draw_right_last(root: int, future: list[int], random: Random) -> RowTree:
    """At each of three levels wrong siblings come first and the right one last: paths are never a prefix."""
    tokens, parents, node = [root], [NONE], 0
    for right in future[:3]:
        tokens += [*_others([right] * 3, random), right]
        parents += [node] * 4
        node = len(tokens) - 1
    return RowTree(tokens, parents)


def draw_duplicates(root: int, future: list[int], random: Random) -> RowTree:  # noqa: ARG001
    """The right token twice under one parent; only the second twin has right children."""
    if len(future) < 3:
        return chain(root, future)
    first, second, third = future[:3]
    return RowTree([root, first, first, (second + 1) % VOCAB_SIZE, second, third], [NONE, 0, 0, 1, 2, 4])


def draw_stale(root: int, future: list[int], random: Random) -> RowTree:  # noqa: ARG001
    """A tree made for another last token."""
    return chain((root + 1) % VOCAB_SIZE, future[:4])


DRAWS: dict[str, Draw] = {
    "right": draw_right,
    "half-right": draw_half_right,
    "wrong": draw_wrong,
    "random": draw_random,
    "empty": draw_empty,
    "right-last": draw_right_last,
    "duplicates": draw_duplicates,
    "stale": draw_stale,
}


def _others(tokens: Sequence[int], random: Random) -> list[int]:
    """A token that differs from each of `tokens`."""
    return [(token + random.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE for token in tokens]
