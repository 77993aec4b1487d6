"""DFlash and DSpark heads that are trained: a block of masks behind every position of the answers.

Every position is an anchor, so a chain of `unroll` is one block. Blocks attend to the context before their anchor and
to all of their own rows. The Markov rows read the true token before (teacher forcing); their bias is a part of the
product with the output matrix, which gets the columns of `markov_w2`, so that the loss is that of other heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specray.layers.parallel import RankGroup
from specray.models.heads.block import Block, trained_settings
from specray.models.heads.block_files import BlockConfig
from specray.models.heads.eagle_files import TensorNames, common_settings, head_shape
from specray.models.llama_shape import LlamaShape
from specray.train.heads import OwnVocabularyHead, start_as_last_block
from specray.train.target import Target
from specray.train.trained_parts import TrainedParts
from specray.train.unroll import Batch, shifted

_MAX_CONFIDENCE_ROWS = 512  # of a batch from which the confidence learns: it is one row of numbers


class TrainedBlockHead(OwnVocabularyHead):
    """`markov_rank` 0: a DFlash head, whose rows predict their own tokens; else a DSpark head."""

    network: Block  # type: ignore[assignment]  # it is called otherwise
    fc: nn.Linear

    def __init__(
        self,
        shape: LlamaShape,
        draft_ids: Tensor,
        target: Target,
        aux_hidden_state_layers: Sequence[int],
        mask_token_id: int,
        num_predicted: int,
        markov_rank: int,
    ) -> None:
        own = trained_settings(len(draft_ids), aux_hidden_state_layers, mask_token_id, num_predicted, markov_rank)
        config = own | {"transformer_layer_config": common_settings(shape, target.config) | {"model_type": "qwen3"}}
        names, parsed = TensorNames.trained("block", shape.num_layers), BlockConfig.of(config, Path("config.json"))
        shape = replace(head_shape(parsed, Path(), names, RankGroup()), qk_norm=True)
        super().__init__(config, shape, draft_ids, names.layer)
        parts, size = TrainedParts(self, shape, target.rotary), target.shape.hidden_size
        self.network = Block(parsed, names, parts, len(aux_hidden_state_layers) * size)
        self.add_output(parts)
        self._config, self._mask_token_id = parsed, mask_token_id

    def start_from(self, target: Target) -> None:
        """Initialize so that the context is the last aux hidden state and the output matrix is the target's."""
        start_as_last_block(self.fc.weight)
        self.take_rows_of(target)
        with torch.no_grad():
            self.network.norm.weight.copy_(target.norm)

    def enter(self, aux_hidden_states: Tensor) -> Tensor:
        return self.network.fuse(aux_hidden_states)

    def rollout(self, target: Target, batch: Batch, steps: int) -> Iterator[Tensor]:
        length, device = batch.token_ids.shape[1], batch.token_ids.device
        positions = torch.arange(length, device=device)
        context = self.network.context_kv(self.enter(batch.aux_hidden_states), positions)
        anchors = positions[batch.start :] + 1
        first = not self._config.samples_from_anchor
        num_rows = first + max(steps, self._config.num_predicted)
        token_ids = torch.full((len(batch.token_ids), len(anchors), num_rows), self._mask_token_id, device=device)
        token_ids[:, :, 0] = shifted(batch.token_ids, anchors)
        # The tables end behind the last label; the few rows past them have none.
        rows = (anchors[:, None] + torch.arange(num_rows, device=device)).clamp(max=length + steps - 1)
        attend = BlockAttention(context, batch.start, num_rows)
        output = self.network(target.embed(token_ids.flatten(1)), rows.flatten(), attend).view(*token_ids.shape, -1)
        for step in range(steps):
            states = output[:, :, first + step]
            if (markov := self.network.markov) is not None:
                states = torch.cat((states, markov.embed(shifted(batch.token_ids, anchors + step)).to(states)), -1)
            yield states

    @property
    def output_weight(self) -> Tensor:
        rows = super().output_weight
        markov = self.network.markov
        return rows if markov is None else torch.cat((rows, markov.project.weight), 1)  # type: ignore[attr-defined]

    def extra_loss(self, outputs: Tensor, weight: Tensor, probs: Tensor, label_of: Tensor) -> Tensor:
        """Cross-entropy of the confidence against the share of drafts that rejection sampling accepts.

        `outputs` are taken as they are: what is drafted does not learn from it.
        """
        if self.network.confidence is None or not len(outputs):
            return outputs.new_zeros(())
        some = torch.arange(0, len(outputs), -(-len(outputs) // _MAX_CONFIDENCE_ROWS), device=outputs.device)
        with torch.no_grad():
            seen = outputs[some]
            drafted = (seen @ weight.T).float().softmax(-1)
            accepted = torch.minimum(drafted, probs[label_of[some]].float()).sum(-1)
        logits = self.network.confidence(seen.to(self.fc.weight.dtype))[:, 0].float()
        return F.binary_cross_entropy_with_logits(logits, accepted.clamp(0.0, 1.0))


class BlockAttention:
    """The `attend` of blocks. The block of anchor a, at position `start` + 1 + a, has `num_rows` rows."""

    def __init__(self, context: Tensor, start: int, num_rows: int) -> None:
        """`context` [layers, B, L, 2, kv_heads, dim] are the keys and values of the positions."""
        self._context, self._start, self._num_rows = context, start, num_rows

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None) -> Tensor:
        """[B, n, heads * dim] from q [B, n, heads, dim] and kv [B, n, 2, kv_heads, dim], n = anchors * rows."""
        assert kv is not None
        count, num_queries, heads, dim = q.shape
        kv_heads, rows = kv.shape[3], self._num_rows
        k, v = self._context[layer].permute(2, 0, 3, 1, 4)  # each [B, kv_heads, L, dim]
        blocks = kv.view(count, -1, rows, 2, kv_heads, dim)
        own_k, own_v = blocks.permute(3, 0, 4, 1, 2, 5)  # each [B, kv_heads, anchors, rows, dim]
        grouped = (q * dim**-0.5).view(count, -1, rows, kv_heads, heads // kv_heads, dim).permute(0, 3, 1, 4, 2, 5)
        anchors, length = grouped.shape[2], k.shape[2]
        flat = grouped.flatten(3, 4)  # [B, kv_heads, anchors, group * rows, dim]
        scores = (flat.flatten(2, 3) @ k.transpose(-1, -2)).view(*flat.shape[:-1], length).float()
        future = torch.ones(anchors, length, dtype=torch.bool, device=q.device).triu(self._start + 1)
        scores = scores.masked_fill(future[:, None], float("-inf"))
        weights = torch.cat((scores, (flat @ own_k.transpose(-1, -2)).float()), -1).softmax(-1).to(v.dtype)
        mixed = (weights[..., :length].flatten(2, 3) @ v).view_as(flat) + weights[..., length:] @ own_v
        by_row = mixed.view(grouped.shape).permute(0, 2, 4, 1, 3, 5)  # [B, anchors, rows, kv_heads, group, dim]
        out: Tensor = by_row.reshape(count, num_queries, heads * dim)
        return out
