"""Multi-token prediction (MTP) layers, which some targets' checkpoints contain for drafting.

A layer reads the embedding of a token and the state before it, each normed, and is otherwise one of the target's own
decoder layers: of a class of MODELS, or of transformers' modules. Its normed output is the next state and the input of
the output matrix, which is the target's, or a layer's own.

`mtp_layouts` has the names of the tensors. Copies of the target's matrices are skipped. With one layer, every draft
step uses it; with several, step k uses layer k. The first state is the target's hidden state after its final norm, as
in SGLang and transformers (vLLM passes MiMo's layer the state before that norm). Step-3.5 passes all states before the
norms, as in SGLang and vLLM. `specray.spec_decode.mtp` grows trees with these layers.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specray.errors import ConfigError, first_of
from specray.layers.module import Layer
from specray.layers.moe import reason_without_graphs
from specray.layers.rotary import RotaryEmbedding
from specray.models.causal_lm import CausalLM
from specray.models.fused import StateLayers, fused_decoder, tree_network
from specray.models.heads.mtp_layouts import Layout, find_layout, require_layout
from specray.models.heads.parts import Layers, Linear, Norm
from specray.models.heads.served import EagleHead, ServedParts
from specray.models.loading import Loader
from specray.models.registry import MODELS, is_native, load_config, shape_of
from specray.models.target_matrices import TargetMatrices
from specray.models.target_model import BEFORE_FINAL_NORM, ModelShape
from specray.models.weights import WeightReader
from specray.ops.attention import Attend
from specray.ops.cpu.attention import PagedAttend
from specray.ops.layer_attention import LayerAttention

TRAINED = 0  # the number of the layer that SpecRay trains, in MiMo's layout
# Copies of the target's matrices and tables, and what chooses the keys of sparse attention, which is not computed.
_UNREAD = re.compile(r".*\.(?:(?:embed_tokens|shared_head(?:\.head)?)\.weight|rotary_emb\.inv_freq|indexer\..+)")


def holds_mtp_layers(folder: Path, load_format: str) -> bool:
    """Whether the checkpoint has MTP layers."""
    with WeightReader(folder, load_format) as reader:
        return find_layout(reader.names()) is not None


def check_mtp_files(folder: Path, load_format: str, target: ModelShape) -> None:
    """ConfigError if the checkpoint has no MTP layers, or they do not fit the target. Reads no weights."""
    _check_target(folder, load_config(folder), target)
    with WeightReader(folder, load_format) as reader:
        require_layout(folder, reader.names())


def load_mtp_layers(folder: Path, load_format: str, shared: TargetMatrices) -> "MtpLayers":
    """Load all MTP layers in `folder`. ConfigError if there are none, or if they do not fit the target.

    The ranks of `shared` share a layer as they share the target's own. One of transformers' modules is whole on each.
    """
    config = load_config(folder)
    loader = Loader(
        folder,
        load_format,
        shared.dtype,
        shared.device,
        quantization=shared.quantization,
        group=shared.group if is_native(config) else None,
        moe_runner_backend=shared.moe_runner_backend,
    )
    try:
        layout, numbers = require_layout(folder, loader.names())
        layers = MtpLayers(config, loader, shared, layout, numbers)
        _check_rest(loader, layout, numbers)
        return layers
    finally:
        loader.close()


def trained_settings(num_target_layers: int) -> dict[str, Any]:
    """The settings in config.json, beside `common_settings`, of a layer that SpecRay trains."""
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "attention_bias": True,
        "num_hidden_layers": num_target_layers,
        "num_nextn_predict_layers": 1,
    }


class MtpParts(Protocol):
    """Makes the parts of one layer; see `Parts`."""

    @property
    def shape(self) -> ModelShape: ...

    def norm(self, name: str, size: int) -> Norm: ...

    def linear(self, name: str, shape: tuple[int, int]) -> Linear: ...

    def layers(self, prefixes: Sequence[str], width: int, norms_input: bool = False) -> Layers: ...


class MtpLayer:
    """The network of one layer."""

    def __init__(self, layout: Layout, number: int, parts: MtpParts) -> None:
        size = parts.shape.hidden_size
        self.state_first = layout.state_first
        self.states_are_normed = layout.states_are_normed
        self._masks_first = layout.masks_first
        self.embed_norm = parts.norm(f"{layout.at(layout.embed_norm, number)}.weight", size)
        self.state_norm = parts.norm(f"{layout.at(layout.state_norm, number)}.weight", size)
        self.project = parts.linear(f"{layout.at(layout.project, number)}.weight", (size, 2 * size))
        self.layers = parts.layers([layout.prefix(number)], size, norms_input=True)
        self.out_norm = parts.norm(f"{layout.at(layout.out_norm, number)}.weight", size)

    def __call__(self, embeds: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The next states [..., T, H] from embeddings and states; `positions` int64 [T] are those of the states."""
        x = self.project(self.joined(embeds, states, positions))
        output = self.layers(x, x, positions, attend)
        return self.out_norm(output) if self.states_are_normed else output

    def normed(self, states: Tensor) -> Tensor:
        """What the output matrix reads of the next states."""
        return states if self.states_are_normed else self.out_norm(states)

    def joined(self, embeds: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """The input [..., T, 2 * H] of the projection."""
        if self._masks_first:
            embeds = embeds.masked_fill((positions == 0)[:, None], 0.0)
        pair = self.state_norm(states), self.embed_norm(embeds)
        return torch.cat(pair if self.state_first else pair[::-1], -1)


class MtpLayers:
    """All layers of a checkpoint, and what they share. Layer i keeps its KV in layer i of the drafter's pool."""

    def __init__(
        self, config: PretrainedConfig, loader: Loader, shared: TargetMatrices, layout: Layout, numbers: list[int]
    ) -> None:
        _check_target(loader.folder, config, shared.shape)
        self.shared = shared
        self.layers: list[MtpLayer] = []
        self.attention: list[LayerAttention] = []  # of each layer
        self.reason_without_graphs: str | None = None
        self.outputs: list[Tensor] = []  # of each layer, [vocab, hidden]; none: all use the target's output matrix
        self.aux_hidden_state_layer = shared.shape.num_layers if layout.states_are_normed else BEFORE_FINAL_NORM
        if layout.output is not None:
            size = shared.shape.vocab_size, shared.shape.hidden_size
            self.outputs = [loader.tensor(f"{layout.at(layout.output, number)}.weight", size) for number in numbers]
        if is_native(config):
            self._add_native(config, loader, layout, numbers)
        else:
            self._add_modules(config, loader, layout, numbers)

    def _add_native(self, config: PretrainedConfig, loader: Loader, layout: Layout, numbers: Sequence[int]) -> None:
        self.shape = shape_of(config, loader.group)
        rotary = _architecture(config).rotary_of(config, loader, self.shared.max_positions)
        for kv_layer, number in enumerate(numbers):
            parts = _TargetParts(config, self.shape, rotary, loader, kv_layer)
            self.layers.append(MtpLayer(layout, number, parts))
            self.attention.append(LayerAttention())
            self.reason_without_graphs = self.reason_without_graphs or parts.reason_without_graphs

    def _add_modules(self, config: Any, loader: Loader, layout: Layout, numbers: Sequence[int]) -> None:
        from specray.models.transformers_mtp import TransformersParts  # imports transformers' models

        types, names = getattr(config, "mtp_layer_types", None) or [], loader.names()
        for kv_layer, number in enumerate(numbers):
            parts = TransformersParts(
                config,
                self.shared.shape,
                types[kv_layer] if kv_layer < len(types) else layout.layer_type,
                loader,
                layout.prefix(number),
                layout.parts(number, names),
                kv_layer,
                self.shared.max_positions,
            )
            self.layers.append(MtpLayer(layout, number, parts))
            self.attention.append(parts.attention)
            self.reason_without_graphs = self.reason_without_graphs or parts.reason_without_graphs
        widest = max(self.attention, key=lambda layer: layer.num_kv_heads * layer.head_dim)
        self.shape = replace(
            self.shared.shape,
            num_layers=len(numbers),
            eps=config.rms_norm_eps,
            num_local_heads=widest.num_heads,
            num_local_kv_heads=widest.num_kv_heads,
            head_dim=widest.head_dim,
            num_shared_kv_layers=0,
            num_state_layers=0,
            states=(),
        )


class _MtpDrafter(EagleHead):
    """The first `count` of the layers, each with its output matrix; `token_map` as in Eagle2Head."""

    def __init__(self, layers: MtpLayers, count: int, token_map: Tensor | None = None) -> None:
        self._layers = layers.layers[:count]
        shape, shared = replace(layers.shape, num_layers=len(self._layers)), layers.shared
        own = [shared.head(token_map, output) for output in layers.outputs[:count]]
        self._heads = own or [shared.head(token_map)] * count
        aux_hidden_state_layers = (layers.aux_hidden_state_layer,)
        super().__init__(shape, shared, aux_hidden_state_layers, token_map, shared.embedding(), self._heads[0])
        self.layer_attention = layers.attention[:count]
        self.reason_without_graphs = layers.reason_without_graphs

    def _logits_of(self, layer: int, states: Tensor) -> Tensor:
        """See `logits`, from the next states [n, H] of a layer."""
        return self._heads[layer].shard(self._layers[layer].normed(states))


class MtpHead(_MtpDrafter):
    """One layer whose output is its next state."""

    extends_in_network = False  # it does not mask position 0, where no node of a tree lies

    def __init__(self, layers: MtpLayers, token_map: Tensor | None = None) -> None:
        super().__init__(layers, 1, token_map)
        (layer,) = self._layers
        self.network = tree_network(
            layer.layers.fused,
            self._embedding,
            StateLayers(layer.embed_norm, layer.state_norm, layer.project, layer.state_first),
            layer.out_norm,
            self.vocab_head,
            self.draft_token_ids,
            self.vocab_size,
            state_is_normed=layer.states_are_normed,
            output_is_normed=layer.states_are_normed,
        )

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self._layers[0](self._embedding(token_ids), states, positions, attend)

    def logits(self, output: Tensor) -> Tensor:
        return self._logits_of(0, output)


class MtpStack(_MtpDrafter):
    """Several layers, each for its own draft step.

    Layer k turns the state of position i and token i + k + 1 into the state that predicts token i + k + 2. All layers
    process a token as soon as it is known: at position p, layer k is at position i = p - k. So a tree's node carries
    the states of all layers that are used below it, the next one's first: [T, layers left, H]. `network` is None,
    because each level runs other layers.
    """

    def read(self, layer: int, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H] of one layer; `states` [T, H] are the previous layer's one position earlier."""
        shifted = (positions - layer).clamp(min=0)  # a prompt may have fewer tokens than there are layers
        return self._layers[layer](self._embedding(token_ids), states, shifted, attend)

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Outputs [T, layers left, H] of the last layers at tree nodes."""
        first = len(self._layers) - states.shape[1]
        outputs = [
            self.read(first + place, token_ids, states[:, place], positions, attend) for place in range(states.shape[1])
        ]
        return torch.stack(outputs, 1)

    def recur(self, output: Tensor) -> Tensor:
        """Each layer's output is the next layer's state."""
        return output[:, :-1]

    def logits(self, output: Tensor) -> Tensor:
        return self._logits_of(len(self._layers) - output.shape[1], output[:, 0])


class _TargetParts(ServedParts):
    """Parts of a layer that is one of the target's own decoder layers, with its KV in layer `kv_layer` of the pool."""

    def __init__(
        self, config: PretrainedConfig, shape: ModelShape, rotary: RotaryEmbedding, loader: Loader, kv_layer: int
    ) -> None:
        super().__init__(shape, rotary, loader)
        self._config = config
        self._kv_layer = kv_layer
        self.reason_without_graphs: str | None = None  # of the layers that were made

    def layers(self, prefixes: Sequence[str], width: int, norms_input: bool = False) -> Layers:
        assert width == self.shape.hidden_size
        assert norms_input
        (prefix,) = prefixes
        index = self._config.num_hidden_layers + self._kv_layer
        block = _architecture(self._config).layer(self._config, self._loader, prefix, index, self._kv_layer)
        self.reason_without_graphs = reason_without_graphs(block)
        return _TargetLayer(block, self.rotary, self.shape.eps, self._kv_layer)


class _TargetLayer:
    """Implements `Layers`."""

    def __init__(self, block: Layer, rotary: RotaryEmbedding, eps: float, kv_layer: int) -> None:
        self._block = block
        self._rotary = rotary
        self._kv_layer = kv_layer
        self.fused = fused_decoder([block], rotary, eps)

    def __call__(self, x: Tensor, residual: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if self.fused is None or not isinstance(attend, PagedAttend):
            return self._block(residual, *self._rotary.at(positions), attend)
        stream = x.to(torch.float32, copy=True)
        self.fused(stream, positions, attend, first_layer=self._kv_layer)
        return stream.to(x.dtype)


def _architecture(config: PretrainedConfig) -> type[CausalLM]:
    return MODELS[(config.architectures or [""])[0]]


def _check_target(folder: Path, config: PretrainedConfig, target: ModelShape) -> None:
    for name in ("vocab_size", "hidden_size"):
        if getattr(config, name) != getattr(target, name):
            raise ConfigError(
                f"{folder / 'config.json'}: {name}={getattr(config, name)}, but the target's is "
                f"{getattr(target, name)}; MTP layers work with the target they were trained with: set "
                "speculative.draft_model_path to a checkpoint of this target, or to null for the target's own"
            )


def _check_rest(loader: Loader, layout: Layout, numbers: Sequence[int]) -> None:
    """ConfigError if a layer has tensors that nothing has read, although they change what it computes."""
    unused = [
        name
        for name in loader.unused()
        if any(layout.owns(name, number) for number in numbers) and not _UNREAD.fullmatch(name)
    ]
    if unused:
        raise ConfigError(
            f"{loader.path(unused[0])}: {len(unused)} tensors are not part of an MTP layer with this config.json: "
            f"{first_of(unused, 4)}; the weights and the config do not belong together"
        )
