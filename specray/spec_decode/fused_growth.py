"""Draft extend and trees in one call of the CPU kernels, where these have the drafter's model; elsewhere in parts."""

from collections.abc import Callable, Sequence

from torch import Tensor

from specray.ops.cpu.attention import PagedAttention
from specray.ops.cpu.steps import TableKernels
from specray.ops.cpu.trees import CommittedTokens, GrownTrees, TreeLimits, TreeNetwork, TreeOptions, TreeRequests
from specray.ops.sampling_state import GREEDY_BELOW
from specray.spec_decode.draft_rows import DraftKV, DraftRows
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.scheduled_rows import ScheduledRows
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape


class FusedDrafts:
    """Calls the kernels' form of a draft model, `network`; its trees have one shape."""

    def __init__(self, network: TreeNetwork | None, kv: DraftKV, scratch: Tensor) -> None:
        """`network` None: the kernels do not have the model. `scratch` are the KV slots of `kv` for what is drafted."""
        self._kernels = (network, kv.attention) if network and isinstance(kv.attention, PagedAttention) else None
        self._kv = kv
        self._scratch = scratch

    def grow(self, rows: DraftRows, output: Tensor, positions: Tensor) -> DraftTree | None:
        """Trees below the last known tokens; see `TreeGrower.grow`. None if the kernels cannot grow them."""
        if self._kernels is None:
            return None
        assert isinstance(rows, ScheduledRows), "a CPU has no graphs"
        if (fused := self._fused(rows.context, rows.requests)) is None:
            return None
        network, attention = fused
        shape = rows.limited(self._kv.shape)
        [(kv_slots, kv_lens)] = rows.prefixes
        requests = TreeRequests(output, rows.roots, positions, kv_slots, kv_lens)
        options = self._options(rows.noise(shape.num_steps))
        return _tree(network.grow(attention, requests, self._limits(shape), options), shape)

    def extend_and_grow(self, context: ProposeContext, fuse: Callable[[Tensor], Tensor]) -> DraftTree | None:
        """Trees of `requests` after draft extend of all requests, of which the model must have all KV.

        `fuse` makes states of hidden states. None where the kernels cannot do both in one call.
        """
        table, count = context.table.ops, len(context.requests)
        if not count or not isinstance(table, TableKernels):
            return None
        if (fused := self._fused(context, context.requests)) is None:
            return None
        network, attention = fused
        shape = context.limited(self._kv.shape, context.requests)
        assert context.aux_hidden_states is not None
        read = context.aux_hidden_states if network.fuses else fuse(context.aux_hidden_states)
        slots, starts, ends = context.bounds
        committed = CommittedTokens(table, count, slots, starts, ends, read)
        slots, ends = slots[:count], ends[:count]
        options = self._options(context.noise(context.requests, slots, ends, shape.num_steps))
        return _tree(network.draft(attention, committed, self._limits(shape), options), shape)

    def _fused(
        self, context: ProposeContext, requests: Sequence[DraftRequest]
    ) -> tuple[TreeNetwork, PagedAttention] | None:
        """The kernels' model and attention; None if they are not there or cannot grow such trees."""
        returns_probs = self._kv.shape.returns_draft_probs and any(context.are_sampled(requests))
        return None if returns_probs else self._kernels

    def _limits(self, shape: TreeShape) -> TreeLimits:
        kv = self._kv
        return TreeLimits(shape.topk, shape.num_steps, shape.num_draft_tokens - 1, kv.last_position)

    def _options(self, noise: TreeNoise | None) -> TreeOptions:
        if noise is None:
            return TreeOptions(self._scratch, None)
        temperature = noise.temperature.where(noise.temperature >= GREEDY_BELOW, 0.0)
        return TreeOptions(self._scratch, (noise.seeds, noise.ends, temperature))


def _tree(grown: GrownTrees, shape: TreeShape) -> DraftTree:
    return DraftTree(grown.tokens, grown.parents, grown.num_nodes, shape.num_steps, scores=grown.scores)
