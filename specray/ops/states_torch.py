"""The operations with states in torch: the specification of the kernels. See `specray.ops.states`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.ops.row_wise import sigmoid, silu, softplus
from specray.ops.states import AnyStateRows, PaddedStateRows, StateRows

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


def convolve(conv: Convolution, x: Tensor, pool: Tensor, rows: AnyStateRows) -> Tensor:
    """See TorchOps.convolve."""
    if isinstance(rows, PaddedStateRows):
        return rows.flat(_convolve_padded(conv, rows.padded(x), pool, rows))
    width, device = len(conv.weights), x.device
    windows = pool.index_select(0, rows.slots.to(device))
    windows = windows.masked_fill(rows.is_fresh.bool().to(device)[:, None, None], 0)
    table = torch.cat((x, windows.flatten(0, 1))).float()  # the rows' inputs, and those before this step
    requests = np.repeat(np.arange(len(rows.lens)), rows.lens.numpy())
    ends, slots = _kept_rows(rows)
    kept = _inputs(rows, ends, requests[ends], width - 1, width)
    places = _inputs(rows, np.arange(rows.total), requests, width, width)
    result = _weighted(conv, x, table, [torch.from_numpy(part).to(device) for part in places])
    if kept.size:
        pool[torch.from_numpy(slots).to(device)] = table[torch.from_numpy(kept.T).to(device)].to(pool.dtype)
    return result


def _convolve_padded(conv: Convolution, x: Tensor, pool: Tensor, rows: PaddedStateRows) -> Tensor:
    before = len(conv.weights) - 1  # inputs of a window, which lie before the rows of each request
    table = torch.cat((_states_of(pool, rows), x.view(len(rows.slots), -1, x.shape[1])), 1)
    count, length = table.shape[:2]
    node = torch.arange(length, device=x.device)
    parents = torch.cat(((node[:before] - 1).expand(count, -1), rows.parents + before), 1)
    starts = torch.arange(count, device=x.device)[:, None] * length

    def inputs(ends: Tensor, number: int) -> list[Tensor]:
        """Places of the last inputs up to `ends` [R, n], int64 [R * n] each, oldest first."""
        places = []
        for _ in range(number):
            places.append((starts + ends).flatten())
            ends = parents.gather(1, ends).clamp(min=0)
        return places[::-1]

    flat = table.flatten(0, 1).float()
    result = _weighted(conv, x, flat, inputs(node[before:].expand(count, -1), before + 1))
    known, targets = _kept_padded(rows)
    if before:
        windows = torch.stack([flat.index_select(0, places) for places in inputs(known + before, before)], 1)
        _write(pool, targets, windows)
    return result


def _weighted(conv: Convolution, x: Tensor, table: Tensor, places: Sequence[Tensor]) -> Tensor:
    """The sums of the inputs at `places` of `table`, [T] of each weight, of x's shape and type."""
    result = torch.zeros(x.shape, device=x.device) if conv.bias is None else conv.bias.expand(x.shape)
    for weights, part in zip(conv.weights, places, strict=True):
        result = result + table.index_select(0, part) * weights
    return (silu(result) if conv.has_silu else result).to(x.dtype)


def gated_delta(
    net: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, pool: Tensor, rows: AnyStateRows
) -> Tensor:
    """See TorchOps.gated_delta."""
    if isinstance(rows, StateRows):
        seen = _run(_changes(net, qkv, a, b), pool, rows)
    else:
        seen = rows.flat(_run_padded(_changes(net, *map(rows.padded, (qkv, a, b))), pool, rows))
    normed = seen * torch.rsqrt(_sum(seen * seen, -1)[..., None] / net.v_dim + net.eps) * net.norm
    return (normed.flatten(1) * silu(z.float())).to(z.dtype)


class _Changes(NamedTuple):
    """How T rows change the matrices of their heads, and read them; float32."""

    q: Tensor  # [T, heads, k_dim]
    k: Tensor
    v: Tensor  # [T, heads, v_dim]
    decay: Tensor  # [T, heads, 1, 1]
    beta: Tensor  # [T, heads, 1]

    def at(self, rows: Tensor) -> "_Changes":
        return _Changes(*(part.index_select(0, rows) for part in self))

    def apply(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """(the states behind the rows, their results) from the states before them [T, heads, k_dim, v_dim]."""
        state = state * self.decay
        change = (self.v - _sum(state * self.k[..., None], -2)) * self.beta
        state = state + self.k[..., None] * change[..., None, :]
        return state, _sum(state * self.q[..., None], -2)


def _changes(net: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor) -> _Changes:
    heads = net.num_v_heads
    sizes = [net.num_k_heads * net.k_dim] * 2 + [heads * net.v_dim]
    q, k, v = qkv.float().split_with_sizes(sizes, -1)
    q, k, v = (part.reshape(len(qkv), -1, dim) for part, dim in ((q, net.k_dim), (k, net.k_dim), (v, net.v_dim)))
    q, k = (part * torch.rsqrt(_sum(part * part, -1) + NORM_EPS)[..., None] for part in (q, k))
    q, k = (part.repeat_interleave(heads // net.num_k_heads, 1) for part in (q * net.k_dim**-0.5, k))
    decay = (net.rates * softplus(a.float() + net.dt_bias)).exp()[..., None, None]
    return _Changes(q, k, v, decay, net.beta_scale * sigmoid(b.float())[..., None])


def _run(changes: _Changes, pool: Tensor, rows: StateRows) -> Tensor:
    """The results [T, heads, v_dim]."""
    device = pool.device
    requests = torch.repeat_interleave(torch.arange(len(rows.lens)), rows.lens)
    ends, kept_slots = map(torch.from_numpy, _kept_rows(rows))
    seen = torch.empty(changes.v.shape, device=device)
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
        state, seen[at] = changes.at(at).apply(state)
        stays = torch.isin(ends, level)
        pool[kept_slots[stays].to(device)] = state[place[ends[stays]].to(device)]
    return seen


def _run_padded(changes: _Changes, pool: Tensor, rows: PaddedStateRows) -> Tensor:
    """The results [T, heads, v_dim]."""
    (count, width), device = rows.parents.shape, pool.device
    request = torch.arange(count, device=device)
    states, seen = [_states_of(pool, rows)], []  # behind no row, and behind each
    for node in range(width):
        before = torch.stack(states, 1)[request, rows.parents[:, node] + 1]
        state, result = changes.at(request * width + node).apply(before)
        states.append(state)
        seen.append(result)
    known, targets = _kept_padded(rows)
    _write(pool, targets, torch.stack(states, 1)[request[:, None], known + 1].flatten(0, 1))
    return torch.stack(seen, 1).flatten(0, 1)


def _states_of(pool: Tensor, rows: PaddedStateRows) -> Tensor:
    """[R, *shape] before the step."""
    states = pool.index_select(0, rows.slots)
    return states.masked_fill(rows.is_fresh.view(-1, *[1] * (pool.dim() - 1)), 0)


def _kept_padded(rows: PaddedStateRows) -> tuple[Tensor, Tensor]:
    """(rows whose states are kept, int64 [R, n], -1: none of this step; rows of the pools for them [R * n], or -1)."""
    node = torch.arange(rows.parents.shape[1], device=rows.slots.device)
    known = torch.cat((rows.num_known[:, None] - 1, node.expand_as(rows.parents)), 1)
    copies = rows.copies.where(node < rows.num_known[:, None], -1)
    slots = rows.slots.where(rows.num_known > 0, -1)
    return known, torch.cat((slots[:, None], copies), 1).flatten()


def _write(pool: Tensor, targets: Tensor, states: Tensor) -> None:
    """Write `states` [n, *shape] to the rows `targets` int64 [n] of a pool, where these are not -1."""
    places = torch.arange(len(targets), device=pool.device)
    sources = torch.full((len(pool) + 1,), -1, dtype=torch.int64, device=pool.device)
    sources = sources.scatter(0, targets.where(targets >= 0, len(pool)), places)[:-1]
    new = states.index_select(0, sources.clamp(min=0)).to(pool.dtype)
    pool.copy_(torch.where((sources >= 0).view(-1, *[1] * (pool.dim() - 1)), new, pool))


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
