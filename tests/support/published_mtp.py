"""Small random checkpoints with MTP layers in the layouts of published ones, and a reference in transformers' modules.

The names are those of the checkpoints, written out here once more, so that a wrong name in the package is noticed.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.architectures import spread
from tests.support.decoders import computed_buffers, write_decoder

_FULL: dict[str, Any] = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}


@dataclass(frozen=True, slots=True)
class Published:
    """A family's MTP layers: # is the number behind the target's own layers, * counts from 0."""

    block: str
    parts: tuple[str, str, str, str]  # the norms of embedding and state, the projection, the last norm
    settings: Mapping[str, Any]  # in which a layer's configuration differs from the target's
    renamed: Mapping[str, str] = field(default_factory=dict)  # parts of the decoder layer in transformers
    copies: tuple[str, ...] = ()  # [vocabulary, hidden] tensors that must not be read
    num_layers: int = 1
    output: str | None = None  # a layer's own output matrix
    passes_normed: bool = True  # on to the next layer

    def at(self, name: str, number: int, first: int) -> str:
        return name.replace("#", str(first + number)).replace("*", str(number))


def _nextn(last_norm: str, copies: tuple[str, ...], **settings: Any) -> Published:
    names = (f"model.layers.#.{part}" for part in ("enorm", "hnorm", "eh_proj", last_norm))
    return Published("model.layers.#.", (*names,), settings, copies=copies)  # type: ignore[arg-type]


_SPARSE: dict[str, Any] = {"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"]}
_QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_ERNIE = ("mtp_emb_norm.*", "mtp_hidden_norm.*", "mtp_linear_proj.*", "norm")
_COPIES = ("model.layers.#.embed_tokens.weight", "model.layers.#.shared_head.head.weight")
FAMILIES: dict[str, Published] = {
    "glm4_moe": _nextn("shared_head.norm", _COPIES, first_k_dense_replace=0),
    "glm4_moe_lite": _nextn("shared_head.norm", _COPIES, mlp_layer_types=["sparse"]),
    "glm_moe_dsa": _nextn("shared_head.norm", _COPIES, **_SPARSE),
    "deepseek_v32": _nextn("shared_head.norm", _COPIES, **_SPARSE),
    "glm_ocr": Published(  # in an image model
        "model.language_model.layers.#.",
        tuple(f"model.language_model.layers.#.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),  # type: ignore[arg-type]
        {},
        copies=("model.language_model.layers.#.embed_tokens.weight",),
    ),
    "hy_v3": _nextn("final_layernorm", (), mlp_layer_types=["sparse"]),
    "mimo_v2_flash": Published(
        "model.mtp.layers.*.",
        tuple(f"model.mtp.layers.*.{part}" for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")),  # type: ignore[arg-type]
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        {"post_attention_layernorm": "pre_mlp_layernorm"},
        num_layers=3,
    ),
    "step3p7": Published(
        "model.layers.#.",
        tuple(f"model.layers.#.{part}" for part in ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm")),  # type: ignore[arg-type]
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"], "num_attention_heads": 8},
        num_layers=3,
        output="model.layers.#.transformer.shared_head.output",
        passes_normed=False,
    ),
    "ernie4_5_moe": Published(
        "model.mtp_block.*.",
        tuple(f"model.{part}" for part in _ERNIE),  # type: ignore[arg-type]
        {"moe_layer_start_index": 9},
    ),
    "exaone_moe": Published("mtp.layers.*.", _QWEN, _FULL | {"mlp_layer_types": ["dense"]}),
    "mellum": Published("mtp.layers.*.", _QWEN, _FULL),
    "qwen3_next": Published("mtp.layers.*.", _QWEN, _FULL | {"mlp_only_layers": []}),
    "qwen3_5": Published("mtp.layers.*.", _QWEN, {"layer_types": ["full_attention"]}),
    "qwen3_5_moe": Published("mtp.layers.*.", _QWEN, {"layer_types": ["full_attention"]}),
    "qwen3_5-image": Published("mtp.layers.*.", _QWEN, {"layer_types": ["full_attention"]}),
}


class ReferenceLayer:
    """An MTP layer of a plain projection and transformers' decoder of one layer, with its eager attention."""

    def __init__(self, target: PreTrainedModel, family: Published) -> None:
        whole = deepcopy(target.config)
        config: Any = whole.get_text_config(decoder=True)
        config.per_layer_config = None
        for name, value in {"num_hidden_layers": 1, **family.settings}.items():
            setattr(config, name, value)
        self.decoder: Any = type(target)._from_config(whole, attn_implementation="eager").float().eval()
        last_norm, size = target.get_decoder().norm, config.hidden_size
        norms = [type(last_norm)(size, eps=config.rms_norm_eps) for _ in range(3)]
        self.embed_norm, self.state_norm, self.out_norm = norms
        self.project = torch.nn.Linear(2 * size, size, bias=False)
        self.output = target.get_output_embeddings()
        self.passes_normed = family.passes_normed
        for name, tensor in [*self.decoder.named_parameters(), *self.decoder.named_buffers()]:
            if name not in computed_buffers(self.decoder):
                spread(name, tensor)
        for name, module in (*(("norm", norm) for norm in norms), ("project", self.project)):
            spread(name, module.weight)
        if family.parts[3] == "model.norm":
            self.out_norm = last_norm
        if family.output is not None:
            self.output = torch.nn.Linear(size, config.vocab_size, bias=False)
            spread("output", self.output.weight)
        self.decoder.get_decoder().norm = torch.nn.Identity()

    @torch.no_grad()
    def __call__(self, embeds: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the next states [T, hidden] of [T, hidden], the logits [T, vocabulary])."""
        x = self.project(torch.cat((self.embed_norm(embeds), self.state_norm(states)), -1))
        out = self.decoder.get_decoder()(inputs_embeds=x[None]).last_hidden_state[0]
        normed = self.out_norm(out)
        return normed if self.passes_normed else out, self.output(normed)


def write_published(name: str, folder: Path) -> tuple[PreTrainedModel, list[ReferenceLayer]]:
    """Write a target with MTP layers; returns transformers' models of both."""
    family = FAMILIES[name]
    target = write_decoder(name, folder)
    layers = [ReferenceLayer(target, family) for _ in range(family.num_layers)]
    tensors = load_file(folder / "model.safetensors")
    config = target.config.get_text_config(decoder=True)
    first = config.num_hidden_layers
    for number, layer in enumerate(layers):
        layer.decoder.save_pretrained(folder / f"mtp-{number}")
        saved = load_file(folder / f"mtp-{number}" / "model.safetensors")
        for usual, tensor in saved.items():
            if match := re.match(r"model\.(?:language_model\.)?layers\.0\.", usual):
                part, dot, rest = usual[match.end() :].partition(".")
                tensors[family.at(family.block, number, first) + family.renamed.get(part, part) + dot + rest] = tensor
        modules = layer.embed_norm, layer.state_norm, layer.project, layer.out_norm
        for part, module in zip(family.parts, modules, strict=True):
            tensors[f"{family.at(part, number, first)}.weight"] = module.weight.detach().clone()
        for copied in family.copies:
            tensors[family.at(copied, number, first)] = torch.zeros(config.vocab_size, config.hidden_size)
        if family.output is not None:
            tensors[f"{family.at(family.output, number, first)}.weight"] = layer.output.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors")
    return target, layers
