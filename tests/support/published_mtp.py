"""Small random checkpoints with MTP layers in the layouts of published ones, and a reference in transformers' modules.

The names are those of the checkpoints, written out here once more, so that a wrong name in the package is noticed.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

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
    "hy_v3": _nextn("final_layernorm", (), mlp_layer_types=["sparse"]),
    "mimo_v2_flash": Published(
        "model.mtp.layers.*.",
        tuple(f"model.mtp.layers.*.{part}" for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")),  # type: ignore[arg-type]
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        {"post_attention_layernorm": "pre_mlp_layernorm"},
        num_layers=3,
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
}


class ReferenceLayer:
    """An MTP layer of a plain projection and transformers' decoder of one layer, with its eager attention."""

    def __init__(self, target: PreTrainedModel, family: Published) -> None:
        config: Any = deepcopy(target.config)
        for name, value in {"num_hidden_layers": 1, **family.settings}.items():
            setattr(config, name, value)
        self.decoder = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        norm, size = type(target.model.norm), config.hidden_size
        self.embed_norm, self.state_norm = norm(size, eps=config.rms_norm_eps), norm(size, eps=config.rms_norm_eps)
        self.project = torch.nn.Linear(2 * size, size, bias=False)
        for name, tensor in [*self.decoder.named_parameters(), *self.decoder.named_buffers()]:
            if name not in computed_buffers(self.decoder):
                spread(name, tensor)
        for name, module in (("norm", self.embed_norm), ("norm", self.state_norm), ("project", self.project)):
            spread(name, module.weight)
        if family.parts[3] == "model.norm":
            self.decoder.model.norm = target.model.norm

    @torch.no_grad()
    def __call__(self, embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The next states [T, hidden] of [T, hidden]."""
        x = self.project(torch.cat((self.embed_norm(embeds), self.state_norm(states)), -1))
        out: torch.Tensor = self.decoder.model(inputs_embeds=x[None]).last_hidden_state[0]
        return out


def write_published(name: str, folder: Path) -> tuple[PreTrainedModel, list[ReferenceLayer]]:
    """Write a target with MTP layers; returns transformers' models of both."""
    family = FAMILIES[name]
    target = write_decoder(name, folder)
    layers = [ReferenceLayer(target, family) for _ in range(family.num_layers)]
    tensors = load_file(folder / "model.safetensors")
    first = target.config.num_hidden_layers
    for number, layer in enumerate(layers):
        layer.decoder.save_pretrained(folder / f"mtp-{number}")
        saved = load_file(folder / f"mtp-{number}" / "model.safetensors")
        for usual, tensor in saved.items():
            if usual.startswith("model.layers.0."):
                part, dot, rest = usual.removeprefix("model.layers.0.").partition(".")
                tensors[family.at(family.block, number, first) + family.renamed.get(part, part) + dot + rest] = tensor
        modules = layer.embed_norm, layer.state_norm, layer.project, layer.decoder.model.norm
        for part, module in zip(family.parts, modules, strict=True):
            tensors[f"{family.at(part, number, first)}.weight"] = module.weight.detach().clone()
        for copied in family.copies:
            tensors[family.at(copied, number, first)] = torch.zeros(target.config.vocab_size, target.config.hidden_size)
    save_file(tensors, folder / "model.safetensors")
    return target, layers
