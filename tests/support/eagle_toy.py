"""Toy EAGLE heads for the toy target, in every supported layout, and a float64 reference.

The reference is written in numpy from the definition of the heads and shares no code with the package. Tensors have one
set of names here (`layer.*` for the layer); a layout defines their names, nesting and files in a checkpoint.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.toy import _LLAMA3_ROPE, VOCAB_SIZE, _attention, _ffn, _norm

TARGET_SIZE, NUM_LAYERS = 32, 2  # of the toy target
DRAFT_VOCAB = 24
# The default layers need more layers than the toy target has. Nested ids are layers whose output is read, ids at top
# level (speculators) layers whose input is read; all outputs and inputs of the toy target.
AUX = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}}
TOP_LEVEL_AUX = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}

Tensors = dict[str, torch.Tensor]
Save = Callable[[Tensors, Path], None]

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": TARGET_SIZE,
    "intermediate_size": 40,
    "num_attention_heads": 2,  # unlike the target's
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 20,  # shorter than the target's context
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
}
_NESTED = frozenset(_BASE) - {"architectures"} | {"rope_theta", "rope_scaling", "attention_bias"}


def save_safetensors(tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors")


def save_bin(tensors: Tensors, folder: Path) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def save_sharded_safetensors(tensors: Tensors, folder: Path) -> None:
    _save_shards(tensors, folder, "model-{}.safetensors", "model.safetensors.index.json", save_file)


def save_sharded_bin(tensors: Tensors, folder: Path) -> None:
    _save_shards(tensors, folder, "pytorch_model-{}.bin", "pytorch_model.bin.index.json", torch.save)


@dataclass(frozen=True)
class Layout:
    """The form of a checkpoint: `settings` go into config.json, and `layer` replaces `layer.` in names of tensors."""

    version: int
    settings: dict[str, Any] = field(default_factory=dict)
    layer: str = "layers.0."
    spelling: dict[str, str] = field(default_factory=dict)  # other beginnings of names
    prefix: str = ""  # before all names but those of the vocabulary
    is_nested: bool = False  # speculators
    save: Save = save_safetensors
    without: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()  # settings that config.json omits, because the tensors imply them
    own: tuple[str, ...] = ()  # trained matrices of the size of the target's


_OWN_VOCAB = {"draft_vocab_size": DRAFT_VOCAB}
_THIRD = {"architectures": ["LlamaForCausalLMEagle3"]}

LAYOUTS: dict[str, Layout] = {
    "eagle3-safeailab": Layout(3, _OWN_VOCAB | AUX, layer="midlayer.", save=save_bin),
    "eagle3-layers": Layout(3, _OWN_VOCAB | AUX | _THIRD, own=("embed_tokens.weight",)),
    "eagle3-no-mask": Layout(3, _OWN_VOCAB | AUX | _THIRD, without=("t2d",)),
    "eagle3-prefixed": Layout(3, _OWN_VOCAB | AUX, prefix="model.", save=save_sharded_safetensors),
    "eagle3-speculators": Layout(
        3,
        _OWN_VOCAB
        | TOP_LEVEL_AUX
        | {"architectures": ["Eagle3Speculator"], "norm_before_residual": True, "target_hidden_size": None}
        | {"speculators_config": {"algorithm": "eagle3"}, "rope_theta": 5e5, "rope_scaling": _LLAMA3_ROPE},
        is_nested=True,
        own=("embed_tokens.weight",),
    ),
    "eagle3-target-head": Layout(3, {"draft_vocab_size": None} | AUX, layer="midlayer.", without=("lm_head.weight",)),
    "eagle3-own-full-head": Layout(3, AUX, layer="midlayer.", own=("lm_head.weight",)),
    "eagle3-full-vocabulary": Layout(3, {"draft_vocab_size": VOCAB_SIZE} | AUX),
    "eagle3-fc-norm": Layout(3, _OWN_VOCAB | AUX | {"fc_norm": True}, layer="midlayer."),
    "eagle3-norm-before-fc": Layout(3, _OWN_VOCAB | AUX | {"norm_before_fc": True}),
    "eagle3-norm-output": Layout(3, _OWN_VOCAB | AUX | {"norm_output": True}),
    "eagle3-biases": Layout(3, _OWN_VOCAB | AUX | {"bias": True, "attention_bias": True}),
    "eagle3-biases-omitted": Layout(
        3, _OWN_VOCAB | AUX | {"bias": True, "attention_bias": True}, omitted=("bias", "attention_bias")
    ),
    "eagle3-two-layers": Layout(
        3, _OWN_VOCAB | {"eagle_aux_hidden_state_layer_ids": [0, 1], "num_aux_hidden_states": 2}
    ),
    "eagle3-last-state": Layout(
        3, _OWN_VOCAB | {"eagle_config": {"use_aux_hidden_state": False}}, without=("fc.weight",)
    ),
    "eagle3-stacked": Layout(3, _OWN_VOCAB | TOP_LEVEL_AUX | {"num_hidden_layers": 2}),
    "eagle2-stacked": Layout(2, {"bias": True, "num_hidden_layers": 2}),
    # gpt-oss: 64 heads of 64 for a hidden size of 2880
    "eagle3-indivisible-heads": Layout(3, _OWN_VOCAB | AUX | {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "eagle3-wider": Layout(3, _OWN_VOCAB | AUX | {"hidden_size": 48, "target_hidden_size": TARGET_SIZE}),
    "eagle2": Layout(2, {"bias": False}, save=save_bin, own=("embed_tokens.weight",)),
    "eagle2-bias-omitted": Layout(2, {"architectures": ["LlamaForCausalLMEagle"], "bias": True}, omitted=("bias",)),
    "eagle2-qkv-bias-omitted": Layout(
        2, {"attention_bias": True}, omitted=("attention_bias",), without=("layer.self_attn.o_proj.bias",)
    ),
    "eagle2-prefixed": Layout(2, {"bias": True}, prefix="model.", save=save_sharded_bin),
    "eagle2-speculators": Layout(
        2,
        {"architectures": ["EagleSpeculator"], "fusion_bias": False, "speculators_config": {"algorithm": "eagle"}},
        layer="transformer.",
        spelling={"fc.": "fusion_fc."},
        is_nested=True,
        own=("embed_tokens.weight", "lm_head.weight"),
    ),
}


@dataclass
class ToyHead:
    """A head and its reference. To break the checkpoint, change `tensors` (as stored) or `config` before `write`."""

    layout: Layout
    settings: dict[str, Any]  # flat
    weights: dict[str, np.ndarray]  # float64, under our names
    tensors: Tensors
    config: dict[str, Any]

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        self.layout.save(self.tensors, folder)
        return folder

    def stored(self, name: str) -> str:
        return _spelled(name, self.layout)

    def fuse(self, aux_hidden_states: np.ndarray) -> np.ndarray:
        """States from auxiliary hidden states [T, columns]."""
        w = self.weights
        if self.layout.version == 2 or "fc.weight" not in w:
            return aux_hidden_states
        if "input_norm.weight" in w:
            aux_hidden_states = _norm(aux_hidden_states, w["input_norm.weight"], self.settings)
        if "fc_norm.0.weight" in w:
            chunks = enumerate(np.split(aux_hidden_states, aux_hidden_states.shape[1] // TARGET_SIZE, 1))
            aux_hidden_states = np.concatenate(
                [_norm(c, w[f"fc_norm.{i}.weight"], self.settings) for i, c in chunks], 1
            )
        return self._fc(aux_hidden_states)

    def step(self, embeds: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Outputs [T, H] of a row that starts at position 0."""
        layer = self._layer("layer.")
        if self.layout.version == 2:
            x = residual = self._fc(np.concatenate((embeds, states), 1))
        else:
            normed = _norm(states, layer["hidden_norm.weight"], self.settings)
            x = np.concatenate((_norm(embeds, layer["input_layernorm.weight"], self.settings), normed), 1)
            residual = normed if self.settings.get("norm_before_residual") else states
        hidden = residual + _attention(x, layer, self.settings) + layer.get("self_attn.o_proj.bias", 0)
        hidden = hidden + _ffn(_norm(hidden, layer["post_attention_layernorm.weight"], self.settings), layer)
        if second := self._layer("layer1."):
            normed = _norm(hidden, second["input_layernorm.weight"], self.settings)
            hidden = hidden + _attention(normed, second, self.settings)
            hidden = hidden + _ffn(_norm(hidden, second["post_attention_layernorm.weight"], self.settings), second)
        return hidden

    def _layer(self, prefix: str) -> dict[str, np.ndarray]:
        return {n.removeprefix(prefix): t for n, t in self.weights.items() if n.startswith(prefix)}

    def recur(self, output: np.ndarray) -> np.ndarray:
        return self._normed(output) if self.settings.get("norm_output") else output

    def logits(self, output: np.ndarray, target_head: np.ndarray) -> np.ndarray:
        """[T, draft vocabulary]; computed with the target's matrix if the head has none."""
        normed = output if self.layout.version == 2 else self._normed(output)
        return normed @ self.weights.get("lm_head.weight", target_head).T

    def _fc(self, x: np.ndarray) -> np.ndarray:
        return x @ self.weights["fc.weight"].T + self.weights.get("fc.bias", 0)

    def _normed(self, output: np.ndarray) -> np.ndarray:
        return _norm(output, self.weights["norm.weight"], self.settings)


def toy_head(name: str, seed: int = 0) -> ToyHead:
    """The head of layout `name`."""
    layout = LAYOUTS[name]
    settings = {**_BASE, **layout.settings.get("eagle_config", {}), **layout.settings}
    tensors = _tensors(layout, settings, torch.Generator().manual_seed(seed))
    kept = {n: t for n, t in tensors.items() if n not in layout.without}
    weights = {n: t.double().numpy() for n, t in kept.items()}
    stored = {_spelled(n, layout): t for n, t in kept.items()}
    return ToyHead(layout, {"rope_theta": 1e4, **settings}, weights, stored, _config(layout))


def target_matrices(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """float64 embedding and output matrix of a toy target."""
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    return embedding.double().numpy(), tensors.get("lm_head.weight", embedding).double().numpy()


def _tensors(layout: Layout, s: dict[str, Any], generator: torch.Generator) -> Tensors:
    size, dim, ffn = s["hidden_size"], s["head_dim"], s["intermediate_size"]
    q_size, kv_size = s["num_attention_heads"] * dim, s["num_key_value_heads"] * dim
    width = size * (layout.version - 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    def scale(length: int = size) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(length, generator=generator)

    tensors = {
        "layer.self_attn.q_proj.weight": normal(q_size, width),
        "layer.self_attn.k_proj.weight": normal(kv_size, width),
        "layer.self_attn.v_proj.weight": normal(kv_size, width),
        "layer.self_attn.o_proj.weight": normal(size, q_size),
        "layer.mlp.gate_proj.weight": normal(ffn, size),
        "layer.mlp.up_proj.weight": normal(ffn, size),
        "layer.mlp.down_proj.weight": normal(size, ffn),
        "layer.post_attention_layernorm.weight": scale(),
    }
    if s["num_hidden_layers"] == 2:
        widths = {"q": q_size, "k": kv_size, "v": kv_size}
        first = {name.removeprefix("layer."): tensor for name, tensor in tensors.items()}
        tensors |= {f"layer1.{name}": normal(*tensor.shape) for name, tensor in first.items() if tensor.ndim == 2}
        tensors |= {f"layer1.self_attn.{n}_proj.weight": normal(rows, size) for n, rows in widths.items()}
        tensors |= {f"layer1.{n}.weight": scale() for n in ("input_layernorm", "post_attention_layernorm")}
    if s.get("attention_bias"):
        sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": size}
        tensors |= {f"layer.self_attn.{n}_proj.bias": normal(length) for n, length in sizes.items()}
    if s.get("bias"):
        tensors["fc.bias"] = normal(size)
    tensors |= {name: normal(VOCAB_SIZE, size) for name in layout.own}
    if layout.version == 2:
        return tensors | {"fc.weight": normal(size, 2 * size)}
    return tensors | _eagle3_tensors(s, normal, scale)


def _eagle3_tensors(
    s: dict[str, Any], normal: Callable[..., torch.Tensor], scale: Callable[..., torch.Tensor]
) -> Tensors:
    """Tensors that only EAGLE-3 heads have."""
    size, count = s["hidden_size"], len(s.get("eagle_aux_hidden_state_layer_ids", [0]))
    tensors = {
        "layer.hidden_norm.weight": scale(),
        "layer.input_layernorm.weight": scale(),
        "norm.weight": scale(),
        "fc.weight": normal(size, count * TARGET_SIZE),
    }
    if s.get("norm_before_fc"):
        tensors["input_norm.weight"] = scale(count * TARGET_SIZE)
    if s.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": scale(TARGET_SIZE) for i in range(count)}
    if s.get("draft_vocab_size") is not None:
        tensors["lm_head.weight"] = normal(s["draft_vocab_size"], size)
    if s.get("draft_vocab_size") == DRAFT_VOCAB:
        ids = 1 + torch.arange(DRAFT_VOCAB) * 2 + torch.arange(DRAFT_VOCAB) // 5
        tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, ids, True)
    if size != TARGET_SIZE:
        tensors["embed_tokens.weight"] = normal(VOCAB_SIZE, size)
    return tensors


def _spelled(name: str, layout: Layout) -> str:
    if name in ("d2t", "t2d", "lm_head.weight"):
        return name
    for ours, theirs in (("layer.", layout.layer), ("layer1.", "layers.1."), *layout.spelling.items()):
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return layout.prefix + name


def _config(layout: Layout) -> dict[str, Any]:
    settings = {n: v for n, v in (_BASE | layout.settings).items() if n not in layout.omitted}
    if not layout.is_nested:
        return settings
    nested = {name: value for name, value in settings.items() if name in _NESTED}
    return {n: v for n, v in settings.items() if n not in nested} | {"transformer_layer_config": nested}


def _save_shards(tensors: Tensors, folder: Path, pattern: str, index: str, save: Callable[..., object]) -> None:
    """Distribute the tensors over three files."""
    names = sorted(tensors)
    for part in range(3):
        save({name: tensors[name] for name in names[part::3]}, folder / pattern.format(part))
    weight_map = {name: pattern.format(part) for part in range(3) for name in names[part::3]}
    (folder / index).write_text(json.dumps({"weight_map": weight_map}))
