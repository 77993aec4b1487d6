"""A draft model in the CPU kernels: draft extend, and trees that one call grows, all levels of them."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.attention import Attend
from specray.ops.cpu.attention import PagedAttend, PagedAttention
from specray.ops.cpu.packed_network import PackedNetwork
from specray.ops.cpu.processor import num_threads
from specray.ops.cpu.steps import TableKernels
from specray.ops.cpu.structs import FLOAT_TYPES, CommittedStruct, GrowthStruct, pointer


class TreeLimits(NamedTuple):
    """Limits of a call's trees. `num_drafts` does not count the root; positions past `last_position` count as it."""

    topk: int
    num_levels: int
    num_drafts: int
    last_position: int


class TreeOptions(NamedTuple):
    """Options of growing trees, apart from the requests and limits."""

    scratch: Tensor  # int64 [rows, n], KV slots of the nodes
    # (seeds int64 [B], positions of the roots int64 [B], temperature float32 [B], 0 where a request is greedy); None:
    # all are greedy
    noise: tuple[Tensor, Tensor, Tensor] | None


class TreeRequests(NamedTuple):
    """The requests below which B trees grow."""

    output: Tensor  # [B, H], the model's, from which the roots' children are predicted
    roots: Tensor  # int64 [B], last known tokens
    positions: Tensor  # int64 [B], of the roots' children
    kv_slots: Tensor  # int64 [B, n] of the prefixes
    kv_lens: list[int]  # how many of them each has


class CommittedTokens(NamedTuple):
    """What a step committed of R requests, of which the first `num_trees` get trees."""

    table: TableKernels
    num_trees: int
    slots: Tensor  # int64 [R], like the next two
    starts: Tensor
    ends: Tensor
    hidden_states: Tensor  # [sum of ends - starts, columns]; states if the network does not fuse hidden states


class GrownTrees(NamedTuple):
    """Trees of B requests, as in DraftTree."""

    tokens: Tensor  # int64 [B, 1 + num_drafts], like the next one
    parents: Tensor
    scores: Tensor  # float32 [B, 1 + num_drafts]
    num_nodes: Tensor  # int64 [B]

    @classmethod
    def empty(cls, count: int, num_drafts: int) -> "GrownTrees":
        tokens, parents = torch.empty(2, count, 1 + num_drafts, dtype=torch.int64).unbind()
        return cls(tokens, parents, torch.empty(count, 1 + num_drafts), torch.empty(count, dtype=torch.int64))


class TreeNetwork(PackedNetwork):
    """A draft model that processes committed tokens and grows trees."""

    def extend(
        self,
        token_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        attend: Attend,
        read_lens: Sequence[int] | None = None,
    ) -> Tensor:
        """Draft extend: see EagleHead's call. Only of a network that reads states, with this backend's `attend`.

        The output is only right for the last `read_lens` rows of each request, None all.
        """
        assert self._inputs is not None
        assert isinstance(attend, PagedAttend)
        token_ids, states, positions = token_ids.contiguous(), states.contiguous(), positions.contiguous()
        output = torch.empty_like(states)
        lens = None if read_lens is None else (ctypes.c_int32 * len(read_lens))(*read_lens)
        self._layers.kernels.extend(
            ctypes.byref(self._struct),
            ctypes.byref(self._layers.step(positions, attend, read_lens=lens)),
            pointer(token_ids),
            pointer(states),
            pointer(output),
            FLOAT_TYPES[states.dtype],
            num_threads(self._layers.num_bytes),
        )
        return output

    def draft(
        self, attention: PagedAttention, committed: CommittedTokens, limits: TreeLimits, options: TreeOptions
    ) -> GrownTrees:
        """Draft extend and the trees below, in one call, of a network that reads states.

        All earlier KV must be in the pool.
        """
        assert self._inputs is not None
        table, num_trees, *columns, read = committed
        slots, starts, ends = (column.contiguous() for column in columns)
        read = read.contiguous()
        parts = CommittedStruct(
            count=slots.shape[0],
            slots=pointer(slots),
            starts=pointer(starts),
            ends=pointer(ends),
            hidden_states=pointer(read),
            type=FLOAT_TYPES[read.dtype],
        )
        trees = GrownTrees.empty(num_trees, limits.num_drafts)
        growth, _keep_alive = self._growth(attention, num_trees, limits, options, trees)
        self._layers.kernels.draft(
            ctypes.byref(self._struct),
            ctypes.byref(table.struct),
            ctypes.byref(parts),
            ctypes.byref(growth),
            num_threads(limits.num_levels * self._level_bytes),
        )
        return trees

    def grow(
        self, attention: PagedAttention, requests: TreeRequests, limits: TreeLimits, options: TreeOptions
    ) -> GrownTrees:
        """The trees below the roots of B requests."""
        output = requests.output.float().contiguous()
        roots, positions, kv_slots = (
            part.contiguous() for part in (requests.roots, requests.positions, requests.kv_slots)
        )
        kv_lens = torch.tensor(requests.kv_lens, dtype=torch.int32)
        trees = GrownTrees.empty(len(kv_lens), limits.num_drafts)
        growth, _keep_alive = self._growth(attention, len(kv_lens), limits, options, trees)
        growth.output, growth.roots, growth.positions = pointer(output), pointer(roots), pointer(positions)
        growth.kv_slots, growth.kv_lens, growth.slots_width = pointer(kv_slots), pointer(kv_lens), kv_slots.shape[1]
        threads = num_threads(limits.num_levels * self._level_bytes)
        self._layers.kernels.grow(ctypes.byref(self._struct), ctypes.byref(growth), threads)
        return trees

    def _growth(
        self,
        attention: PagedAttention,
        count: int,
        limits: TreeLimits,
        options: TreeOptions,
        trees: GrownTrees,
    ) -> tuple[GrowthStruct, list[Tensor | None]]:
        """The struct without what the trees grow from, and what must live as long as it."""
        scratch = options.scratch
        noise: list[Tensor | None] = [None] * 3
        if options.noise is not None:
            noise = [part.contiguous() for part in options.noise]
        growth = GrowthStruct(
            num_trees=count,
            topk=limits.topk,
            num_levels=limits.num_levels,
            num_drafts=limits.num_drafts,
            last_position=limits.last_position,
            scratch=scratch.data_ptr(),
            scratch_width=scratch.stride(0),
            attention=attention.address_of(0),
            seeds=pointer(noise[0]),
            ends=pointer(noise[1]),
            temperature=pointer(noise[2]),
            tokens=pointer(trees.tokens),
            parents=pointer(trees.parents),
            scores=pointer(trees.scores),
            num_nodes=pointer(trees.num_nodes),
        )
        return growth, noise
