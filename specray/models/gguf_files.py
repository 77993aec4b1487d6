"""Converts a GGUF file into a Hugging Face model folder: config.json, model.safetensors and tokenizer files.

The modules gguf_config, gguf_tensors and gguf_tokenizer say what is in it; this one writes the folder and caches it.
"""

import hashlib
import json
import math
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from specray.caches import cache_root
from specray.errors import ConfigError
from specray.models.gguf_blocks import BLOCK_TYPES, BLOCKS_FILE
from specray.models.gguf_reader import GgufFile, gguf_parts, read_parts

if TYPE_CHECKING:
    from specray.models.gguf_tensors import CheckpointTensor

_LAYOUT_VERSION = 6  # raise it when the converted folders change, so that old ones are not used


def convert_gguf(path: Path, *, progress: bool) -> Path:
    """Return the model folder converted from `path`, converting it on first use.

    `path` may be any file of a model that llama.cpp has split into several. The cache key is the files' content.
    Several processes may convert one model at once; all use the folder of the first to finish.
    """
    paths = gguf_parts(path)
    target = cache_root() / "gguf" / f"{_sha256(paths)}-v{_LAYOUT_VERSION}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            _write_folder(read_parts(paths), folder, progress)
            _publish(folder, target)
    except OSError as error:
        raise ConfigError(
            f"cannot write the converted model to {target.parent}: {error}; free space there or set SPECRAY_CACHE "
            "to a folder with room for five bytes per parameter"
        ) from error
    return target


def _sha256(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _publish(folder: Path, target: Path) -> None:
    try:
        folder.replace(target)
    except OSError:
        if not target.is_dir():  # no other process has published it either
            raise


def _write_folder(file: GgufFile, folder: Path, progress: bool) -> None:
    # Their imports take seconds, which only a conversion needs.
    from specray.models.gguf_config import model_config
    from specray.models.gguf_tensors import checkpoint_tensors
    from specray.models.gguf_tokenizer import generation_config, token_id, write_tokenizer

    ids = {f"{name}_token_id": token_id(file, name) for name in ("bos", "eos")}
    config = {**model_config(file), **ids}
    _write_json(folder / "config.json", config)
    _check_served(file, folder)
    tensors = checkpoint_tensors(file, config)
    _write_json(folder / "generation_config.json", generation_config(file))
    write_tokenizer(file, folder)
    _write_weights(file, tensors, folder / "model.safetensors", progress)
    _write_blocks(file, tensors, folder / BLOCKS_FILE)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_served(file: GgufFile, folder: Path) -> None:
    """ConfigError, before minutes of converting, if the model could not be loaded."""
    from specray.layers.parallel import RankGroup
    from specray.models.registry import load_config, shape_of

    try:
        shape_of(load_config(folder), RankGroup())
    except ConfigError as error:
        reason = str(error).replace(str(folder / "config.json"), str(file.path)).replace(str(folder), str(file.path))
        raise ConfigError(reason) from None


class _Entry(NamedTuple):
    """A tensor to write, in parts."""

    name: str
    dtype: str  # safetensors' name of it
    shape: tuple[int, ...]
    num_bytes: int
    parts: Callable[[], Iterator[npt.NDArray[Any]]]


def _write_weights(file: GgufFile, tensors: Mapping[str, "CheckpointTensor"], path: Path, progress: bool) -> None:
    """All tensors as float32."""
    entries = [
        _Entry(name, "F32", tensor.shape, 4 * math.prod(tensor.shape), partial(_floats, tensor))
        for name, tensor in tensors.items()
    ]
    _write_tensors(path, entries, {"format": "pt"}, f"Converting {file.path.name}" if progress else None)


def _floats(tensor: "CheckpointTensor") -> Iterator[npt.NDArray[np.float32]]:
    for part in tensor.floats():
        yield part.astype("<f4", copy=False)


def _write_blocks(file: GgufFile, tensors: Mapping[str, "CheckpointTensor"], path: Path) -> None:
    """The quantised matrices as they are stored, uint8 [outs, bytes], with their types as metadata."""
    entries, types = [], {}
    for name, tensor in tensors.items():
        kind = file.tensors[tensor.tensors[0]].tensor_type.name
        if kind in BLOCK_TYPES and (blocks := tensor.blocks()) is not None:
            types[name] = kind
            entries.append(_Entry(name, "U8", blocks.shape, math.prod(blocks.shape), partial(_rows, tensor)))
    _write_tensors(path, entries, types, None)


def _rows(tensor: "CheckpointTensor") -> Iterator[npt.NDArray[Any]]:
    blocks = tensor.blocks()
    assert blocks is not None
    yield blocks


def _write_tensors(path: Path, entries: Sequence[_Entry], metadata: dict[str, str], title: str | None) -> None:
    # safetensors.save_file would need all tensors in memory at once.
    header, end = {}, 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (start, end)}
    encoded = json.dumps({"__metadata__": metadata, **header}).encode()
    encoded += b" " * (-len(encoded) % 8)
    bar = tqdm(total=end, desc=title, unit="B", unit_scale=True, disable=title is None)
    with path.open("wb") as out, bar:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for entry in entries:
            for part in entry.parts():
                bar.update(out.write(np.ascontiguousarray(part).data.cast("B")))
