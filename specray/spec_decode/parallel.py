"""PARALLEL: one forward of a head drafts all levels of the trees (P-EAGLE, arXiv:2602.01469).

The forward that reads the tokens that the target committed also has a row for each further level. Such a row reads a
mask, because its token is not known, and attends to the rows before it. It predicts the token of its level, whatever
the tokens before it in the tree are: all nodes of a level have the same candidate children. Their scores and the
selection of nodes are EAGLE-2's. A tree costs one pass through the head's weights instead of one for each level.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.heads.eagle3 import ParallelHead
from specray.models.heads.loading import load_eagle3_head
from specray.spec_decode.draft_rows import DraftKV, DraftRows, Reads, ScheduledRows
from specray.spec_decode.draft_setup import attention_without_graphs, head_attention, scratch_slots, target_matrices
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.draft_vocabulary import DraftVocabulary
from specray.spec_decode.drafter import TargetView
from specray.spec_decode.eagle_tree import CandidatePool
from specray.spec_decode.fused_growth import FusedDrafts
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.tree_growth import with_draft_probs
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape, check_width, configured_shape
from specray.spec_decode.written_slots import WrittenSlots


def make_parallel(config: SpeculativeConfig, target: TargetView) -> "ParallelDrafter":
    head = load_eagle3_head(config, target_matrices(config, target), ParallelHead)
    return ParallelDrafter(head, configured_shape(config, target.architecture), target)


class ParallelDrafter:
    """Drafter over a P-EAGLE head."""

    reads_next_token = True

    def __init__(self, head: ParallelHead, shape: TreeShape, target: TargetView) -> None:
        check_width(shape, head.vocab_size)
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self.aux_hidden_state_layers = head.aux_hidden_state_layers
        self._head = head
        masks = scratch_slots(target, shape.num_steps - 1)  # their KV is discarded
        padding_slot = target.num_slots + masks.numel()
        attention, last_position = head_attention(head, padding_slot + 1, target), target.context_length - 1
        self._kv = DraftKV(attention, shape, last_position, padding_slot, None, extra=masks)
        sizes = head.vocab_size, head.draft_token_ids, head.vocab_head
        self._vocabulary = DraftVocabulary(*sizes, target.max_rows, target.device)
        self._fused = FusedDrafts(head.network, self._kv, masks)
        self.reason_without_graphs = attention_without_graphs(attention) or head.reason_without_graphs
        self._written = WrittenSlots(target.num_slots)

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> DraftTree:
        self._written.read(context)
        requests = context.requests + context.unfinished
        if not requests:
            return DraftTree.from_lists([], context.table.device)
        if self._written.are_all(context.table, requests):
            if context.replay is not None:
                return context.replay()
            if (tree := self._fused.extend_and_grow(context, self._head.fuse)) is not None:
                return tree
        visible = self._written.visible(context.table, context.bounds[0], requests)
        return self.draft(ScheduledRows(context, context.requests, [Reads(requests, context.bounds, *visible)]))

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
        return self._tree(rows.roots, shape, rows.noise(shape.num_steps), output[read.last])

    def forget_kv(self, table: RequestTable, requests: Sequence[DraftRequest]) -> None:
        self._written.update(table, requests, [request.end for request in requests])

    def release(self, slots: Sequence[int]) -> None:
        """The only state is KV in the requests' blocks."""

    def _tree(self, roots: Tensor, shape: TreeShape, noise: TreeNoise | None, output: Tensor) -> DraftTree:
        """Trees below `roots` int64 [B] from the head's output [B, levels, H]."""
        logits = self._head.logits(output.flatten(0, 1))
        logits = logits.view(*output.shape[:2], logits.shape[1])
        level_probs: list[Tensor] = []
        kept = level_probs if shape.returns_draft_probs else None
        pool, frontier, topk = None, None, shape.topk
        for level in range(shape.num_steps):
            of_level = logits[:, level : level + 1]
            probs, tokens = self._vocabulary.candidates(of_level, noise, level, kept, topk)
            if pool is None:
                pool = CandidatePool.of_roots(probs[:, 0], tokens[:, 0])
                frontier = torch.arange(topk, device=tokens.device).expand(len(tokens), topk)
                continue
            assert frontier is not None
            scores = pool.scores.gather(1, frontier)[:, :, None] * probs
            pool.expand(frontier, scores, tokens.expand(-1, topk, -1))
            frontier = pool.best_of_last()
        assert pool is not None
        return with_draft_probs(pool.tree(roots, shape.num_draft_tokens - 1), level_probs)
