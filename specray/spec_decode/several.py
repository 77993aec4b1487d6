"""Several drafters that act as one: each drafts for the requests that the engine has given to it.

A request names its drafter in the request table. A request without a name, or with the name of a drafter that was
dropped, gets the first one. A drafter that fails leaves its requests without drafts, and the others theirs. A drafter
sees its own requests and keeps its own state. One with KV in the target's slots also reads the prompts of the others:
prompts share their beginnings in the prefix cache, and a draft head that has not read the header of a chat template
drafts worse and more slowly. `forget_kv` notifies it of the slots of all other tokens. The trees of all drafters
become one batch for the verifier.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.ops.host_copy import HostCopy
from specray.spec_decode.draft_tree import NONE, ROOT, DraftTree
from specray.spec_decode.drafter import Drafter, DraftFaultError, SharesKVSlots
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.shadow_trees import ShadowTrees
from specray.step import DrafterUse

# The device or the process is lost, whichever drafter found it out. torch 2.6 has no AcceleratorError.
ENDS_THE_RANK = (MemoryError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))

logger = logging.getLogger(__name__)


class SeveralDrafters:
    """Drafter made of `drafters` by name. `clock` returns seconds.

    Of `num_ranks` that draft together, one where a drafter fails would go on alone, and the others wait for its part
    of a sum. So its error ends it there, as that of a single drafter does.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        clock: Callable[[], float] = time.perf_counter,
        num_ranks: int = 1,
    ) -> None:
        members = list(drafters.values())
        self.max_draft_tokens = max(drafter.max_draft_tokens for drafter in members)
        layers = [layer for drafter in members for layer in drafter.aux_hidden_state_layers]
        self.aux_hidden_state_layers = tuple(dict.fromkeys(layers))
        self.reads_next_token = any(drafter.reads_next_token for drafter in members)
        self.members = dict(drafters)
        self.replays: dict[str, Callable[[ProposeContext], Callable[[], DraftTree] | None]] = {}
        self._first = next(iter(drafters))
        self._sharing = {name: sharing for name, drafter in drafters.items() if (sharing := _sharing_kv(drafter))}
        self._missed: dict[str, set[int]] = {name: set() for name in self._sharing}  # KV slots, until it gets a context
        self._shadow_trees = {name: ShadowTrees() for name in drafters}
        self._failing: set[str] = set()  # that did not draft the last time
        self._clock, self._num_ranks = clock, num_ranks
        self._uses: list[tuple[DrafterUse, HostCopy | None]] = []  # with the numbers of nodes of the trees

    def propose(self, context: ProposeContext) -> DraftTree:
        trees: list[tuple[list[int], DraftTree]] = []
        for name in self.members:
            part = self._part(name, context)
            if sharing := self._sharing.get(name):
                self._missed[name].update(context.missed_kv_slots)
                others = [request for request in _all(context) if request.slot not in part.slots]
                if others:
                    sharing.forget_kv(context.table, others)
            if part.slots and (drafted := self._draft(name, part, context)) is not None:
                trees.append(drafted)
        if len(trees) == 1 and trees[0][0] == list(range(len(context.requests))):
            return trees[0][1]
        device = context.table.device
        return merge_trees(context.roots(), [(torch.tensor(places, device=device), tree) for places, tree in trees])

    def release(self, slots: Sequence[int]) -> None:
        for name, drafter in self.members.items():
            drafter.release(slots)
            self._shadow_trees[name].release(slots)

    def take_uses(self) -> list[DrafterUse]:
        made, self._uses = self._uses, []
        return [use._replace(num_faults=1) if nodes and 0 in nodes.wait().tolist() else use for use, nodes in made]

    def _part(self, name: str, context: ProposeContext) -> "_Part":
        """What `name` sees of a step."""
        states = context.table.states
        owners = {request.slot: self._owner(states[request.slot]) for request in _all(context)}
        own = {slot for slot, owner in owners.items() if owner == name}
        shadowed = {slot for slot in owners if states[slot].shadow == name} - own
        drafted = own | shadowed
        is_reader = name in self._sharing
        read = {r.slot for r in _all(context) if is_reader and r.start < states[r.slot].num_prompt_tokens}
        places = [place for place, request in enumerate(context.requests) if request.slot in drafted]
        is_own = [context.requests[place].slot in own for place in places]
        return _Part(drafted | read, places, is_own, own, shadowed)

    def _owner(self, state: RequestState) -> str:
        """The name of a request's drafter."""
        return state.drafter if state.drafter in self.members else self._first

    def _draft(self, name: str, part: "_Part", context: ProposeContext) -> tuple[list[int], DraftTree] | None:
        """The places in the batch that get this drafter's trees, and the trees; None if there are none."""
        drafter, shadow = self.members[name], self._shadow_trees[name]
        seen = self._context(part, drafter.aux_hidden_state_layers, context)
        if missed := self._missed.get(name):
            seen = replace(seen, missed_kv_slots=missed)
        compared = shadow.compare(context)
        start = self._clock()
        try:
            if (replay := self.replays.get(name)) is not None:
                seen = replace(seen, replay=replay(seen))
            tree = drafter.propose(seen)
        except ENDS_THE_RANK:
            raise
        except Exception as error:  # a new head that is only measured must not end the others' drafts
            own, shadowed = part.shares(seen)
            seconds = self._clock() - start
            self._uses.append((DrafterUse(name, seconds * own, seconds * shadowed, *compared, num_faults=1), None))
            if len(self.members) == 1 or (self._num_ranks > 1 and not isinstance(error, DraftFaultError)):
                raise
            if name not in self._failing and not isinstance(error, DraftFaultError):
                logger.exception("the drafter %s failed; its requests go on without drafts", name)
            self._failing.add(name)
            return None
        self._failing.discard(name)
        if missed:
            self._missed[name] = set()
        device, is_own = context.table.device, part.is_own
        if not all(is_own):
            rows = [row for row, owns in enumerate(is_own) if not owns]
            shadow.keep([seen.requests[row] for row in rows], tree.select(torch.tensor(rows, device=device)))
        seconds = self._clock() - start
        own_share, shadow_share = part.shares(seen)
        use = DrafterUse(name, seconds * own_share, seconds * shadow_share, *compared)
        self._uses.append((use, HostCopy(tree.num_nodes)))
        rows = [row for row, owns in enumerate(is_own) if owns]
        if not rows:
            return None
        return [part.places[row] for row in rows], tree.select(torch.tensor(rows, device=device))

    def _context(self, part: "_Part", layers: Sequence[int], context: ProposeContext) -> ProposeContext:
        """The context of a drafter that sees only `part` and reads only these layers."""
        rows, num_trees = _all(context), len(context.requests)
        is_whole = len(part.slots) == len(rows) and len(part.places) == num_trees
        if is_whole and tuple(layers) == self.aux_hidden_state_layers:
            return context
        has_tree = set(part.places)
        rest = [place for place, row in enumerate(rows) if row.slot in part.slots and place not in has_tree]
        order = part.places + rest
        columns = [self.aux_hidden_state_layers.index(layer) for layer in layers]

        def gather() -> Tensor:
            states = context.aux_hidden_states
            assert states is not None
            if order == list(range(len(rows))) and columns == list(range(len(self.aux_hidden_state_layers))):
                return states
            lengths = [row.end - row.start for row in rows]
            ends = np.cumsum(lengths)
            seen = [np.arange(ends[place] - lengths[place], ends[place]) for place in order]
            by_layer = states.view(len(states), len(self.aux_hidden_state_layers), -1)
            index, chosen = torch.from_numpy(np.concatenate(seen)), torch.tensor(columns)
            device = states.device
            return by_layer.index_select(0, index.to(device)).index_select(1, chosen.to(device)).flatten(1)

        return ProposeContext(
            context.table,
            [rows[place] for place in part.places],
            [rows[place] for place in rest],
            gather if columns and context.gather_aux_hidden_states is not None else None,
        )


class _Part(NamedTuple):
    """The requests of a step that one drafter sees."""

    slots: set[int]  # its own and those that it shadows, and of a drafter that reads prompts, those with such tokens
    places: list[int]  # places of the requests that get a tree, in the context's `requests`
    is_own: list[bool]  # whether the tree of each place is verified
    own_slots: set[int]  # all of its own, those that are read only included
    shadow_slots: set[int]  # the same of those that it shadows

    def shares(self, seen: ProposeContext) -> tuple[float, float]:
        """The parts of its time that were for its own requests and for those that it shadows, by tokens read.

        The prompts of other drafters' requests are neither's: they are part of the step's rest.
        """
        num_tokens = {request.slot: request.end - request.start for request in _all(seen)}
        total = max(1, sum(num_tokens.values()))
        own, shadowed = (
            sum(num_tokens[slot] for slot in slots) / total for slots in (self.own_slots, self.shadow_slots)
        )
        return own, shadowed


def _all(context: ProposeContext) -> list[DraftRequest]:
    return context.requests + context.unfinished


def _sharing_kv(drafter: Drafter | None) -> SharesKVSlots | None:
    """This drafter, or the one behind its `drafter`, if it keeps KV in the target's slots."""
    while drafter is not None and not isinstance(drafter, SharesKVSlots):
        drafter = getattr(drafter, "drafter", None)
    return drafter


def merge_trees(roots: Tensor, parts: Sequence[tuple[Tensor, DraftTree]]) -> DraftTree:
    """One batch from the trees of several drafters; requests without a tree get their root from int64 `roots` [B].

    `parts` are places in the batch, int64 [n] and each at most once, and their trees.
    """
    width = max((tree.tokens.shape[1] for _, tree in parts), default=1)
    tokens, parents = roots.new_full((2, len(roots), width), NONE)
    tokens[:, ROOT] = roots
    num_nodes = torch.ones_like(roots)
    drawn = [tree.draft_probs.shape[2] for _, tree in parts if tree.draft_probs is not None]
    probs = torch.zeros(len(roots), width, max(drawn), device=roots.device) if drawn else None
    scores = torch.ones(len(roots), width, device=roots.device)
    for places, tree in parts:
        size = tree.tokens.shape[1]
        tokens[:, :size].index_copy_(0, places, tree.tokens)
        parents[:, :size].index_copy_(0, places, tree.parents)
        num_nodes.index_copy_(0, places, tree.num_nodes)
        if tree.scores is not None:
            scores[:, :size].index_copy_(0, places, tree.scores)
        if probs is not None and tree.draft_probs is not None:
            _, size, vocab = tree.draft_probs.shape
            probs[:, :size, :vocab].index_copy_(0, places, tree.draft_probs)
    max_depth = max((tree.max_depth for _, tree in parts), default=0)
    return DraftTree(tokens, parents, num_nodes, max_depth, probs, scores=scores)
