"""Draft extend and trees in one call of the CPU kernels, where these have the drafter's model; elsewhere in parts."""

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from specray.ops.attention import AttentionBackend
from specray.ops.cpu.attention import PagedAttention
from specray.ops.cpu.steps import TableKernels
from specray.ops.cpu.trees import CommittedTokens, GrownTrees, TreeLimits, TreeNetwork, TreeOptions, TreeRequests
from specray.ops.sampling_state import GREEDY_BELOW
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.tree_growth import TreeGrower, TreePrefix
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape


class FusedDrafts:
    """Calls the kernels' form of a draft model, `network`; its trees have one shape. See TreeGrower for the rest."""

    def __init__(
        self,
        network: TreeNetwork | None,
        shape: TreeShape,
        attention: AttentionBackend,
        scratch: Tensor,
        last_position: int,
        window: int | None,
    ) -> None:
        """`network` None: the kernels do not have the model."""
        self._network = network
        self._shape = shape
        self._attention = attention
        self._scratch = scratch
        self._last_position = last_position
        self._window = window

    def grow(self, context: ProposeContext, prefix: TreePrefix, output: Tensor) -> DraftTree | None:
        """Trees below the last known tokens; `output` [B, H] predicts the roots' children.

        None if the kernels cannot grow them.
        """
        if (fused := self._fused(context)) is None:
            return None
        network, attention = fused
        shape = limited(self._shape, context)
        [(kv_slots, kv_lens)] = prefix.visible
        requests = TreeRequests(output, context.roots(), prefix.positions, kv_slots, kv_lens)
        options = self._options(noise_of(context, shape))
        return _tree(network.grow(attention, requests, self._limits(shape), options), shape)

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
        shape = limited(self._shape, context)
        assert context.aux_hidden_states is not None
        read = context.aux_hidden_states if network.fuses else fuse(context.aux_hidden_states)
        committed = CommittedTokens(table, len(context.requests), *context.bounds, read)
        options = self._options(noise_of(context, shape))
        return _tree(network.draft(attention, committed, self._limits(shape), options), shape)

    def _fused(self, context: ProposeContext) -> tuple[TreeNetwork, PagedAttention] | None:
        """The kernels' model and attention; None if they are not there or cannot grow such trees."""
        network = self._network
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


class FusedTreeGrower(TreeGrower):
    """Grows trees in one call of the kernels where it can; see TreeGrower."""

    @cached_property
    def fused(self) -> FusedDrafts:
        scratch, last_position = self._scratch, self._last_position
        return FusedDrafts(self._model.network, self._shape, self._attention, scratch, last_position, self._window)

    def grow(self, context: ProposeContext, prefix: TreePrefix, output: Tensor) -> DraftTree:
        """Trees below the last known tokens; `output` [B, H] predicts the roots' children."""
        if (tree := self.fused.grow(context, prefix, output)) is not None:
            return tree
        shape = limited(self._shape, context)
        return self.grow_levels(context.roots(), prefix, output, shape, noise_of(context, shape))


def limited(shape: TreeShape, context: ProposeContext) -> TreeShape:
    """The shape within the requests' limits."""
    return shape.limited(
        max(request.draft_limit.num_steps for request in context.requests),
        max(request.draft_limit.num_tokens for request in context.requests),
    )


def noise_of(context: ProposeContext, shape: TreeShape) -> TreeNoise | None:
    """The noise of the sampled requests; None if there are none."""
    requests, is_sampled = context.requests, context.are_sampled(context.requests)
    if not any(is_sampled):
        return None
    return TreeNoise.of(context, requests, is_sampled, context.bounds[0][: len(requests)], shape.num_steps)


def _tree(grown: GrownTrees, shape: TreeShape) -> DraftTree:
    return DraftTree(grown.tokens, grown.parents, grown.num_nodes, shape.num_steps, scores=grown.scores)
