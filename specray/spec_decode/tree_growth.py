"""Trees that grow level by level on a drafter's own outputs, for EAGLE heads, MTP layers and draft models.

For sampled requests the noise that the target will sample with is added to every node's logits, which raises
acceptance and cannot change the output. The KV of nodes lies in scratch slots behind the KV slots of the target's pool
and is discarded. `eagle_tree` selects the nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.attention import (
    Attend,
    AttentionBackend,
    AttentionBatch,
    PaddedAttention,
    PaddedBatch,
    pack_paths,
)
from specray.ops.cpu.trees import TreeNetwork
from specray.ops.gpu import uses_triton
from specray.ops.largest_logits import top_probs
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.eagle_tree import CandidatePool
from specray.spec_decode.propose_context import DraftRequest
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.tree_config import check_width
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape


class TreeModel(Protocol):
    """The model that predicts tokens. A state is what a node receives from its parent, beside KV."""

    vocab_size: int  # columns of `logits`
    draft_token_ids: Tensor | None  # int64 [vocab_size]: target id of each column; None: the same id
    network: TreeNetwork | None  # the same model as a function that grows trees, where the kernels have one

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H]; token_ids (of the target) and positions are int64 [T], states [T, H]."""

    def recur(self, output: Tensor) -> Tensor:
        """The states to go with the tokens that are drafted from `output`."""

    def logits(self, output: Tensor) -> Tensor:
        """float32 [n, vocab_size]"""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """int64: the target's ids of draft ids of any shape."""


class TreePrefix(NamedTuple):
    """The prefixes of the trees of B requests."""

    requests: list[DraftRequest]  # their last known tokens, at `end`, are the roots
    slots: Tensor  # int64 [B], of the request table
    positions: Tensor  # int64 [B], of the roots' children as the model counts
    # What every node attends to beside its ancestors, for each layer or once for all layers: (KV slots int64 [B, n],
    # how many of them each request has)
    visible: list[tuple[Tensor, list[int]]]


class PaddedPrefix(NamedTuple):
    """The prefixes of R trees in a CUDA graph. Nodes attend to all positions before the roots."""

    slots: Tensor  # int64 [R], of the request table
    ends: Tensor  # int64 [R], positions of the roots
    roots: Tensor  # int64 [R], the last known tokens
    positions: Tensor  # int64 [R], of the roots' children as the model counts
    before: Tensor | None = None  # int64 [R, n], KV slots to attend to between the prefix and the nodes
    skipped: Sequence[int] = (0,)  # how many first positions have no KV, for each layer or once for all layers


def without_first(batch: PaddedBatch, count: int) -> PaddedBatch:
    """The batch without the first `count` positions of its prefixes."""
    if not count:
        return batch
    return replace(batch, kv_slots=batch.kv_slots[:, count:], prefix_lens=(batch.prefix_lens - count).clamp(min=0))


class TreeGrower:
    """Grows trees of one shape, level by level; FusedTreeGrower does so in one call of the CPU kernels where it can.

    `scratch` int64 [rows, at least topk * (num_steps - 1)] are KV slots for the nodes. `window` is
    that of the model's attention (see AttentionBatch).
    """

    def __init__(
        self,
        model: TreeModel,
        shape: TreeShape,
        attention: AttentionBackend,
        scratch: Tensor,
        last_position: int,
        device: torch.device,
        window: int | None = None,
    ) -> None:
        check_width(shape, model.vocab_size)
        self._model = model
        self._shape = shape
        self._attention = attention
        self._scratch = scratch
        self._last_position = last_position
        self._device = device
        self._window = window
        self._steps = torch.arange(shape.num_steps, device=device)
        self._row_numbers = torch.arange(len(scratch), device=device)
        self._ones = torch.ones_like(self._row_numbers)
        self._all_ancestors = torch.ones(1, 1, shape.num_steps, dtype=torch.bool, device=device)  # in a chain
        # Of each level but the first, so that growing in a CUDA graph need not make them.
        count, topk = shape.num_steps - 1, shape.topk
        self._written = [scratch[:, level * topk : (level + 1) * topk].contiguous() for level in range(count)]
        self._depths = [torch.full((len(scratch),), level + 1, device=device) for level in range(count)]

    def grow_levels(
        self, roots: Tensor, prefix: TreePrefix, output: Tensor, shape: TreeShape, noise: TreeNoise | None
    ) -> DraftTree:
        """Trees of `shape` below `roots` int64 [B]; `output` [B, H] predicts the roots' children."""
        keys = [self._with_scratch(kv_slots, kv_lens) for kv_slots, kv_lens in prefix.visible]

        def attend_at(level: int, sees: Tensor) -> Attend:
            return self._plan_level(prefix, keys, sees, level, shape.topk)

        return self._grow(roots, prefix.positions, output, shape, noise, attend_at)

    def grow_padded(self, table: RequestTable, prefix: PaddedPrefix, output: Tensor, is_sampled: bool) -> DraftTree:
        """Grow trees for R requests with any draft limits, in a CUDA graph."""
        assert isinstance(self._attention, PaddedAttention)
        plan, shape = self._attention.plan_padded, self._shape
        slots, ends, count, topk = prefix.slots, prefix.ends, len(prefix.slots), shape.topk
        scratch = self._scratch[:count]
        prefix_lens, rows = (part.repeat_interleave(topk) for part in (ends, slots)) if topk > 1 else (ends, slots)

        def attend_at(level: int, sees: Tensor) -> Attend:
            written, own = self._written[level - 1][:count].flatten(), scratch[:, : level * topk]
            lengths = self._depths[level - 1][:count]
            if prefix.before is not None:
                number = prefix.before.shape[1]
                own, lengths = torch.cat((prefix.before, own), 1), lengths + number
                sees = F.pad(sees, (number, 0), value=True) if topk > 1 else sees
            paths = pack_paths(sees, own) if topk > 1 else (own, lengths)
            batch = PaddedBatch(prefix_lens, rows, table.kv_slots, *paths, written, self._window)
            return by_layer([plan(without_first(batch, skipped)) for skipped in prefix.skipped])

        noise = TreeNoise.padded(table, slots, ends, shape.num_steps) if is_sampled else None
        return self._grow(prefix.roots, prefix.positions, output, shape, noise, attend_at)

    def _grow(
        self,
        roots: Tensor,
        positions: Tensor,
        output: Tensor,
        shape: TreeShape,
        noise: TreeNoise | None,
        attend_at: Callable[[int, Tensor], Attend],
    ) -> DraftTree:
        """Trees below `roots` int64 [B], whose children have `positions`.

        `attend_at` is the attention of a level's nodes, of which `sees` bool [B, topk, level * topk] are the ancestors.
        """
        if shape.topk == 1 and not shape.returns_draft_probs:
            return self._grow_chain(roots, positions, output, shape, noise, attend_at)
        topk, num_steps, num_rows = shape.topk, shape.num_steps, len(roots)
        level_probs: list[Tensor] = []  # the distribution that each level's children are drawn from
        scores, tokens = self._candidates(self._model.logits(output)[:, None], noise, 0, level_probs, topk)
        pool = CandidatePool.of_roots(scores[:, 0], tokens[:, 0])
        states = self._model.recur(output).repeat_interleave(topk, 0)  # of the parent of each token of the frontier
        rows = torch.arange(num_rows, device=self._device)[:, None]
        eye = torch.eye(topk, dtype=torch.bool, device=self._device).expand(num_rows, topk, topk)
        sees = eye[:, :, :0]  # which of the earlier nodes are ancestors
        frontier = torch.arange(topk, device=self._device).expand(num_rows, topk)
        for level in range(1, num_steps):
            tokens = pool.tokens.gather(1, frontier).flatten()
            sees = torch.cat((sees, eye), 2)
            # A node past the last position has no rotary angle, but is never verified.
            at_level = (positions + level - 1).clamp(max=self._last_position).repeat_interleave(topk)
            output = self._model(tokens, states, at_level, attend_at(level, sees))
            logits = self._model.logits(output).view(num_rows, topk, -1)
            probs, children = self._candidates(logits, noise, level, level_probs, topk)
            pool.expand(frontier, pool.scores.gather(1, frontier)[:, :, None] * probs, children)
            if level + 1 < num_steps:
                frontier = pool.best_of_last()
                parents = (frontier - (pool.scores.shape[1] - topk**2)) // topk  # places in the level just computed
                states = self._model.recur(output).index_select(0, (parents + topk * rows).flatten())
                sees = sees.gather(1, parents[:, :, None].expand_as(sees))
        return with_draft_probs(pool.tree(roots, shape.num_draft_tokens - 1), level_probs)

    def _grow_chain(
        self,
        roots: Tensor,
        positions: Tensor,
        output: Tensor,
        shape: TreeShape,
        noise: TreeNoise | None,
        attend_at: Callable[[int, Tensor], Attend],
    ) -> DraftTree:
        """Grow trees of one branch: the most likely token at each level, without scores."""
        sees = self._all_ancestors.expand(len(roots), 1, -1)
        at_levels = (positions + self._steps[:, None]).clamp_(max=self._last_position)
        chain, are_finite = [roots], []
        for level in range(shape.num_steps):
            if level:
                states = self._model.recur(output)
                output = self._model(chain[-1], states, at_levels[level - 1], attend_at(level, sees[:, :, :level]))
            token, is_finite = self._best(self._model.logits(output), noise, level)
            chain.append(token)
            are_finite.append(is_finite)
        tree = DraftTree.chains(torch.stack(chain, 1))
        return tree._replace(num_nodes=tree.num_nodes * torch.stack(are_finite, 1).all(-1))

    def _best(self, logits: Tensor, noise: TreeNoise | None, level: int) -> tuple[Tensor, Tensor]:
        """(the most likely token of each row of `logits` [B, V] as the target's id, whether its logit is finite)."""
        if uses_triton(logits.device):
            from specray.ops.gpu.sampling import Rows, choose_drafts

            count = len(logits)
            rows = Rows(logits.contiguous(), self._row_numbers[:count], self._ones[:count], 1)
            keys = None if noise is None else noise.keys_on_gpu[level]
            heat = None if noise is None else noise.temperature
            found = choose_drafts(rows, heat, keys, self._model.draft_token_ids)
            return found.tokens, found.is_finite
        if noise is not None:
            logits = noise.added(logits[:, None], level, self._model.draft_token_ids)[:, 0]
        logit, token = logits.max(-1)
        return self._model.target_ids(token), logit.isfinite()

    def _with_scratch(self, kv_slots: Tensor, kv_lens: list[int]) -> Tensor:
        """KV slots [B, n]: the visible ones, followed by all scratch slots of the request."""
        scratch = self._scratch[: len(kv_lens)]
        ends = torch.tensor(kv_lens, device=self._device)[:, None]
        places = ends + torch.arange(scratch.shape[1], device=self._device)
        return F.pad(kv_slots, (0, scratch.shape[1])).scatter_(1, places, scratch)

    def _plan_level(self, prefix: TreePrefix, keys: list[Tensor], sees: Tensor, level: int, topk: int) -> Attend:
        """The attention of one level's nodes, grouped by request; `keys` are `_with_scratch`."""
        num_rows = len(prefix.requests)
        written = self._scratch[:num_rows, (level - 1) * topk : level * topk].flatten()
        plans = [
            self._attention.plan(
                AttentionBatch(
                    query_lens=[topk] * num_rows,
                    kv_lens=[length + level * topk for length in kv_lens],
                    kv_slots=kv_slots,
                    slot_mapping=written,
                    tree_sizes=[(topk, level * topk)] * num_rows,
                    tree_mask=sees,
                    window=self._window,
                )
            )
            for kv_slots, (_, kv_lens) in zip(keys, prefix.visible, strict=True)
        ]
        return by_layer(plans)

    def _candidates(
        self, logits: Tensor, noise: TreeNoise | None, level: int, level_probs: list[Tensor], topk: int
    ) -> tuple[Tensor, Tensor]:
        kept = level_probs if self._shape.returns_draft_probs else None
        probs, ids = candidates(logits, noise, level, self._model.draft_token_ids, kept, topk)
        return probs, self._model.target_ids(ids)


def candidates(
    logits: Tensor,
    noise: TreeNoise | None,
    level: int,
    draft_token_ids: Tensor | None,
    level_probs: list[Tensor] | None,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """(probabilities, draft ids) of the most likely tokens below a level's nodes, [B, nodes, topk], best first.

    `logits` is [B, nodes, V]. The distribution that sampled children are drawn from is appended to `level_probs`.
    """
    if noise is not None:
        if level_probs is not None:
            level_probs.append(noise.probs(logits[:, 0], draft_token_ids))
        logits = noise.added(logits, level, draft_token_ids)
    return top_probs(logits, topk)


def with_draft_probs(tree: DraftTree, level_probs: list[Tensor]) -> DraftTree:
    """The tree with the distributions of its levels, each [B, V], if there are any."""
    if not level_probs:
        return tree
    return tree._replace(draft_probs=F.pad(torch.stack(level_probs, 1), (0, 0, 0, 1)))


def by_layer(plans: Sequence[Attend]) -> Attend:
    """One Attend for all layers: layer i uses plan i; a single plan is used by all layers."""
    return plans[0] if len(plans) == 1 else lambda layer, q, kv: plans[layer](layer, q, kv)
