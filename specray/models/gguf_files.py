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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize
from tqdm import tqdm

from specray.caches import cache_root
from specray.errors import ConfigError
from specray.models.gguf_blocks import BLOCK_TYPES, BLOCKS_FILE

_LAYOUT_VERSION = 2  # raise it when the converted folders change, so that old ones are not used


def convert_gguf(path: Path, *, progress: bool) -> Path:
    """Return the model folder converted from `path`, converting it on first use.

    The cache key is the file's content. Several processes may convert one file at once; all use the folder of the first
    to finish.
    """
    target = cache_root() / "gguf" / f"{_sha256(path)}-v{_LAYOUT_VERSION}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            _write_folder(read_gguf(path), folder, progress)
            _publish(folder, target)
    except OSError as error:
        raise ConfigError(
            f"cannot write the converted model to {target.parent}: {error}; free space there or set SPECRAY_CACHE "
            "to a folder with room for five bytes per parameter"
        ) from error
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _config(file: GgufFile) -> dict[str, Any]:
    architecture = file.get("general.architecture", str)
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{file.path} has the architecture {architecture!r}; supported are {', '.join(_ARCHITECTURES)}"
        )
    if "token_embd.weight" not in file.tensors:
        raise _unusable(file.path, "it has no tensor token_embd.weight")
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


def _shape_config(file: GgufFile, architecture: str) -> dict[str, Any]:
    hidden_size = file.need(f"{architecture}.embedding_length", int)
    num_heads = file.need(f"{architecture}.attention.head_count", int)
    head_dim = file.need(f"{architecture}.attention.key_length", int, hidden_size // num_heads)
    if file.get(f"{architecture}.rope.dimension_count", int, head_dim) != head_dim:
        raise _unusable(file.path, f"it rotates only part of each head (head_dim {head_dim}), which is not supported")
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
    kind = file.get(f"{prefix}.type", str, "none")
    if "rope_freqs.weight" in file.tensors:
        return {"rope_theta": theta, **_llama3_scaling(file, theta, head_dim)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    parameters = {"rope_theta": theta, "rope_type": kind, "factor": file.need(f"{prefix}.factor", float)}
    if kind == "linear":
        return parameters
    if kind == "yarn":
        original = file.need(f"{prefix}.original_context_length", int)
        return {**parameters, "original_max_position_embeddings": original}
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


def _generation_config(file: GgufFile) -> dict[str, Any]:
    ends = (_token_id(file, name) for name in ("eos", "eot", "eom"))
    return {
        "bos_token_id": _token_id(file, "bos"),
        "eos_token_id": sorted({token for token in ends if token is not None}),
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
    dtype: str  # as safetensors names it
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

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
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
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

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


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {key: _token_id(file, name) for key, name in ids.items()}
    template = file.get("tokenizer.chat_template", str)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", bool, False),
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
