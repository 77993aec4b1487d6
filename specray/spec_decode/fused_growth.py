"""Draft extend and trees in one call of the CPU kernels, where these have the drafter's model; elsewhere in parts."""

from collections.abc import Callable

from torch import Tensor

from specray.ops.cpu.attention import PagedAttention
from specray.ops.cpu.drafted_step import PlannedDrafts
from specray.ops.cpu.steps import TableKernels
from specray.ops.cpu.trees import CommittedTokens, GrownTrees, TreeLimits, TreeNetwork, TreeOptions, TreeRequests
from specray.ops.sampling_state import GREEDY_BELOW
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.tree_growth import TreeGrower, TreePrefix
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape


class FusedTreeGrower(TreeGrower):
    """Grows trees of one shape; see TreeGrower."""

    def grow(self, context: ProposeContext, prefix: TreePrefix, output: Tensor) -> DraftTree:
        """Trees below the last known tokens; `output` [B, H] predicts the roots' children."""
        shape = self._limited(context)
        noise = self._noise(context, shape)
        if (fused := self._fused(context)) is None:
            return self.grow_levels(context.roots(), prefix, output, shape, noise)
        network, attention = fused
        [(kv_slots, kv_lens)] = prefix.visible
        requests = TreeRequests(output, context.roots(), prefix.positions, kv_slots, kv_lens)
        return _tree(network.grow(attention, requests, self._limits(shape), self._options(noise)), shape)

    def extend_and_grow(self, context: ProposeContext, fuse: Callable[[Tensor], Tensor]) -> DraftTree | None:
        """Trees of `requests` after draft extend of all requests, of which the model must have all KV.

        `fuse` makes states of hidden states. None where the kernels cannot do both in one call.
        """
        table = context.table.ops
        if not context.requests or not isinstance(table, TableKernels):
            return None
        if (fused := self._fused(context)) is None:
            return None
        network, attention = fused
        shape = self._limited(context)
        noise = self._noise(context, shape)
        assert context.aux_hidden_states is not None
        read = context.aux_hidden_states if network.fuses else fuse(context.aux_hidden_states)
        committed = CommittedTokens(table, len(context.requests), *context.bounds, read)
        return _tree(network.draft(attention, committed, self._limits(shape), self._options(noise)), shape)

    def plan_ahead(self, context: ProposeContext) -> PlannedDrafts | None:
        """The same for `requests` whose step still runs; see DraftsAhead. None where the kernels cannot do so."""
        if not isinstance(context.table.ops, TableKernels) or (fused := self._fused(context)) is None:
            return None
        network, attention = fused
        shape = self._limited(context)
        options = self._options(self._noise(context, shape))
        return network.plan(attention, len(context.requests), self._limits(shape), options)

    def _limited(self, context: ProposeContext) -> TreeShape:
        """The shape within the requests' limits."""
        return self._shape.limited(
            max(request.draft_limit.num_steps for request in context.requests),
            max(request.draft_limit.num_tokens for request in context.requests),
        )

    def _noise(self, context: ProposeContext, shape: TreeShape) -> TreeNoise | None:
        """The noise of the sampled requests; None if there are none."""
        requests, is_sampled = context.requests, context.are_sampled(context.requests)
        if not any(is_sampled):
            return None
        return TreeNoise.of(context, requests, is_sampled, context.bounds[0][: len(requests)], shape.num_steps)

    def _fused(self, context: ProposeContext) -> tuple[TreeNetwork, PagedAttention] | None:
        """The kernels' model and attention; None if they are not there or cannot grow such trees."""
        network = self._model.network
        returns_probs = self._shape.returns_draft_probs and any(context.are_sampled(context.requests))
        if network is None or not isinstance(self._attention, PagedAttention) or returns_probs:
            return None
        return network, self._attention

    def _limits(self, shape: TreeShape) -> TreeLimits:
        return TreeLimits(shape.topk, shape.num_steps, shape.num_draft_tokens - 1, self._last_position, self._window)

    def _options(self, noise: TreeNoise | None) -> TreeOptions:
        if noise is None:
            return TreeOptions(self._scratch, None)
        temperature = noise.temperature.where(noise.temperature >= GREEDY_BELOW, 0.0)
        return TreeOptions(self._scratch, (noise.seeds, noise.ends, temperature))


def _tree(grown: GrownTrees, shape: TreeShape) -> DraftTree:
    return DraftTree(grown.tokens, grown.parents, grown.num_nodes, shape.num_steps, scores=grown.scores)
