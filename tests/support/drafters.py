"""Drafters that are correct, wrong or invalid on purpose. None of them may change the output.

Each makes a tree from the request's true continuation, known from a run without drafts.
"""

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import torch

from specray.config import SpeculativeConfig
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import TargetView
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.step import UNLIMITED, DraftLimit, NewRequest, SamplingOptions
from tests.support.distributions import OPTIONS

# (last known token, its true continuation, random) -> a tree below that token
Draw = Callable[[int, list[int], Random], TreeLists]

MAX_DRAFTS = 12
VOCAB_SIZE = 64  # of the toy


class ScriptedDrafter:
    """A Drafter that makes every tree with `draw`; `texts` are the requests' complete sequences with their prompts."""

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_next_token = False

    def __init__(self, draw: Draw, texts: Sequence[Sequence[int]] = (), max_draft_tokens: int = MAX_DRAFTS) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.num_proposed = 0
        self._draw = draw
        self._texts = [list(text) for text in texts]
        self._random = Random(0)

    def propose(self, context: ProposeContext) -> DraftTree:
        known = [context.token_ids(request) for request in context.requests]
        trees = [self._draw(tokens[-1], self._future(tokens), self._random) for tokens in known]
        self.num_proposed += sum(len(tree.tokens) - 1 for tree in trees)
        return DraftTree.from_lists(trees)

    def release(self, slots: Sequence[int]) -> None:
        pass

    def _future(self, known: list[int]) -> list[int]:
        return next((text[len(known) :] for text in self._texts if text[: len(known)] == known), [])


class UnequalDrafter:
    """A drafter of another project: its trees are not equal in two processes."""

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_next_token = False
    max_draft_tokens = 3

    def __init__(self, config: SpeculativeConfig, target: TargetView) -> None:
        del config, target
        self._first = os.getpid()

    def propose(self, context: ProposeContext) -> DraftTree:
        drafts = torch.arange(self._first, self._first + self._first % 2 + 1) % VOCAB_SIZE
        return DraftTree.chains(torch.cat((context.roots()[:, None], drafts.expand(len(context.requests), -1)), 1))

    def release(self, slots: Sequence[int]) -> None:
        pass


class Tokens(NamedTuple):
    """A request for drafters that read only tokens."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int = 0
    cache_salt: str = ""
    draft_limit: DraftLimit = UNLIMITED
    options: SamplingOptions = OPTIONS


def make_context(requests: Sequence[Tokens], unfinished: Sequence[Tokens] = ()) -> ProposeContext:
    """The context of a step that computed all of these requests' tokens but the last."""
    every = [*requests, *unfinished]
    slots, length = (
        max((value for value in values), default=0)
        for values in ([request.slot for request in every], [len(request.token_ids) for request in every])
    )
    table = RequestTable(slots + 1, length + 1, 1, 2**16, torch.device("cpu"))
    for slot, token_ids, num_prompt_tokens, salt, _, options in every:
        blocks = list(range(1, len(token_ids) + 1))
        table.enter(NewRequest(slot, list(token_ids), num_prompt_tokens, 0, blocks, options, salt))
    table.flush()
    drafted, read = (
        [DraftRequest(part.slot, 0, len(part.token_ids) - 1, part.draft_limit) for part in parts]
        for parts in (requests, unfinished)
    )
    return ProposeContext(table, drafted, read)


def paths_of(tree: TreeLists) -> list[tuple[int, ...]]:
    """Tokens from below the root to each node but the root, in the order of nodes."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree.tokens)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths[1:]


def chain(root: int, tokens: Sequence[int]) -> TreeLists:
    return TreeLists([root, *tokens], [NONE, *range(len(tokens))])


def draw_right(root: int, future: list[int], random: Random) -> TreeLists:  # noqa: ARG001
    """A correct chain, as deep as possible."""
    return chain(root, future[:MAX_DRAFTS])


def draw_half_right(root: int, future: list[int], random: Random) -> TreeLists:
    """Correct up to a random depth, wrong below it."""
    cut = random.randint(0, 4)
    return chain(root, future[:cut] + _others(future[cut : cut + 3], random))


def draw_wrong(root: int, future: list[int], random: Random) -> TreeLists:
    """A tree in which every token is wrong."""
    tree = draw_random(root, future, random)
    allowed = [t for t in range(VOCAB_SIZE) if t not in future]
    return TreeLists([root] + [random.choice(allowed or [0]) for _ in tree.tokens[1:]], tree.parents)


def draw_random(root: int, future: list[int], random: Random) -> TreeLists:  # noqa: ARG001
    """A random tree of random tokens."""
    size = random.randint(0, MAX_DRAFTS)
    return TreeLists(
        [root] + [random.randrange(VOCAB_SIZE) for _ in range(size)],
        [NONE] + [random.randint(0, i) for i in range(size)],
    )


def draw_empty(root: int, future: list[int], random: Random) -> TreeLists:  # noqa: ARG001
    return chain(root, [])


def draw_right_last(root: int, future: list[int], random: Random) -> TreeLists:
    """Three levels; at each, the correct sibling comes after wrong ones, so that its path is no prefix of the nodes."""
    tokens, parents, node = [root], [NONE], 0
    for right in future[:3]:
        tokens += [*_others([right] * 3, random), right]
        parents += [node] * 4
        node = len(tokens) - 1
    return TreeLists(tokens, parents)


def draw_duplicates(root: int, future: list[int], random: Random) -> TreeLists:  # noqa: ARG001
    """The correct token twice below one parent; only the second one has correct children."""
    if len(future) < 3:
        return chain(root, future)
    first, second, third = future[:3]
    return TreeLists([root, first, first, (second + 1) % VOCAB_SIZE, second, third], [NONE, 0, 0, 1, 2, 4])


def draw_stale(root: int, future: list[int], random: Random) -> TreeLists:  # noqa: ARG001
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
