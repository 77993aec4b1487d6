"""Draft heads that are trained: the networks of `specray.models.heads` with trainable parts, and their initialization.

A head is made from its config.json, so that it is served as it was trained.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specray.layers.parallel import RankGroup
from specray.models.heads import eagle2, eagle3, mtp
from specray.models.heads.eagle_files import HeadConfig, TensorNames, common_settings, head_shape
from specray.models.heads.mtp_layouts import MIMO
from specray.models.llama_shape import LlamaShape
from specray.models.loading import HEAD
from specray.train.attention import ChainAttention
from specray.train.target import Target
from specray.train.trained_parts import SMALL_STD, STD, TrainedParts
from specray.train.unroll import Batch, TrainedModel, shifted


class TrainedHead(TrainedModel):
    """A head over hidden states. `config` is its config.json, `shape` that of its decoder layers.

    `decoder_prefix` begins the names of the tensors of the first of these.
    """

    network: eagle2.Eagle2 | eagle3.Eagle3 | mtp.MtpLayer
    fc: nn.Linear  # joins the head's inputs

    def __init__(self, config: dict[str, Any], shape: LlamaShape, draft_ids: Tensor, decoder_prefix: str) -> None:
        super().__init__(draft_ids)
        self.config = config
        self.shape = shape
        self.decoder_prefix = decoder_prefix

    @abstractmethod
    def start_from(self, target: Target) -> None:
        """Initialize with the target's weights."""

    def enter(self, aux_hidden_states: Tensor) -> Tensor:
        """The first states [B, L, H], from aux hidden states [B, L, columns]."""
        return aux_hidden_states

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        start, length = batch.start, batch.token_ids.shape[1]
        attend = ChainAttention(start, self.shape.num_layers)
        states = self.enter(batch.aux_hidden_states)
        for step in range(steps):  # step 0 reads all positions and returns those with chains
            positions = torch.arange(start if step else 0, length, device=batch.token_ids.device) + step
            embeds = target.embed(shifted(batch.token_ids, positions + 1))
            states = self.network(embeds, states, positions, attend)
            yield states

    def outputs(self, states: Tensor) -> Tensor:
        return states


class OwnVocabularyHead(TrainedHead):
    """A head with a draft vocabulary and an output matrix of its own."""

    lm_head: nn.Linear
    d2t: Tensor
    t2d: Tensor

    def add_output(self, parts: TrainedParts) -> None:
        """Add the output matrix and the tensors of the vocabulary."""
        ids, size = self.draft_ids, self.shape.vocab_size
        parts.linear(HEAD, (len(ids), self.shape.hidden_size))
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(size, dtype=torch.bool).index_fill_(0, ids, True))

    def take_rows_of(self, target: Target) -> None:
        """Start with the target's output matrix."""
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head[self.draft_ids])

    @property
    def output_weight(self) -> Tensor:
        return self.lm_head.weight


class TrainedEagle3Head(OwnVocabularyHead):
    """Input: several aux hidden states and the next token."""

    network: eagle3.Eagle3

    def __init__(
        self,
        shape: LlamaShape,
        draft_ids: Tensor,
        target: Target,
        aux_hidden_state_layers: Sequence[int],
        mask_token_id: int | None = None,
    ) -> None:
        own = eagle3.trained_settings(len(draft_ids), aux_hidden_state_layers, mask_token_id)
        config, names = common_settings(shape, target.config) | own, TensorNames.trained(3, shape.num_layers)
        parsed, shape = _parsed(config, names)
        super().__init__(config, shape, draft_ids, names.layer)
        parts = TrainedParts(self, shape, target.rotary)
        num_states, size = len(aux_hidden_state_layers), target.shape.hidden_size
        self.network = eagle3.Eagle3(parsed, names, parts, num_states, size)
        self.add_output(parts)

    def start_from(self, target: Target) -> None:
        """Initialize so that the state is the last aux hidden state and the output matrix is the target's."""
        start_as_last_block(self.fc.weight)
        self.take_rows_of(target)
        with torch.no_grad():
            self.network.norm.weight.copy_(target.norm)

    def enter(self, aux_hidden_states: Tensor) -> Tensor:
        return self.network.fuse(aux_hidden_states)

    def outputs(self, states: Tensor) -> Tensor:
        return self.network.norm(states)


class TrainedParallelHead(TrainedEagle3Head):
    """P-EAGLE: after step 0, the mask stands for the token and the state, so that no step waits for the one before."""

    def __init__(
        self,
        shape: LlamaShape,
        draft_ids: Tensor,
        target: Target,
        aux_hidden_state_layers: Sequence[int],
        mask_token_id: int,
    ) -> None:
        super().__init__(shape, draft_ids, target, aux_hidden_state_layers, mask_token_id)
        self.mask_token_id = mask_token_id
        columns = len(aux_hidden_state_layers) * target.shape.hidden_size
        self.mask_hidden = nn.Parameter(torch.randn(1, columns))

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        attend, device = ChainAttention(batch.start, self.shape.num_layers), batch.token_ids.device
        states = self.enter(batch.aux_hidden_states)
        num_rows, length = batch.token_ids.shape
        positions = torch.arange(length, device=device)
        yield self.network(target.embed(shifted(batch.token_ids, positions + 1)), states, positions, attend)
        chains = positions[batch.start :]
        token = torch.tensor([self.mask_token_id], device=device)
        embed, state = target.embed(token), self.enter(self.mask_hidden.to(states.dtype))
        embeds, states = (mask.expand(num_rows, len(chains), -1) for mask in (embed, state))
        for step in range(1, steps):
            yield self.network(embeds, states, chains + step, attend)


class TrainedEagle2Head(TrainedHead):
    """Input: the target's final hidden state and the next token."""

    network: eagle2.Eagle2

    def __init__(self, shape: LlamaShape, draft_ids: Tensor, target: Target, bias: bool = False) -> None:
        common = common_settings(replace(shape, num_layers=1), target.config)  # however many the target has
        config, names = common | eagle2.trained_settings(bias), TensorNames.trained(2, 1)
        parsed, shape = _parsed(config, names)
        super().__init__(config, shape, draft_ids, names.layer)
        self.network = eagle2.Eagle2(parsed, names, TrainedParts(self, shape, target.rotary))

    def start_from(self, target: Target) -> None:
        """Initialize so that the layer's input is the hidden state."""
        start_as_last_block(self.fc.weight)
        self.take_output_of(target)


class TrainedMtpHead(TrainedHead):
    """MiMo's MTP layer. Input: the target's final hidden state and the next token, each normed."""

    network: mtp.MtpLayer

    def __init__(self, shape: LlamaShape, draft_ids: Tensor, target: Target) -> None:
        config = common_settings(shape, target.config) | mtp.trained_settings(target.shape.num_layers)
        shape = replace(shape, num_layers=1, qkv_bias=True, output_bias=False, qk_norm=False)  # MiMo's
        super().__init__(config, shape, draft_ids, MIMO.prefix(mtp.TRAINED))
        self.network = mtp.MtpLayer(MIMO, mtp.TRAINED, TrainedParts(self, shape, target.rotary))

    @property
    def fc(self) -> nn.Linear:  # type: ignore[override]
        """The projection of the two inputs, under the name that other heads give it."""
        assert isinstance(self.network.project, nn.Linear)
        return self.network.project

    def start_from(self, target: Target) -> None:
        """Initialize so that the state passes through: the first norm's weight is the inverse of the last one's."""
        norm, size = target.norm.float(), self.shape.hidden_size
        with torch.no_grad():
            self.fc.weight.mul_(SMALL_STD / STD)
            self.fc.weight[:, :size].copy_(torch.eye(size))
            self.network.state_norm.weight.copy_(norm.square().mean().sqrt() / norm)
            self.network.out_norm.weight.copy_(norm)
        self.take_output_of(target)


def _parsed(config: dict[str, Any], names: TensorNames) -> tuple[HeadConfig, LlamaShape]:
    path = Path("config.json")
    parsed = HeadConfig.of(config, path)
    return parsed, head_shape(parsed, path.parent, names, RankGroup())


def start_as_last_block(weight: Tensor) -> None:
    """Make the last block of weight [H, n * H] the identity and the others small."""
    size = weight.shape[0]
    with torch.no_grad():
        weight.mul_(SMALL_STD / STD)
        weight[:, -size:].copy_(torch.eye(size))
