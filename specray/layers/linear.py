"""Linear layers split over a RankGroup: by output (column), by input (row), by vocabulary.

`specray.ops.linear` packs each weight once and chooses the kernel, so weights are not parameters of these modules.
`quantization` is a key of its QUANTIZATIONS. A rank computes the scales of its own part, so a quantized row-parallel
layer does not give exactly the same output with one rank as with several.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specray.layers.module import Layer
from specray.layers.parallel import RankGroup
from specray.ops.cpu.matrix import PackedMatrix
from specray.ops.linear import make_gated, make_linear
from specray.ops.quantised_weight import Weight


class ColumnParallelLinear(Layer):
    """This rank's part of y = x W^T + b, from its rows of W [out / ranks, in]."""

    def __init__(self, weight: Weight, bias: Tensor | None = None, quantization: str | None = None) -> None:
        super().__init__()
        self.run = make_linear(weight, bias, quantization)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class GatedLinear(Layer):
    """This rank's part of silu(x G^T) * (x U^T), from its rows of G and U [out / ranks, in]."""

    def __init__(self, gate: Weight, up: Weight, quantization: str | None = None) -> None:
        super().__init__()
        self.run = make_gated(gate, up, quantization)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class RowParallelLinear(Layer):
    """y = x W^T + b, from this rank's part of x and its columns of W [out, in / ranks]."""

    def __init__(
        self, weight: Weight, group: RankGroup, bias: Tensor | None = None, quantization: str | None = None
    ) -> None:
        super().__init__()
        bias = bias if group.leads else None  # added once in the sum over ranks
        self.run = make_linear(weight, bias, quantization)
        self.group = group
        self._run_added: Callable[[Tensor, Tensor], Tensor] | None = None
        if group.size == 1:
            self._run_added = getattr(self.run, "added", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.group.sum(self.run(x))

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of y, which the sum over ranks completes (`RMSNorm.after_add`)."""
        return self.run(x)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """y + residual, a new tensor."""
        return self(x).add_(residual) if self._run_added is None else self._run_added(x, residual)


class SplitInputLinear(RowParallelLinear):
    """y = x W^T + b, from an x that is whole on every rank, and this rank's columns `part` of W [out, in]."""

    def __init__(
        self, weight: Weight, group: RankGroup, part: slice, bias: Tensor | None = None, quantization: str | None = None
    ) -> None:
        super().__init__(weight, group, bias, quantization)
        self._part = part

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., self._part].contiguous())


class VocabEmbedding(Layer):
    """Token embeddings; `weight` is this rank's rows, [ceil(vocab / ranks), hidden], zero past the vocabulary."""

    def __init__(self, weight: Tensor, group: RankGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.group.rank * len(self.weight)
        is_local = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(is_local, 0), self.weight) * is_local[:, None]
        return self.group.sum(rows)


class VocabHead(Layer):
    """Logits over the vocabulary from this rank's rows of the output matrix (see VocabEmbedding).

    A rank's columns begin with token `first_id`. The last ranks may have fewer than the others, or none.
    """

    def __init__(
        self,
        weight: Weight,
        vocab_size: int,
        group: RankGroup,
        quantization: str | None = None,
        is_screened: bool = False,
        bias: Tensor | None = None,
    ) -> None:
        """`is_screened`: where the CPU kernels compute in the weight's own type, keep a copy that finds the largest."""
        super().__init__()
        self.run = make_linear(weight, bias, quantization)
        self.screen = self.run.screen_of(weight) if is_screened and isinstance(self.run, PackedMatrix) else None
        self.returns_float32 = isinstance(self.run, PackedMatrix)  # whatever the states are
        self.vocab_size = vocab_size
        self.group = group
        self._num_rows = weight.shape[0]
        self.first_id = group.rank * self._num_rows
        self.num_columns = max(0, min(self._num_rows, vocab_size - self.first_id))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """float32 [n, vocab_size], on all ranks"""
        return self.gathered(self.shard(hidden_states)).to(torch.float32)

    def shard(self, hidden_states: Tensor, only_largest: bool = False) -> Tensor:
        """This rank's columns [n, num_columns], of the type that they are computed in: see `returns_float32`.

        `only_largest`: see `TargetModel.with_logits`.
        """
        if only_largest and self.screen is not None and isinstance(self.run, PackedMatrix):
            return self.run.largest(hidden_states, self.screen)[:, : self.num_columns]
        if isinstance(self.run, PackedMatrix):  # its sums are float32 already
            logits = self.run(hidden_states, torch.float32)
        else:
            logits = self.run(hidden_states)
        return logits[:, : self.num_columns]

    def gathered(self, shard: Tensor) -> Tensor:
        """All columns, on all ranks, from each rank's [n, num_columns] or fewer."""
        if self.group.size == 1:
            return shard
        padded = F.pad(shard, (0, self._num_rows - shard.shape[1]))
        return self.group.gather(padded)[:, : self.vocab_size]
