"""Which of transformers' tensors and experts a tensor-parallel rank has a part of: the plan of their configuration.

Linears that the plan does not split, or splits and gathers again, are whole on every rank. Layers with states are split
by their heads or channels, whatever the plan says.
"""

import re
from typing import Any, NamedTuple

from torch import Tensor, nn

from specray.errors import ConfigError
from specray.layers.parallel import Part, RankGroup
from specray.models.llama_shape import check_heads, heads_of_rank
from specray.models.transformers_layers import is_experts
from specray.models.transformers_skeleton import decoder_of
from specray.models.transformers_states import StateLayer, state_layers

_DIM_OF = {"colwise": 0, "rowwise": 1}  # of a weight [out, in]

_LFM2 = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")},
    "layers.*.self_attn.out_proj": "rowwise",
    **{f"layers.*.feed_forward.{name}": "colwise" for name in ("w1", "w3")},
    "layers.*.feed_forward.w2": "rowwise",
    "layers.*.feed_forward.experts": "moe_tp_experts",
}
_OWN_PLANS = {  # of configuration classes that have none
    "gpt_oss": {
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")},
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
}


class Split(NamedTuple):
    """What a rank has a part of in a causal language model."""

    tensors: dict[str, Part]  # parameters by their names
    experts: set[str]  # by their paths


def split_skeleton(model: Any, group: RankGroup) -> Split:
    """Shrink a skeleton's linears to this rank's parts. ConfigError if it cannot be split."""
    split = Split({}, set())
    if group.size == 1:
        return split
    config = model.config.get_text_config(decoder=True)
    kind = config.model_type
    plan = getattr(config, "base_model_tp_plan", None) or _OWN_PLANS.get(kind)
    if not plan:
        raise ConfigError(
            f"tp_size={group.size}: transformers has no plan that splits model_type={kind}; set tp_size: 1"
        )
    body = decoder_of(model)
    prefix = next(name for name, part in model.named_modules() if part is body)
    heads = _heads(body)
    for path, module in list(body.named_modules()):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if type(module) is nn.Linear and style in _DIM_OF:
            part = _part(module, _DIM_OF[style], group, f"{prefix}.{path}", heads.get(path))
            split.tensors[f"{prefix}.{path}.weight"] = part
            if module.bias is not None and part.dim == 0:
                split.tensors[f"{prefix}.{path}.bias"] = part
        elif style == "moe_tp_experts" and is_experts(module) and not module.has_post_expert_norm:
            split.experts.add(f"{prefix}.{path}")
        elif isinstance(module, StateLayer):
            split.tensors.update((f"{prefix}.{path}.{name}", part) for name, part in module.split(group).items())
    for name, part in split.tensors.items():
        _shrink(model, name, part)
    for layer in state_layers(body):
        layer.plan()
    return split


def _heads(body: nn.Module) -> dict[str, tuple[int, int]]:
    """The numbers of query and KV heads of each of the linears of grouped-query attention, by its path.

    A layer without keys reads those of an earlier layer of its type; values may be made of the keys.
    """
    found: dict[str, tuple[int, int]] = {}
    kv_heads: dict[tuple[object, int], int] = {}  # of the last layer of each type
    for path, module in body.named_modules():
        head_dim: Any = getattr(module, "head_dim", None)
        linears = {name: part for name, part in module.named_children() if isinstance(part, nn.Linear)}
        kind = getattr(module, "layer_type", None), head_dim
        output = linears.get("o_proj", linears.get("out_proj"))
        if head_dim is None or "q_proj" not in linears or output is None:
            continue
        if "k_proj" in linears:
            kv_heads[kind] = linears["k_proj"].out_features // head_dim
        elif kind not in kv_heads:
            continue
        num_heads = output.in_features // head_dim
        if "v_proj" in linears:  # whose heads may have another size
            num_heads = output.in_features * kv_heads[kind] // linears["v_proj"].out_features
        found |= {f"{path}.{name}_proj": (num_heads, kv_heads[kind]) for name in ("q", "k", "v", "o", "out")}
    return found


def _part(module: nn.Linear, dim: int, group: RankGroup, path: str, heads: tuple[int, int] | None) -> Part:
    """`heads`: see `_heads`. Several ranks have the same KV head where there are more ranks than heads."""
    length, name = module.weight.shape[dim], path.rpartition(".")[2]
    if heads is not None:
        check_heads(*heads, group.size)
        kind = 1 if name in ("k_proj", "v_proj") else 0
        share, rows = heads_of_rank(*heads, group)[kind], length // heads[kind]
        return Part(dim, (slice(share.start * rows, share.stop * rows),), length)
    if length % group.size:
        raise ConfigError(f"tp_size={group.size} does not divide the {length} rows of {path}; choose another tp_size")
    size = length // group.size
    return Part(dim, (slice(group.rank * size, (group.rank + 1) * size),), length)


def _shrink(model: nn.Module, name: str, part: Part) -> None:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    whole: Tensor = getattr(module, key)
    module._parameters[key] = nn.Parameter(whole.narrow(part.dim, 0, part.size).clone(), requires_grad=False)
    if isinstance(module, nn.Linear) and key == "weight":
        module.out_features, module.in_features = module.weight.shape
