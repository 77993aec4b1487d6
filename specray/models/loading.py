"""From a checkpoint's tensors to a rank's: shapes checked, this rank's part taken, type and device set.

Not here: the files' formats (`weights`), or which tensors a model has (`llama`).
"""

from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from specray.errors import ConfigError
from specray.models.weights import WeightReader


class Loader:
    """Takes tensors out of a WeightReader for one rank; `quantization` is what the model's linears are to have."""

    def __init__(
        self,
        folder: Path,
        load_format: str,
        dtype: torch.dtype,
        device: torch.device,
        progress: bool = False,
        quantization: str | None = None,
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        self._reader = WeightReader(folder, load_format)
        self._read: set[str] = set()
        self._bar = tqdm(total=len(self._reader.names()), desc="loading weights", unit="tensor", disable=not progress)

    def __contains__(self, name: str) -> bool:
        return name in self._reader.names()

    def tensor(self, name: str, shape: tuple[int, ...], part: slice = slice(None), dim: int = 0) -> Tensor:
        """`part` along `dim` of tensor `name`, which must have `shape`. ConfigError if it is missing or misshapen."""
        tensor = self.stored(name, shape)
        return tensor.narrow(dim, *_span(part, shape[dim])).to(self.device, self.dtype)

    def stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor `name` as the file has it: neither cast nor moved. ConfigError if it is missing or misshapen."""
        tensor = self._reader.get(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{self._reader.path(name)}: tensor {name} has shape {list(tensor.shape)}, but config.json implies "
                f"{list(shape)}; the weights and the config do not belong together"
            )
        self._read.add(name)
        self._bar.update()
        return tensor

    def vocab(self, name: str, shape: tuple[int, int], rank: int, num_ranks: int) -> Tensor:
        """This rank's ceil(vocab / ranks) rows of an embedding or output matrix, zeros past its end."""
        size = -(-shape[0] // num_ranks)
        start = min(rank * size, shape[0])
        rows = self.tensor(name, shape, slice(start, min(start + size, shape[0])))
        missing = size - len(rows)
        return torch.cat((rows, rows.new_zeros(missing, shape[1]))) if missing else rows.contiguous()

    def names(self) -> list[str]:
        return sorted(self._reader.names())

    def path(self, name: str) -> Path:
        """The file that holds tensor `name`, which must be there."""
        return self._reader.path(name)

    def unread(self) -> list[str]:
        """Tensors of the checkpoint that nothing has asked for."""
        return sorted(set(self._reader.names()) - self._read)

    def close(self) -> None:
        self._bar.close()
        self._reader.close()


def _span(part: slice, length: int) -> tuple[int, int]:
    start, stop, _ = part.indices(length)
    return start, stop - start
