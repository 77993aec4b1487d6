"""Linear layers divided over a RankGroup: by output (column), by input (row), by vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.layers.parallel import RankGroup


class ColumnLinear:
    """y = x W^T + b with this rank's rows of W, [out / ranks, in]; each rank holds its part of y."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._by_input = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return torch.addmm(self.bias, x, self._by_input)
        return x.mm(self._by_input)  # F.linear is the same kernel, 3 us later


class RowLinear:
    """y = x W^T + b with this rank's columns of W, [out, in / ranks]; x is this rank's part, y is whole."""

    def __init__(self, weight: Tensor, group: RankGroup, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.group = group
        self._by_input = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        y = self.group.sum(x.mm(self._by_input))
        return y if self.bias is None else y + self.bias


class VocabEmbedding:
    """Token embeddings; `weight` is this rank's rows, [ceil(vocab / ranks), hidden], zero past the vocabulary."""

    def __init__(self, weight: Tensor, group: RankGroup) -> None:
        self.weight = weight
        self.group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.group.rank * len(self.weight)
        mine = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(mine, 0), self.weight) * mine[:, None]
        return self.group.sum(rows)


class VocabHead:
    """Logits over the whole vocabulary from this rank's rows of the output matrix (see VocabEmbedding)."""

    def __init__(self, weight: Tensor, vocab_size: int, group: RankGroup) -> None:
        self.weight = weight
        self.vocab_size = vocab_size
        self.group = group

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """float32 [n, vocab_size]"""
        logits = self.group.gather(F.linear(hidden_states, self.weight))
        return logits[:, : self.vocab_size].to(torch.float32)
