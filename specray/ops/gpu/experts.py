"""Routed experts on a GPU, without a read by the host: grouped products with Triton."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from specray.ops.gpu.layers import silu_and_mul
from specray.ops.gpu.matrix_kernels import grouped_products
from specray.ops.gpu.quantised import constants_of, parts_of
from specray.ops.gpu.quantised_kernels import grouped_quantised
from specray.ops.grouped_weight import GroupedWeight
from specray.ops.linear import concat
from specray.ops.quantised_weight import QuantisedWeight, Weight

ROWS = 16  # of a block
COLUMNS, INPUTS = 64, 64


Expert = tuple[Tensor | QuantisedWeight, Tensor | QuantisedWeight, Tensor | QuantisedWeight]


class GroupedExperts:
    """`specray.layers.moe.Experts` from each expert's gate and up [ffn, hidden] and down [hidden, ffn]."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        self._gate_up = _stacked([concat(gate, up) for gate, up, _ in experts])  # [experts, 2 * ffn, hidden]
        self._down = _stacked([down for _, _, down in experts])  # [experts, hidden, ffn]
        self._num_experts = len(experts)

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See Experts. A token's experts are added in the order of the router's preference."""
        num_pairs, num_chosen = chosen.numel(), chosen.shape[1]
        blocks = expert_blocks(chosen.flatten(), self._num_experts)
        gate_up = self._products(x.contiguous(), self._gate_up, blocks, num_pairs, num_chosen, x.dtype)
        parts = self._products(silu_and_mul(gate_up), self._down, blocks, num_pairs, 1, torch.float32)
        return (parts.view(*chosen.shape, x.shape[1]) * weights[:, :, None]).sum(1)

    def _products(
        self,
        x: Tensor,
        matrices: Tensor | QuantisedWeight,
        blocks: tuple[Tensor, Tensor],
        num_pairs: int,
        share: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """[pairs, outs] of each pair's row of x, number pair // share, with its expert's matrix."""
        experts, pairs = blocks
        outs, ins = matrices.shape[0] // self._num_experts, matrices.shape[1]
        out = torch.empty(num_pairs, outs, dtype=dtype, device=x.device)
        if not num_pairs:
            return out
        grid, sizes = (len(experts), triton.cdiv(outs, COLUMNS)), (num_pairs, outs, ins)
        tile = {"SHARE": share, "ROWS": ROWS, "COLUMNS": COLUMNS}
        if isinstance(matrices, Tensor):
            grouped_products[grid](out, x, matrices, experts, pairs, *sizes, **tile, INPUTS=INPUTS)
        else:
            groups = matrices.group, matrices.scales.shape[1]
            constants = tile | constants_of(matrices, x.dtype)
            grouped_quantised[grid](out, x, *parts_of(matrices), experts, pairs, *sizes, *groups, **constants)
        return out


def _stacked(weights: Sequence[Weight]) -> Tensor | QuantisedWeight:
    """The outputs of all experts, one below the other. All are expanded if one of them is."""
    matrix = concat(*weights)
    assert not isinstance(matrix, GroupedWeight), "which runs on CPUs"
    return matrix


def expert_blocks(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(expert of each block, int32 [n], -1 past the last one; its pairs, int32 [n, ROWS]) from `chosen` int64 [pairs].

    The pairs of an expert are in ascending order. Their number n of blocks is an upper bound that the host knows.
    """
    num_pairs, device = len(chosen), chosen.device
    num_blocks = num_pairs // ROWS + min(num_experts, num_pairs)
    order = chosen.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(0, chosen, torch.ones_like(chosen))
    sizes = (counts + ROWS - 1) // ROWS
    ends = sizes.cumsum(0)
    block = torch.arange(num_blocks, device=device)
    expert = torch.searchsorted(ends, block, right=True)
    is_block, known = expert < num_experts, expert.clamp(max=num_experts - 1)
    offset = (block - (ends - sizes)[known])[:, None] * ROWS + torch.arange(ROWS, device=device)
    is_pair = is_block[:, None] & (offset < counts[known][:, None])
    place = ((counts.cumsum(0) - counts)[known][:, None] + offset).clamp(max=max(num_pairs - 1, 0))
    pairs = torch.where(is_pair, order[place], num_pairs)
    return torch.where(is_block, known, -1).to(torch.int32), pairs.to(torch.int32)
