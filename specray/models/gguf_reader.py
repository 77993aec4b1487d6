"""Reads GGUF files: metadata and memory-mapped tensors, of a model in one file or in several.

Nothing here knows what the metadata mean.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, ReaderTensor, dequantize

from specray.errors import ConfigError, first_of

_MAX_VALUES = 1_048_576  # of the header, outside of arrays
_MAX_LENGTH = 1_048_576  # of an array; the merges of the largest vocabularies are half as many
_PART_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def gguf_parts(path: Path) -> list[Path]:
    """All files of the model that `path` belongs to, by llama.cpp's names. ConfigError if one is missing."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    names = (f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1))
    paths = [path.with_name(name) for name in names]
    missing = [part.name for part in paths if not part.is_file()]
    if missing or not paths:
        raise ConfigError(
            f"{path} is one of {len(paths)} files of a model, but {path.parent} has no {first_of(missing)}; "
            "fetch the missing files, or rename this one if it is a whole model"
        )
    return paths


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of a model. Tensor data is memory-mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The metadata value under `key`, checked to be of `kind`."""
        value = self.metadata.get(key, default)
        if value is not None and type(value) is not kind:
            raise unusable(self.path, f"{key} is of type {type(value).__name__} instead of {kind.__name__}")
        return value

    def entries(self, key: str, kind: type) -> list[Any]:
        """The array under `key`, checked to have entries of `kind`; empty if there is none."""
        entries: list[Any] = self.get(key, list, [])
        if others := {type(entry).__name__ for entry in entries} - {kind.__name__}:
            raise unusable(self.path, f"{key} has entries of type {min(others)} instead of {kind.__name__}")
        return entries

    def need(self, key: str, kind: type, default: Any = None) -> Any:
        """As `get`, but the value must exist, and must be positive if it is an integer."""
        value = self.get(key, kind, default)
        if value is None:
            raise unusable(self.path, f"it has no {key}")
        if kind is int and value < 1:
            raise unusable(self.path, f"{key}={value}, where a model needs a number above zero")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name` in numpy's order; GGUF stores it reversed."""
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def floats(self, name: str, data: npt.NDArray[Any] | None = None) -> npt.NDArray[np.float32]:
        """Tensor `name` as float32, or `data`, some of its rows."""
        kind = self.tensors[name].tensor_type
        try:
            return dequantize(self.tensors[name].data if data is None else data, kind)
        except NotImplementedError as error:
            raise unusable(self.path, f"{name} is stored as {kind.name}, which cannot be dequantized") from error


def read_gguf(path: Path) -> GgufFile:
    """Read the header. ConfigError if it is damaged or claims more than the file holds."""
    try:
        reader = _BoundedReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, OverflowError, TypeError, RecursionError) as error:
        raise unusable(path, f"it is damaged or ends too early ({error})") from error
    if reader.byte_order != "I":
        raise unusable(path, "it is big-endian")
    for tensor in reader.tensors:
        if tensor.shape.size == 0 or tensor.n_elements < 1:
            raise unusable(path, f"its tensor {tensor.name} is empty")
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def read_parts(paths: Sequence[Path]) -> GgufFile:
    """A model's files as one: the first has its settings. ConfigError if they do not belong together."""
    files = [read_gguf(path) for path in paths]
    first, tensors = files[0], dict(chain.from_iterable(file.tensors.items() for file in files))
    count, num_tensors = first.metadata.get("split.count", 0), first.metadata.get("split.tensors.count")
    if count > 1 and count != len(paths):
        raise unusable(
            first.path,
            f"it is one of {count} files of a model; give all of them names as NAME-00001-of-{count:05}.gguf",
        )
    numbers = [file.metadata.get("split.no", index) for index, file in enumerate(files)]
    if numbers != [*range(len(files))] or (num_tensors is not None and len(tensors) != num_tensors):
        raise unusable(first.path, f"its {len(files)} files are not the parts of one model, in their order")
    return GgufFile(first.path, first.metadata, tensors)


def unusable(path: Path, reason: str) -> ConfigError:
    """The error for a file that cannot be used for `reason`."""
    return ConfigError(f"{path} is not a usable GGUF file: {reason}; fetch the file again or use another model")


class _BoundedReader(GGUFReader):
    """GGUFReader that refuses to read past the end of the file, and reads arrays at once.

    The library's own `_get` returns an empty array there, so that a damaged length of 2**62 is counted to the end. Its
    loop over an array takes microseconds for each value, and a damaged length is one of weights.
    """

    _num_values = 0

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: str | None = None,  # noqa: ARG002
    ) -> npt.NDArray[Any]:
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES} values")
        return np.frombuffer(self.data, dtype, int(count), int(offset))  # ValueError past the end

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, length = GGUFValueType(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
        start, types = orig_offs + 12, [GGUFValueType.ARRAY, kind]
        if length > _MAX_LENGTH:
            raise ValueError(f"an array of {length} values")
        if kind is GGUFValueType.STRING:
            end, strings = self._strings(start, length)
            return end - orig_offs, strings, [*range(length)], types
        if (scalar := self.gguf_scalar_to_np.get(kind)) is None:
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(start, scalar, length)
        return start + values.nbytes - orig_offs, [values], [0], types

    def _strings(self, start: int, count: int) -> tuple[int, list[Any]]:
        """(the end of `count` strings that lie behind each other, their bytes)."""
        data, strings, end = self.data.data, [], start
        for _ in range(count):
            first = end + 8
            end = first + int.from_bytes(data[end:first], "little")
            if end > len(data):
                raise ValueError("a string past the end of the file")
            strings.append(data[first:end])
        return end, strings
