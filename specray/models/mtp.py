"""Multi-token prediction (MTP) layers, which some targets' checkpoints contain for drafting.

A layer reads the embedding of a token and the state before it, each normed, and is otherwise one of the target's own
decoder layers. Its normed output is the next state and the input of the target's output matrix.

Two layouts are supported: MiMo's (`model.mtp_layers.0.*`: [state; embedding], with a zero embedding at the first
position) and DeepSeek's NextN (`model.layers.L.*` after the target's L layers: [embedding; state]). The copies of the
target's matrices in both are skipped. With one layer, every draft step uses it; with several, step k uses layer k. The
first state is the target's hidden state after its final norm, as in SGLang and transformers (vLLM passes MiMo's layer
the state before that norm). `specray.spec_decode.mtp` grows trees with these layers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specray.errors import ConfigError, first_of
from specray.layers.linear import ColumnParallelLinear
from specray.layers.moe import reason_without_graphs
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.layers.rotary import RotaryEmbedding
from specray.models.eagle import HeadForward
from specray.models.fused import StateLayers, fused_decoder, tree_network
from specray.models.loading import Loader
from specray.models.registry import MODELS, load_config, shape_of
from specray.models.target_matrices import TargetMatrices
from specray.models.target_model import ModelShape
from specray.models.weights import WeightReader
from specray.ops.attention import Attend, AttentionBackend
from specray.ops.cpu.attention import PagedAttend
from specray.ops.cpu.trees import TreeNetwork


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of a layer's parts in one family of models, and how they are combined."""

    layers: str  # before and after a layer's number
    embed_norm: str
    state_norm: str
    project: str
    out_norm: str
    state_first: bool  # of the two inputs of `project`
    masks_first: bool  # the embedding at position 0 is replaced by zeros

    def numbers(self, names: Sequence[str]) -> list[int]:
        """Numbers of the layers whose projection is among the tensors `names`."""
        pattern = re.compile(re.escape(self.layers).replace("\\*", r"(\d+)") + re.escape(f".{self.project}.weight"))
        return sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name)))


MIMO = Layout(
    "model.mtp_layers.*",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    state_first=True,
    masks_first=True,
)
NEXTN = Layout("model.layers.*", "enorm", "hnorm", "eh_proj", "shared_head.norm", state_first=False, masks_first=False)
_COPIES = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")


def holds_mtp_layers(folder: Path, load_format: str) -> bool:
    """Whether the checkpoint has MTP layers."""
    with WeightReader(folder, load_format) as reader:
        return any(layout.numbers(list(reader.names())) for layout in (MIMO, NEXTN))


def check_mtp_files(folder: Path, load_format: str, target: ModelShape) -> None:
    """ConfigError if the checkpoint has no MTP layers, or they do not fit the target. Reads no weights."""
    _check_target(folder, shape_of(load_config(folder), RankGroup()), target)
    with WeightReader(folder, load_format) as reader:
        _layout_of(folder, list(reader.names()))


def load_mtp_layers(folder: Path, load_format: str, shared: TargetMatrices) -> "MtpLayers":
    """Load all MTP layers in `folder`, not sharded. ConfigError if there are none, or if they do not fit the target."""
    config = load_config(folder)
    loader = Loader(
        folder,
        load_format,
        shared.dtype,
        shared.device,
        quantization=shared.quantization,
        moe_runner_backend=shared.moe_runner_backend,
    )
    try:
        layout, numbers = _layout_of(folder, loader.names())
        layers = MtpLayers(config, loader, shared, layout, numbers)
        _check_rest(loader, layout, numbers)
        return layers
    finally:
        loader.close()


def _layout_of(folder: Path, names: list[str]) -> tuple[Layout, list[int]]:
    """The layout of the MTP layers among a checkpoint's tensors, and the layers' numbers."""
    found = [(layout, numbers) for layout in (MIMO, NEXTN) if (numbers := layout.numbers(names))]
    if len(found) != 1:
        raise ConfigError(
            f"{folder} holds no MTP layers: expected tensors {MIMO.layers}.{MIMO.project}.weight or "
            f"{NEXTN.layers}.{NEXTN.project}.weight; set speculative.draft_model_path to a checkpoint that has "
            "them, or choose another speculative.algorithm"
        )
    return found[0]


class MtpLayers:
    """The layers and what they share. Layer i keeps its KV in layer i of the drafter's pool."""

    def __init__(
        self, config: PretrainedConfig, loader: Loader, shared: TargetMatrices, layout: Layout, numbers: list[int]
    ) -> None:
        self.shape = shape = shape_of(config, loader.group)
        _check_target(loader.folder, shape, shared.shape)
        architecture = MODELS[(config.architectures or [""])[0]]
        rotary = architecture.rotary_of(config, loader, shared.max_positions)
        self.dtype = shared.dtype
        self.aux_hidden_state_layers: tuple[int, ...] = (shared.shape.num_layers,)
        self.shared = shared
        self.layers = [
            MtpLayer(config, shape, loader, layout, number, place, rotary) for place, number in enumerate(numbers)
        ]


class MtpLayer:
    """One layer: [T, H] from embeddings and states [T, H]."""

    def __init__(
        self,
        config: PretrainedConfig,
        shape: ModelShape,
        loader: Loader,
        layout: Layout,
        number: int,
        kv_layer: int,
        rotary: RotaryEmbedding,
    ) -> None:
        prefix, size = layout.layers.replace("*", str(number)) + ".", shape.hidden_size

        def norm(name: str) -> RMSNorm:
            return RMSNorm(loader.tensor(f"{prefix}{name}.weight", (size,)), shape.eps)

        self._layout = layout
        self._embed_norm, self._state_norm = norm(layout.embed_norm), norm(layout.state_norm)
        weight = loader.tensor(f"{prefix}{layout.project}.weight", (size, 2 * size))
        self._project = ColumnParallelLinear(weight, quantization=loader.quantization)
        architecture = MODELS[(config.architectures or [""])[0]]
        index = config.num_hidden_layers + kv_layer
        self._block = architecture.layer(config, loader, prefix, index, kv_layer)
        self.fused = fused_decoder([self._block], rotary, shape.eps)
        self.reason_without_graphs = reason_without_graphs(self._block)
        self._kv_layer = kv_layer
        self.out_norm = norm(layout.out_norm)
        self._rotary = rotary

    @property
    def state_layers(self) -> StateLayers:
        """The combination of embeddings and states, without masking position 0, where no node of a tree lies."""
        return StateLayers(self._embed_norm, self._state_norm, self._project, self._layout.state_first)

    def __call__(self, embeds: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The next states; `positions` int64 [T] are those of the states."""
        if self._layout.masks_first:
            embeds = embeds.masked_fill((positions == 0)[:, None], 0.0)
        pair = self._state_norm(states), self._embed_norm(embeds)
        x = self._project(torch.cat(pair if self._layout.state_first else pair[::-1], -1))
        if self.fused is None or not isinstance(attend, PagedAttend):
            return self.out_norm(self._block(x, *self._rotary.at(positions), attend))
        stream = x.to(torch.float32, copy=True)
        self.fused(stream, positions, attend, first_layer=self._kv_layer)
        return self.out_norm(stream.to(x.dtype))


class _Drafting:
    """The common parts of MtpHead and MtpStack."""

    def __init__(self, layers: MtpLayers, token_map: Tensor | None) -> None:
        shape = layers.shape
        self.aux_hidden_state_layers = layers.aux_hidden_state_layers
        self.num_heads, self.num_kv_heads = shape.num_local_heads, shape.num_local_kv_heads
        self.head_dim, self.dtype, self.hidden_size = shape.head_dim, layers.dtype, shape.hidden_size
        self.draft_token_ids = None if token_map is None else token_map.to(layers.shared.device, torch.int64)
        self.vocab_size = shape.vocab_size if token_map is None else len(token_map)
        self._head = layers.shared.head(self.draft_token_ids)
        self._embed = layers.shared.embedding()
        reasons = (layer.reason_without_graphs for layer in layers.layers)
        self.reason_without_graphs = next(filter(None, reasons), None)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        return aux_hidden_states.to(self.dtype)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        ids = draft_ids.to(torch.int64)
        return ids if self.draft_token_ids is None else self.draft_token_ids[ids]


class MtpHead(_Drafting):
    """One layer whose output is its next state. Implements `specray.models.eagle.EagleHead`."""

    num_layers = 1
    window: int | None = None

    def __init__(self, layers: MtpLayers, token_map: Tensor | None = None) -> None:
        super().__init__(layers, token_map)
        self._layer = layer = layers.layers[0]
        self.network = tree_network(
            layer.fused,
            self._embed,
            layer.state_layers,
            layer.out_norm,
            self._head,
            self.draft_token_ids,
            self.vocab_size,
            state_is_normed=True,
            output_is_normed=True,
        )

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self._layer(self._embed(token_ids), states, positions, attend)

    def step_forward(self, attention: AttentionBackend) -> HeadForward:  # noqa: ARG002
        return self

    def recur(self, output: Tensor) -> Tensor:
        return output

    def logits(self, output: Tensor) -> Tensor:
        return self._head(output)


class MtpStack(_Drafting):
    """Several layers, each for its own draft step.

    Layer k turns the state of position i and token i + k + 1 into the state that predicts token i + k + 2. All layers
    process a token as soon as it is known: at position p, layer k is at position i = p - k. So a tree's node carries
    the states of all layers that are used below it, the next one's first: [T, layers left, H].
    """

    def __init__(self, layers: MtpLayers, count: int, token_map: Tensor | None = None) -> None:
        super().__init__(layers, token_map)
        self._layers = layers.layers[:count]
        self.network: TreeNetwork | None = None  # each level runs other layers

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def read(self, layer: int, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H] of one layer; `states` [T, H] are the previous layer's one position earlier."""
        shifted = (positions - layer).clamp(min=0)  # a prompt may have fewer tokens than there are layers
        return self._layers[layer](self._embed(token_ids), states, shifted, attend)

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
        return self._head(output[:, 0])


def _check_target(folder: Path, ours: ModelShape, target: ModelShape) -> None:
    for name in ("vocab_size", "hidden_size"):
        if getattr(ours, name) != getattr(target, name):
            raise ConfigError(
                f"{folder / 'config.json'}: {name}={getattr(ours, name)}, but the target's is {getattr(target, name)}; "
                "MTP layers work with the target they were trained with: set speculative.draft_model_path to a "
                "checkpoint of this target, or to null for the target's own"
            )


def _check_rest(loader: Loader, layout: Layout, numbers: list[int]) -> None:
    """ConfigError if a layer has tensors that nothing has read, other than copies of the target's."""
    prefixes = tuple(layout.layers.replace("*", str(number)) + "." for number in numbers)
    unread = [name for name in loader.unread() if name.startswith(prefixes) and not name.endswith(_COPIES)]
    if unread:
        raise ConfigError(
            f"{loader.path(unread[0])}: {len(unread)} tensors are not part of an MTP layer with this config.json: "
            f"{first_of(unread, 4)}; the weights and the config do not belong together"
        )
