"""Messages between a target rank and a drafter in another process: msgpack, deltas only.

A request's tokens and KV blocks are sent once and then extended (`DeltaEncoder` at the target, `DeltaDecoder` at the
drafter), so an order is as long as what the step added. Trees come back as int32 arrays. Hidden states go through
shared memory (`ring`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgpack
import numpy as np
import torch
from torch import Tensor

from specray.config import MAX_DRAFTERS
from specray.spec_decode.draft_tree import NONE, ROOT, DraftTree
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.step import DrafterUse, DraftFault, DraftLimit, NewRequest
from specray.step_wire import new_request

_UNSIGNED_NONE = NONE & 0xFFFFFFFF


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


class RequestDelta(NamedTuple):
    """What was added to a request since the last order."""

    slot: int
    token_ids: list[int]
    block_ids: list[int]


class Order(NamedTuple):
    """One step's context. `region` of the ring holds the hidden states; the reply frees it."""

    number: int
    region: int
    freed_slots: list[int]
    new_requests: list[NewRequest]
    deltas: list[RequestDelta]
    requests: list[DraftRequest]  # get a tree
    unfinished: list[DraftRequest]


class Reply(NamedTuple):
    """Trees of an order's requests, in their order: arrays as bytes, empty after a fault. Integers are int32."""

    number: int
    seconds: float
    num_nodes: bytes  # [B]
    tokens: bytes  # [B, N]
    parents: bytes  # [B, N]
    fault: DraftFault | None = None
    uses: Sequence[DrafterUse] = ()  # of several drafters
    scores: bytes = b""  # float32 [B, N], or empty where they are not known

    @classmethod
    def of(cls, number: int, seconds: float, tree: DraftTree) -> "Reply":
        """One copy to the host."""
        if tree.tokens.device.type != "cpu":
            tree = _copied_to_host(tree)
        num_nodes, tokens, parents = (
            part.numpy().astype(np.int32) for part in (tree.num_nodes, tree.tokens, tree.parents)
        )
        if not num_nodes.all():
            return cls.failed(number, seconds, DraftFault.NOT_A_NUMBER)
        scores = b"" if tree.scores is None else tree.scores.numpy().tobytes()
        return cls(number, seconds, num_nodes.tobytes(), tokens.tobytes(), parents.tobytes(), scores=scores)

    @classmethod
    def failed(cls, number: int, seconds: float, fault: DraftFault) -> "Reply":
        return cls(number, seconds, b"", b"", b"", fault)

    def tree(self, num_requests: int, vocab_size: int, max_draft_tokens: int) -> DraftTree:
        """The trees, on the CPU. ValueError if they are not valid trees of `num_requests` requests."""
        if not num_requests and not (self.num_nodes or self.tokens or self.parents):
            return DraftTree.roots(torch.empty(0, dtype=torch.int64))
        # Unsigned, so that negative numbers are too large.
        num_nodes, tokens, parents = (
            np.frombuffer(data, dtype=np.uint32).astype(np.int64).reshape(num_requests, -1)
            for data in (self.num_nodes, self.tokens, self.parents)
        )
        width = tokens.shape[1]
        if num_nodes.shape[1] != 1 or parents.shape != tokens.shape or not 1 <= width <= max_draft_tokens + 1:
            raise ValueError(f"arrays of shapes {num_nodes.shape}, {tokens.shape} and {parents.shape} are not trees")
        nodes = np.arange(width)
        is_past = nodes >= num_nodes
        has_parent = parents < nodes
        has_parent[:, ROOT] = parents[:, ROOT] == _UNSIGNED_NONE
        if num_nodes.min() < 1 or num_nodes.max() > width or not ((tokens < vocab_size) & has_parent | is_past).all():
            raise ValueError("tokens outside the vocabulary, or a child before its parent")
        tokens[is_past] = parents[is_past] = NONE
        parents[:, ROOT] = NONE
        counts, scores = torch.from_numpy(num_nodes[:, 0]), None
        if self.scores:
            scores = torch.from_numpy(np.frombuffer(self.scores, np.float32).reshape(tokens.shape).copy())
        return DraftTree(torch.from_numpy(tokens), torch.from_numpy(parents), counts, width - 1, scores=scores)


def pack(message: TargetHandshake | Order | Reply) -> bytes:
    data: bytes = msgpack.packb(message)
    return data


def unpack_target_handshake(data: bytes) -> TargetHandshake:
    return TargetHandshake(*msgpack.unpackb(data))


def unpack_order(data: bytes) -> Order:
    number, region, freed, new, deltas, requests, unfinished = msgpack.unpackb(data)
    entered = [new_request(*fields) for fields in new]
    drafted, read = ([_draft_request(*fields) for fields in part] for part in (requests, unfinished))
    return Order(number, region, freed, entered, [RequestDelta(*fields) for fields in deltas], drafted, read)


def unpack_reply(data: bytes) -> Reply:
    """ValueError for anything that is not a reply. `Reply.tree` checks the trees."""
    try:
        reply = Reply(*msgpack.unpackb(data))
        fault = None if reply.fault is None else DraftFault(reply.fault)
    except (TypeError, ValueError) as error:  # msgpack's own errors are among them
        raise ValueError(f"not a reply: {error}") from None
    arrays = (reply.num_nodes, reply.tokens, reply.parents, reply.scores)
    if type(reply.number) is not int or type(reply.seconds) is not float or any(type(a) is not bytes for a in arrays):
        raise ValueError("not a reply: its fields have other types")
    return reply._replace(fault=fault, uses=_uses(reply.uses))


class DeltaEncoder:
    """Makes orders. Remembers how much of each slot's request was sent."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, int]] = {}  # slot -> numbers of tokens and blocks
        self._freed: list[int] = []

    def release(self, slots: Sequence[int]) -> None:
        self._freed += [slot for slot in slots if self._sent.pop(slot, None)]

    def order(self, number: int, region: int, context: ProposeContext) -> Order:
        freed, self._freed = self._freed, []
        order = Order(number, region, freed, [], [], context.requests, context.unfinished)
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

    def context(self, order: Order, region: Tensor) -> ProposeContext:
        """Apply an order. `region` [region_tokens, width] holds its hidden states."""
        for slot in order.freed_slots:
            self._table.free(slot)
        for new in order.new_requests:
            self._table.enter(new)
        for delta in order.deltas:
            self._table.extend(*delta)
        self._table.flush()
        count = sum(request.end - request.start for request in order.requests + order.unfinished)
        states = region[:count].to(self._table.device)
        return ProposeContext(self._table, order.requests, order.unfinished, lambda: states)


def _copied_to_host(tree: DraftTree) -> DraftTree:
    """A reply's part of a tree, by one copy."""
    parts, width = [tree.num_nodes[:, None], tree.tokens, tree.parents], tree.tokens.shape[1]
    packed = torch.cat(parts, 1).to(torch.int32)
    if tree.scores is not None:
        packed = torch.cat((packed, tree.scores.view(torch.int32)), 1)
    num_nodes, tokens, parents, scores = packed.cpu().tensor_split((1, 1 + width, 1 + 2 * width), 1)
    known = scores.view(torch.float32) if tree.scores is not None else None
    return DraftTree(tokens, parents, num_nodes[:, 0], tree.max_depth, scores=known)


def _uses(data: object) -> list[DrafterUse]:
    """ValueError for anything that is not a list of uses."""
    if not isinstance(data, list | tuple) or len(data) > MAX_DRAFTERS:
        raise ValueError("not a reply: its uses are not a list")
    try:
        uses = [DrafterUse(*use) for use in data]
    except TypeError as error:
        raise ValueError(f"not a reply: {error}") from None
    for use in uses:
        if type(use.drafter) is not str or not all(type(part) in (int, float) and 0 <= part < 1e9 for part in use[1:]):
            raise ValueError("not a reply: its uses have other types")
    return uses


def _draft_request(slot: int, start: int, end: int, limit: list[int]) -> DraftRequest:
    return DraftRequest(slot, start, end, DraftLimit(*limit))
