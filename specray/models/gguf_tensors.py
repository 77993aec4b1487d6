"""A GGUF file's tensors as those of a checkpoint of transformers.

Which tensors there are, and their shapes, is what transformers itself would save for the file's configuration; the
`gguf` package knows what llama.cpp calls each. This module undoes what llama.cpp's converter changes in them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH_NAMES, TensorNameMap

from specray.errors import first_of
from specray.models.gguf_architectures import Architecture, architecture_of
from specray.models.gguf_config import num_layers
from specray.models.gguf_reader import GgufFile, unusable
from specray.models.gguf_rope import FREQUENCIES, LONG, SHORT

Floats = npt.NDArray[np.float32]
_CHUNK_ELEMENTS = 4_194_304  # dequantized at a time, which bounds memory
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_NOT_WEIGHTS = {FREQUENCIES, LONG, SHORT}


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint's tensor that is one tensor of the file, or one expert's part of it."""

    file: GgufFile
    shape: tuple[int, ...]
    tensor: str
    expert: int | None = None
    num_heads: int | None = None
    """Heads whose rows the converter reordered."""
    offset: float = 0.0
    """What the converter added."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The file's tensors that it is made of."""
        return (self.tensor,)

    def floats(self) -> Iterator[Floats]:
        """Its numbers, in parts."""
        data = self._data()
        if self.num_heads is not None:
            yield _unpermuted(self.file.floats(self.tensor, data), self.num_heads)
            return
        data = data.reshape(-1, data.shape[-1])
        rows = max(1, _CHUNK_ELEMENTS // self.file.shape(self.tensor)[-1])
        for first in range(0, len(data), rows):
            part = self.file.floats(self.tensor, data[first : first + rows])
            yield part - self.offset if self.offset else part

    def blocks(self) -> npt.NDArray[np.uint8] | None:
        """Its rows as they are stored; None if it is no matrix."""
        if len(self.shape) != 2 or self.offset:
            return None
        data = self._data()
        return data if self.num_heads is None else _unpermuted(data, self.num_heads)

    def _data(self) -> npt.NDArray[Any]:
        data: npt.NDArray[Any] = self.file.tensors[self.tensor].data
        return data if self.expert is None else data[self.expert]


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor that llama.cpp stores as several, or transposed: joined expert by expert, or head by head."""

    file: GgufFile
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    join: Callable[..., Floats]

    def floats(self) -> Iterator[Floats]:
        """Its numbers, in parts."""
        data = [self.file.tensors[name].data for name in self.tensors]
        for parts in [data] if self.join is _whole else zip(*data, strict=True):
            yield self.join(*(self.file.floats(name, part) for name, part in zip(self.tensors, parts, strict=True)))

    def blocks(self) -> None:
        """None: its blocks are not rows of one matrix."""


CheckpointTensor = Stored | Joined


def _interleaved(gate: Floats, up: Floats) -> Floats:
    """[hidden, 2 * ffn] of [ffn, hidden] each, or [2 * ffn] of [ffn]: gate and up in turn."""
    return np.stack((gate, up), 1).reshape(-1, *gate.shape[1:]).T


def _transposed(*parts: Floats) -> Floats:
    return np.concatenate(parts).T


def _latent(keys: Floats, values: Floats) -> Floats:
    """A head's rows [nope + v, rank] of keys [rank, nope] and values [v, rank]."""
    return np.concatenate((keys.T, values))


def _stacked(gate: Floats, up: Floats) -> Floats:
    return np.concatenate((gate, up))


def _whole(gate: Floats, up: Floats) -> Floats:
    """As `_stacked`, of tensors that are not of several experts."""
    return np.concatenate((gate, up))


# Ends of names in a checkpoint: the tensors of the layer, and how they are joined.
_JOINED: Mapping[str, tuple[tuple[str, ...], Callable[..., Floats]]] = {
    ".self_attn.kv_b_proj.weight": (("attn_k_b.weight", "attn_v_b.weight"), _latent),
    ".mlp.experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), _interleaved),
    ".mlp.experts.gate_up_proj_bias": (("ffn_gate_exps.bias", "ffn_up_exps.bias"), _interleaved),
    ".mlp.experts.down_proj": (("ffn_down_exps.weight",), _transposed),
    ".feed_forward.experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), _transposed),
    ".feed_forward.experts.down_proj": (("ffn_down_exps.weight",), _transposed),
    ".block_sparse_moe.input_linear.weight": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), _stacked),
    ".shared_mlp.input_linear.weight": (("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), _whole),
}


def checkpoint_tensors(file: GgufFile, config: Mapping[str, Any]) -> dict[str, CheckpointTensor]:
    """All tensors of the checkpoint by name; `config` is the content of config.json.

    ConfigError if the file lacks one of them, has one of another shape, or has one that the model does not.
    """
    name, architecture = architecture_of(file)
    arch = next(arch for arch, known in MODEL_ARCH_NAMES.items() if known == _GGUF_NAMES.get(name, name))
    names = TensorNameMap(arch, num_layers(file))
    found: dict[str, CheckpointTensor] = {}
    missing: list[str] = []
    for wanted, shape in _published(config).items():
        places = _places(names, wanted)
        place = next((place for place in places if place in file.tensors), None)
        if (joined := _joined(file, wanted, shape)) is not None:
            found[wanted] = joined
        elif place is not None:
            found[wanted] = _stored(file, architecture, config, place, wanted, shape)
        else:
            missing.append(places[0])
    _check_complete(file, found, missing)
    return found


_GGUF_NAMES = {"mistral": "llama"}  # names of architectures that the package gguf does not know


def _published(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint, as transformers saves it."""
    import torch
    from transformers import CONFIG_MAPPING
    from transformers.core_model_loading import revert_weight_conversion

    from specray.models.transformers_skeleton import build_skeleton

    skeleton = build_skeleton(CONFIG_MAPPING[config["model_type"]](**config), torch.float32)
    tied = skeleton.all_tied_weights_keys if config["tie_word_embeddings"] else {}
    own = {name: tensor for name, tensor in skeleton.state_dict().items() if name not in tied}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(skeleton, own).items()}


def _places(names: TensorNameMap, wanted: str) -> list[str]:
    """What llama.cpp may call the tensor that a checkpoint calls `wanted`, or one that it is a part of."""
    stem = _EXPERT.sub(".experts.", wanted)
    for end, suffixes in (
        (".weight", (".weight",)),
        (".bias", (".bias", "")),
        ("_bias", (".bias", "")),
        ("", (".weight", "")),
    ):
        name = names.get_name(stem.removesuffix(end)) if stem.endswith(end) else None
        if name is not None:
            return [name + suffix for suffix in suffixes]
    return [wanted]


def _joined(file: GgufFile, wanted: str, shape: tuple[int, ...]) -> Joined | None:
    """The tensor, if it is joined and the file has the first of its parts."""
    end = next((end for end in _JOINED if wanted.endswith(end)), None)
    match = re.search(r"\.(\d+)\.", wanted)
    if end is None or match is None:
        return None
    parts, join = _JOINED[end]
    tensors = tuple(f"blk.{match[1]}.{part}" for part in parts)
    if any(tensor not in file.tensors for tensor in tensors):
        return None
    joined = Joined(file, shape, tensors, join)
    size = sum(int(np.prod(file.shape(tensor))) for tensor in tensors)
    if size != int(np.prod(shape)):
        raise unusable(file.path, f"{' and '.join(tensors)} have {size} numbers, where its settings imply {shape}")
    return joined


def _stored(
    file: GgufFile,
    architecture: Architecture,
    config: Mapping[str, Any],
    tensor: str,
    wanted: str,
    shape: tuple[int, ...],
) -> Stored:
    stored, match = file.shape(tensor), _EXPERT.search(wanted)
    expert = int(match[1]) if match is not None else None
    if expert is not None and (len(stored) != len(shape) + 1 or expert >= stored[0]):
        raise unusable(file.path, f"{tensor} has the shape {stored}, which are not experts of {shape}")
    own = stored if expert is None else stored[1:]
    if [size for size in own if size > 1] != [size for size in shape if size > 1]:
        raise unusable(file.path, f"{tensor} has the shape {own}, where its settings imply {shape}")
    heads = None
    if architecture.has_interleaved_rope:
        part = tensor.split(".")[-2]
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part)
    is_norm = wanted.endswith("norm.weight") or (wanted.endswith("layernorm.weight"))
    return Stored(file, shape, tensor, expert, heads, architecture.norm_offset if is_norm else 0.0)


def _check_complete(file: GgufFile, found: Mapping[str, CheckpointTensor], missing: Sequence[str]) -> None:
    if missing:
        raise unusable(
            file.path, f"it has no tensor {missing[0]} ({len(missing)} are missing); a part of a model cannot be used"
        )
    read = {tensor for entry in found.values() for tensor in entry.tensors}
    last = num_layers(file)
    unread = [tensor for tensor in file.tensors if tensor not in read | _NOT_WEIGHTS and not _is_after(tensor, last)]
    if unread:
        raise unusable(file.path, f"{len(unread)} of its tensors are not part of its architecture: {first_of(unread)}")


def _is_after(tensor: str, num_layers: int) -> bool:
    """Whether a tensor is of an MTP layer, which follow those of the decoder and are not served."""
    match = re.match(r"blk\.(\d+)\.", tensor)
    return match is not None and int(match[1]) >= num_layers


def _unpermuted(tensor: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorder each head's rows from interleaved pairs (x0 y0 x1 y1 …) to halves (x0 x1 … y0 y1 …)."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
