"""stories260K in Hugging Face layout: rotary pairs reordered, tokenizer rebuilt from tok512.bin."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

SOURCE = Path(__file__).parents[1] / "data" / "stories260K"
BOS, EOS = 1, 2
_SPACE = "▁"


def expected_greedy() -> tuple[list[int], list[int]]:
    """(prompt, the tokens that follow it)."""
    known = json.loads((SOURCE / "expected_greedy.json").read_text())
    return known["prompt_token_ids"], known["greedy_token_ids"]


def write_stories(folder: Path) -> Path:
    """The model in `folder`, in the layout that `LLM(model=folder)` reads."""
    data = (SOURCE / "stories260K.bin").read_bytes()
    dim, ffn, layers, heads, kv_heads, vocab, context = struct.unpack("<7i", data[:28])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(np.frombuffer(data, np.float32, offset=28), config), folder / "model.safetensors")
    stories_tokenizer().save_pretrained(folder)
    return folder


def stories_tokenizer() -> PreTrainedTokenizerFast:
    """Its SentencePiece vocabulary as a BPE: a space is part of the next piece, unknown bytes are <0x..> tokens."""
    pieces, scores = _read_vocab()
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in zip(pieces, scores, strict=True)
        for cut in range(1, len(piece))
        if not piece.startswith("<") and piece[:cut] in vocab and piece[cut:] in vocab
    ]
    ranked = [(left, right) for _, left, right in sorted(merges, key=lambda merge: -merge[0])]
    backend = Tokenizer(models.BPE(vocab, ranked, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # its __init__ is untyped
    return make(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _tensors(flat: np.ndarray, config: dict[str, int]) -> dict[str, np.ndarray]:
    """Cut the file's arrays, each stacked over layers, in its order."""
    dim, ffn, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kv_dim = dim // heads * kv_heads
    order = [
        ("input_layernorm", (dim,)),
        ("self_attn.q_proj", (dim, dim)),
        ("self_attn.k_proj", (kv_dim, dim)),
        ("self_attn.v_proj", (kv_dim, dim)),
        ("self_attn.o_proj", (dim, dim)),
        ("post_attention_layernorm", (dim,)),
        ("mlp.gate_proj", (ffn, dim)),
        ("mlp.down_proj", (dim, ffn)),
        ("mlp.up_proj", (ffn, dim)),
    ]
    rest = iter(np.split(flat, np.cumsum(_sizes(config["vocab_size"] * dim, order, layers, dim))))
    tensors = {"model.embed_tokens.weight": next(rest).reshape(-1, dim)}
    for name, shape in order:
        for index, tensor in enumerate(next(rest).reshape(layers, *shape)):
            tensors[f"model.layers.{index}.{name}.weight"] = tensor
    tensors["model.norm.weight"] = next(rest)
    for name in tensors:
        if "q_proj" in name or "k_proj" in name:
            tensors[name] = _half_split(tensors[name], heads if "q_proj" in name else kv_heads)
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _sizes(embedding: int, order: list[tuple[str, tuple[int, ...]]], layers: int, dim: int) -> list[int]:
    return [embedding, *(layers * int(np.prod(shape)) for _, shape in order), dim]


def _half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (x0, y0, x1, y1, …) of each head become (x0, x1, …, y0, y1, …)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def _read_vocab() -> tuple[list[str], list[float]]:
    data = (SOURCE / "tok512.bin").read_bytes()
    pieces, scores, at = [], [], 4
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        piece = data[at + 8 : at + 8 + length].decode()
        pieces.append(piece.strip("\n") if piece.startswith("\n<") else piece.replace(" ", _SPACE))
        scores.append(score)
        at += 8 + length
    return pieces, scores
