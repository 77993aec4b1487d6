"""Messages between a target rank and a drafter in another process: msgpack, deltas only.

A request's tokens and KV blocks are sent once and then extended (`DeltaEncoder` at the target, `DeltaDecoder` at the
drafter), so an order is as long as what the step added. Trees come back as lists, or through a GPU's memory
(`device_trees`). Hidden states go through shared memory (`ring`).
"""

import operator
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import msgpack
import numpy as np
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from specray.config import MAX_DRAFTERS
from specray.spec_decode.draft_tree import NONE, ROOT, DraftTree, TreeLists
from specray.spec_decode.propose_context import DraftRequest, ProposeContext, bounds_on_host
from specray.spec_decode.request_table import RequestTable
from specray.step import TOLERATED_FAULTS, DrafterUse, DraftFault, NewRequest
from specray.worker.remote_drafter.received_trees import ReceivedTree

Score = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
_MOST_OF_A_USE = 1e9  # seconds or trees of a step, far above any that is true


class TargetHandshake(NamedTuple):
    """The target's reply to a drafter's handshake. The ring's file descriptor comes before it."""

    region_tokens: int
    width: int
    dtype: str
    num_slots: int  # the rest: dimensions of the request table
    max_tokens: int
    page_size: int
    vocab_size: int
    device_ring: bytes = b""  # what a DeviceRing is opened with; empty: the ring is the file
    device_trees: bytes = b""  # what DeviceTrees are opened with; empty: trees are part of replies


class RequestDelta(NamedTuple):
    """What was added to a request since the last order."""

    slot: int
    token_ids: list[int]
    block_ids: list[int]


class Order(NamedTuple):
    """One step's context. `region` of the ring holds the hidden states; the reply frees it.

    An early order leaves before the host has the step's outcome: `requests` have no bounds, and the region has the
    outcome, too. What the step committed is sent later under the same number, without a region, and has no reply.
    """

    number: int
    region: int  # NONE: what the step of an early order committed
    freed_slots: list[int]
    new_requests: list[NewRequest]
    deltas: list[RequestDelta]
    requests: list[DraftRequest]  # get a tree
    unfinished: list[DraftRequest]
    missed_kv_slots: list[int]
    outcome_nodes: int = 0  # nodes of the step's trees; 0: this is no early order

    @property
    def num_tokens(self) -> int:
        """Tokens with hidden states; for an early order the nodes that may be kept."""
        return len(self.requests) * self.outcome_nodes or sum(
            request.end - request.start for request in self.requests + self.unfinished
        )


class DraftReply(NamedTuple):
    """Trees of an order's requests, in their order; none after a fault, or if they are in a GPU's memory.

    They are lists, because a step has few nodes: the target took 0.2 ms to read them as arrays, and takes 0.13 ms.
    """

    number: int
    seconds: float  # 0: not known
    trees: list[TreeLists]
    fault: str | None  # name of a DraftFault that ends the drafter: the others are the target's to notice
    uses: Annotated[list[DrafterUse], Field(max_length=MAX_DRAFTERS)]  # of several drafters
    scores: list[list[Score]]  # scores of each tree's nodes, or empty where they are not known
    num_broken: int = 0  # trees that are only roots because their drafter's logits are not finite
    early_nodes: int = 0  # the next order of these requests may be an early one for a step with trees of so many nodes

    @classmethod
    def of(
        cls, number: int, seconds: float, tree: DraftTree, roots: Callable[[], Tensor] | None = None
    ) -> "DraftReply":
        """At most one copy to the host, and one more if a tree has no nodes.

        A tree without nodes is that of a drafter whose logits are not finite. It becomes its root, one of `roots`
        int64 [B], because the other trees may be those of other drafters. Without `roots` the reply is a fault.
        """
        trees, scores = _lists(tree)
        num_broken = sum(not each.tokens for each in trees)
        if num_broken:
            if roots is None:
                return cls.failed(number, seconds, DraftFault.NOT_A_NUMBER)
            tokens = roots().tolist()
            trees = [
                each if each.tokens else TreeLists([root], [NONE]) for root, each in zip(tokens, trees, strict=True)
            ]
            scores = [known or [1.0] for known in scores]
        return cls(number, seconds, trees, None, [], scores, num_broken)

    @classmethod
    def of_sizes(cls, number: int, num_nodes: list[int], has_others: bool) -> "DraftReply":
        """The reply for trees of these sizes in a GPU's memory; `has_others`: some may be those of other drafters."""
        if (num_broken := num_nodes.count(0)) and not has_others:
            return cls.failed(number, 0.0, DraftFault.NOT_A_NUMBER)
        return cls(number, 0.0, [], None, [], [], num_broken)

    @classmethod
    def failed(cls, number: int, seconds: float, fault: DraftFault) -> "DraftReply":
        return cls(number, seconds, [], fault, [], [])

    def checked_trees(self, num_requests: int, vocab_size: int, max_draft_tokens: int) -> list[ReceivedTree]:
        """The trees. ValueError if they are not valid trees of `num_requests` requests."""
        if len(self.trees) != num_requests or len(self.scores) not in (0, num_requests):
            raise ValueError(
                f"{len(self.trees)} trees and {len(self.scores)} rows of scores for {num_requests} requests"
            )
        for tokens, parents in self.trees:
            _check_tree(tokens, parents, vocab_size, max_draft_tokens)
        if not self.scores:
            return [ReceivedTree(tree, []) for tree in self.trees]
        if [len(scores) for scores in self.scores] != [len(tokens) for tokens, _ in self.trees]:
            raise ValueError("the scores have another shape than the trees")
        return [ReceivedTree(tree, scores) for tree, scores in zip(self.trees, self.scores, strict=True)]


def pack(message: TargetHandshake | Order | DraftReply) -> bytes:
    data: bytes = msgpack.packb(message)
    return data


_TARGET_HANDSHAKE, _ORDER, _REPLY = TypeAdapter(TargetHandshake), TypeAdapter(Order), TypeAdapter(DraftReply)


def unpack_target_handshake(data: bytes) -> TargetHandshake:
    return _TARGET_HANDSHAKE.validate_python(msgpack.unpackb(data))


def unpack_order(data: bytes) -> Order:
    return _ORDER.validate_python(msgpack.unpackb(data))


def unpack_reply(data: bytes) -> DraftReply:
    """ValueError for anything that is not a reply. `DraftReply.checked_trees` checks the trees."""
    try:
        reply = _REPLY.validate_python(msgpack.unpackb(data), strict=True)
    except ValueError:  # of msgpack or pydantic; their messages would print the data, however deeply it is nested
        raise ValueError("not a reply: its fields have other types or bounds") from None
    if reply.fault not in {None, *DraftFault} - TOLERATED_FAULTS:
        raise ValueError(f"not a reply: its fault is {str(reply.fault)[:20]!r}")
    if not all(map(_is_possible, reply.uses)):
        raise ValueError("not a reply: a drafter's use has impossible numbers")
    return reply


class DeltaEncoder:
    """Makes orders. Remembers how much of each slot's request was sent."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, int]] = {}  # slot -> numbers of tokens and blocks
        self._freed: list[int] = []
        self._missed: set[int] = set()  # KV slots

    def skip(self, context: ProposeContext) -> None:
        """The drafter does not see this step. The next order tells it which KV slots it has not read."""
        self._missed.update(context.missed_kv_slots)
        for request in context.requests + context.unfinished:
            self._missed.update(context.table.host_kv_slots[request.slot, request.start : request.end].tolist())

    def release(self, slots: Sequence[int]) -> None:
        self._freed += [slot for slot in slots if self._sent.pop(slot, None)]

    def is_current(self, table: RequestTable, slots: Sequence[int]) -> bool:
        """Whether the drafter was told all that the host knows of these requests but their blocks."""
        return not self._missed and all(
            slot in self._sent and self._sent[slot][0] == len(table.states[slot].token_ids) for slot in slots
        )

    def order(self, number: int, region: int, context: ProposeContext, outcome_nodes: int = 0) -> Order:
        freed, self._freed = self._freed, []
        missed = [*self._missed, *context.missed_kv_slots]
        self._missed.clear()
        order = Order(number, region, freed, [], [], context.requests, context.unfinished, missed, outcome_nodes)
        for slot, *_ in context.requests + context.unfinished:
            state = context.table.states[slot]
            num_tokens, num_blocks = self._sent.get(slot, (0, 0))
            tokens, blocks = state.token_ids[num_tokens:], state.block_ids[num_blocks:]
            if slot in self._sent:
                order.deltas.append(RequestDelta(slot, tokens, blocks))
            else:
                options = state.sampling.options._replace(grammar=None)  # the target cuts the trees
                new = NewRequest(slot, tokens, state.num_prompt_tokens, 0, blocks, options, state.cache_salt)
                new = new._replace(predicted_token_ids=state.predicted_token_ids)
                new = new._replace(drafter=state.drafter, shadow=state.shadow)
                order.new_requests.append(new)
            self._sent[slot] = len(state.token_ids), len(state.block_ids)
        return order


class DeltaDecoder:
    """The drafter's copy of the target's request table."""

    def __init__(self, target: TargetHandshake, device: torch.device, table: RequestTable | None = None) -> None:
        """`table` is an empty one to use, if it has the target's dimensions."""
        sizes = target.num_slots, target.max_tokens, target.page_size, target.vocab_size
        fits = table is not None and sizes == (table.num_slots, table.max_tokens, table.page_size, table.vocab_size)
        self._table = table if table is not None and fits else RequestTable(*sizes, device)

    def enter(self, order: Order) -> None:
        """Apply an order on the host. The device knows the tokens that follow an early one."""
        for slot in order.freed_slots:
            self._table.free(slot)
        for new in order.new_requests:
            self._table.enter(new)
        for slot, token_ids, block_ids in order.deltas:
            if order.region == NONE:
                self._table.states[slot].token_ids += token_ids
            self._table.extend(slot, [] if order.region == NONE else token_ids, block_ids)

    def flush(self) -> None:
        """Write what was entered to the device."""
        self._table.flush()

    def committed(self, order: Order, tree: DraftTree) -> ProposeContext:
        """Apply what the step of an early order committed, after which the device has made `tree`."""
        self.enter(order)
        parts = order.requests, order.unfinished, None, order.missed_kv_slots
        return ProposeContext(self._table, *parts, lambda: tree, are_drafts_taken=True)

    def context(self, order: Order, region: Tensor) -> ProposeContext:
        """Apply an order, by one copy to the device. `region` [region_tokens, width] holds its hidden states.

        The copy is asynchronous: `region` may be written again only after the device has drafted.
        """
        self.enter(order)
        requests = order.requests + order.unfinished
        bounds = self._table.flush(*bounds_on_host(requests))
        states = region[: order.num_tokens].to(self._table.device, non_blocking=True)
        return ProposeContext(
            self._table,
            order.requests,
            order.unfinished,
            lambda: states,
            order.missed_kv_slots,
            known_bounds=bounds,
        )


def _is_possible(use: DrafterUse) -> bool:
    """Whether its numbers are within bounds. A shadow's gain is negative where its drafts are worse."""
    parts = use._replace(shadow_gain=abs(use.shadow_gain))[1:]
    return all(0 <= part < _MOST_OF_A_USE for part in parts)


def _check_tree(tokens: list[int], parents: list[int], vocab_size: int, max_draft_tokens: int) -> None:
    """ValueError if it is no tree."""
    if not 1 <= len(tokens) == len(parents) <= max_draft_tokens + 1:
        raise ValueError(f"{len(tokens)} tokens and {len(parents)} parents are not a tree")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError("tokens outside the vocabulary")
    is_before = map(operator.lt, parents, range(len(parents)))
    if parents[ROOT] != NONE or min(parents[1:], default=ROOT) < ROOT or not all(is_before):
        raise ValueError("a child before its parent")


def _lists(tree: DraftTree) -> tuple[list[TreeLists], list[list[float]]]:
    """(trees, the scores of each one's nodes or nothing)."""
    if tree.tokens.device.type != "cpu":
        return _lists_from_device(tree)
    trees = tree.to_lists()
    return trees, [] if tree.scores is None else _cut(tree.scores.tolist(), trees)


def _lists_from_device(tree: DraftTree) -> tuple[list[TreeLists], list[list[float]]]:
    """`_lists` of a tree on another device, by one copy."""
    parts, width = [tree.num_nodes[:, None], tree.tokens, tree.parents], tree.tokens.shape[1]
    packed = torch.cat(parts, 1).to(torch.int32)
    if tree.scores is not None:
        packed = torch.cat((packed, tree.scores.view(torch.int32)), 1)
    num_nodes, tokens, parents, scores = np.split(packed.cpu().numpy(), np.cumsum([1, width, width]), axis=1)
    rows = zip(tokens.tolist(), parents.tolist(), num_nodes[:, 0].tolist(), strict=True)
    trees = [TreeLists(tokens[:count], parents[:count]) for tokens, parents, count in rows]
    return trees, [] if tree.scores is None else _cut(scores.view(np.float32).tolist(), trees)


def _cut(scores: list[list[float]], trees: list[TreeLists]) -> list[list[float]]:
    return [row[: len(tree.tokens)] for row, tree in zip(scores, trees, strict=True)]
