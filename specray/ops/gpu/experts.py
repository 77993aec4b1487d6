"""Routed experts on a GPU, without a read by the host: grouped products with Triton."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specray.ops.gpu.layers import silu_and_mul
from specray.ops.gpu.matrix import launch_of
from specray.ops.gpu.matrix_kernels import multiply_pairs
from specray.ops.grouped_weight import GroupedWeight
from specray.ops.linear import concat
from specray.ops.quantised_weight import Weight

ROWS = 16  # of a block
COLUMNS = 64


class Pairs(NamedTuple):
    """Pairs of a row and an expert. Pair p is of row p // `share`."""

    blocks: tuple[Tensor, Tensor]  # see `expert_blocks`
    num_pairs: int
    share: int

    @property
    def of_own_rows(self) -> "Pairs":
        """Those pairs, each with a row of its own."""
        return self._replace(share=1)


class ExpertMatrices:
    """x [rows, in] -> [pairs, out]: each pair's row times its expert's matrix [out, in]."""

    def __init__(self, weights: Sequence[Weight], biases: Tensor | None = None) -> None:
        """`biases` are [experts, out]. All weights are expanded if one of them is."""
        matrix = concat(*weights)
        assert not isinstance(matrix, GroupedWeight), "which runs on CPUs"
        self.matrix = matrix  # the outputs of all experts, one below the other
        self.num_experts = len(weights)
        self._biases = None if biases is None else biases.contiguous()

    def pairs(self, chosen: Tensor) -> Pairs:
        """Of each row with its experts `chosen`, int64 [rows, k]."""
        return Pairs(expert_blocks(chosen.flatten(), self.num_experts), chosen.numel(), chosen.shape[1])

    def __call__(self, x: Tensor, pairs: Pairs, dtype: torch.dtype) -> Tensor:
        """The result has type `dtype`."""
        outs, ins = self.matrix.shape[0] // self.num_experts, self.matrix.shape[1]
        out = torch.empty(pairs.num_pairs, outs, dtype=dtype, device=x.device)
        if pairs.num_pairs:
            launch = launch_of(self.matrix, self._biases, x.dtype)
            multiply_pairs[(len(pairs.blocks[0]), triton.cdiv(outs, COLUMNS))](
                out,
                x.contiguous(),
                *launch.parts,
                *pairs.blocks,
                pairs.num_pairs,
                outs,
                ins,
                *launch.groups,
                **launch.constants,
                SHARE=pairs.share,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
            )
        return out


class GroupedExperts:
    """`specray.layers.moe.Experts` from each expert's gate and up [ffn, hidden] and down [hidden, ffn]."""

    def __init__(self, experts: Sequence[tuple[Weight, Weight, Weight]]) -> None:
        self._gate_up = ExpertMatrices([concat(gate, up) for gate, up, _ in experts])
        self._down = ExpertMatrices([down for _, _, down in experts])

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See Experts. A token's experts are added in the order of the router's preference."""
        pairs = self._gate_up.pairs(chosen)
        parts = self._down(silu_and_mul(self._gate_up(x, pairs, x.dtype)), pairs.of_own_rows, torch.float32)
        return (parts.view(*chosen.shape, x.shape[1]) * weights[:, :, None]).sum(1)


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
