"""Linear layers divided over a RankGroup: by output (column), by input (row), by vocabulary.

`quantization` is that of `specray.ops.linear`. A rank scales what it holds: of a row-parallel layer its own inputs,
so quantised outputs of several ranks are near those of one, not equal to them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.layers.parallel import RankGroup
from specray.ops.linear import make_linear


class ColumnParallelLinear:
    """y = x W^T + b with this rank's rows of W, [out / ranks, in]; each rank holds its part of y."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, quantization: str | None = None) -> None:
        self._run = make_linear(weight, bias, quantization)

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x)


class RowParallelLinear:
    """y = x W^T + b with this rank's columns of W, [out, in / ranks]; x is this rank's part, y is whole."""

    def __init__(
        self, weight: Tensor, group: RankGroup, bias: Tensor | None = None, quantization: str | None = None
    ) -> None:
        bias = bias if group.leads else None  # the sum over ranks has it once
        self._run = make_linear(weight, bias, quantization)
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.sum(self._run(x))


class VocabEmbedding:
    """Token embeddings; `weight` is this rank's rows, [ceil(vocab / ranks), hidden], zero past the vocabulary."""

    def __init__(self, weight: Tensor, group: RankGroup) -> None:
        self.weight = weight
        self._group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._group.rank * len(self.weight)
        is_mine = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(is_mine, 0), self.weight) * is_mine[:, None]
        return self._group.sum(rows)


class VocabHead:
    """Logits over the whole vocabulary from this rank's rows of the output matrix (see VocabEmbedding)."""

    def __init__(self, weight: Tensor, vocab_size: int, group: RankGroup, quantization: str | None = None) -> None:
        self._run = make_linear(weight, quantization=quantization)
        self._vocab_size = vocab_size
        self._group = group

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """float32 [n, vocab_size]"""
        logits = self._group.gather(self._run(hidden_states))
        return logits[:, : self._vocab_size].to(torch.float32)
