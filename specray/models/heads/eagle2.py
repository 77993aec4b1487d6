"""EAGLE-1 and EAGLE-2 heads, which differ only in training.

`fc` of [embedding, state], then a layer without an input norm, then the target's output matrix. The first state is the
target's hidden state after its final norm.
"""

from typing import Any

import torch
from torch import Tensor

from specray.errors import ConfigError
from specray.models.fused import StateLayers, tree_network
from specray.models.heads.eagle_files import HeadConfig, TensorNames
from specray.models.heads.parts import Parts
from specray.models.heads.served import EagleHead, ServedParts, full_output, load_embedding, load_rotary
from specray.models.llama_shape import LlamaShape
from specray.models.loading import Loader
from specray.models.target_matrices import TargetMatrices
from specray.ops.attention import Attend
from specray.ops.layer_attention import LayerAttention


def trained_settings(bias: bool) -> dict[str, Any]:
    """The settings in config.json, beside `common_settings`, of a head that SpecRay trains; `bias`: that of fc."""
    return {"architectures": ["LlamaForCausalLMEagle"], "bias": bias}


class Eagle2:
    """The network."""

    def __init__(self, config: HeadConfig, names: TensorNames, parts: Parts) -> None:
        size = parts.shape.hidden_size
        weight, bias = names.fusion(config)
        self.fc = parts.linear(weight, (size, 2 * size), bias)
        self.layers = parts.layers(names.layers(parts.shape.num_layers), size)

    def __call__(self, embeds: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The next states, which are also what the output matrix reads."""
        x = self.fc(torch.cat((embeds, states), -1))
        return self.layers(x, x, positions, attend)


class Eagle2Head(EagleHead):
    """The network, served."""

    def __init__(
        self,
        config: HeadConfig,
        shape: LlamaShape,
        loader: Loader,
        names: TensorNames,
        shared: TargetMatrices,
        token_map: Tensor | None = None,
    ) -> None:
        size = shape.hidden_size
        if size != shared.shape.hidden_size:
            raise ConfigError(
                f"{loader.folder}: an EAGLE-2 head of hidden_size={size} cannot use the output matrix of a target of "
                f"{shared.shape.hidden_size}; choose a head made for this target"
            )
        if config.num_draft_ids != shape.vocab_size:
            raise ConfigError(
                f"{loader.folder / 'config.json'}: a vocabulary of {config.num_draft_ids} tokens is not supported in "
                "EAGLE-2 heads; choose one with the target's vocabulary and set speculative.token_map"
            )
        output = shared.head(token_map, full_output(shape, loader, names))
        embedding = load_embedding(shape, loader, names, shared)
        super().__init__(shape, shared, (shared.shape.num_layers,), token_map, embedding, output)
        self.layer_attention = [LayerAttention(window=config.window)] * shape.num_layers
        rotary = load_rotary(config, shape, loader, shared.max_positions)
        self._net = Eagle2(config, names, ServedParts(shape, rotary, loader))
        states = StateLayers(None, None, self._net.fc)
        self.network = tree_network(
            self._net.layers.fused, embedding, states, None, output, self.draft_token_ids, self.vocab_size
        )

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self._net(self._embedding(token_ids), states, positions, attend)
