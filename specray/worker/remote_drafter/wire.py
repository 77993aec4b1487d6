"""All that crosses between a target rank and a drafter in a process of its own: plain data, msgpack, deltas only.

A request's tokens and KV slots are sent once and then extended (`DeltaEncoder` on the target's side, `DeltaDecoder` on
the drafter's), so an order is as long as what the step added. Hidden states go through shared memory (`ring`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
from torch import Tensor

from specray.spec_decode.draft_tree import RowTree
from specray.spec_decode.drafter import DraftRow, ProposeContext
from specray.step import DraftFault


class TargetHandshake(NamedTuple):
    """The target's answer to a hello, with the ring's file beside it."""

    region_tokens: int
    width: int
    dtype: str


class Entry(NamedTuple):
    """What stays as it is while a request has its slot."""

    num_prompt_tokens: int
    cache_salt: str
    seed: int
    temperature: float


class RequestDelta(NamedTuple):
    """A `DraftRow`, without what was told before."""

    slot: int
    entry: Entry | None  # of a request that is told for the first time
    new_token_ids: list[int]
    new_kv_slots: bytes  # int64
    start: int
    end: int
    max_steps: int


class Order(NamedTuple):
    """One step's context. `region` of the ring holds the features; it is the target's again once this is answered."""

    number: int
    region: int
    freed_slots: list[int]
    rows: list[RequestDelta]  # want a tree
    unfinished: list[RequestDelta]


class Reply(NamedTuple):
    """The trees of an order's rows, in their order; none if there was a fault."""

    number: int
    seconds: float
    trees: list[RowTree]
    fault: DraftFault | None


def pack(message: TargetHandshake | Order | Reply) -> bytes:
    data: bytes = msgpack.packb(message)
    return data


def unpack_target_handshake(data: bytes) -> TargetHandshake:
    return TargetHandshake(*msgpack.unpackb(data))


def unpack_order(data: bytes) -> Order:
    number, region, freed, rows, unfinished = msgpack.unpackb(data)
    return Order(number, region, freed, [_row(*row) for row in rows], [_row(*row) for row in unfinished])


def unpack_reply(data: bytes, vocab_size: int, max_draft_tokens: int) -> Reply:
    """ValueError for anything that is not a reply of sound trees: a drafter may be broken in every way there is."""
    try:
        number, seconds, rows, fault = msgpack.unpackb(data)
        trees = [RowTree(*row) for row in rows]
        fault = None if fault is None else DraftFault(fault)
        sound = isinstance(number, int) and isinstance(seconds, float)
        sound = sound and all(_is_tree(tree, vocab_size, max_draft_tokens) for tree in trees)
    except (TypeError, ValueError) as error:  # msgpack's own errors are among them
        raise ValueError(f"not a reply: {error}") from None
    if not sound:
        raise ValueError("a reply with parts that are no trees of this vocabulary")
    return Reply(number, seconds, trees, fault)


class DeltaEncoder:
    """Makes wire rows; knows what of each slot was told."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, int]] = {}  # slot -> tokens and KV slots told
        self._freed: list[int] = []

    def release(self, slots: Sequence[int]) -> None:
        self._freed += [slot for slot in slots if self._told.pop(slot, None)]

    def order(self, number: int, region: int, context: ProposeContext) -> Order:
        freed, self._freed = self._freed, []
        rows, unfinished = ([self._tell(row) for row in part] for part in (context.rows, context.unfinished))
        return Order(number, region, freed, rows, unfinished)

    def _tell(self, row: DraftRow) -> RequestDelta:
        num_tokens, num_slots = self._told.get(row.slot, (0, 0))
        is_new = row.slot not in self._told
        entry = Entry(row.num_prompt_tokens, row.cache_salt, row.seed, row.temperature) if is_new else None
        self._told[row.slot] = len(row.token_ids), len(row.kv_slots)
        new_slots = row.kv_slots[num_slots:].tobytes()
        return RequestDelta(row.slot, entry, row.token_ids[num_tokens:], new_slots, row.start, row.end, row.max_steps)


class DeltaDecoder:
    """The drafter's copy of the rows."""

    def __init__(self) -> None:
        self._rows: dict[int, DraftRow] = {}

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._rows[slot]

    def context(self, order: Order, aux_hidden_states: Tensor) -> ProposeContext:
        rows, unfinished = ([self._enter(row) for row in part] for part in (order.rows, order.unfinished))
        count = sum(row.end - row.start for row in rows + unfinished)
        return ProposeContext(rows, unfinished, aux_hidden_states[:count])

    def _enter(self, told: RequestDelta) -> DraftRow:
        new_slots = np.frombuffer(told.new_kv_slots, dtype=np.int64)
        if told.entry is not None:
            old = DraftRow(
                told.slot,
                [],
                told.entry.num_prompt_tokens,
                told.entry.cache_salt,
                0,
                0,
                new_slots[:0],
                told.entry.seed,
                told.entry.temperature,
            )
        else:
            old = self._rows[told.slot]
        old.token_ids.extend(told.new_token_ids)
        kv_slots = np.concatenate((old.kv_slots, new_slots)) if len(new_slots) else old.kv_slots
        row = old._replace(start=told.start, end=told.end, kv_slots=kv_slots, max_steps=told.max_steps)
        self._rows[told.slot] = row
        return row


def _row(*fields: Any) -> RequestDelta:
    row = RequestDelta(*fields)
    return row._replace(entry=Entry(*row.entry)) if row.entry is not None else row


def _is_tree(tree: RowTree, vocab_size: int, max_draft_tokens: int) -> bool:
    size = len(tree.tokens)
    return (
        1 <= size <= max_draft_tokens + 1
        and len(tree.parents) == size
        and all(type(number) is int for number in (*tree.tokens, *tree.parents))
        and tree.or_root(vocab_size) is tree
    )
