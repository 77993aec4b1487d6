"""Converts a GGUF file into a Hugging Face model folder: config.json, model.safetensors and tokenizer files.

`gguf` parses and dequantizes the file. This module maps llama.cpp's names and layouts to those of transformers and
caches the converted folder.
"""

import hashlib
import json
import math
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize
from tqdm import tqdm

from specray.caches import cache_root
from specray.errors import ConfigError, first_of
from specray.models.gguf_blocks import BLOCK_TYPES, BLOCKS_FILE

_LAYOUT_VERSION = 3  # raise it when the converted folders change, so that old ones are not used


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


def _write_folder(file: "GgufFile", folder: Path, progress: bool) -> None:
    config = _config(file)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(file))
    _write_tokenizer(file, folder)
    _write_weights(file, config, folder / "model.safetensors", progress)
    _write_blocks(file, config, folder / BLOCKS_FILE)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- reading -------------------------------------------------------------------------------------------------------

_MAX_VALUES = 16_777_216  # values of the header; the largest vocabularies need a tenth


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of a file. Tensor data is memory-mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The metadata value under `key`, checked to be of `kind`."""
        value = self.metadata.get(key, default)
        if value is not None and type(value) is not kind:
            raise _unusable(self.path, f"{key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def need(self, key: str, kind: type, default: Any = None) -> Any:
        """As `get`, but the value must exist, and must be positive if it is an integer."""
        value = self.get(key, kind, default)
        if value is None or (kind is int and value < 1):
            raise _unusable(self.path, f"{key}={value}, where a model needs a {kind.__name__} above zero")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name` in numpy's order; GGUF stores it reversed."""
        return tuple(reversed(self.tensors[name].shape.tolist()))


def read_gguf(path: Path) -> GgufFile:
    """Read the header. ConfigError if it is damaged or claims more than the file holds."""
    try:
        reader = _BoundedReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, OverflowError, TypeError, RecursionError) as error:
        raise _unusable(path, f"its header cannot be read ({error})") from error
    if reader.byte_order != "I":
        raise _unusable(path, "it is big-endian")
    for tensor in reader.tensors:
        if tensor.shape.size == 0 or tensor.n_elements < 1:
            raise _unusable(path, f"its tensor {tensor.name} is empty")
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def read_parts(paths: Sequence[Path]) -> GgufFile:
    """A model's files as one: the first has its settings. ConfigError if they do not belong together."""
    files = [read_gguf(path) for path in paths]
    first, tensors = files[0], dict(chain.from_iterable(file.tensors.items() for file in files))
    count, num_tensors = first.metadata.get("split.count", 0), first.metadata.get("split.tensors.count")
    if count > 1 and count != len(paths):
        raise _unusable(
            first.path,
            f"it is one of {count} files of a model; give all of them names as NAME-00001-of-{count:05}.gguf",
        )
    numbers = [file.metadata.get("split.no", index) for index, file in enumerate(files)]
    if numbers != [*range(len(files))] or (num_tensors is not None and len(tensors) != num_tensors):
        raise _unusable(first.path, f"its {len(files)} files are not the parts of one model, in their order")
    return GgufFile(first.path, first.metadata, tensors)


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is not a usable GGUF file: {reason}; fetch the file again or use another model")


class _BoundedReader(GGUFReader):
    """GGUFReader that refuses to read past the end of the file.

    The library's own `_get` returns an empty array there, so that a damaged length of 2**62 is counted to the end.
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


# ---- config --------------------------------------------------------------------------------------------------------

_ARCHITECTURES = {  # general.architecture: (model_type, class); llama.cpp stores Mistral and SmolLM as llama
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_INTERLEAVED_ROPE = ("llama", "mistral")  # llama.cpp reorders the rows of q and k for these


# Keys that change the arithmetic and are not computed, and the values that change nothing; as in `config_keys`.
_NEUTRAL: dict[str, float | bool] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "use_parallel_residual": False,
}


def _config(file: GgufFile) -> dict[str, Any]:
    architecture = file.get("general.architecture", str)
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{file.path} has the architecture {architecture!r}; supported are {', '.join(_ARCHITECTURES)}"
        )
    _check_complete(file, file.need(f"{architecture}.block_count", int))
    model_type, class_name = _ARCHITECTURES[architecture]
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": file.shape("token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,  # llama.cpp stores it only when it differs
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        **_shape_config(file, architecture),
        **{f"{name}_token_id": _token_id(file, name) for name in ("bos", "eos")},
    }


_LAYER_PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def _check_complete(file: GgufFile, num_layers: int) -> None:
    """ConfigError if a tensor that every model has is missing. Converting takes minutes, so this comes first."""
    if num_layers > len(file.tensors):
        raise _unusable(file.path, f"it has {len(file.tensors)} tensors, too few for {num_layers} layers")
    layers = (f"blk.{layer}.{part}.weight" for layer in range(num_layers) for part in _LAYER_PARTS)
    missing = [name for name in ("token_embd.weight", "output_norm.weight", *layers) if name not in file.tensors]
    if missing:
        raise _unusable(
            file.path, f"it has no tensor {missing[0]} ({len(missing)} are missing); a part of a model cannot be used"
        )


def _shape_config(file: GgufFile, architecture: str) -> dict[str, Any]:
    hidden_size = file.need(f"{architecture}.embedding_length", int)
    num_heads = file.need(f"{architecture}.attention.head_count", int)
    head_dim = file.need(f"{architecture}.attention.key_length", int, hidden_size // num_heads)
    if file.get(f"{architecture}.rope.dimension_count", int, head_dim) != head_dim:
        raise _unusable(file.path, f"it rotates only part of each head (head_dim {head_dim}), which is not supported")
    neutral = _NEUTRAL | {"attention.value_length": head_dim, "attention.scale": head_dim**-0.5}
    for name, value in neutral.items():
        stored = file.metadata.get(f"{architecture}.{name}", value)
        is_unset = stored == 0 and not isinstance(stored, bool)
        is_neutral = stored == value or (isinstance(stored, float) and math.isclose(stored, value, rel_tol=1e-5))
        if not (is_unset or is_neutral):
            raise _unusable(file.path, f"{architecture}.{name}={stored!r} is not supported (only {value!r} is)")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": file.need(f"{architecture}.feed_forward_length", int),
        "num_hidden_layers": file.need(f"{architecture}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.need(f"{architecture}.attention.head_count_kv", int, num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.need(f"{architecture}.context_length", int),
        "rms_norm_eps": file.need(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope_parameters(file, architecture, head_dim),
    }


def _rope_parameters(file: GgufFile, architecture: str, head_dim: int) -> dict[str, Any]:
    theta = file.need(f"{architecture}.rope.freq_base", float, 10_000.0)
    prefix = f"{architecture}.rope.scaling"
    if "rope_freqs.weight" in file.tensors:
        return {"rope_theta": theta, **_llama3_scaling(file, theta, head_dim)}
    factor = file.get(f"{prefix}.factor", float) or file.get(f"{architecture}.rope.scale_linear", float) or 1.0
    kind = file.get(f"{prefix}.type", str, "none" if factor == 1.0 else "linear")
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    parameters = {"rope_theta": theta, "rope_type": kind, "factor": factor}
    if kind == "linear":
        return parameters
    if kind == "yarn":
        context = file.need(f"{architecture}.context_length", int)
        # llama.cpp multiplies the attention factor that follows from the scaling, transformers replaces it.
        scale = file.get(f"{prefix}.attn_factor", float, 1.0) * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        return {
            **parameters,
            "original_max_position_embeddings": file.need(f"{prefix}.original_context_length", int, context),
            "beta_fast": file.need(f"{prefix}.yarn_beta_fast", float, 32.0),
            "beta_slow": file.need(f"{prefix}.yarn_beta_slow", float, 1.0),
            "attention_factor": scale,
        }
    raise _unusable(file.path, f"{prefix}.type={kind!r} is not supported (none, linear, yarn)")


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's RoPE parameters, recovered from the frequency divisors that llama.cpp stores instead."""
    stored = _dequantize(file, "rope_freqs.weight", file.tensors["rope_freqs.weight"].data)
    low, high, original = 1.0, 4.0, 8192
    factor = float(stored.max())
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise _unusable(file.path, "its rope_freqs.weight is not Llama 3.1's scaling, the only one supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# Texts of tokens that end a turn of a chat. llama.cpp finds them by text where the file does not name their ids.
_END_OF_TURN = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<EOT>", "_<EOT>", "<|EOT|>"}
_END_OF_TURN |= {"<end_of_utterance>", "<|eom_id|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|END_OF_TURN_TOKEN|>"}


def _generation_config(file: GgufFile) -> dict[str, Any]:
    ends = [_token_id(file, name) for name in ("eos", "eot", "eom")]
    kinds = file.get("tokenizer.ggml.token_type", list, [])
    by_text = [
        index
        for index, (token, kind) in enumerate(zip(_tokens(file), kinds, strict=False))
        if token in _END_OF_TURN and kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "bos_token_id": _token_id(file, "bos"),
        "eos_token_id": sorted({token for token in (*ends, *by_text) if token is not None}),
    }


def _token_id(file: GgufFile, name: str) -> int | None:
    token: int | None = file.get(f"tokenizer.ggml.{name}_token_id", int)
    if token is not None and not 0 <= token < len(_tokens(file)):
        raise _unusable(file.path, f"its {name} token {token} is not in its vocabulary of {len(_tokens(file))}")
    return token


# ---- tensors -------------------------------------------------------------------------------------------------------

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,4})\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")
_CHUNK_ELEMENTS = 4_194_304  # dequantized at a time, which bounds memory


class _Entry(NamedTuple):
    """A tensor to write, in parts."""

    name: str
    dtype: str  # safetensors' name of it
    shape: tuple[int, ...]
    num_bytes: int
    parts: Callable[[], Iterator[npt.NDArray[Any]]]


def _write_weights(file: GgufFile, config: dict[str, Any], path: Path, progress: bool) -> None:
    """All tensors as float32."""
    entries = []
    for name in file.tensors:
        if name != "rope_freqs.weight":
            shape = file.shape(name)
            entries.append(
                _Entry(_hf_name(file, name), "F32", shape, 4 * math.prod(shape), partial(_floats, file, config, name))
            )
    _write_tensors(path, entries, {"format": "pt"}, f"Converting {file.path.name}" if progress else None)


def _write_blocks(file: GgufFile, config: dict[str, Any], path: Path) -> None:
    """The quantised matrices as they are stored, uint8 [outs, bytes], with their types as metadata."""
    entries, types = [], {}
    for name, tensor in file.tensors.items():
        if tensor.tensor_type.name in BLOCK_TYPES and len(file.shape(name)) == 2:
            types[_hf_name(file, name)] = tensor.tensor_type.name
            shape = tuple(tensor.data.shape)
            entries.append(
                _Entry(_hf_name(file, name), "U8", shape, math.prod(shape), partial(_blocks, file, config, name))
            )
    _write_tensors(path, entries, types, None)


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


def _hf_name(file: GgufFile, name: str) -> str:
    match = _TENSOR_NAME.fullmatch(name)
    if match is None or match["part"] not in _NAMES:
        raise _unusable(file.path, f"the tensor {name!r} is not part of a supported architecture")
    layer = f"model.layers.{int(match['layer'])}." if match["layer"] else ""
    return f"{layer}{_NAMES[match['part']]}.{match['kind']}"


def _floats(file: GgufFile, config: dict[str, Any], name: str) -> Iterator[npt.NDArray[np.float32]]:
    heads = _permuted_heads(file, config, name)
    if heads is not None:
        yield _unpermuted(_dequantize(file, name, file.tensors[name].data), heads).astype("<f4")
        return
    for chunk in _chunks(file, name):
        yield chunk.astype("<f4", copy=False)


def _blocks(file: GgufFile, config: dict[str, Any], name: str) -> Iterator[npt.NDArray[np.uint8]]:
    heads, data = _permuted_heads(file, config, name), file.tensors[name].data
    yield data if heads is None else _unpermuted(data, heads)


def _chunks(file: GgufFile, name: str) -> Iterator[npt.NDArray[np.float32]]:
    data = file.tensors[name].data
    data = data.reshape(-1, data.shape[-1])
    rows = max(1, _CHUNK_ELEMENTS // file.shape(name)[-1])
    for first in range(0, len(data), rows):
        yield _dequantize(file, name, data[first : first + rows])


def _dequantize(file: GgufFile, name: str, data: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Rows of tensor `name` as float32."""
    kind = file.tensors[name].tensor_type
    try:
        return dequantize(data, kind)
    except NotImplementedError as error:
        raise _unusable(file.path, f"{name} is stored as {kind.name}, which cannot be dequantized") from error


def _permuted_heads(file: GgufFile, config: dict[str, Any], name: str) -> int | None:
    """Number of heads whose rows llama.cpp reordered in this tensor; None if it did not reorder them."""
    if file.metadata["general.architecture"] not in _INTERLEAVED_ROPE:
        return None
    part = name.split(".")[-2]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part)
    rows = file.shape(name)[0]
    if heads is not None and rows != heads * config["head_dim"]:
        raise _unusable(file.path, f"{name} has {rows} rows, not {heads} heads of {config['head_dim']}")
    return heads


def _unpermuted(tensor: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorder each head's rows from interleaved pairs (x0 y0 x1 y1 …) to halves (x0 x1 … y0 y1 …)."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


# ---- tokenizer -----------------------------------------------------------------------------------------------------

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _CL100K % "{1,3}", _CL100K % ""
# tokenizer.ggml.pre: regexes that split text, applied in order before the merges.
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2,)),
}


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    model = file.get("tokenizer.ggml.model", str)
    if model == "gpt2":
        _write_byte_level(file, folder)
    elif model == "llama":
        _write_sentencepiece(file, folder)
    else:
        raise _unusable(file.path, f"its tokenizer is {model!r}; supported are gpt2 (byte-level BPE) and llama")


def _tokens(file: GgufFile) -> list[str]:
    tokens: list[str] = file.need("tokenizer.ggml.tokens", list)
    return tokens


def _write_byte_level(file: GgufFile, folder: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pre = file.get("tokenizer.ggml.pre", str, "default")
    if pre not in _PRE_TOKENIZERS:
        raise _unusable(file.path, f"tokenizer.ggml.pre={pre!r} is unknown; known are {', '.join(_PRE_TOKENIZERS)}")
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in _PRE_TOKENIZERS[pre]]
    tokenizer = Tokenizer(_bpe(file, models.BPE, ignore_merges=_PRE_TOKENIZERS[pre] == (_LLAMA3,)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if file.metadata["general.architecture"].startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in _of_type(file, _CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in _of_type(file, _USER_DEFINED)])
    if (bos := _added_bos(file)) is not None:
        ids = [(bos, _token_id(file, "bos"))]
        tokenizer.post_processor = processors.TemplateProcessing([bos, "$A"], [bos, "$A", "$B"], ids)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(file))


def _bpe(file: GgufFile, bpe: Callable[..., Any], *, ignore_merges: bool) -> Any:
    vocabulary = {token: index for index, token in enumerate(_tokens(file))}
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges", list)]
    try:
        return bpe(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # tokenizers raises bare Exception for a bad merge
        raise _unusable(file.path, f"its merges do not fit its vocabulary ({error})") from error


def _of_type(file: GgufFile, kind: int) -> list[str]:
    kinds = file.get("tokenizer.ggml.token_type", list, [])
    return [token for token, token_kind in zip(_tokens(file), kinds, strict=False) if token_kind == kind]


def _added_bos(file: GgufFile) -> str | None:
    """The token that begins every text, if the file says so; if it says nothing, Llama 3's tokenizers have one."""
    is_llama3 = _PRE_TOKENIZERS.get(file.get("tokenizer.ggml.pre", str, "default")) == (_LLAMA3,)
    token = _token_id(file, "bos")
    return (
        _tokens(file)[token]
        if file.get("tokenizer.ggml.add_bos_token", bool, is_llama3) and token is not None
        else None
    )


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {key: _token_id(file, name) for key, name in ids.items()}
    template, bos = file.get("tokenizer.chat_template", str), _added_bos(file)
    if template and bos is not None and bos not in template and "bos_token" not in template:
        template = "{{- bos_token }}" + template  # as llama.cpp: a chat begins with it, too
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bos is not None,
        "add_eos_token": file.get("tokenizer.ggml.add_eos_token", bool, False),
        **{key: _tokens(file)[token] for key, token in special.items() if token is not None},
        **({"chat_template": template} if template is not None else {}),
    }


def _write_sentencepiece(file: GgufFile, folder: Path) -> None:
    # transformers derives the merges from the scores. Imported here because the import takes seconds.
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        shutil.copyfile(folder / "config.json", Path(scratch) / "config.json")
        (Path(scratch) / "model.gguf").symlink_to(file.path.resolve())
        tokenizer = AutoTokenizer.from_pretrained(
            scratch, gguf_file="model.gguf", local_files_only=True, trust_remote_code=False
        )
    tokenizer.save_pretrained(folder)
