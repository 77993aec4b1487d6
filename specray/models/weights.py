"""Reads tensors by name from a model folder with one or many safetensors or .bin files.

`gguf_files` converts GGUF files to safetensors first. A matrix of a quantised checkpoint has one name, that of the
weight, whatever the names of its parts are.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specray.errors import ConfigError, first_of
from specray.models.gguf_blocks import BLOCKS_FILE, grouped_weight
from specray.models.quantized_formats import KV_SCALES, Names, checkpoint_format
from specray.models.quantized_matrices import StoredMatrix
from specray.ops.grouped_weight import GroupedWeight
from specray.ops.quantised_weight import QuantisedWeight

_SCALED = 128  # weights of an output that usually share a scale


class WeightReader:
    """Tensors of a checkpoint folder, read on demand. Each file is memory-mapped and opened once.

    A tensor keeps its mapping alive and may outlive the reader.
    """

    def __init__(self, folder: Path, load_format: str = "auto") -> None:
        self._folder = folder
        self._shards: dict[str, _Shard] = {}
        self._file_of = _files_by_tensor(folder, load_format, self._shards)
        blocks = folder / BLOCKS_FILE
        self._blocks = _Blocks(blocks) if blocks.is_file() else None
        self._format = checkpoint_format(folder)
        self._names = Names.of(self._format, self._file_of.keys())

    def names(self) -> Collection[str]:
        return self._names.plain | self._names.parts.keys()

    def is_quantised(self, name: str) -> bool:
        return name in self._names.parts

    def matrix(self, name: str) -> StoredMatrix | None:
        """Matrix `name` as it is stored, if the checkpoint has it quantised."""
        parts = self._names.parts.get(name)
        return None if self._format is None or parts is None else self._format.matrix(name, parts, self._stored)

    def packed(self, name: str) -> QuantisedWeight | None:
        """Matrix `name` as a quantised checkpoint stores it; None if it does not, or in a way that no kernel reads."""
        matrix = self.matrix(name)
        return None if matrix is None else matrix.packed()

    def grouped(self, name: str) -> GroupedWeight | None:
        """Matrix `name` in the groups of a GGUF file or a quantised checkpoint; None if it is not stored so."""
        if (weight := self.packed(name)) is not None:
            return weight.grouped()
        return None if self._blocks is None else self._blocks.get(name)

    def get(self, name: str) -> Tensor:
        """Tensor `name` with its stored type; a quantised matrix in float32."""
        matrix = self.matrix(name)
        if matrix is None:
            return self._stored(name)
        return matrix.part(slice(None), slice(None), torch.device("cpu"), torch.float32)

    def kv_scales(self) -> list[str]:
        """The stored scales of a KV cache in float8 that are not 1."""
        names = [name for name in self._file_of if name.endswith(KV_SCALES)]
        return [name for name in names if bool((self._stored(name).float() != 1).any())]

    def num_bytes(self, itemsize: int, expands: Callable[[str], bool]) -> int:
        """Bytes of all tensors with numbers of `itemsize` bytes. Reads headers, and the order of desc_act's inputs.

        Quantised matrices take those of their files, and scales for each output, unless the model `expands` them by
        their names or no kernel has their groups.
        """
        weights, kept = sum(self._stored(name).numel() for name in self._names.plain), 0
        for name, parts in self._names.parts.items():
            matrix = self.matrix(name)
            assert matrix is not None
            if matrix.group is None or expands(name):
                weights += math.prod(matrix.shape)
            else:
                stored = [self._stored(part) for part in parts]
                kept += sum(part.numel() * part.itemsize for part in stored) + 4 * math.prod(matrix.shape) // _SCALED
        return weights * itemsize + kept

    def _stored(self, name: str) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(
                f"the checkpoint in {self._folder} has no tensor {name!r} in {_listed(self._file_of)}; "
                "the files are incomplete or config.json describes another model"
            )
        return _open(self._folder / file, self._shards).get(name)

    def path(self, name: str) -> Path:
        """The file of tensor `name`, which must exist."""
        return self._folder / self._file_of[self._names.parts.get(name, [name])[0]]

    def close(self) -> None:
        self._shards.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# What torch's reader of pickles raises for damaged ones, beside its own error.
_MALFORMED_PICKLE = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
)


def read_torch_file(path: Path, remedy: str) -> object:
    """Content of a torch.save file: tensors, numbers and containers of them. `remedy` ends the ConfigError."""
    try:
        # The file is a pickle. weights_only refuses to run code from it.
        loaded: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, *_MALFORMED_PICKLE) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{path} cannot be read as plain tensors ({reason}); only zip-format files with nothing but tensors "
            f"are accepted: {remedy}"
        ) from error
    return loaded


class _Shard(Protocol):
    """One open file of tensors."""

    def names(self) -> Collection[str]: ...

    def get(self, name: str) -> Tensor: ...


class _SafetensorsShard:
    def __init__(self, path: Path) -> None:
        self._path = path
        opener: Any = safe_open  # untyped in its package
        try:
            self._file = opener(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} is not a readable safetensors file ({error}); delete it and fetch it again"
            ) from error
        self._names: frozenset[str] = frozenset(self._file.keys())

    def names(self) -> Collection[str]:
        return self._names

    def metadata(self) -> dict[str, str]:
        return self._file.metadata() or {}

    def get(self, name: str) -> Tensor:
        if name not in self._names:
            raise _not_in_shard(name, self._path)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


class _Blocks:
    """Quantised blocks beside a converted model."""

    def __init__(self, path: Path) -> None:
        self._shard = _SafetensorsShard(path)
        self._types = self._shard.metadata()

    def get(self, name: str) -> GroupedWeight | None:
        return grouped_weight(self._types[name], self._shard.get(name)) if name in self._types else None


class _BinShard:
    def __init__(self, path: Path) -> None:
        self._path = path
        loaded = read_torch_file(path, "save the model again as safetensors")
        entries = loaded.items() if isinstance(loaded, dict) else ()
        self._tensors = {name: value for name, value in entries if isinstance(value, Tensor)}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def get(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise _not_in_shard(name, self._path)
        return self._tensors[name]


_LAYOUTS = {  # load_format: (index, usual single file, pattern of a single file)
    "safetensors": ("model.safetensors.index.json", "model.safetensors", "*.safetensors"),
    "bin": ("pytorch_model.bin.index.json", "pytorch_model.bin", "*.bin"),
}


def _files_by_tensor(folder: Path, load_format: str, shards: dict[str, _Shard]) -> dict[str, str]:
    formats = {"auto": ("safetensors", "bin"), "gguf": ("safetensors",)}.get(load_format, (load_format,))
    for name in formats:
        index, usual, pattern = _LAYOUTS[name]
        if (folder / index).is_file() and (file_of := _indexed(folder / index, folder / usual)) is not None:
            return file_of
        if files := _files_without_index(folder, usual, pattern):
            return _tensors_of(folder, files, shards)
    wanted = " or ".join(f"{_LAYOUTS[name][1]} (or {_LAYOUTS[name][0]})" for name in formats)
    raise ConfigError(
        f"no weights in {folder} for load_format={load_format}: expected {wanted}; "
        "fetch the weight files or choose the load_format of those that are there"
    )


_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.\w+")


def _files_without_index(folder: Path, usual: str, pattern: str) -> list[str]:
    """The usual file, the only one, or all shards by their names; empty if there is none.

    ConfigError if it cannot be known which files are the model's.
    """
    if (folder / usual).is_file():
        return [usual]
    files = sorted(path.name for path in folder.glob(pattern))
    shards = [match for name in files if (match := _SHARD_NAME.fullmatch(name))]
    if not shards:
        if len(files) > 1:
            raise ConfigError(
                f"{folder} has {len(files)} files of weights ({first_of(files)}) "
                f"and no index of their tensors; name the model's file {usual}, or fetch its index"
            )
        return files
    models = {(match["stem"], match["count"]) for match in shards}
    numbers = [int(match["number"]) for match in shards]
    if len(models) > 1 or numbers != [*range(1, int(shards[0]["count"]) + 1)]:
        raise ConfigError(
            f"{folder} has the shards {first_of([match[0] for match in shards])} "
            f"({len(shards)} of {shards[0]['count']}), which are not one whole model; fetch the missing weight files"
        )
    return [match[0] for match in shards]


def _tensors_of(folder: Path, files: Sequence[str], shards: dict[str, _Shard]) -> dict[str, str]:
    file_of: dict[str, str] = {}
    for file in files:
        for name in _open(folder / file, shards).names():
            if name in file_of:
                raise ConfigError(
                    f"{folder}: the tensor {name} is in {file_of[name]} and in {file}; delete one of them"
                )
            file_of[name] = file
    return file_of


def _indexed(index: Path, usual: Path) -> dict[str, str] | None:
    """The index; None if it is a leftover beside the file `usual`, which transformers reads before any index."""
    if not usual.is_file():
        return _read_index(index)
    try:
        file_of = _read_index(index)
    except ConfigError:
        return None
    return file_of if usual.name in file_of.values() else None


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        weight_map: dict[str, str] = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} is not a readable index of tensors and files: {error!r}; fetch it again") from error
    # The index is untrusted: its file names must not point outside the folder.
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if Path(file).name != file or not _is_file(path.parent / file)]:
        raise ConfigError(
            f"{path} names {len(files)} files of weights, of which {len(missing)} are not in {path.parent}: "
            f"{first_of(missing)}; fetch the missing weight files"
        )
    return weight_map


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _open(path: Path, shards: dict[str, _Shard]) -> _Shard:
    shard = shards.get(path.name)
    if shard is None:
        shard = _SafetensorsShard(path) if path.suffix == ".safetensors" else _BinShard(path)
        shards[path.name] = shard
    return shard


def _not_in_shard(name: str, path: Path) -> ConfigError:
    return ConfigError(f"the index puts the tensor {name!r} into {path}, but it is not there; fetch that file again")


def _listed(file_of: dict[str, str]) -> str:
    files = sorted(set(file_of.values()))
    return ", ".join(files) if len(files) <= 4 else f"{files[0]} … {files[-1]} ({len(files)} files)"
