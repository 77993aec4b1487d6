"""Toy DFlash, JetSpec and DSpark heads for any target, in every supported layout, and a float64 reference.

The reference is written in plain torch from the definition of the heads and shares no code with the package.
"""

import copy
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HEADS, KV_HEADS, DIM, FFN, RANK, EPS, THETA = 2, 1, 16, 40, 5, 1e-5, 1e4
MASK_TOKEN = 3
DRAFT_VOCAB = 24


@dataclass(frozen=True)
class BlockLayout:
    """`settings` are those of config.json apart from the sizes; `own` matrices have the size of the target's."""

    settings: dict[str, Any]
    num_layers: int = 2
    is_nested: bool = False  # speculators
    own: tuple[str, ...] = ()
    markov: str | None = None  # its type
    confidence: str | None = None  # "output", or "token" too
    draft_vocab: int | None = None
    has_bias: bool = False
    # What the settings mean: for each layer (sees earlier rows only, window), the rows that predict, and target layers.
    masks: tuple[tuple[bool, int | None], ...] = ((False, None), (False, None))
    samples_from_anchor: bool = False
    aux: tuple[int, ...] = (0, 1)  # layers whose output is read


def _zlab(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 6,
        "num_target_layers": 2,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK_TOKEN, **settings},
    }


def _deepspec(**settings: Any) -> dict[str, Any]:
    base = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 5, "num_anchors": 8}
    return base | {"target_layer_ids": [-1, 0], "mask_token_id": MASK_TOKEN} | settings


def _speculators(kind: str, **settings: Any) -> dict[str, Any]:
    base = {"speculators_model_type": kind, "block_size": 6, "mask_token_id": MASK_TOKEN}
    return base | {"aux_hidden_state_layer_ids": [1, 2], "speculators_config": {"algorithm": kind}} | settings


_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_MATRICES = ("embed_tokens.weight", "lm_head.weight")
LAYOUTS: dict[str, BlockLayout] = {
    "z-lab": BlockLayout(_zlab()),
    "z-lab-default-layers": BlockLayout(_zlab(target_layer_ids=None), num_layers=1, masks=((False, None),), aux=(1,)),
    "z-lab-sliding": BlockLayout(_zlab() | _SLIDING, masks=((True, 4), (False, None))),
    "z-lab-not-causal": BlockLayout(_zlab() | _SLIDING | {"is_causal": False}, masks=((False, 4), (False, None))),
    "z-lab-scaled": BlockLayout(
        _zlab(input_embedding_scale=2.5, output_multiplier=0.5, final_logit_softcapping=3.0), has_bias=True
    ),
    "jetspec": BlockLayout(_zlab(causal_head=True), masks=((True, None), (True, None))),
    "deepspec-dflash": BlockLayout(_deepspec(markov_rank=0), own=_MATRICES, samples_from_anchor=True, aux=(-1, 0)),
    "deepspec-vanilla": BlockLayout(
        _deepspec(), own=_MATRICES, markov="vanilla", confidence="token", samples_from_anchor=True, aux=(-1, 0)
    ),
    "deepspec-rnn": BlockLayout(
        _deepspec(), own=_MATRICES, markov="rnn", confidence="output", samples_from_anchor=True, aux=(-1, 0)
    ),
    "speculators-dflash": BlockLayout(
        _speculators("dflash") | _SLIDING, is_nested=True, draft_vocab=DRAFT_VOCAB, masks=((True, 4), (False, None))
    ),
    "speculators-two-sided": BlockLayout(
        _speculators("dflash", sliding_window_non_causal=True) | _SLIDING,
        is_nested=True,
        masks=((False, 4), (False, None)),
    ),
    "speculators-dspark": BlockLayout(
        _speculators("dspark"),
        is_nested=True,
        own=("embed_tokens.weight",),
        draft_vocab=DRAFT_VOCAB,
        markov="gated",
        confidence="token",
        samples_from_anchor=True,
    ),
    "speculators-dspark-own-rows": BlockLayout(
        _speculators("dspark", sample_from_anchor=False), is_nested=True, markov="vanilla"
    ),
}


@dataclass
class BlockToy:
    """A head and its reference. To break the checkpoint, change `tensors` or `config` before `write`."""

    layout: BlockLayout
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: Path

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        return folder

    @property
    def algorithm(self) -> str:
        return "DSPARK" if self.layout.markov or self.layout.confidence else "DFLASH"

    @property
    def draft_ids(self) -> Tensor:
        """int64: the target's ids of the columns of the logits."""
        if "d2t" not in self.tensors:
            return torch.arange(len(self._of("lm_head.weight")))
        return self.tensors["d2t"] + torch.arange(len(self.tensors["d2t"]))

    def outputs(self, context: Tensor, token: int, num_rows: int) -> Tensor:
        """Normed outputs float64 [rows that predict, H] behind hidden states `context` [n, columns] and `token`."""
        flash = self.config.get("dflash_config", {})
        states = self._norm(context.double() @ self._of("fc.weight").T, "hidden_norm.weight")
        ids = [token] + [MASK_TOKEN] * (num_rows - 1)
        hidden = self._of("embed_tokens.weight")[ids] * flash.get("input_embedding_scale", 1.0)
        for number, (is_causal, window) in enumerate(self.layout.masks):
            layer = f"layers.{number}."
            normed = self._norm(hidden, f"{layer}input_layernorm.weight")
            attended = self._attention(layer + "self_attn.", normed, states, is_causal, window)
            hidden = hidden + attended
            normed = self._norm(hidden, f"{layer}post_attention_layernorm.weight")
            gate, up = (normed @ self._of(f"{layer}mlp.{name}_proj.weight").T for name in ("gate", "up"))
            hidden = hidden + (gate * gate.sigmoid() * up) @ self._of(f"{layer}mlp.down_proj.weight").T
        first = 0 if self.layout.samples_from_anchor else 1
        return self._norm(hidden, "norm.weight")[first:]

    def predictions(self, outputs: Tensor, path: list[int]) -> tuple[Tensor, float]:
        """(logits float64 [columns] behind `path`, which starts with the root, the confidence there)."""
        flash, level = self.config.get("dflash_config", {}), len(path) - 1
        output, state, embeds = outputs[level], torch.zeros(RANK).double(), torch.zeros(0).double()
        logits = output @ self._of("lm_head.weight").T * flash.get("output_multiplier", 1.0)
        if cap := flash.get("final_logit_softcapping"):
            logits = cap * (logits / cap).tanh()
        if self.layout.markov:
            for row, token in enumerate(path):
                embeds = self._of("markov_head.markov_w1.weight")[token]
                features, state = self._markov(embeds, outputs[row], state)
            logits = logits + features @ self._of("markov_head.markov_w2.weight").T
        if not self.layout.confidence:
            return logits, 1.0
        read = torch.cat((output, embeds)) if self.layout.confidence == "token" else output
        score = self._of("confidence_head.proj.weight") @ read + self._of("confidence_head.proj.bias")
        return logits, float(score.sigmoid())

    def _markov(self, embeds: Tensor, output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.layout.markov == "vanilla":
            return embeds, state
        part = "gate_proj" if self.layout.markov == "gated" else "joint_proj"
        weight, bias = (self._of(f"markov_head.{part}.{name}") for name in ("weight", "bias"))
        if self.layout.markov == "gated":
            return (weight @ torch.cat((output, embeds)) + bias).sigmoid() * embeds, state
        gate, candidate, result = (weight @ torch.cat((state, embeds, output)) + bias).split(RANK)
        return result.tanh(), gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()

    def _attention(self, name: str, normed: Tensor, states: Tensor, is_causal: bool, window: int | None) -> Tensor:
        count, length = len(normed), len(states)
        every = torch.cat((states, normed))
        q, k, v = (
            (x @ self._of(f"{name}{part}_proj.weight").T + self.bias(f"{name}{part}_proj.bias")).view(len(x), -1, DIM)
            for part, x in (("q", normed), ("k", every), ("v", every))
        )
        q, k = self._norm(q, f"{name}q_norm.weight"), self._norm(k, f"{name}k_norm.weight")
        positions = torch.arange(length + count)
        q, k = _rotated(q, positions[length:]), _rotated(k, positions)
        distance = positions[length:, None] - positions
        sees = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            sees = sees & (distance.abs() < window)
        mixed = []
        for head in range(HEADS):
            scores = q[:, head] @ k[:, head * KV_HEADS // HEADS].T * DIM**-0.5
            mixed.append(scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v[:, head * KV_HEADS // HEADS])
        return torch.cat(mixed, 1) @ self._of(f"{name}o_proj.weight").T + self.bias(f"{name}o_proj.bias")

    def bias(self, name: str) -> Tensor:
        return self.tensors[name].double() if name in self.tensors else torch.zeros(1).double()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self._of(name)

    def _of(self, name: str) -> Tensor:
        return self.tensors[name].double() if name in self.tensors else self._of_target[name]

    @cached_property
    def _of_target(self) -> dict[str, Tensor]:
        stored = load_file(self.target / "model.safetensors")
        embedding = stored["model.embed_tokens.weight"].double()
        output = stored.get("lm_head.weight", embedding).double()
        return {"embed_tokens.weight": embedding, "lm_head.weight": output}


def block_toy(name: str, target: Path, seed: int = 0, **settings: Any) -> BlockToy:
    """The head of layout `name` for the model in `target`, with further `settings` in config.json."""
    layout, generator = LAYOUTS[name], torch.Generator().manual_seed(seed)
    sizes = json.loads((target / "config.json").read_text())
    size, vocab = sizes["hidden_size"], sizes["vocab_size"]
    tensors = _tensors(layout, size, vocab, generator)
    base = {
        "hidden_size": size,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": layout.num_layers,
        "hidden_act": "silu",
        "max_position_embeddings": 32,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": vocab,
        "attention_bias": layout.has_bias,
    }
    inner = {key: value for key, value in layout.settings.items() if key in _SLIDING}
    outer = {key: value for key, value in layout.settings.items() if key not in _SLIDING}
    if layout.markov:
        outer |= {"markov_rank": RANK, "markov_head_type": layout.markov}
    if layout.confidence:
        outer |= {"enable_confidence_head": True, "confidence_head_with_markov": layout.confidence == "token"}
    if layout.is_nested:
        outer["draft_vocab_size"] = layout.draft_vocab or vocab
        config = outer | {"transformer_layer_config": base | inner}
    else:
        config = base | inner | outer
    return BlockToy(layout, copy.deepcopy(config | settings), tensors, target)


def _tensors(layout: BlockLayout, size: int, vocab: int, generator: torch.Generator) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 1.3 * shape[-1] ** -0.5

    def scale(length: int = size) -> Tensor:
        return 1 + 0.3 * torch.randn(length, generator=generator)

    widths = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    tensors = {"fc.weight": normal(size, len(layout.aux) * size), "hidden_norm.weight": scale(), "norm.weight": scale()}
    for number in range(layout.num_layers):
        layer = f"layers.{number}."
        tensors |= {f"{layer}self_attn.{name}_proj.weight": normal(rows, size) for name, rows in widths.items()}
        tensors[f"{layer}self_attn.o_proj.weight"] = normal(size, HEADS * DIM)
        tensors |= {f"{layer}self_attn.{name}_norm.weight": scale(DIM) for name in "qk"}
        tensors |= {f"{layer}mlp.{name}_proj.weight": normal(FFN, size) for name in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = normal(size, FFN)
        tensors |= {f"{layer}{name}.weight": scale() for name in ("input_layernorm", "post_attention_layernorm")}
        if layout.has_bias:
            rows = widths | {"o": size}
            tensors |= {f"{layer}self_attn.{name}_proj.bias": normal(length) for name, length in rows.items()}
    tensors |= {name: normal(vocab, size) * 3 for name in layout.own}
    columns = layout.draft_vocab or vocab
    if layout.draft_vocab:
        ids = 1 + torch.arange(columns) * 2 + torch.arange(columns) // 5
        tensors["d2t"] = ids - torch.arange(columns)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        tensors["lm_head.weight"] = normal(columns, size) * 3
    if layout.markov:
        tensors |= {"markov_head.markov_w1.weight": normal(vocab, RANK) * 4}
        tensors |= {"markov_head.markov_w2.weight": normal(columns, RANK) * 3}
    if layout.markov == "gated":
        tensors |= {
            "markov_head.gate_proj.weight": normal(RANK, size + RANK),
            "markov_head.gate_proj.bias": normal(RANK),
        }
    if layout.markov == "rnn":
        tensors["markov_head.joint_proj.weight"] = normal(3 * RANK, 2 * RANK + size)
        tensors["markov_head.joint_proj.bias"] = normal(3 * RANK)
    if layout.confidence:
        width = size + (RANK if layout.confidence == "token" else 0)
        tensors |= {"confidence_head.proj.weight": normal(1, width), "confidence_head.proj.bias": torch.tensor([1.5])}
    return tensors


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [n, heads, dim] in the half-split form."""
    frequencies = THETA ** (-torch.arange(0, DIM, 2).double() / DIM)
    angles = torch.outer(positions.double(), frequencies)[:, None]
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
