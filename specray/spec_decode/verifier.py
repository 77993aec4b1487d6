"""The verifier: walk each draft tree from its root, and sample a token at every node on the way.

If the token is a child of the node, the walk continues there; otherwise it is the bonus token and the walk ends. With
coupled sampling the target samples its own token, so the output does not depend on the drafts. Most requests are
verified at once: the CPU kernels walk all trees in one call; elsewhere, the tokens of all nodes are chosen in one
batch, and Triton's kernels or comparisons on the device give the path. Requests whose logits depend on the path
(penalties), that need logprobs, or whose sampler depends on the drafts are walked depth by depth (`depth_walk`). So are
sampled requests on a CPU without the kernels, where noise for unvisited nodes costs more than the depths.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specray.ops.argmax import argmax
from specray.ops.cpu.library import Kernels, kernels
from specray.ops.cpu.sampling import walk
from specray.ops.gpu import uses_triton
from specray.ops.noise import noise_keys
from specray.ops.sampling import sample, sample_padded
from specray.ops.sampling_state import SamplingBatch, SamplingState
from specray.ops.token_mask import TokenMask, forbid_masked
from specray.spec_decode.depth_walk import walk_by_depth
from specray.spec_decode.draft_tree import ROOT, DraftTree
from specray.spec_decode.node_sampler import NodeSampler, PaddedSampler, coupled
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput


def verify(inputs: VerifyInput, sampler: NodeSampler = coupled, mask: TokenMask | None = None) -> VerifyOutput:
    """Verify all trees. `mask` has the tokens that grammars allow; it is applied to the logits in place."""
    is_cpu, states = inputs.logits.device.type == "cpu", inputs.sampling.states
    if mask is not None:
        if any(state.options.logprobs is not None for state in states):
            inputs = inputs._replace(unmasked=inputs.logits.clone())
        forbid_masked(inputs.logits, mask)
    own = kernels() if is_cpu else None
    walks_sampled = is_cpu and own is None and not uses_triton(inputs.logits.device)
    walked = [row for row, state in enumerate(states) if sampler is not coupled or needs_walk(state, walks_sampled)]
    if not walked:
        return _verify_at_once(inputs, own)
    if len(walked) == len(states):
        return walk_by_depth(inputs, sampler)
    others = sorted(set(range(len(states))) - set(walked))
    outputs = [_verify_at_once(inputs.select(others), own), walk_by_depth(inputs.select(walked), sampler)]
    return in_order(outputs, others + walked)


def in_order(outputs: Sequence[VerifyOutput], rows: Sequence[int]) -> VerifyOutput:
    """One output of several, whose requests, one output after the other, are number `rows` of the batch."""
    order = torch.tensor(rows).argsort().to(outputs[0].tokens.device)
    num_tokens, tokens, nodes = (
        torch.cat(parts).index_select(0, order) for parts in zip(*(output[:3] for output in outputs), strict=True)
    )
    starts = accumulate((len(output.num_tokens) for output in outputs), initial=0)
    logprobs = {
        rows[start + row]: probs
        for start, output in zip(starts, outputs, strict=False)
        for row, probs in output.logprobs.items()
    }
    return VerifyOutput(num_tokens, tokens, nodes, logprobs)


def can_verify_padded(states: Sequence[SamplingState], sampler: NodeSampler) -> bool:
    """Whether `verify_padded` can verify these requests."""
    return is_padded(sampler) and not any(needs_walk(state) for state in states)


def is_padded(sampler: NodeSampler) -> bool:
    """Whether the sampler can choose in a CUDA graph."""
    return sampler is coupled or isinstance(sampler, PaddedSampler)


def needs_walk(state: SamplingState, walks_sampled: bool = False) -> bool:
    """Whether a request's tokens depend on the path, or its logprobs are wanted."""
    return state.options.logprobs is not None or state.adjusts_logits or (walks_sampled and state.is_sampled)


def _verify_at_once(inputs: VerifyInput, own: Kernels | None) -> VerifyOutput:
    """Choose the target's token at every node, then accept the nodes whose whole path was chosen."""
    tree, device = inputs.tree, inputs.logits.device
    if own is not None:
        parts = (tree.tokens, tree.parents, tree.num_nodes, tree.max_depth, inputs.sampling, inputs.lengths)
        return VerifyOutput(*walk(own, inputs.logits, *parts), {})
    if uses_triton(device):
        from specray.spec_decode.gpu_verifier import verify_on_gpu

        return verify_on_gpu(inputs)
    ancestors = tree.ancestors()
    depths = ancestors.sum(-1) - 1
    nodes = torch.arange(tree.tokens.shape[1], device=device)
    is_node = nodes < tree.num_nodes[:, None]
    starts = tree.num_nodes.cumsum(0) - tree.num_nodes
    places = torch.where(is_node, starts[:, None] + nodes, 0)
    flat = _choose_everywhere(inputs, depths, is_node)
    is_finite = inputs.logits.gather(1, flat[:, None])[:, 0].isfinite()
    return accept(tree, ancestors, flat[places], is_finite[places])


def verify_padded(
    logits: Tensor,
    tree: DraftTree,
    sampling: SamplingBatch | None,
    lengths: Tensor,
    is_sampled: bool,
    sampler: NodeSampler,
) -> VerifyOutput:
    """`verify` for CUDA graphs, where `can_verify_padded`.

    `logits` float32 [B * N, V] has a row for every place of `tree`. Unless `is_sampled`, all requests are greedy.
    `lengths` int64 [B] are the known tokens. A request whose tree has no node keeps and emits nothing. `sampling` may
    be None for greedy requests with coupled sampling.
    """
    if uses_triton(logits.device):
        from specray.spec_decode.gpu_verifier import verify_padded_on_gpu

        return verify_padded_on_gpu(logits, tree, sampling, lengths, is_sampled, sampler)
    ancestors, shape = tree.ancestors(), tree.tokens.shape
    if not is_sampled:
        chosen = argmax(logits)
    else:
        assert sampling is not None
        keys = noise_keys(sampling.seeds[:, None], lengths[:, None] + ancestors.sum(-1) - 1)
        chosen = sample_padded(logits, sampling.repeat(shape[1]), keys.flatten(0, 1))
    is_finite = logits.gather(1, chosen[:, None])[:, 0].isfinite()
    chosen = chosen.view(shape)
    if isinstance(sampler, PaddedSampler):
        assert sampling is not None
        chosen = sampler.at_nodes(chosen, tree, sampling.seeds, lengths, logits.shape[-1])
    return accept(tree, ancestors, chosen, is_finite.view(shape))


def accept(tree: DraftTree, ancestors: Tensor, chosen: Tensor, is_finite: Tensor) -> VerifyOutput:
    """Accept the nodes whose whole path was chosen; `chosen` are the target's tokens at all places.

    `ancestors` bool [B, N, N] are those of `tree`. `chosen` and `is_finite` [B, N] are undefined without a node.
    """
    num_rows, width = tree.tokens.shape
    nodes = torch.arange(width, device=chosen.device)
    is_node = nodes < tree.num_nodes[:, None]
    depths = ancestors.sum(-1) - 1
    is_finite = is_finite & is_node
    parents = tree.parents.clamp(min=0)
    is_chosen = (tree.tokens == chosen.gather(1, parents)) & is_node & ~tree.repeats_sibling()
    is_chosen[:, ROOT].fill_(True)
    is_accepted = (is_chosen[:, None, :] | ~ancestors).all(-1) & (depths <= tree.max_depth) & is_node
    has_finite_path = (is_finite | ~is_accepted).all(-1)
    # At most one node of each depth is accepted; the others go to a column that is cut off.
    columns = torch.where(is_accepted, depths, tree.max_depth + 1)
    path = torch.zeros(num_rows, tree.max_depth + 2, dtype=torch.int64, device=chosen.device)
    path = path.scatter_(1, columns, nodes.expand(num_rows, width))[:, :-1]
    return VerifyOutput(is_accepted.sum(-1) * has_finite_path, chosen.gather(1, path), path, {})


def _choose_everywhere(inputs: VerifyInput, depths: Tensor, is_node: Tensor) -> Tensor:
    """The target's token at every node, int64 [sum of num_nodes]; `depths` and `is_node` are [B, N]."""
    if not any(state.is_sampled for state in inputs.sampling.states):
        return argmax(inputs.logits)
    positions = inputs.lengths[:, None] + depths
    keys = noise_keys(inputs.sampling.seeds[:, None], positions)
    places = is_node.flatten().argsort(descending=True, stable=True)[: len(inputs.logits)]
    rows = np.repeat(np.arange(len(inputs.num_nodes)), inputs.num_nodes).tolist()
    return sample(inputs.logits, inputs.sampling.select(rows), keys.flatten(0, 1).index_select(0, places))
