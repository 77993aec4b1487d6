"""Trees that grow in one call of the CPU kernels, where these have the drafter's model; level by level elsewhere."""

from torch import Tensor

from specray.ops.cpu.attention import PagedAttention
from specray.ops.cpu.trees import TreeRequests
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
        shape = self._shape.limited(
            max(request.draft_limit.num_steps for request in prefix.requests),
            max(request.draft_limit.num_tokens for request in prefix.requests),
        )
        is_sampled, noise = context.are_sampled(prefix.requests), None
        if any(is_sampled):
            noise = TreeNoise.of(context, prefix.requests, is_sampled, prefix.slots, shape.num_steps)
        if (tree := self._grow_fused(context, prefix, output, shape, noise)) is not None:
            return tree
        return self.grow_levels(context.roots(), prefix, output, shape, noise)

    def _grow_fused(
        self, context: ProposeContext, prefix: TreePrefix, output: Tensor, shape: TreeShape, noise: TreeNoise | None
    ) -> DraftTree | None:
        """All levels in one call of the CPU kernels; None where that is not possible."""
        network, returns_probs = self._model.network, noise is not None and shape.returns_draft_probs
        if network is None or not isinstance(self._attention, PagedAttention) or returns_probs:
            return None
        sampled = None
        if noise is not None:
            temperature = noise.temperature.where(noise.temperature >= GREEDY_BELOW, 0.0)
            sampled = (noise.seeds, noise.ends, temperature)
        [(kv_slots, kv_lens)] = prefix.visible
        requests = TreeRequests(output, context.roots(), prefix.positions, kv_slots, kv_lens, self._scratch, sampled)
        tokens, parents, scores, num_nodes = network.grow(
            self._attention,
            requests,
            shape.topk,
            shape.num_steps,
            shape.num_draft_tokens - 1,
            self._last_position,
            self._window,
        )
        return DraftTree(tokens, parents, num_nodes, shape.num_steps, scores=scores)
