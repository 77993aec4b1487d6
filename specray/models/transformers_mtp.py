"""One decoder layer of transformers' modules on its own, which a multi-token prediction (MTP) layer is around.

It is built as a decoder of a single layer that reads embeddings, so that transformers' own code chooses its rotary
positions and what else a layer is called with.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specray.errors import ConfigError
from specray.models.loading import Loader
from specray.models.transformers_layers import weight_shift
from specray.models.transformers_model import OwnValues, PooledAttention, decode, pooled
from specray.models.transformers_skeleton import attention_calls, build_skeleton, decoder_of
from specray.models.transformers_weights import load_first_layer
from specray.ops.attention import Attend
from specray.ops.cpu.layers import FusedLayers

# Keys by which the architectures choose the feed-forward of a layer by its number, for one that is layer 0.
_DENSE = {"mlp_layer_types": ["dense"], "mlp_only_layers": [0], "first_k_dense_replace": 1, "moe_layer_start_index": 1}
_SPARSE = {
    "mlp_layer_types": ["sparse"],
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 0,
    "moe_layer_interval": 1,
    "decoder_sparse_step": 1,
}


class TransformersLayer:
    """A decoder layer with its KV in layer `kv_layer` of a pool. Implements `specray.models.heads.parts.Layers`."""

    fused: FusedLayers | None = None

    def __init__(
        self,
        config: PretrainedConfig,
        layer_type: str,
        loader: Loader,
        prefix: str,
        parts: Mapping[str, str],
        kv_layer: int,
        max_positions: int,
    ) -> None:
        """`config` is the target's; `layer_type` is one of its `layer_types`, where it has such. `prefix` and `parts`:
        see `load_first_layer`. Whether the feed-forward has experts is known by its tensors.
        """
        single = _single_layer_config(config, layer_type, is_dense="mlp.gate_proj.weight" in parts)
        model = build_skeleton(single, loader.dtype)
        (call,) = attention_calls(model)
        self._body: Any = decoder_of(model)
        self.norm_shift = _norm_shift(self._body)  # what the model's norms add to their weights
        self._body.norm = nn.Identity()
        load_first_layer(model, loader, prefix, parts, call)
        self._kv_layer = kv_layer
        (sinks,) = self._sinks(loader)
        self.attention = pooled(call, sinks, max_positions)

    def __call__(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        assert residual is x
        attention = PooledAttention(attend, [(self._kv_layer, self.attention)])
        return decode(self._body, positions, attention, inputs_embeds=x[None])

    @torch.no_grad()
    def _sinks(self, loader: Loader) -> list[Tensor | None]:
        attention = OwnValues()
        zeros = torch.zeros(1, 1, self._body.config.hidden_size, dtype=loader.dtype, device=loader.device)
        decode(self._body, torch.zeros(1, dtype=torch.int64, device=loader.device), attention, inputs_embeds=zeros)
        return attention.sinks


def _single_layer_config(config: PretrainedConfig, layer_type: str, is_dense: bool) -> PretrainedConfig:
    single = deepcopy(config)
    changed = {"num_hidden_layers": 1, "layer_types": [layer_type], **(_DENSE if is_dense else _SPARSE)}
    for name, value in changed.items():
        if getattr(single, name, None) is not None:
            setattr(single, name, value)
    return single


def _norm_shift(body: Any) -> float:
    shift = weight_shift(body.norm) if hasattr(body, "norm") else None
    if shift is None:
        raise ConfigError(
            f"{type(body).__name__} does not end with a root-mean-square norm, which MTP layers need; choose another "
            "speculative.algorithm"
        )
    return shift
