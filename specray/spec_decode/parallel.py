"""PARALLEL: one forward of a head drafts all levels of the trees (P-EAGLE, arXiv:2602.01469).

The forward that reads the tokens that the target committed also has a row for each further level. Such a row reads a
mask, because its token is not known, and attends to the rows before it. It predicts the token of its level, whatever
the tokens before it in the tree are: all nodes of a level have the same candidate children. Their scores and the
selection of nodes are EAGLE-2's. A tree costs one pass through the head's weights instead of one for each level.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.eagle_loading import load_eagle3_head
from specray.models.parallel_head import ParallelHead
from specray.ops.attention import AttentionBatch, PaddedAttention, PaddedBatch
from specray.ops.ragged_index import RaggedIndex
from specray.spec_decode.draft_setup import attention_without_graphs, head_attention, scratch_slots, target_matrices
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import PaddedCommit, TargetView
from specray.spec_decode.eagle_tree import CandidatePool
from specray.spec_decode.fused_growth import FusedDrafts, limited, noise_of
from specray.spec_decode.padded_input import extend_input
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.tree_config import check_width, configured_shape
from specray.spec_decode.tree_growth import candidates, with_draft_probs
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.written_slots import WrittenSlots


def make_parallel(config: SpeculativeConfig, target: TargetView) -> "ParallelDrafter":
    head = load_eagle3_head(config, target_matrices(config, target), ParallelHead)
    return ParallelDrafter(head, configured_shape(config, target.architecture), target)


class ParallelDrafter:
    """Drafter over a P-EAGLE head, not sharded."""

    reads_next_token = True

    def __init__(self, head: ParallelHead, shape: TreeShape, target: TargetView) -> None:
        check_width(shape, head.vocab_size)
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self.aux_hidden_state_layers = head.aux_hidden_state_layers
        self._head = head
        self._shape = shape
        self._last_position = target.context_length - 1
        self._scratch = scratch_slots(target, shape.num_steps - 1)  # for the masks' KV, which is discarded
        self._padding_slot = target.num_slots + self._scratch.numel()  # where padding writes
        self._attention = attention = head_attention(head, self._padding_slot + 1, target)
        self._fused = FusedDrafts(head.network, shape, attention, self._scratch, self._last_position, head.window)
        self.reason_without_graphs = attention_without_graphs(self._attention) or head.reason_without_graphs
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
        if not context.requests:
            self._forward(context, requests, 1)
            return DraftTree.from_lists([], context.table.device)
        shape = limited(self._shape, context)
        output = self._forward(context, requests, shape.num_steps)
        return self._tree(context.roots(), shape, noise_of(context, shape), output)

    @torch.inference_mode()
    def propose_padded(self, table: RequestTable, commit: PaddedCommit, is_sampled: bool) -> DraftTree:
        """See PaddedDrafter. For requests of which this drafter has written all KV. Ignores draft limits."""
        shape, head, count = self._shape, self._head, len(commit.slots)
        num_masks, width = shape.num_steps - 1, min(commit.nodes.shape[1], shape.num_steps + 1)
        read = extend_input(table, commit.slots, commit.num_kept, commit.nodes, width, self._padding_slot, head.window)
        states = head.fuse(commit.aux_hidden_states.index_select(0, read.nodes))
        positions = read.ends[:, None] + torch.arange(num_masks, device=read.ends.device)
        assert isinstance(self._attention, PaddedAttention)
        output = head(
            torch.cat((read.token_ids, read.token_ids.new_full((count * num_masks,), head.mask_token_id))),
            torch.cat((states, head.mask_state.to(states.dtype).expand(count * num_masks, -1))),
            torch.cat((read.positions, positions.clamp(max=self._last_position).flatten())),
            self._attention.plan_padded(self._with_masks(read.attention, commit.slots, read.ends, num_masks)),
        )
        first, masked = output.index_select(0, read.last), output[count * width :]
        levels = torch.cat((first[:, None], masked.view(count, num_masks, output.shape[1])), 1)
        noise = TreeNoise.padded(table, commit.slots, read.ends, shape.num_steps) if is_sampled else None
        return self._tree(read.roots, shape, noise, levels)

    def forget_kv(self, table: RequestTable, requests: Sequence[DraftRequest]) -> None:
        self._written.update(table, requests, [request.end for request in requests])

    def release(self, slots: Sequence[int]) -> None:
        """The only state is KV in the requests' blocks."""

    def _forward(self, context: ProposeContext, requests: list[DraftRequest], num_levels: int) -> Tensor:
        """The head's output [B, num_levels, H] for the requests that get a tree, which come first."""
        table, count, num_masks = context.table, len(context.requests), num_levels - 1
        slots, starts, ends = context.columns(requests, "slot", "start", "end")
        num_known = ends - starts
        gets_tree = torch.arange(len(requests), device=slots.device) < count
        lengths = [request.end - request.start + num_masks * (row < count) for row, request in enumerate(requests)]
        index = RaggedIndex.of(num_known + num_masks * gets_tree, sum(lengths))
        rows = _Rows.of(index, num_known)
        row_slots = slots.index_select(0, index.rows)
        positions = (starts.index_select(0, index.rows) + index.offsets).clamp(max=self._last_position)
        kv_slots, kv_lens, scratch = self._keys(context, requests, slots, num_masks)
        written = table.kv_slots_at(row_slots, torch.where(rows.is_mask, 0, positions))
        batch = AttentionBatch(
            lengths,
            kv_lens,
            kv_slots,
            torch.where(rows.is_mask, scratch[index.rows, rows.mask], written),
            tree_sizes=[(0, 0)] * len(requests),
            window=self._head.window,
        )
        tokens = table.tokens_at(row_slots, torch.where(rows.is_mask, 0, positions + 1))
        tokens = torch.where(rows.is_mask, self._head.mask_token_id, tokens)
        assert context.aux_hidden_states is not None
        known = self._head.fuse(context.aux_hidden_states).index_select(0, rows.known)
        states = torch.where(rows.is_mask[:, None], self._head.mask_state.to(known.dtype), known)
        output = self._head(tokens, states, positions, self._attention.plan(batch))
        last = (num_known + num_masks).cumsum(0)[:count] - 1  # requests with a tree come first
        levels = torch.arange(-num_masks, 1, device=slots.device)
        return output[last[:, None] + levels]

    def _keys(
        self, context: ProposeContext, requests: list[DraftRequest], slots: Tensor, num_masks: int
    ) -> tuple[Tensor, list[int], Tensor]:
        """(KV slots [R, n], how many of them each request has, scratch slots [R, at least 1]), with the masks' own."""
        kv_slots, kv_lens = self._written.visible(context.table, slots, requests)
        scratch = self._scratch[: len(requests), : max(1, num_masks)]
        if not num_masks:
            return kv_slots, kv_lens, F.pad(scratch, (0, 1))
        ends = torch.tensor(kv_lens, device=slots.device)[:, None]
        places = ends + torch.arange(num_masks, device=slots.device)
        count = len(context.requests)
        return (
            F.pad(kv_slots, (0, num_masks)).scatter_(1, places, scratch),
            [length + num_masks * (row < count) for row, length in enumerate(kv_lens)],
            scratch,
        )

    def _with_masks(self, known: PaddedBatch, slots: Tensor, ends: Tensor, num_masks: int) -> PaddedBatch:
        """The rows of `known` and behind them the masks, which attend to all positions before `ends` int64 [R]."""
        count, width = len(slots), max(known.paths.shape[1], num_masks)
        own = self._scratch[:count, :num_masks]
        paths = [
            F.pad(paths, (0, width - paths.shape[1])) for paths in (known.paths, own.repeat_interleave(num_masks, 0))
        ]
        lengths = torch.arange(1, num_masks + 1, device=slots.device).repeat(count)
        return PaddedBatch(
            torch.cat((known.prefix_lens, ends.repeat_interleave(num_masks))),
            torch.cat((known.rows, slots.repeat_interleave(num_masks))),
            known.kv_slots,
            torch.cat(paths),
            torch.cat((known.path_lengths, lengths)),
            torch.cat((known.slot_mapping, own.flatten())),
            known.window,
        )

    def _tree(self, roots: Tensor, shape: TreeShape, noise: TreeNoise | None, output: Tensor) -> DraftTree:
        """Trees below `roots` int64 [B] from the head's output [B, levels, H]."""
        logits = self._head.logits(output.flatten(0, 1)).view(*output.shape[:2], -1)
        level_probs: list[Tensor] = []
        kept = level_probs if shape.returns_draft_probs else None
        pool, frontier, topk = None, None, shape.topk
        for level in range(shape.num_steps):
            of_level = logits[:, level : level + 1]
            probs, ids = candidates(of_level, noise, level, self._head.draft_token_ids, kept, topk)
            tokens = self._head.target_ids(ids)
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


class _Rows(NamedTuple):
    """What the rows of the forward read."""

    is_mask: Tensor  # bool [T]
    mask: Tensor  # int64 [T]: number of the mask among its request's; 0 for known tokens
    known: Tensor  # int64 [T]: place of the token among the known ones; that of its request's last one for masks

    @classmethod
    def of(cls, index: RaggedIndex, num_known: Tensor) -> "_Rows":
        counts = num_known.index_select(0, index.rows)
        first = (num_known.cumsum(0) - num_known).index_select(0, index.rows)
        number = index.offsets - counts
        return cls(number >= 0, number.clamp(min=0), first + torch.minimum(index.offsets, counts - 1))
