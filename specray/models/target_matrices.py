"""The matrices of a target that draft heads share."""

from pathlib import Path

import torch
from torch import Tensor

from specray.layers.linear import VocabEmbedding, VocabHead
from specray.layers.parallel import RankGroup
from specray.models.loading import Loader, padded_share, vocab_share
from specray.models.registry import vocab_names
from specray.models.target_model import ModelShape, TargetModel


class TargetMatrices:
    """The target's embedding and output matrix, for a draft head.

    They are shared with `target`, quantized as there, if it holds them in `dtype`, on `device` and split over the ranks
    of `group`, which are those of the head. Otherwise they are read from the target's files: a drafter process has no
    target. `quantization` is that of the head's linears, `moe_runner_backend` names the kernels of its experts.
    """

    def __init__(
        self,
        shape: ModelShape,
        max_positions: int,
        folder: Path,
        load_format: str,
        dtype: torch.dtype,
        device: torch.device,
        target: TargetModel | None,
        quantization: str | None = None,
        moe_runner_backend: str = "auto",
        group: RankGroup | None = None,
    ) -> None:
        """`group` None: the head is on one rank."""
        self.shape = shape
        self.quantization = quantization
        self.moe_runner_backend = moe_runner_backend
        self.dtype = dtype
        self.device = device
        self.max_positions = max_positions
        self.group = group or RankGroup()
        self._folder = folder
        self._load_format = load_format
        self._target = target if target is not None and _is_usable(target.embedding, self) else None
        # Ranks may have a whole embedding and parts of the output matrix.
        self._shares_head = self._target is not None and self._target.head.group.size == self.group.size

    def embedding(self, own: Tensor | None = None) -> VocabEmbedding:
        """The target's embedding, or the head's `own` [vocab, hidden] where that is another matrix."""
        if self._target is not None:
            shared = self._target.embedding
            if own is None or torch.equal(vocab_share(own, shared.group), shared.weight):
                return shared
        return VocabEmbedding(vocab_share(self._read(0) if own is None else own, self.group), self.group)

    def head(self, ids: Tensor | None, own: Tensor | None = None) -> VocabHead:
        """The target's output matrix, or the head's `own` [vocab, hidden] where that is another; of these rows `ids`.

        `ids` is int64 [n]; None: all rows.
        """
        if self._shares_head and ids is None and (own is None or torch.equal(own, self._output())):
            assert self._target is not None
            return self._target.head
        matrix = self._output() if own is None else own
        if ids is not None:
            part = ids[self.group.even_share(len(ids))]
            rows = padded_share(matrix.index_select(0, part.to(matrix.device)), len(ids), self.group)
        else:
            rows = vocab_share(matrix, self.group)
        return VocabHead(rows, len(matrix) if ids is None else len(ids), self.group, self.quantization)

    def _output(self) -> Tensor:
        """[vocab, hidden]. The embedding serves as output matrix if the target has no other."""
        if self._target is not None and self.shape.tied and self._target.embedding.group.size == 1:
            return self._target.embedding.weight
        return self._read(1)

    def _read(self, place: int) -> Tensor:
        """The embedding (0) or the output matrix (1) [vocab, hidden], whole."""
        loader = Loader(self._folder, self._load_format, self.dtype, self.device)
        try:
            name = vocab_names(self._folder, loader, self.shape.tied)[place]
            return loader.tensor(name, (self.shape.vocab_size, self.shape.hidden_size))
        finally:
            loader.close()


def _is_usable(embedding: VocabEmbedding, wanted: TargetMatrices) -> bool:
    """Whether the head's ranks can share an embedding: one that each has whole, or that they split."""
    weight, size = embedding.weight, embedding.group.size
    is_theirs = size in (1, wanted.group.size) and len(weight) == -(-wanted.shape.vocab_size // size)
    return is_theirs and weight.dtype == wanted.dtype and weight.device == wanted.device
