"""How checkpoints name the tensors of multi-token prediction (MTP) layers: one table, a row for each layout.

The rows are those of published checkpoints, as vLLM, SGLang and transformers read them. Nothing is computed here.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from specray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of a layer's parts, and how they are combined. * is the layer's number.

    A part whose name has no number is one for all layers.
    """

    layer: str  # the decoder layer
    embed_norm: str
    state_norm: str
    project: str
    out_norm: str
    output: str | None = None  # a layer's own output matrix; None: the target's
    states_are_normed: bool = True  # that layers pass on, by `out_norm`, and that the target does, by its final norm
    state_first: bool = False  # of the two inputs of `project`
    masks_first: bool = False  # the embedding at position 0 is replaced by zeros
    layer_type: str = "full_attention"  # where config.json has no `mtp_layer_types`
    renamed: Mapping[str, str] = field(default_factory=dict)  # parts of the decoder layer, to their names in the target

    def prefix(self, number: int) -> str:
        """Of the tensors of decoder layer `number`."""
        return self.at(self.layer, number) + "."

    def at(self, part: str, number: int) -> str:
        """The name of a part in layer `number`."""
        return part.replace("*", str(number))

    def numbers(self, names: Collection[str]) -> list[int]:
        """The numbers of the layers whose projection is among the tensors `names`."""
        pattern = re.compile(re.escape(self.layer).replace("\\*", r"(\d+)") + r"\..+")
        found = {int(match[1]) for name in names if (match := pattern.fullmatch(name))}
        return sorted(number for number in found if f"{self.at(self.project, number)}.weight" in names)

    def parts(self, number: int, names: Collection[str]) -> dict[str, str]:
        """The tensors behind `prefix`, by the names that they would have in one of the target's own layers."""
        prefix = self.prefix(number)
        found = {}
        for name in names:
            if name.startswith(prefix):
                first, dot, rest = name.removeprefix(prefix).partition(".")
                found[self.renamed.get(first, first) + dot + rest] = name
        return found

    def within(self, prefix: str) -> Self:
        """The layout of an image model, whose language model's tensors have `prefix` instead of "model."."""
        names = ("layer", "embed_norm", "state_norm", "project", "out_norm", "output")
        parts = {name: getattr(self, name) for name in names}
        moved: dict[str, Any] = {name: part and re.sub(r"^model\.", prefix, part) for name, part in parts.items()}
        return replace(self, **moved)

    def owns(self, name: str, number: int) -> bool:
        """Whether a tensor is of layer `number`."""
        others = self.embed_norm, self.state_norm, self.project, self.out_norm
        return name.startswith((self.prefix(number), *(f"{self.at(part, number)}." for part in others)))


def _in_layer(layer: str, *parts: str, **options: Any) -> Layout:
    """A layout whose parts, in the order of the fields, are all named below the decoder layer's own name."""
    names = ("embed_norm", "state_norm", "project", "out_norm", "output")
    named: dict[str, Any] = {name: f"{layer}.{part}" for name, part in zip(names, parts, strict=False)}
    return Layout(layer, **named, **options)


MIMO = _in_layer(
    "model.mtp_layers.*",
    *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    state_first=True,
    masks_first=True,
)
LAYOUTS: dict[str, Layout] = {
    "MiMo": MIMO,
    # behind the target's own layers: DeepSeek-V3, GLM-4.5 to 4.7, Air and Flash
    "NextN": _in_layer("model.layers.*", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "Hunyuan-V3": _in_layer("model.layers.*", "enorm", "hnorm", "eh_proj", "final_layernorm"),
    "MiMo-V2": _in_layer(
        "model.mtp.layers.*",
        *("enorm", "hnorm", "eh_proj", "final_layernorm"),
        layer_type="sliding_attention",
        renamed={"pre_mlp_layernorm": "post_attention_layernorm"},
    ),
    "Step-3.5": _in_layer(
        "model.layers.*",
        *("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm", "transformer.shared_head.output"),
        states_are_normed=False,
        layer_type="sliding_attention",
    ),
    # Baidu's own engine also norms the output as the target's last layer's
    "ERNIE-4.5": Layout(
        layer="model.mtp_block.*",
        embed_norm="model.mtp_emb_norm.*",
        state_norm="model.mtp_hidden_norm.*",
        project="model.mtp_linear_proj.*",
        out_norm="model.norm",
    ),
    # Qwen3-Next, Qwen3.5, EXAONE-MoE, Mellum
    "mtp": Layout(
        layer="mtp.layers.*",
        embed_norm="mtp.pre_fc_norm_embedding",
        state_norm="mtp.pre_fc_norm_hidden",
        project="mtp.fc",
        out_norm="mtp.norm",
    ),
}


_PREFIXES = ("model.", "model.language_model.", "language_model.model.")  # of a language model, alone or in another


def find_layout(names: Collection[str]) -> tuple[Layout, list[int]] | None:
    """The layout of the MTP layers among a checkpoint's tensors, and the layers' numbers; None if there are none."""
    names = frozenset(names)
    layouts = [layout.within(prefix) for prefix in _PREFIXES for layout in LAYOUTS.values()]
    found = [(layout, numbers) for layout in layouts if (numbers := layout.numbers(names))]
    whole = [(layout, numbers) for layout, numbers in found if _has_output_norms(layout, numbers, names)]
    return next(iter(whole or found), None)


def require_layout(folder: Path, names: Collection[str]) -> tuple[Layout, list[int]]:
    """See `find_layout`; ConfigError if there are no MTP layers."""
    found = find_layout(names)
    if found is None:
        projections = sorted({layout.project for layout in LAYOUTS.values()})
        raise ConfigError(
            f"{folder} holds no MTP layers: expected one of the tensors {', '.join(projections)} (.weight); set "
            "speculative.draft_model_path to a checkpoint that has them, or choose another speculative.algorithm"
        )
    return found


def _has_output_norms(layout: Layout, numbers: list[int], names: Collection[str]) -> bool:
    """Whether this tells the layout from another one that names the projection alike."""
    return all(f"{layout.at(layout.out_norm, number)}.weight" in names for number in numbers)
