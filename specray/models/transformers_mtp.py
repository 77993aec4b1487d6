"""One decoder layer of transformers' modules on its own, which a multi-token prediction (MTP) layer is around.

It is built as a decoder of a single layer that reads embeddings, so that transformers' own code chooses its rotary
positions and what else a layer is called with.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specray.errors import ConfigError
from specray.layers.linear import ColumnParallelLinear
from specray.layers.norm import RMSNorm
from specray.models.loading import Loader
from specray.models.target_model import ModelShape
from specray.models.transformers_layers import shifted, weight_shift
from specray.models.transformers_model import OwnValues, PooledAttention, decode, pooled
from specray.models.transformers_rows import Recorder, reason_without_graphs
from specray.models.transformers_skeleton import attention_calls, build_skeleton, decoder_of
from specray.models.transformers_weights import load_first_layer
from specray.ops.attention import Attend
from specray.ops.cpu.layers import FusedLayers
from specray.ops.layer_attention import LayerAttention

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


class TransformersParts:
    """Makes the parts of an MTP layer around a decoder layer of the model of `config`.

    `layer_type` is the decoder layer's among `layer_types` of `config`, if there are such, and `kv_layer` its place in
    the KV pool. `prefix` and `tensors`: see `load_first_layer`. Implements `specray.models.heads.mtp.MtpParts`.
    """

    def __init__(
        self,
        config: Any,
        shape: ModelShape,
        layer_type: str,
        loader: Loader,
        prefix: str,
        tensors: Mapping[str, str],
        kv_layer: int,
        max_positions: int,
    ) -> None:
        single = _single_layer_config(config, layer_type, is_dense="mlp.gate_proj.weight" in tensors)
        model = build_skeleton(single, loader.dtype)
        (call,) = attention_calls(model).values()
        body: Any = decoder_of(model)
        self.shape = shape
        self._loader, self._eps = loader, config.rms_norm_eps
        self._norm_shift = _norm_shift(body)
        body.norm = nn.Identity()
        load_first_layer(model, loader, prefix, tensors, call)
        (sinks,), self.reason_without_graphs = _trial(body, loader)
        self.attention = pooled(call, sinks, max_positions)
        self._layer = TransformersLayer(body, self.attention, kv_layer)

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(shifted(self._loader.tensor(name, (size,)), self._norm_shift), self._eps)

    def linear(self, name: str, shape: tuple[int, int]) -> ColumnParallelLinear:
        return ColumnParallelLinear(self._loader.weight(name, shape), None, self._loader.quantization)

    def layers(self, prefixes: Sequence[str], width: int, norms_input: bool = False) -> "TransformersLayer":  # noqa: ARG002
        """The decoder layer, which is made already."""
        return self._layer


class TransformersLayer:
    """A decoder of one layer. Implements `specray.models.heads.parts.Layers`."""

    fused: FusedLayers | None = None

    def __init__(self, body: nn.Module, attention: LayerAttention, kv_layer: int) -> None:
        self._body = body
        self._attention = attention
        self._kv_layer = kv_layer

    def __call__(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        assert residual is x
        attention = PooledAttention(attend, [(self._kv_layer, self._attention)])
        return decode(self._body, positions, attention, inputs_embeds=x[None])


def _single_layer_config(config: Any, layer_type: str, is_dense: bool) -> PretrainedConfig:
    """The configuration of a model that has nothing but the layer, with what the target's layers of its type have."""
    single: PretrainedConfig = deepcopy(config)
    if config.is_heterogeneous:
        single.per_layer_config = None
        if layer_type in (types := getattr(config, "layer_types", None) or []):
            like = config.per_layer_config[types.index(layer_type)]
            for name in config.per_layer_attributes:
                setattr(single, name, getattr(like, name))
    changed = {"num_hidden_layers": 1, "layer_types": [layer_type], **(_DENSE if is_dense else _SPARSE)}
    for name, value in changed.items():
        if getattr(single, name, None) is not None:
            setattr(single, name, value)
    return single


@torch.no_grad()
def _trial(body: Any, loader: Loader) -> tuple[list[Tensor | None], str | None]:
    """The layer's sinks, and why no graph can record a pass."""
    attention = OwnValues()
    zeros = torch.zeros(1, 1, body.config.hidden_size, dtype=loader.dtype, device=loader.device)
    positions = torch.zeros(1, dtype=torch.int64, device=loader.device)
    with Recorder(body) as recorder:
        decode(body, positions, attention, inputs_embeds=zeros)
    return attention.sinks, reason_without_graphs(body, recorder)


def _norm_shift(body: Any) -> float:
    """What the model's norms add to their weights."""
    shift = weight_shift(body.norm) if hasattr(body, "norm") else None
    if shift is None:
        raise ConfigError(
            f"{type(body).__name__} does not end with a root-mean-square norm, which MTP layers need; choose another "
            "speculative.algorithm"
        )
    return shift
