"""Attention of unrolled draft steps: what the served head does with its KV cache, for all positions of a batch at once.

A chain starts at every position i. Its step 0 reads the keys of step 0 at positions <= i, as served after a verify;
its step s reads those and the keys of its own steps 1 … s. Not here: projections and norms (`heads`).
"""

import torch
from torch import Tensor


class ChainMemory:
    """Keys and values of one unrolled batch. Chains start at positions `start` … L-1; earlier ones are context."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._shared: tuple[Tensor, Tensor] | None = None  # of step 0, each [B, kv_heads, L, dim]
        self._own: list[tuple[Tensor, Tensor]] = []  # of steps 1 …, each [B, kv_heads, chains, dim]

    @property
    def is_empty(self) -> bool:
        """Whether step 0, which runs over all positions, is still to come."""
        return self._shared is None

    def rows_with_queries(self, x: Tensor) -> Tensor:
        """The part of x [B, L or chains, …] that belongs to chains."""
        return x[:, self.start :] if self._shared is None else x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add this step's k and v [B, L or chains, kv_heads, dim] and attend with q [B, chains, heads, dim].

        Returns [B, chains, heads * dim].
        """
        batch, chains, heads, dim = q.shape
        kv_heads = k.shape[2]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self._shared is None:
            self._shared = (k, v)
        else:
            self._own.append((k, v))
        grouped = (q * dim**-0.5).view(batch, chains, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
        mixed = self._mix(grouped)  # [B, kv_heads, group, chains, dim]
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch, chains, heads * dim)

    def _mix(self, q: Tensor) -> Tensor:
        assert self._shared is not None
        keys, values = self._shared
        length = keys.shape[2]
        scores = q.flatten(2, 3) @ keys.transpose(-1, -2)  # a KV head's queries as rows of one product
        scores = scores.view(*q.shape[:-1], length).float()
        scores = scores.masked_fill(self._future(q.shape[3], length, q.device), float("-inf"))
        own = [(q * k[:, :, None]).sum(-1, keepdim=True, dtype=torch.float32) for k, _ in self._own]
        weights = torch.cat((scores, *own), -1).softmax(-1).to(values.dtype)
        mixed = (weights[..., :length].flatten(2, 3) @ values).view(q.shape)
        for index, (_, v) in enumerate(self._own):
            mixed = mixed + weights[..., length + index, None] * v[:, :, None]
        return mixed

    def _future(self, chains: int, length: int, device: torch.device) -> Tensor:
        """bool [chains, L]: the positions after each chain's start."""
        return torch.ones(chains, length, dtype=torch.bool, device=device).triu(self.start + 1)
