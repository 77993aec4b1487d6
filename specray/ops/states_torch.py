"""The operations with states in torch: the specification of the kernels. See `specray.ops.states`."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specray.ops.row_wise import sigmoid, silu, softplus
from specray.ops.states import StateRows

NORM_EPS = 1e-6  # of queries and keys, as in flash-linear-attention


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """For each channel the weighted sum of the last `width` inputs, oldest first; silu of it if `has_silu`."""

    weights: Tensor  # float32 [width, channels]
    bias: Tensor | None  # float32 [channels]
    has_silu: bool


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNet:
    """A gated delta rule, with the norm and gate of its result.

    Each head's matrix S changes with a token to exp(rate * softplus(a + dt_bias)) S + beta k (v - k S), where k S is of
    the decayed S and beta = beta_scale * sigmoid(b); the result is q S, normed, times silu(z). q and k have length 1.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    rates: Tensor  # float32 [num_v_heads]: -exp(A_log)
    dt_bias: Tensor  # float32 [num_v_heads]
    norm: Tensor  # float32 [v_dim]
    eps: float
    beta_scale: float = 1.0

    @property
    def num_channels(self) -> int:
        """Of queries, keys and values together."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


def convolve(conv: Convolution, x: Tensor, pool: Tensor, rows: StateRows) -> Tensor:
    """See TorchOps.convolve."""
    width, device = len(conv.weights), x.device
    windows = pool.index_select(0, rows.slots.to(device))
    windows = windows.masked_fill(rows.is_fresh.bool().to(device)[:, None, None], 0)
    table = torch.cat((x, windows.flatten(0, 1))).float()  # the rows' inputs, and those before this step
    requests = np.repeat(np.arange(len(rows.lens)), rows.lens.numpy())
    ends, slots = _kept_rows(rows)
    kept = _inputs(rows, ends, requests[ends], width - 1, width)
    result = torch.zeros(x.shape, device=device) if conv.bias is None else conv.bias.expand(x.shape)
    for weights, places in zip(conv.weights, _inputs(rows, np.arange(rows.total), requests, width, width), strict=True):
        result = result + table[torch.from_numpy(places).to(device)] * weights
    if kept.size:
        pool[torch.from_numpy(slots).to(device)] = table[torch.from_numpy(kept.T).to(device)].to(pool.dtype)
    return (silu(result) if conv.has_silu else result).to(x.dtype)


def gated_delta(net: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, pool: Tensor, rows: StateRows) -> Tensor:
    """See TorchOps.gated_delta."""
    device, heads = qkv.device, net.num_v_heads
    sizes = [net.num_k_heads * net.k_dim] * 2 + [heads * net.v_dim]
    q, k, v = qkv.float().split_with_sizes(sizes, -1)
    q, k, v = (part.reshape(rows.total, -1, dim) for part, dim in ((q, net.k_dim), (k, net.k_dim), (v, net.v_dim)))
    q, k = (part * torch.rsqrt(_sum(part * part, -1) + NORM_EPS)[..., None] for part in (q, k))
    q, k = (part.repeat_interleave(heads // net.num_k_heads, 1) for part in (q * net.k_dim**-0.5, k))
    decay = (net.rates * softplus(a.float() + net.dt_bias)).exp()[..., None, None]
    beta = net.beta_scale * sigmoid(b.float())[..., None]
    requests = torch.repeat_interleave(torch.arange(len(rows.lens)), rows.lens)
    ends, kept_slots = map(torch.from_numpy, _kept_rows(rows))
    seen = torch.empty(rows.total, heads, net.v_dim, device=device)
    place = torch.zeros(rows.total, dtype=torch.int64)  # of a row in its level
    state = pool
    for level in _levels(rows):
        at, slots = level.to(device), rows.slots[requests[level]].to(device)
        if rows.parents[level[0]] < 0:
            fresh = rows.is_fresh[requests[level]].bool().to(device)
            state = pool[slots].masked_fill(fresh[:, None, None, None], 0)
        else:
            state = state[place[rows.parents[level]].to(device)]
        place[level] = torch.arange(len(level))
        state = state * decay[at]
        change = (v[at] - _sum(state * k[at][..., None], -2)) * beta[at]
        state = state + k[at][..., None] * change[..., None, :]
        seen[at] = _sum(state * q[at][..., None], -2)
        stays = torch.isin(ends, level)
        pool[kept_slots[stays].to(device)] = state[place[ends[stays]].to(device)]
    normed = seen * torch.rsqrt(_sum(seen * seen, -1)[..., None] / net.v_dim + net.eps) * net.norm
    return (normed.flatten(1) * silu(z.float())).to(z.dtype)


def _sum(x: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, of halves of halves: torch's own order depends on the other dimensions."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        summed = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat((summed, x.narrow(dim, 2 * half, 1)), dim) if size % 2 else summed
    return x.squeeze(dim)


def _kept_rows(rows: StateRows) -> tuple[np.ndarray, np.ndarray]:
    """(the rows whose states are kept, the rows of the pools that receive them), each int64 [n]."""
    num_known, copies = rows.num_known.numpy(), rows.copies.numpy()
    last = (rows.lens.cumsum(0) - rows.lens).numpy() + num_known - 1
    copied = np.flatnonzero(copies >= 0)
    ends = np.concatenate((last[num_known > 0], copied))
    return ends, np.concatenate((rows.slots.numpy()[num_known > 0], copies[copied]))


def _inputs(rows: StateRows, ends: np.ndarray, requests: np.ndarray, count: int, width: int) -> np.ndarray:
    """int64 [count, n]: places of the last inputs on the paths to the rows `ends`, oldest first.

    Behind the T rows lie the `width - 1` inputs of each request before this step.
    """
    places, at, parents = [], ends, rows.parents.numpy()
    for _ in range(count):
        before = rows.total + requests * (width - 1) + width - 1 + at
        places.append(np.where(at >= 0, at, before))
        at = np.where(at >= 0, parents[np.maximum(at, 0)], at - 1)
    return np.array(places[::-1], dtype=np.int64).reshape(count, len(ends))


def _levels(rows: StateRows) -> list[Tensor]:
    """The rows by their number of predecessors in this step."""
    depths: list[int] = []
    for parent in rows.parents.tolist():
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    of_depth: list[list[int]] = [[] for _ in range(max(depths, default=-1) + 1)]
    for row, depth in enumerate(depths):
        of_depth[depth].append(row)
    return [torch.tensor(level) for level in of_depth]
