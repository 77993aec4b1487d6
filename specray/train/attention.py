"""Attention of training batches: unrolled draft steps, and whole sequences.

A chain of draft steps starts at every position i. Its step 0 reads the keys of step 0 at positions <= i, as in serving
after a verification. Its step s reads those and the keys of its own steps 1 … s.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class TrainingKV(Protocol):
    """What `heads.TrainedAttention` attends to."""

    def rows_with_queries(self, x: Tensor) -> Tensor:
        """The part of x [B, n, …] whose queries are computed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, queries, heads * dim] from q [B, queries, heads, dim] and new k and v [B, n, kv_heads, dim]."""


class ChainKV:
    """Keys and values of one layer. Chains start at positions `start` … L-1; earlier ones are context.

    In step 0, n is L; the last layer has queries for the chains only, those below it for all positions. Later, n is the
    number of chains.
    """

    def __init__(self, start: int, is_last: bool = True) -> None:
        self.start = start
        self._is_last = is_last
        self._shared: tuple[Tensor, Tensor] | None = None  # of step 0, each [B, kv_heads, L, dim]
        self._own: list[tuple[Tensor, Tensor]] = []  # of steps 1 …, each [B, kv_heads, chains, dim]

    @property
    def is_empty(self) -> bool:
        """Whether the next step is step 0, which covers all positions."""
        return self._shared is None

    def rows_with_queries(self, x: Tensor) -> Tensor:
        return x[:, self.start :] if self._shared is None and self._is_last else x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, queries, heads, dim = q.shape
        kv_heads = k.shape[2]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self._shared is None:
            self._shared = (k, v)
        else:
            self._own.append((k, v))
        grouped = (q * dim**-0.5).view(batch, queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
        mixed = self._mix(grouped)  # [B, kv_heads, group, queries, dim]
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads * dim)

    def _mix(self, q: Tensor) -> Tensor:
        assert self._shared is not None
        keys, values = self._shared
        length = keys.shape[2]
        scores = q.flatten(2, 3) @ keys.transpose(-1, -2)  # all queries of a KV head in one product
        scores = scores.view(*q.shape[:-1], length).float()
        first = length - q.shape[3]  # position of the first query: that of step 0 which the chain continues
        scores = scores.masked_fill(_future(first, length, q.device), float("-inf"))
        own = [(q * k[:, :, None]).sum(-1, keepdim=True, dtype=torch.float32) for k, _ in self._own]
        weights = torch.cat((scores, *own), -1).softmax(-1).to(values.dtype)
        mixed = (weights[..., :length].flatten(2, 3) @ values).view(q.shape)
        for index, (_, v) in enumerate(self._own):
            mixed = mixed + weights[..., length + index, None] * v[:, :, None]
        return mixed


class SequenceKV:
    """Causal attention over whole sequences. Padding is at their ends, so no other position reads it."""

    def rows_with_queries(self, x: Tensor) -> Tensor:
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        k, v = (t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2).flatten(2)


def chain_kvs(start: int, num_layers: int) -> list[ChainKV]:
    """An empty ChainKV for each layer of a head."""
    return [ChainKV(start, is_last=layer == num_layers - 1) for layer in range(num_layers)]


def _future(first: int, length: int, device: torch.device) -> Tensor:
    """bool [L - first, L]: the positions after `first`, `first` + 1, …"""
    return torch.ones(length - first, length, dtype=torch.bool, device=device).triu(first + 1)
