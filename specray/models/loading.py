"""Loads a rank's part of a checkpoint's tensors: checks shapes, slices, converts type and device."""

from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.weights import WeightReader
from specray.ops.grouped_weight import GroupedWeight
from specray.ops.quantised_weight import QuantisedWeight, Weight

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Loader:
    """Takes tensors from a WeightReader for one rank of `group`.

    `quantization` is that of the model's linears, `moe_runner_backend` names the kernels of its experts.
    `screens_output`: steps of the model may need only the largest logits (see VocabHead).
    """

    def __init__(
        self,
        folder: Path,
        load_format: str,
        dtype: torch.dtype,
        device: torch.device,
        progress: bool = False,
        quantization: str | None = None,
        group: RankGroup | None = None,
        moe_runner_backend: str = "auto",
        screens_output: bool = False,
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        self.moe_runner_backend = moe_runner_backend
        self.screens_output = screens_output
        self.group = group or RankGroup()
        self._reader = WeightReader(folder, load_format)
        self.expanded: list[str] = []  # quantised matrices that were read as tensors
        self._read: set[str] = set()
        self._bar = tqdm(
            total=len(self._reader.names()), desc="loading weights", unit="tensor", disable=not progress or None
        )

    def __contains__(self, name: str) -> bool:
        return name in self._reader.names()

    def tensor(self, name: str, shape: tuple[int, ...], part: slice = slice(None), dim: int = 0) -> Tensor:
        """`part` along `dim` of tensor `name`. ConfigError if the tensor is missing or does not have `shape`.

        A rank expands its own part of a quantised matrix, on its own device.
        """
        if (matrix := self._reader.matrix(name)) is not None:
            self._note(name, matrix.shape, shape)
            self.expanded.append(name)
            rows, columns = (part, slice(None)) if dim == 0 else (slice(None), part)
            return self._finite(name, matrix.part(rows, columns, self.device, self.dtype))
        tensor = self.stored(name, shape)
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise ConfigError(
                f"{self._reader.path(name)}: tensor {name} is stored in {tensor.dtype} without a scale; its "
                "config.json or the scale's tensor is missing: fetch the files again"
            )
        if shape:
            tensor = tensor.narrow(dim, *_span(part, shape[dim]))
        return tensor.to(self.device, self.dtype)

    def weight(self, name: str, shape: tuple[int, int], part: slice = slice(None), dim: int = 0) -> Weight:
        """A matrix for a linear layer as it is stored, unless `quantization` asks for another form; else `tensor`.

        If the model is quantised for a CPU, these are the file's own groups.
        """
        if (grouped := self._grouped(name, shape)) is not None:
            return grouped.rows(part) if dim == 0 else grouped.columns(*_span(part, shape[1]))
        return self.as_stored(name, shape, part, dim)

    def as_stored(
        self, name: str, shape: tuple[int, int], part: slice = slice(None), dim: int = 0
    ) -> Tensor | QuantisedWeight:
        """`weight` for matrices whose rows or inputs are no groups of a CPU's kernels."""
        weight = self._packed(name, shape, part, dim)
        return self.tensor(name, shape, part, dim).contiguous() if weight is None else weight

    def experts(self, name: str, shape: tuple[int, int, int]) -> list[QuantisedWeight] | None:
        """Matrices [outs, ins] of stored experts [experts, ins, outs], where they stay as they are; None elsewhere."""
        count, ins, outs = shape
        weight = self._packed(name, (count * outs, ins))
        return None if weight is None else [weight.rows(slice(i * outs, (i + 1) * outs)) for i in range(count)]

    def any_matrix(self, name: str) -> QuantisedWeight | None:
        """A matrix whose shape the caller checks, where it stays as it is stored; None elsewhere."""
        return self._packed(name, None)

    def stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor `name` with its stored type, on the CPU. ConfigError if it is missing or does not have `shape`."""
        tensor = self._reader.get(name)
        self._note(name, tuple(tensor.shape), shape)
        return tensor

    def any_shape(self, name: str) -> Tensor:
        """Tensor `name`, whose shape the caller checks."""
        tensor = self._reader.get(name)
        self._read.add(name)
        self._bar.update()
        tensor = tensor.to(self.device, self.dtype) if tensor.is_floating_point() else tensor.to(self.device)
        if self._reader.is_quantised(name):
            self.expanded.append(name)
            self._finite(name, tensor)
        return tensor

    def vocab(self, name: str, shape: tuple[int, int]) -> Tensor:
        """This rank's ceil(vocab / ranks) rows of an embedding or output matrix, zeros past its end."""
        return padded_share(self.tensor(name, shape, self.group.even_share(shape[0])), shape[0], self.group)

    def vocab_weight(self, name: str, shape: tuple[int, int]) -> Weight:
        """`vocab` as a matrix for a linear layer (see `weight`)."""
        return self.weight(name, shape) if self.group.size == 1 else self.vocab(name, shape)

    def output_name(self, tied: bool) -> str:
        """The tensor of the output matrix: lm_head.weight if it is stored, even if config.json says `tied`.

        transformers 5 and later reads a checkpoint so. ConfigError if there is none and it is not the embedding either.
        """
        if HEAD in self:
            return HEAD
        if not tied:
            raise ConfigError(
                f"{self.folder}: tie_word_embeddings=false in config.json, but the checkpoint has no tensor {HEAD}; "
                "fetch the missing weight file, or set tie_word_embeddings: true if the model shares its embedding"
            )
        return EMBEDDING

    def names(self) -> list[str]:
        return sorted(self._reader.names())

    def path(self, name: str) -> Path:
        """The file of tensor `name`, which must exist."""
        return self._reader.path(name)

    def unused(self) -> list[str]:
        """Tensors of the checkpoint that were never read."""
        return sorted(set(self._reader.names()) - self._read)

    def _grouped(self, name: str, shape: tuple[int, int]) -> GroupedWeight | None:
        if self.quantization is None or self.device.type != "cpu":
            return None
        grouped = self._reader.grouped(name)
        if grouped is None or grouped.shape != shape:
            return None  # `tensor` reports a wrong shape
        self._note(name, grouped.shape, shape)
        return grouped

    def _packed(
        self, name: str, shape: tuple[int, int] | None, part: slice = slice(None), dim: int = 0
    ) -> QuantisedWeight | None:
        """`part` of a matrix that stays as it is stored; None if it does not."""
        weight = self._reader.packed(name) if self.quantization in (None, "auto") else None
        if weight is None or weight.shape != (shape or weight.shape):
            return None  # `tensor` reports a wrong shape
        own = weight.rows(part) if dim == 0 else weight.columns(*_span(part, weight.ins))
        if own is None:
            return None
        if own.has_nan:
            raise ConfigError(f"{self._reader.path(name)}: matrix {name} has NaN; the file is damaged: fetch it again")
        self._note(name, weight.shape, weight.shape)
        return own.to(self.device, self.dtype)

    def _finite(self, name: str, expanded: Tensor) -> Tensor:
        """A quantised matrix, expanded. ConfigError for NaN and numbers that are too large for the model's type."""
        if expanded.numel() and not all(bound.isfinite() for bound in expanded.aminmax()):
            raise ConfigError(
                f"{self._reader.path(name)}: matrix {name} has NaN, or numbers that are too large for "
                f"{str(self.dtype).removeprefix('torch.')}; the file is damaged: fetch it again"
            )
        return expanded

    def _note(self, name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """Count `name` as read. ConfigError if its `stored` shape is not the expected one."""
        if stored != shape:
            raise ConfigError(
                f"{self._reader.path(name)}: tensor {name} has shape {list(stored)}, but config.json implies "
                f"{list(shape)}; the weights and the config do not belong together"
            )
        if name not in self._read:  # not yet, or a part of it
            self._read.add(name)
            self._bar.update()

    def close(self) -> None:
        self._bar.close()
        self._reader.close()


def padded_share(rows: Tensor, total: int, group: RankGroup) -> Tensor:
    """A rank's `rows` [n, width], its even share of `total`, with zeros behind them where other ranks have more."""
    missing = -(-total // group.size) - len(rows)
    return torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))) if missing else rows.contiguous()


def vocab_share(matrix: Tensor, group: RankGroup) -> Tensor:
    """`Loader.vocab` of a matrix [vocab, width] that is there already."""
    return padded_share(matrix[group.even_share(len(matrix))], len(matrix), group)


def _span(part: slice, length: int) -> tuple[int, int]:
    start, stop, _ = part.indices(length)
    return start, stop - start
