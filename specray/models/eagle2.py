"""EAGLE-1 and EAGLE-2 heads."""

import torch
from torch import Tensor

from specray.errors import ConfigError
from specray.models.eagle import HeadForward
from specray.models.eagle_files import HeadConfig, TensorNames
from specray.models.eagle_layers import EagleLayers
from specray.models.eagle_parts import full_head, fusion_linear, load_embedding, load_rotary, target_ids
from specray.models.fused import StateLayers, tree_network
from specray.models.llama_shape import LlamaShape
from specray.models.loading import Loader
from specray.models.target_matrices import TargetMatrices
from specray.ops.attention import Attend, AttentionBackend
from specray.ops.cpu.attention import PagedAttention


class Eagle2Head:
    """EAGLE-1 and -2: `fc` of [embedding, state], then a layer without an input norm, then the target's output matrix.

    The first state is the target's hidden state after its final norm.
    """

    reason_without_graphs: str | None = None

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
        self.aux_hidden_state_layers: tuple[int, ...] = (shared.shape.num_layers,)
        self.num_layers, self.num_heads, self.num_kv_heads = shape.num_layers, shape.num_heads, shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.dtype, self.window = shared.dtype, config.window
        self.draft_token_ids = None if token_map is None else token_map.to(shared.device, torch.int64)
        self.vocab_size = shape.vocab_size if token_map is None else len(token_map)
        self._embedding = load_embedding(shape, loader, names, shared)
        self._fc = fusion_linear(config, loader, names, 2 * size, size)
        rotary = load_rotary(config, shape, loader, shared.max_positions)
        self._layers = EagleLayers(shape, loader, names, size, rotary)
        self._head = shared.head(self.draft_token_ids, full_head(shape, loader, names))
        states = StateLayers(None, None, self._fc)
        self.network = tree_network(
            self._layers.fused, self._embedding, states, None, self._head, self.draft_token_ids, self.vocab_size
        )

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        return aux_hidden_states.to(self.dtype)

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self._fc(torch.cat((self._embedding(token_ids), states), -1))
        return self._layers(x, x, positions, attend)

    def step_forward(self, attention: AttentionBackend) -> HeadForward:
        if self.network is not None and isinstance(attention, PagedAttention):
            return self.network.extend
        return self

    def recur(self, output: Tensor) -> Tensor:
        return output

    def logits(self, output: Tensor) -> Tensor:
        return self._head(output)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return target_ids(self.draft_token_ids, draft_ids)
