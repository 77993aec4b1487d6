"""DFLASH and DSPARK: a head drafts a block of tokens in one pass, and trees grow from what the rows predict.

A step costs one forward pass over the blocks, and for each committed token its keys and values (see
`specray.models.heads.block`). Without num_steps and eagle_topk a head drafts chains, as in other engines. Trees are
EAGLE-2's, on products of probabilities. All nodes of a level have the same children in a DFlash or JetSpec head's
trees. In a DSpark head's each node has its own, by its row of the Markov matrix, and a child's probability counts as
much as the head is confident there.
"""

import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.heads.block import BlockHead
from specray.models.heads.loading import check_block_files, load_block_head
from specray.spec_decode.draft_rows import DraftKV, DraftRows
from specray.spec_decode.draft_setup import head_attention, head_pool, scratch_slots, target_matrices
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.draft_vocabulary import DraftVocabulary
from specray.spec_decode.drafter import TargetFiles, TargetView
from specray.spec_decode.head_drafter import HeadDrafter
from specray.spec_decode.tree_growth import LevelPrediction, grow_tree
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import block_shape, check_width


def make_block(config: SpeculativeConfig, target: TargetView) -> "BlockDrafter":
    head = load_block_head(config, target_matrices(config, target))
    return BlockDrafter(head, block_shape(config, head.config.num_predicted), target)


def check_block_drafter(config: SpeculativeConfig, target: TargetFiles) -> None:
    """ConfigError if the head is not for `target`, or drafts fewer tokens than configured."""
    block_shape(config, check_block_files(config, target.shape).num_predicted)


class BlockDrafter(HeadDrafter):
    """Drafter over a DFlash, JetSpec or DSpark head."""

    def __init__(self, head: BlockHead, shape: TreeShape, target: TargetView) -> None:
        check_width(shape, head.vocab_size)
        self._first_row = 0 if head.config.samples_from_anchor else 1  # the first that predicts
        rows = scratch_slots(target, self._first_row + shape.num_steps)  # their KV is discarded
        padding_slot = target.num_slots + rows.numel()
        self._pool = head_pool(head, padding_slot + 1, target)
        attention, last_position = head_attention(head, self._pool, target), target.context_length - 1
        kv = DraftKV(attention, shape, last_position, padding_slot, None, extra=rows, reads_next_token=False)
        super().__init__(head, kv, target)
        self._head = head
        sizes = head.vocab_size, head.draft_token_ids, head.vocab_head
        self._vocabulary = DraftVocabulary(*sizes, target.device)
        self._masks = head.config.masks
        if len({*self._masks}) > 1 or any(mask.window for mask in self._masks):
            self.reason_without_graphs = "layers of the draft head attend through windows or differ"

    @torch.inference_mode()
    def draft(self, rows: DraftRows) -> DraftTree:
        """See DeviceDrafter: keys and values of the committed tokens, and one pass over the blocks."""
        head, read = self._head, rows.read_blocks(self._kv, self._masks)
        context = head.context_kv(head.fuse(rows.aux_hidden_states()), read.positions)
        self._pool.index_copy_(1, read.written, context)
        if not rows.count:
            return DraftTree.from_lists([], context.device)
        token_ids = torch.full_like(read.block_positions, head.mask_token_id).view(rows.count, -1)
        token_ids[:, 0] = rows.roots
        output = head(token_ids.flatten(), read.block_positions, read.attend).view(*token_ids.shape, -1)
        shape = rows.limited(self._kv.shape)
        output = output[:, self._first_row : self._first_row + shape.num_steps]
        return self._tree(rows, shape, output)

    def _tree(self, rows: DraftRows, shape: TreeShape, output: Tensor) -> DraftTree:
        """Trees from the outputs [B, levels, H] of the rows that predict them."""
        head, (count, num_levels, size) = self._head, output.shape
        logits = head.logits(output.flatten(0, 1)).view(count, num_levels, -1)
        row = torch.arange(count, device=output.device)[:, None]
        state: Tensor | None = None

        def predict(level: int, tokens: Tensor, parents: Tensor) -> LevelPrediction:
            nonlocal state
            if not head.looks_at_tokens:
                return LevelPrediction(logits[:, level : level + 1])
            if state is not None:
                state = state.index_select(0, (parents + len(state) // count * row).flatten())
            nodes = output[:, level : level + 1].expand(-1, tokens.shape[1], -1).reshape(-1, size)
            bias, confidence, state = head.after_tokens(tokens.flatten(), nodes, state)
            at_level = logits[:, level : level + 1]
            if bias is not None:
                at_level = at_level + bias.view(count, -1, bias.shape[-1])
            return LevelPrediction(at_level, None if confidence is None else confidence.view(count, -1))

        return grow_tree(rows.roots, shape, rows.noise(shape.num_steps), self._vocabulary, predict)
