"""A GGUF file of one layer with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, FFN = 64, 4, 2, 96
TOKENS = ["<|end|>", "<|start|>", *"abcdefg1", "ab", "Ġ", "Ċ", "ĊĊ", "11"]
MERGES = ["a b", "Ċ Ċ", "1 1"]


def tensors(seed: int = 0, *, untied: bool = False, qk_norm: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    if untied:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    if qk_norm:
        shapes |= {"blk.0.attn_q_norm.weight": (head_dim,), "blk.0.attn_k_norm.weight": (head_dim,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    arch: str = "llama",
    weights: dict[str, np.ndarray] | None = None,
    extra: Callable[[gguf.GGUFWriter], object] = lambda _: None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    add_tokenizer(writer)
    extra(writer)
    for name, tensor in (tensors() if weights is None else weights).items():
        as_kind = kind if tensor.ndim == 2 and tensor.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor, as_kind), raw_dtype=as_kind)
    finish(writer)
    return path


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int = len(TOKENS)) -> None:
    tokens = [*TOKENS, *(f"[PAD{index}]" for index in range(len(TOKENS), vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2) + [5] * (vocab_size - len(TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
