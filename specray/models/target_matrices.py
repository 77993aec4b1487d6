"""The matrices of a target that draft heads share."""

from pathlib import Path

import torch
from torch import Tensor

from specray.layers.linear import VocabEmbedding, VocabHead
from specray.layers.parallel import RankGroup
from specray.models.loading import Loader
from specray.models.registry import vocab_names
from specray.models.target_model import ModelShape, TargetModel


class TargetMatrices:
    """The target's embedding and output matrix, for a draft head.

    They are shared with `target`, quantized as there, if it holds them whole, in `dtype` and on `device`. Otherwise
    they are read from the target's files: a tensor-parallel rank has only a part, and a drafter process has no target.
    `quantization` is that of the head's linears, `moe_runner_backend` names the kernels of its experts.
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
    ) -> None:
        self.shape = shape
        self.quantization = quantization
        self.moe_runner_backend = moe_runner_backend
        self.dtype = dtype
        self.device = device
        self.max_positions = max_positions
        self._folder = folder
        self._load_format = load_format
        self._target = target if target is not None and _is_usable(target.embedding.weight, self) else None
        # Ranks may have a whole embedding and parts of the output matrix, whose products all of them then gather.
        self._shares_head = self._target is not None and self._target.head.group.size == 1

    def embedding(self, own: Tensor | None = None) -> VocabEmbedding:
        """The target's embedding, or the head's `own` [vocab, hidden] where that is another matrix."""
        if self._target is not None and (own is None or torch.equal(own, self._target.embedding.weight)):
            return self._target.embedding
        return VocabEmbedding(self._read(0) if own is None else own, RankGroup())

    def head(self, ids: Tensor | None, own: Tensor | None = None) -> VocabHead:
        """The target's output matrix, or the head's `own` [vocab, hidden] where that is another; of these rows `ids`.

        `ids` is int64 [n]; None: all rows.
        """
        if self._shares_head and ids is None and (own is None or torch.equal(own, self._output())):
            assert self._target is not None
            return self._target.head
        matrix = self._output() if own is None else own
        rows = matrix if ids is None else matrix.index_select(0, ids.to(matrix.device))
        return VocabHead(rows, len(rows), RankGroup(), self.quantization)

    def _output(self) -> Tensor:
        """[vocab, hidden]. The embedding serves as output matrix if the target has no other."""
        return self._target.embedding.weight if self._target is not None and self.shape.tied else self._read(1)

    def _read(self, place: int) -> Tensor:
        """The embedding (0) or the output matrix (1) [vocab, hidden]."""
        loader = Loader(self._folder, self._load_format, self.dtype, self.device)
        try:
            name = vocab_names(self._folder, loader, self.shape.tied)[place]
            return loader.tensor(name, (self.shape.vocab_size, self.shape.hidden_size))
        finally:
            loader.close()


def _is_usable(weight: Tensor, wanted: TargetMatrices) -> bool:
    """Whether a rank's embedding is whole, of the wanted type and on the wanted device."""
    return len(weight) == wanted.shape.vocab_size and weight.dtype == wanted.dtype and weight.device == wanted.device
