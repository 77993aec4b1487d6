"""Attention of training batches: unrolled draft steps, and whole sequences.

A chain of draft steps starts at every position i. Its step 0 reads the keys of step 0 at positions <= i, as in serving
after a verification. Its step s reads those and the keys of its own steps 1 … s.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class ChainAttention:
    """The `attend` of a head's draft steps, and their keys and values. Chains start at positions `start` … L-1.

    In step 0, layers read all L positions; the last layer has queries for the chains only, those below it for all
    positions. Later steps read the chains only.
    """

    def __init__(self, start: int, num_layers: int) -> None:
        self._start = start
        self._num_layers = num_layers
        self._shared: list[tuple[Tensor, Tensor]] = []  # of step 0 by layer, each [B, kv_heads, L, dim]
        self._chains: list[list[tuple[Tensor, Tensor]]] = []  # by layer, of steps 1 …, each [B, kv_heads, chains, dim]

    def rows_with_queries(self, layer: int, x: Tensor) -> Tensor:
        """The part of x [B, n, …] whose queries `layer` computes, the last rows."""
        is_first_step = layer == len(self._shared)
        return x[:, self._start :] if is_first_step and layer == self._num_layers - 1 else x

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None) -> Tensor:
        """[B, queries, heads * dim] from q [B, queries, heads, dim] and new kv [B, n, 2, kv_heads, dim]."""
        assert kv is not None
        batch, queries, heads, dim = q.shape
        kv_heads = kv.shape[3]
        k, v = kv.transpose(1, 3).unbind(2)
        if layer == len(self._shared):
            self._shared.append((k, v))
            self._chains.append([])
        else:
            self._chains[layer].append((k, v))
        grouped = (q * dim**-0.5).view(batch, queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
        mixed = _attend(grouped, *self._shared[layer], self._chains[layer])  # [B, kv_heads, group, queries, dim]
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads * dim)


def attend_to_sequences(layer: int, q: Tensor, kv: Tensor | None) -> Tensor:  # noqa: ARG001
    """The causal `attend` of whole sequences. Padding is at their ends, so no other position reads it."""
    assert kv is not None
    k, v = kv.unbind(2)
    group = q.shape[2] // k.shape[2]
    k, v = (t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2).flatten(2)


def _attend(q: Tensor, keys: Tensor, values: Tensor, chains: list[tuple[Tensor, Tensor]]) -> Tensor:
    length = keys.shape[2]
    scores = q.flatten(2, 3) @ keys.transpose(-1, -2)  # all queries of a KV head in one product
    scores = scores.view(*q.shape[:-1], length).float()
    first = length - q.shape[3]  # position of the first query: that of step 0 which the chain continues
    future = torch.ones(length - first, length, dtype=torch.bool, device=q.device).triu(first + 1)
    scores = scores.masked_fill(future, float("-inf"))
    chain_scores = [(q * k[:, :, None]).sum(-1, keepdim=True, dtype=torch.float32) for k, _ in chains]
    weights = torch.cat((scores, *chain_scores), -1).softmax(-1).to(values.dtype)
    mixed = (weights[..., :length].flatten(2, 3) @ values).view(q.shape)
    for index, (_, v) in enumerate(chains):
        mixed = mixed + weights[..., length + index, None] * v[:, :, None]
    return mixed
