"""Verification of all nodes of the trees at once: choose the target's token at each, then accept the chosen paths."""

import torch
from torch import Tensor

from specray.ops.gpu import uses_triton
from specray.ops.largest_logits import argmax
from specray.ops.noise import noise_keys
from specray.ops.ragged_index import RaggedIndex
from specray.ops.sampling import sample_padded
from specray.ops.sampling_state import SamplingBatch
from specray.spec_decode.draft_tree import ROOT, DraftTree
from specray.spec_decode.node_sampler import NodeSampler, PaddedSampler
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput


def verify_nodes(inputs: VerifyInput) -> VerifyOutput:
    """`verify` with torch's operations, for requests whose tokens do not depend on the path."""
    tree = inputs.tree
    index = RaggedIndex.of(tree.num_nodes, len(inputs.logits))
    ancestors = tree.ancestors()
    chosen = _choose(inputs, index, ancestors.sum(-1) - 1)
    is_finite = inputs.logits.gather(1, chosen[:, None])[:, 0].isfinite()
    # Where there is no node, any row of the logits will do.
    starts, nodes = tree.num_nodes.cumsum(0) - tree.num_nodes, torch.arange(tree.tokens.shape[1], device=chosen.device)
    places = (starts[:, None] + nodes).clamp(max=len(chosen) - 1)
    return accept(tree, ancestors, chosen[places], is_finite[places])


def _choose(inputs: VerifyInput, index: RaggedIndex, depths: Tensor) -> Tensor:
    """The target's token at every node, int64 [sum of num_nodes]; `depths` is [B, N], `index` has the nodes' places."""
    states, rows = inputs.sampling.states, index.rows
    if not any(state.is_sampled for state in states):
        return argmax(inputs.logits)
    options = inputs.sampling.of_rows(rows)
    keys = noise_keys(options.seeds, inputs.lengths.index_select(0, rows) + depths[rows, index.offsets])
    return sample_padded(inputs.logits, options, keys, is_filtered=any(state.is_filtered for state in states))


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
    return VerifyOutput.of(is_accepted.sum(-1) * has_finite_path, chosen.gather(1, path), path)
