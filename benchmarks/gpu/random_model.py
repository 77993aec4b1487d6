"""A Llama and an EAGLE-3 head of random weights: as fast as trained ones, without a download."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specray.layers.parallel import RankGroup
from specray.models.llama import Llama
from specray.models.loading import Loader
from specray.models.registry import load_config

SPREAD = 0.02  # of the weights


class ModelSize(NamedTuple):
    """Sizes of a target, and of the vocabulary of its head."""

    name: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    context: int


LLAMA_8B = ModelSize("Llama 8B", 32, 4096, 14336, 32, 8, 128, 128256, 32000, 8192)
TINY = ModelSize("tiny", 2, 32, 48, 4, 2, 8, 64, 40, 256)


class RandomLoader(Loader):
    """Loads random tensors, which are made on the device."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self.quantization, self.group, self.screens_output = None, RankGroup(), False

    def __contains__(self, name: str) -> bool:
        return True

    def tensor(self, name: str, shape: tuple[int, ...], part: slice = slice(None), dim: int = 0) -> Tensor:  # noqa: ARG002
        """All of it: there is one rank."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=SPREAD)

    def as_stored(self, name: str, shape: tuple[int, int], part: slice = slice(None), dim: int = 0) -> Tensor:
        return self.tensor(name, shape, part, dim)


def make_target(folder: Path, size: ModelSize, dtype: torch.dtype, device: torch.device) -> Llama:
    """The target, without files of weights; `folder` gets what `write_description` writes."""
    write_description(folder, size)
    return Llama(load_config(folder), RandomLoader(folder, dtype, device), size.context)


def write_target(folder: Path, size: ModelSize, dtype: torch.dtype, device: torch.device) -> None:
    """A checkpoint of the target, a file for each layer."""
    folder.mkdir(parents=True)
    write_description(folder, size)
    matrices = {"model.embed_tokens.weight": (size.vocab, size.hidden), "lm_head.weight": (size.vocab, size.hidden)}
    norms, files = ["model.norm.weight"], dict[str, str]()
    for number in range(size.num_layers + 1):  # one after the other, because all are larger than many machines' memory
        tensors = {name: _random(shape, dtype, device) for name, shape in matrices.items()}
        tensors |= {name: torch.ones(size.hidden, dtype=dtype) for name in norms}
        save_file(tensors, folder / f"model-{number:05}.safetensors")
        files |= dict.fromkeys(tensors, f"model-{number:05}.safetensors")
        prefix = f"model.layers.{number}."
        matrices = {f"{prefix}{name}.weight": shape for name, shape in _layer_matrices(size, size.hidden).items()}
        norms = [f"{prefix}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_description(folder: Path, size: ModelSize) -> None:
    """The target's config.json, and a tokenizer with a word for each token."""
    config = _config(size) | {"num_hidden_layers": size.num_layers, "vocab_size": size.vocab}
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<s>": 0, "</s>": 1} | {f"w{token}": token for token in range(2, size.vocab)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w2"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)  # type: ignore[no-untyped-call]


def write_head(
    folder: Path, size: ModelSize, dtype: torch.dtype, device: torch.device, embedding: Tensor | None = None
) -> Path:
    """A checkpoint of an EAGLE-3 head; with the target's `embedding` another process needs no weights of the target."""
    layers = [-1, size.num_layers // 2 - 1, size.num_layers - 1]
    config = _config(size) | {
        "num_hidden_layers": 1,
        "vocab_size": size.vocab,
        "draft_vocab_size": size.draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: _random(shape, dtype, device) for name, shape in _matrices(size).items()}
    for name in ("norm", "layers.0.hidden_norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(size.hidden, dtype=dtype)
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding.detach().cpu().contiguous()
    tensors["d2t"] = torch.zeros(size.draft_vocab, dtype=torch.int64)  # the first ids of the target
    tensors["t2d"] = torch.arange(size.vocab) < size.draft_vocab
    save_file(tensors, folder / "model.safetensors")
    return folder


def _config(size: ModelSize) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }


def _matrices(size: ModelSize) -> dict[str, tuple[int, int]]:
    """Names and shapes of the head's matrices."""
    outer = {"fc.weight": (size.hidden, 3 * size.hidden), "lm_head.weight": (size.draft_vocab, size.hidden)}
    return outer | {f"layers.0.{name}.weight": shape for name, shape in _layer_matrices(size, 2 * size.hidden).items()}


def _layer_matrices(size: ModelSize, width: int) -> dict[str, tuple[int, int]]:
    """Names and shapes of a layer's matrices, whose attention reads `width` columns."""
    q, kv = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    return {
        "self_attn.q_proj": (q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (size.hidden, q),
        "mlp.gate_proj": (size.ffn, size.hidden),
        "mlp.up_proj": (size.ffn, size.hidden),
        "mlp.down_proj": (size.hidden, size.ffn),
    }


def _random(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights, made on the device."""
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=SPREAD).cpu()
