"""A draft model in the CPU kernels: draft extend, and trees that one call grows, all levels of them."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.attention import Attend
from specray.ops.cpu.attention import PagedAttend, PagedAttention
from specray.ops.cpu.packed_network import PackedNetwork
from specray.ops.cpu.pointer import pointer
from specray.ops.cpu.structs import FLOAT_TYPES, Growth
from specray.ops.cpu.threads import num_threads


class TreeRequests(NamedTuple):
    """The inputs for growing B draft trees."""

    output: Tensor  # [B, H], the model's, from which the roots' children are predicted
    roots: Tensor  # int64 [B], last known tokens
    positions: Tensor  # int64 [B], of the roots' children
    kv_slots: Tensor  # int64 [B, n] of the prefixes
    kv_lens: list[int]  # how many of them each has
    scratch: Tensor  # int64 [rows, n], KV slots of the nodes
    # (seeds int64 [B], positions of the roots int64 [B], temperature float32 [B], 0 where a request is greedy); None:
    # all are greedy
    noise: tuple[Tensor, Tensor, Tensor] | None


class TreeNetwork(PackedNetwork):
    """A draft model that processes committed tokens and grows trees."""

    def extend(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Draft extend: see EagleHead's call. Only of a network that reads states, with this backend's `attend`."""
        assert self._inputs is not None
        assert isinstance(attend, PagedAttend)
        token_ids, states, positions = token_ids.contiguous(), states.contiguous(), positions.contiguous()
        output = torch.empty_like(states)
        self._layers.kernels.extend(
            ctypes.byref(self._struct),
            ctypes.byref(self._layers.step(positions, attend)),
            pointer(token_ids),
            pointer(states),
            pointer(output),
            FLOAT_TYPES[states.dtype],
            num_threads(self._layers.num_bytes),
        )
        return output

    def grow(
        self,
        attention: PagedAttention,
        requests: TreeRequests,
        topk: int,
        num_levels: int,
        num_drafts: int,
        last_position: int,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(tokens, parents, scores) [B, 1 + num_drafts] and numbers of nodes int64 [B], as in DraftTree."""
        count = len(requests.kv_lens)
        output = requests.output.float().contiguous()
        columns = [part.contiguous() for part in (requests.roots, requests.positions, requests.kv_slots)]
        kv_lens = torch.tensor(requests.kv_lens, dtype=torch.int32)
        noise: list[Tensor | None] = [None] * 3
        if requests.noise is not None:
            noise = [part.contiguous() for part in requests.noise]
        tokens, parents = torch.empty(2, count, 1 + num_drafts, dtype=torch.int64)
        scores = torch.empty(count, 1 + num_drafts)
        num_nodes = torch.empty(count, dtype=torch.int64)
        growth = Growth(
            num_trees=count,
            topk=topk,
            num_levels=num_levels,
            num_drafts=num_drafts,
            output=pointer(output),
            roots=pointer(columns[0]),
            positions=pointer(columns[1]),
            last_position=last_position,
            kv_slots=pointer(columns[2]),
            kv_lens=pointer(kv_lens),
            scratch=requests.scratch.data_ptr(),
            slots_width=requests.kv_slots.shape[1],
            scratch_width=requests.scratch.stride(0),
            window=window or 0,
            pool=attention.pool_of(0),
            layer_bytes=attention.layer_bytes,
            seeds=pointer(noise[0]),
            ends=pointer(noise[1]),
            temperature=pointer(noise[2]),
            tokens=pointer(tokens),
            parents=pointer(parents),
            scores=pointer(scores),
            num_nodes=pointer(num_nodes),
        )
        threads = num_threads(num_levels * self._level_bytes)
        self._layers.kernels.grow(ctypes.byref(self._struct), ctypes.byref(growth), threads)
        return tokens, parents, scores, num_nodes
