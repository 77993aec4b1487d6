"""PARALLEL: one forward of a head drafts all levels of the trees (P-EAGLE, arXiv:2602.01469).

The forward that reads the tokens that the target committed also has a row for each further level. Such a row reads a
mask, because its token is not known, and attends to the rows before it. It predicts the token of its level, whatever
the tokens before it in the tree are: all nodes of a level have the same candidate children. Their scores and the
selection of nodes are EAGLE-2's. A tree costs one pass through the head's weights instead of one for each level.
"""

import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.heads.eagle3 import ParallelHead
from specray.models.heads.loading import load_eagle3_head
from specray.spec_decode.draft_rows import DraftKV, DraftRows
from specray.spec_decode.draft_setup import head_attention, head_pool, scratch_slots, target_matrices
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.draft_vocabulary import DraftVocabulary
from specray.spec_decode.drafter import TargetView
from specray.spec_decode.fused_growth import FusedDrafts
from specray.spec_decode.head_drafter import HeadDrafter
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.tree_growth import LevelPrediction, grow_tree
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import check_width, configured_shape


def make_parallel(config: SpeculativeConfig, target: TargetView) -> "ParallelDrafter":
    head = load_eagle3_head(config, target_matrices(config, target), ParallelHead)
    return ParallelDrafter(head, configured_shape(config, target.architecture), target)


class ParallelDrafter(HeadDrafter):
    """Drafter over a P-EAGLE head."""

    def __init__(self, head: ParallelHead, shape: TreeShape, target: TargetView) -> None:
        check_width(shape, head.vocab_size)
        masks = scratch_slots(target, shape.num_steps - 1)  # their KV is discarded
        padding_slot = target.num_slots + masks.numel()
        attention = head_attention(head, head_pool(head, padding_slot + 1, target), target)
        last_position = target.context_length - 1
        super().__init__(head, DraftKV(attention, shape, last_position, padding_slot, None, extra=masks), target)
        self._head = head
        sizes = head.vocab_size, head.draft_token_ids, head.vocab_head
        self._vocabulary = DraftVocabulary(*sizes, target.device)
        self._fused = FusedDrafts(head.network, self._kv, masks)

    @torch.inference_mode()
    def draft(self, rows: DraftRows) -> DraftTree:
        """See DeviceDrafter: one forward over the committed tokens and a mask for each level but the first."""
        head, shape = self._head, rows.limited(self._kv.shape) if rows.count else self._kv.shape
        read = rows.read(self._kv, num_extra=shape.num_steps - 1 if rows.count else 0)
        assert read is not None
        token_ids, states = read.token_ids, head.fuse(rows.aux_hidden_states())
        if read.extras is not None:
            are_masks, known = read.extras
            token_ids = torch.where(are_masks, head.mask_token_id, token_ids)
            states = states.index_select(0, known)
            states = torch.where(are_masks[:, None], head.mask_state.to(states.dtype), states)
        output = head(token_ids, states, read.positions, read.attend)
        if not rows.count:
            return DraftTree.from_lists([], output.device)
        logits = head.logits(output[read.last].flatten(0, 1))
        logits = logits.view(*read.last.shape, logits.shape[1])

        def predict(level: int, tokens: Tensor, parents: Tensor) -> LevelPrediction:  # noqa: ARG001
            return LevelPrediction(logits[:, level : level + 1])

        return grow_tree(rows.roots, shape, rows.noise(shape.num_steps), self._vocabulary, predict)

    def _in_one_call(self, context: ProposeContext) -> DraftTree | None:
        return self._fused.extend_and_grow(context, self._head.fuse)
