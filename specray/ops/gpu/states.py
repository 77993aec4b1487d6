"""The operations with states on a GPU. `TorchOps` says what they do."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from specray.ops.gpu.launches import starts_early
from specray.ops.gpu.state_kernels import convolve_rows, keep_windows, norm_and_gate, run_delta_rule
from specray.ops.states import AnyStateRows, PaddedStateRows, StateRows
from specray.ops.states_torch import Convolution, DeltaNet

CHANNELS = 1024  # of a convolution's program
COLUMNS = 32  # of a matrix in a program of the delta rule


class DeviceRows(NamedTuple):
    """StateRows as the kernels read them. All tensors are int64 and on the device."""

    slots: Tensor  # [R]
    num_known: Tensor  # [R]
    is_fresh: Tensor  # [R]
    firsts: Tensor  # [R]
    parents: Tensor  # [T]
    requests: Tensor  # [T]
    copies: Tensor  # [T]
    window_starts: Tensor  # [R + 1]: see `keep_windows`
    window_rows: Tensor
    window_targets: Tensor
    step_starts: Tensor  # [R + 1]: see `run_delta_rule`
    step_rows: Tensor
    step_restarts: Tensor

    @classmethod
    def of(cls, rows: StateRows, device: torch.device) -> "DeviceRows":
        """One copy to the device."""
        slots, lens, num_known, is_fresh, parents, copies = (
            part.numpy() for part in (rows.slots, rows.lens, rows.num_known, rows.is_fresh, rows.parents, rows.copies)
        )
        firsts = lens.cumsum() - lens
        windows, steps = [], []  # by request
        for first, length, known, slot in zip(firsts, lens, num_known, slots, strict=True):
            copied = [(row, copies[row]) for row in range(first, first + known) if copies[row] >= 0]
            windows.append(copied + [(first + known - 1, slot)] * bool(known))
            path_of: dict[int, list[int]] = {}  # of each draft
            for row in range(first + known, first + length):
                path_of[row] = [*path_of.get(parents[row], []), row]
            of_drafts = [(row, int(row == path[0])) for path in path_of.values() for row in path]
            steps.append([(row, 0) for row in range(first, first + known)] + of_drafts)
        listed: list[np.ndarray] = []
        for parts in (windows, steps):
            pairs = np.array([pair for part in parts for pair in part], dtype=np.int64).reshape(-1, 2)
            listed += [np.cumsum([0, *map(len, parts)]), *pairs.T]
        requests = np.repeat(np.arange(len(lens)), lens)
        arrays = [slots, num_known, is_fresh, firsts, parents, requests, copies, *listed]
        # Each begins at a multiple of 16 bytes: Triton compiles a kernel for every pattern of those that do not.
        padded = [np.pad(part, (0, len(part) % 2)) for part in arrays]
        joined = torch.from_numpy(np.concatenate(padded).astype(np.int64)).to(device, non_blocking=True)
        starts = np.cumsum([0, *map(len, padded)])
        return cls(*(joined[start : start + len(part)] for start, part in zip(starts, arrays, strict=False)))

    @classmethod
    def of_padded(cls, rows: PaddedStateRows) -> "DeviceRows":
        """Without a read by the host."""
        count, width = rows.parents.shape
        request, node = (torch.arange(size, device=rows.slots.device) for size in (count, width))
        parents, number = rows.parents, request[:, None] * width + node
        here = number if rows.places is None else rows.places[0]
        firsts = here[:, 0].contiguous()
        is_known = node < rows.num_known[:, None]
        copies = rows.copies.where(is_known, -1)
        last = firsts + (rows.num_known - 1).clamp(min=0)
        windows = _listed(
            torch.cat((copies >= 0, rows.num_known[:, None] > 0), 1),
            torch.cat((here, last[:, None]), 1),
            torch.cat((copies, rows.slots[:, None]), 1),
        )
        if rows.sees is None:
            steps = _listed(is_known, here, torch.zeros_like(here))
        else:  # row 0, then of each draft the rows behind it on its path
            is_step = rows.sees & ((node > 0) | (node[:, None] == 0))
            if rows.places is not None:  # where there is no row, a place is that of another one
                places = rows.places[1].index_select(0, here.flatten())
                is_step = is_step & (places.view_as(number) == number)[:, :, None]
            restarts = ((parents <= 0) & (node > 0)).long()
            shape = is_step.shape
            steps = _listed(
                is_step.flatten(1),
                here[:, None].expand(shape).flatten(1),
                restarts[:, None].expand(shape).flatten(1),
            )
        return cls(
            rows.slots,
            rows.num_known,
            rows.is_fresh.long(),
            firsts,
            rows.flat(torch.where(parents >= 0, parents + firsts[:, None], -1).flatten()),
            rows.flat(request.repeat_interleave(width)),
            rows.flat(copies.flatten()),
            *windows,
            *steps,
        )


def _listed(is_listed: Tensor, *values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(where the listed values of each request start, int64 [R + 1], the values of all), from tensors [R, n]."""
    ends = is_listed.flatten().cumsum(0)
    places = torch.where(is_listed.flatten(), ends - 1, len(ends))  # the others go behind all
    first, second = (
        torch.zeros(len(ends) + 1, dtype=torch.int64, device=ends.device).scatter_(0, places, part.flatten())
        for part in values
    )
    return F.pad(ends[is_listed.shape[1] - 1 :: is_listed.shape[1]], (1, 0)), first, second


# The layers of a pass have the same rows.
@lru_cache(maxsize=2)
def _on_device(rows: AnyStateRows, device: torch.device) -> DeviceRows:
    return DeviceRows.of(rows, device) if isinstance(rows, StateRows) else DeviceRows.of_padded(rows)


def convolve(conv: Convolution, x: Tensor, pool: Tensor, rows: AnyStateRows) -> Tensor:
    """See TorchOps.convolve."""
    x, (width, size) = x.contiguous(), conv.weights.shape
    out, place, early = torch.empty_like(x), _on_device(rows, x.device), starts_early(x.device)
    blocks, of_request = triton.cdiv(size, CHANNELS), (place.slots, place.is_fresh)
    weights = (conv.weights, conv.weights if conv.bias is None else conv.bias)
    kinds = {"HAS_BIAS": conv.bias is not None, "HAS_SILU": conv.has_silu}
    sizes = {"WIDTH": width, "BLOCK": CHANNELS}
    if rows.total:
        convolve_rows[(rows.total, blocks)](
            x, out, pool, *weights, place.requests, *of_request, place.parents, size, **sizes, **kinds, **early
        )
        windows = place.window_starts, place.window_rows, place.window_targets
        keep_windows[(len(place.slots), blocks)](x, pool, *windows, place.firsts, *of_request, size, **sizes, **early)
    return out


def gated_delta(
    net: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, pool: Tensor, rows: AnyStateRows
) -> Tensor:
    """See TorchOps.gated_delta."""
    qkv, a, b, z = (part.contiguous() for part in (qkv, a, b, z))
    out, place, early = torch.empty_like(z), _on_device(rows, z.device), starts_early(z.device)
    heads, seen = net.num_v_heads, torch.empty(z.shape, device=z.device)
    if not rows.total:
        return out
    run_delta_rule[(len(place.slots), heads, triton.cdiv(net.v_dim, COLUMNS))](
        *(qkv, a, b, seen, pool, net.rates, net.dt_bias),
        *(place.step_starts, place.step_rows, place.step_restarts, place.copies),
        *(place.num_known, place.slots, place.is_fresh),
        net.beta_scale,
        HEADS=heads,
        K_HEADS=net.num_k_heads,
        K_DIM=net.k_dim,
        V_DIM=net.v_dim,
        K_PADDED=triton.next_power_of_2(net.k_dim),
        BLOCK=COLUMNS,
        **early,
    )
    padded = triton.next_power_of_2(net.v_dim)
    norm_and_gate[(rows.total * heads,)](
        seen, z, out, net.norm, net.eps, SIZE=net.v_dim, PADDED=padded, num_warps=1, **early
    )
    return out
