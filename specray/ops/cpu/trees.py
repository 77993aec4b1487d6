"""Draft trees that one call of the CPU kernels grows, all levels of it."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.cpu.attention import PagedAttention
from specray.ops.cpu.layers import FusedLayers
from specray.ops.cpu.library import pointer
from specray.ops.cpu.matrix import PackedMatrix
from specray.ops.cpu.structs import FLOAT_TYPES, DraftNetwork, Growth, Matrix
from specray.ops.cpu.threads import num_threads


class StateInput(NamedTuple):
    """How a node's state joins the embedding of its token: x = [embedding, state], normed, then projected."""

    token_norm: Tensor | None  # float32 [H]
    state_norm: Tensor | None
    project: PackedMatrix | None
    state_first: bool = False  # x = [state, embedding]
    residual_is_normed: bool = False  # without a projection, the residual stream starts from the normed state


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


class TreeNetwork:
    """A draft model of H columns: embedding, state, decoder layers, output matrix. None of it is split over ranks."""

    def __init__(
        self,
        layers: FusedLayers,
        embedding: Tensor,
        inputs: StateInput | None,
        norm: Tensor | None,
        output: PackedMatrix,
        num_columns: int,
        target_ids: Tensor | None,
        state_is_normed: bool = False,
        output_is_normed: bool = False,
    ) -> None:
        """`inputs` None: the layers read the embedding alone. `norm` float32 [H] comes before the output matrix.

        `target_ids` int64 [num_columns] are the target's ids of its columns; None: the same ids. `state_is_normed`:
        nodes pass their children the normed output. `output_is_normed`: the outputs given to `grow` are normed.
        """
        self._layers = layers
        self._embedding, self._norm, self._output, self._inputs = embedding.contiguous(), norm, output, inputs
        self._target_ids = None if target_ids is None else target_ids.contiguous()
        inputs = inputs or StateInput(None, None, None)
        self._struct = DraftNetwork(
            embedding=pointer(self._embedding),
            embedding_type=FLOAT_TYPES[embedding.dtype],
            vocab_size=len(embedding),
            token_norm=pointer(inputs.token_norm),
            state_norm=pointer(inputs.state_norm),
            project=Matrix() if inputs.project is None else inputs.project.struct,
            reads_states=self._inputs is not None,
            state_first=inputs.state_first,
            residual_is_normed=inputs.residual_is_normed,
            num_layers=len(layers.structs),
            layers=ctypes.addressof(layers.structs),
            sizes=layers.sizes,
            cos=pointer(layers.cos),
            sin=pointer(layers.sin),
            norm=pointer(norm),
            state_is_normed=state_is_normed,
            output_is_normed=output_is_normed,
            num_columns=num_columns,
            output=output.struct,
            target_ids=pointer(self._target_ids),
        )
        self._level_bytes = layers.num_bytes + output.num_bytes

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
