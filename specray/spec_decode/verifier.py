"""The verifier: walk each draft tree from its root, and sample a token at every node on the way.

If the token is a child of the node, the walk continues there; otherwise it is the bonus token and the walk ends. With
coupled sampling the target samples its own token, so the output does not depend on the drafts. Most requests are
verified at once: the CPU kernels walk all trees in one call; elsewhere, the tokens of all nodes are chosen in one
batch, and Triton's kernels or comparisons on the device give the path (`node_verifier`). Requests whose logits depend
on the path (penalties), that need logprobs, or whose sampler depends on the drafts are walked depth by depth
(`depth_walk`). So are sampled requests on a CPU without the kernels, where noise for unvisited nodes costs more than
the depths.
"""

from collections.abc import Sequence

from specray.ops.cpu.library import Kernels, kernels, kernels_on
from specray.ops.cpu.tree_walk import follow, walk
from specray.ops.gpu import uses_triton
from specray.ops.largest_logits import LargestLogits
from specray.ops.sampling_state import SamplingState
from specray.ops.token_mask import TokenMask, forbid_masked
from specray.spec_decode.depth_walk import walk_by_depth
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.node_sampler import NodeSampler, PaddedSampler, coupled
from specray.spec_decode.node_verifier import verify_nodes
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput, in_order


def verify(inputs: VerifyInput, sampler: NodeSampler = coupled, mask: TokenMask | None = None) -> VerifyOutput:
    """Verify all trees. `mask` has the tokens that grammars allow; it is applied to the logits in place."""
    is_cpu, states = inputs.logits.device.type == "cpu", inputs.sampling.states
    if mask is not None:
        if any(state.options.logprobs is not None for state in states):
            inputs = inputs._replace(unmasked=inputs.logits.clone())
        forbid_masked(inputs.logits, mask)
    own = kernels_on(inputs.logits.device)
    walks_sampled = is_cpu and own is None and not uses_triton(inputs.logits.device)
    walked = [row for row, state in enumerate(states) if sampler is not coupled or needs_walk(state, walks_sampled)]
    if not walked:
        return _verify_at_once(inputs, own)
    if len(walked) == len(states):
        return walk_by_depth(inputs, sampler)
    others = sorted(set(range(len(states))) - set(walked))
    outputs = [_verify_at_once(inputs.select(others), own), walk_by_depth(inputs.select(walked), sampler)]
    return in_order(outputs, others + walked)


def verify_largest(largest: LargestLogits, tree: DraftTree) -> VerifyOutput:
    """Verify the trees of requests of which `reads_largest_logit` is true, in one call of the CPU kernels."""
    own = kernels()
    assert own is not None, "only they make LargestLogits"
    return VerifyOutput(follow(own, largest.token_ids, tree.tokens, tree.parents, tree.num_nodes, tree.max_depth))


def can_verify_padded(states: Sequence[SamplingState], sampler: NodeSampler) -> bool:
    """Whether `verify_padded` can verify these requests."""
    return is_padded(sampler) and not any(needs_walk(state) for state in states)


def is_padded(sampler: NodeSampler) -> bool:
    """Whether the sampler can choose in a CUDA graph."""
    return sampler is coupled or isinstance(sampler, PaddedSampler)


def needs_walk(state: SamplingState, walks_sampled: bool = False) -> bool:
    """Whether a request's tokens depend on the path, or its logprobs are wanted."""
    is_adjusted = state.num_output_tokens < state.adjusts_until
    return is_adjusted or state.options.logprobs is not None or (walks_sampled and state.is_sampled)


def reads_largest_logit(state: SamplingState) -> bool:
    """Whether a request's tokens depend on nothing but the largest logit of each node."""
    return not state.is_sampled and not needs_walk(state)


def _verify_at_once(inputs: VerifyInput, own: Kernels | None) -> VerifyOutput:
    """Verify all trees in one call of the CPU kernels, in Triton's, or with torch's operations."""
    if own is not None:
        tree = inputs.tree
        parts = (tree.tokens, tree.parents, tree.num_nodes, tree.max_depth, inputs.sampling, inputs.lengths)
        return VerifyOutput(walk(own, inputs.logits, *parts))
    if uses_triton(inputs.logits.device):
        from specray.spec_decode.gpu_verifier import verify_on_gpu

        return verify_on_gpu(inputs)
    return verify_nodes(inputs)
