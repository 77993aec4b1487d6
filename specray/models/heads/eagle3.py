"""EAGLE-3 heads, and P-EAGLE heads, which are EAGLE-3 heads with a mask (arXiv:2602.01469).

The first state is `fc` of several aux hidden states; the first layer reads [norm(embedding), norm(state)]. Found in
checkpoints rather than in papers: the norm over all aux hidden states before `fc` is stored as `input_norm`.

P-EAGLE predicts several positions in one forward. A position whose token and hidden states are not known yet reads the
mask instead: the embedding of `ptd_token_id` and a learned value of the aux hidden states, `mask_hidden`. The layout is
that of vLLM's parallel drafting (vllm-project/vllm#32887).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specray.layers.linear import ColumnParallelLinear
from specray.layers.norm import NormOfParts, RMSNorm
from specray.models.fused import StateLayers, tree_network
from specray.models.heads.eagle_files import HeadConfig, TensorNames, read_draft_vocabulary
from specray.models.heads.parts import Parts
from specray.models.heads.served import EagleHead, ServedParts, load_embedding, load_rotary, output_matrix
from specray.models.llama_shape import LlamaShape
from specray.models.loading import Loader
from specray.models.target_matrices import TargetMatrices
from specray.ops.attention import Attend
from specray.ops.cpu.matrix import PackedMatrix
from specray.ops.cpu.packed_network import Fusion
from specray.ops.device_ops import ops_on
from specray.ops.layer_attention import LayerAttention

MASK = "mask_hidden"


def trained_settings(
    num_draft_ids: int, aux_hidden_state_layers: Sequence[int], mask_token_id: int | None
) -> dict[str, Any]:
    """The settings in config.json, beside `common_settings`, of a head that SpecRay trains.

    `mask_token_id`: of a P-EAGLE head.
    """
    mask = {} if mask_token_id is None else {"parallel_drafting": True, "ptd_token_id": mask_token_id}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **mask,
        "draft_vocab_size": num_draft_ids,
        "fc_norm": True,
        # Public heads list layer outputs: the input of layer l is the output of layer l - 1.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in aux_hidden_state_layers],
            "use_aux_hidden_state": True,
        },
    }


class Eagle3:
    """The network."""

    def __init__(self, config: HeadConfig, names: TensorNames, parts: Parts, count: int, width: int) -> None:
        """`count` aux hidden states of `width` columns."""
        size, first = parts.shape.hidden_size, names.layer
        self.aux_norms: list[Callable[[Tensor], Tensor]] = []
        if config.norm_before_fc:
            name = names.of_plain("input_norm.weight", "norm_before_fc.weight")
            self.aux_norms.append(parts.norm(name, count * width))
        if config.fc_norm:
            each = [names.of_plain(f"fc_norm.{index}.weight") for index in range(count)]
            self.aux_norms.append(parts.norm_of_parts(each, width))
        has_fc = config.use_aux_hidden_state or names.has("fc.weight") or width != size
        weight, bias = names.fusion(config)
        self.fc = parts.linear(weight, (size, count * width), bias) if has_fc else None
        self.token_norm = parts.norm(first + "input_layernorm.weight", size)
        self.state_norm = parts.norm(first + "hidden_norm.weight", size)
        self.layers = parts.layers(names.layers(parts.shape.num_layers), 2 * size)
        self.norm = parts.norm(names.of_plain("norm.weight"), size)
        self.residual_is_normed = config.norm_before_residual
        self.state_is_normed = config.norm_output

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """The first states, from aux hidden states [..., count * width]."""
        states = self.normed(aux_hidden_states)
        return states if self.fc is None else self.fc(states)

    def normed(self, aux_hidden_states: Tensor) -> Tensor:
        """The input of fc."""
        for norm in self.aux_norms:
            aux_hidden_states = norm(aux_hidden_states)
        return aux_hidden_states

    def __call__(self, embeds: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last layer's output."""
        return self.layers(*self.joined(embeds, states), positions, attend)

    def joined(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """(input [..., 2 * H] of the layers, their residual stream)."""
        normed = self.state_norm(states)
        x = torch.cat((self.token_norm(embeds), normed), -1)
        return x, normed if self.residual_is_normed else states

    def recur(self, output: Tensor) -> Tensor:
        """The next states."""
        return self.norm(output) if self.state_is_normed else output


class Eagle3Head(EagleHead):
    """The network, served."""

    has_mask = False  # whether there is a state for rows whose token is not known

    def __init__(
        self, config: HeadConfig, shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices
    ) -> None:
        layers = config.aux_hidden_state_layers(loader.folder, shared.shape.num_layers)
        ids = read_draft_vocabulary(loader, names, config.num_draft_ids, shape.vocab_size)
        embedding = load_embedding(shape, loader, names, shared)
        output, quantised = output_matrix(config.num_draft_ids, ids, shape, loader, names, shared)
        super().__init__(shape, shared, layers, ids, embedding, output)
        self.layer_attention = [LayerAttention(window=config.window)] * shape.num_layers
        rotary = load_rotary(config, shape, loader, shared.max_positions)
        parts = ServedParts(shape, rotary, loader)
        self._net = net = Eagle3(config, names, parts, len(layers), shared.shape.hidden_size)
        self._ops = ops = ops_on(shared.device)
        self._joined_norms = ops.pack_norm(net.token_norm.weight), ops.pack_norm(net.state_norm.weight)
        states = StateLayers(net.token_norm, net.state_norm, None, residual_is_normed=net.residual_is_normed)
        self.network = tree_network(
            net.layers.fused,
            embedding,
            states,
            net.norm,
            output,
            self.draft_token_ids,
            self.vocab_size,
            state_is_normed=net.state_is_normed,
            quantised_output=quantised,
            fusion=_packed_fusion(net),
        )

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        return self._net.fuse(aux_hidden_states.to(self.dtype))

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        net = self._net
        if self._embedding.group.size > 1:
            return net(self._embedding(token_ids), states, positions, attend)
        parts = (token_ids, self._embedding.weight, states, self._joined_norms, net.state_norm.eps)
        x, normed = self._ops.join_normed(*parts, keeps=net.residual_is_normed)
        return net.layers(x, states if normed is None else normed, positions, attend)

    def recur(self, output: Tensor) -> Tensor:
        return self._net.recur(output)

    def logits(self, output: Tensor) -> Tensor:
        return super().logits(self._net.norm(output))


class ParallelHead(Eagle3Head):
    """A P-EAGLE head."""

    has_mask = True

    def __init__(
        self, config: HeadConfig, shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices
    ) -> None:
        super().__init__(config, shape, loader, names, shared)
        assert config.ptd_token_id is not None, "load_eagle3_head checks it"
        self.mask_token_id = config.ptd_token_id
        columns = len(self.aux_hidden_state_layers) * shared.shape.hidden_size
        self.mask_state = self.fuse(loader.tensor(names.of_plain(MASK), (1, columns)))  # [1, H]
        if self.network is not None and not self.network.fuses:
            self.network = None
        if self.network is not None:
            self.network.use_mask(self.mask_token_id, self.mask_state[0].float())


def _packed_fusion(net: Eagle3) -> Fusion | None:
    """`Eagle3.fuse` for the CPU kernels; None if they do not have `fc`, or there are several norms in a row."""
    matrix = net.fc.run if isinstance(net.fc, ColumnParallelLinear) else None
    if not isinstance(matrix, PackedMatrix) or len(net.aux_norms) > 1:
        return None
    weights = [norm.weight for norm in net.aux_norms if isinstance(norm, RMSNorm | NormOfParts)]
    return Fusion(weights[0].view(-1, weights[0].shape[-1]).float().contiguous() if weights else None, matrix)
