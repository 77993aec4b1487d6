"""EAGLE-3 heads.

Found in checkpoints rather than in papers: the norm over all aux hidden states before `fc` is stored as `input_norm`.
"""

import torch
from torch import Tensor

from specray.layers.linear import VocabHead
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.models.aux_fusion import AuxFusion
from specray.models.eagle import HeadForward
from specray.models.eagle_files import HeadConfig, TensorNames, read_draft_vocabulary
from specray.models.eagle_layers import EagleLayers
from specray.models.eagle_parts import full_head, load_embedding, load_rotary, target_ids
from specray.models.fused import StateLayers, tree_network
from specray.models.llama_shape import LlamaShape
from specray.models.loading import HEAD, Loader
from specray.models.target_matrices import TargetMatrices
from specray.ops.attention import Attend, AttentionBackend
from specray.ops.cpu.attention import PagedAttention
from specray.ops.gpu import uses_triton
from specray.ops.grouped_weight import Weight


class Eagle3Head:
    """EAGLE-3: the first state is `fc` of several aux hidden states; the layer reads [norm(embedding), norm(state)]."""

    reason_without_graphs: str | None = None
    has_mask = False  # for rows whose token is not known

    def __init__(
        self, config: HeadConfig, shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices
    ) -> None:
        size, width, layer, eps = shape.hidden_size, shared.shape.hidden_size, names.layer, shape.eps
        self.aux_hidden_state_layers = config.aux_hidden_state_layers(loader.folder, shared.shape.num_layers)
        self.num_layers, self.num_heads, self.num_kv_heads = shape.num_layers, shape.num_heads, shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.dtype, self.window = shared.dtype, config.window
        self.vocab_size = config.num_draft_ids
        ids = read_draft_vocabulary(loader, names, self.vocab_size, shape.vocab_size)
        self.draft_token_ids = None if ids is None else ids.to(shared.device)
        self._embedding = load_embedding(shape, loader, names, shared)
        self._uses_triton = uses_triton(shared.device)
        count = len(self.aux_hidden_state_layers)
        self.fuse = AuxFusion(config, shape, loader, names, count, width, self.dtype)
        self._token_norm = RMSNorm(loader.tensor(layer + "input_layernorm.weight", (size,)), eps)
        self._state_norm = RMSNorm(loader.tensor(layer + "hidden_norm.weight", (size,)), eps)
        self._normed_residual = config.norm_before_residual
        rotary = load_rotary(config, shape, loader, shared.max_positions)
        self._layers = EagleLayers(shape, loader, names, 2 * size, rotary)
        self._norm = RMSNorm(loader.tensor(names.of_plain("norm.weight"), (size,)), eps)
        self._normed_output = config.norm_output
        self._head, own = _output_matrix(self.vocab_size, ids, shape, loader, names, shared)
        states = StateLayers(self._token_norm, self._state_norm, None, residual_is_normed=self._normed_residual)
        self.network = tree_network(
            self._layers.fused,
            self._embedding,
            states,
            self._norm,
            self._head,
            self.draft_token_ids,
            self.vocab_size,
            state_is_normed=self._normed_output,
            quantised_output=own,
            fusion=self.fuse.packed,
        )

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x, normed = self._joined(token_ids, states)
        return self._layers(x, states if normed is None else normed, positions, attend)

    def _joined(self, token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """([norm of the embeddings, norm of the states], the latter again if it is the layers' residual)."""
        if self._uses_triton and self._embedding.group.size == 1:
            from specray.ops.gpu import layers

            norms, eps = (self._token_norm.weight, self._state_norm.weight), self._state_norm.eps
            weight = self._embedding.weight
            return layers.join_normed(token_ids, weight, states, norms, eps, keeps=self._normed_residual)
        normed = self._state_norm(states)
        x = torch.cat((self._token_norm(self._embedding(token_ids)), normed), -1)
        return x, normed if self._normed_residual else None

    def step_forward(self, attention: AttentionBackend) -> HeadForward:
        if self.network is not None and isinstance(attention, PagedAttention):
            return self.network.extend
        return self

    def recur(self, output: Tensor) -> Tensor:
        return self._norm(output) if self._normed_output else output

    def logits(self, output: Tensor) -> Tensor:
        return self._head(self._norm(output))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return target_ids(self.draft_token_ids, draft_ids)


def _output_matrix(
    num_ids: int, ids: Tensor | None, shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices
) -> tuple[VocabHead, Weight | None]:
    """The output matrix over the draft vocabulary of `num_ids`, whose target ids are `ids` (None: the same).

    A full one that the checkpoint leaves out is the target's. Also the weights of a quantised one of the head's own.
    """
    if num_ids == shape.vocab_size and ids is None and shape.hidden_size == shared.shape.hidden_size:
        return shared.head(None, full_head(shape, loader, names)), None
    own = loader.weight(names.of_plain(HEAD), (num_ids, shape.hidden_size))
    head = VocabHead(own, num_ids, RankGroup(), loader.quantization)
    return head, own if loader.quantization in ("int8", "int4") else None
