"""Verification by Triton's kernels: the target's token at all nodes, then the walk, without a read by the host."""

import torch
from torch import Tensor

from specray.ops.gpu.sampling import Rows, choose, keys_of_nodes, walk_chosen
from specray.ops.sampling_state import SamplingBatch
from specray.ops.shard_sampling import Choices
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.node_sampler import NodeSampler, PaddedSampler
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput


def verify_on_gpu(inputs: VerifyInput) -> VerifyOutput:
    """Requests without penalties and logprobs, with coupled sampling."""
    return walk_on_gpu(inputs.tree, choose_on_gpu(inputs))


def verify_padded_on_gpu(
    logits: Tensor,
    tree: DraftTree,
    sampling: SamplingBatch | None,
    lengths: Tensor,
    is_sampled: bool,
    sampler: NodeSampler,
) -> VerifyOutput:
    """See `verify_padded`."""
    num_trees, width = tree.tokens.shape
    choices = choose_padded_on_gpu(logits, tree, sampling if is_sampled else None, lengths)
    if isinstance(sampler, PaddedSampler):
        assert sampling is not None
        chosen = choices.tokens.view(num_trees, width)
        chosen = sampler.at_nodes(chosen, tree, sampling.seeds, lengths, logits.shape[-1])
        choices = choices._replace(tokens=chosen.flatten())
    return walk_on_gpu(tree, choices)


def choose_padded_on_gpu(
    logits: Tensor, tree: DraftTree, sampling: SamplingBatch | None, lengths: Tensor, first_id: int = 0
) -> Choices:
    """The target's token at every place of padded trees; all requests are greedy without `sampling`.

    `logits` and `lengths` are those of `verify_padded`; `first_id` is the token id of the first column.
    """
    num_trees, width = tree.tokens.shape
    starts = torch.arange(0, num_trees * width, width, device=logits.device)
    rows, keys = Rows(logits, starts, tree.num_nodes.contiguous(), width), None
    if sampling is not None:
        keys = keys_of_nodes(sampling.seeds, lengths, tree.parents, tree.max_depth)
    return choose(rows, sampling, keys, first_id)


def choose_on_gpu(inputs: VerifyInput, first_id: int = 0) -> Choices:
    """The target's token at every place of the trees, [B * N]; `first_id` is the token id of the first column."""
    tree, sampling, keys = inputs.tree, inputs.sampling, None
    num_nodes = tree.num_nodes.contiguous()
    rows = Rows(inputs.logits.contiguous(), num_nodes.cumsum(0) - num_nodes, num_nodes, tree.tokens.shape[1])
    if not any(state.is_sampled for state in sampling.states):
        return choose(rows, None, None, first_id)
    keys = keys_of_nodes(sampling.seeds, inputs.lengths, tree.parents, tree.max_depth)
    return choose(rows, sampling, keys, first_id)


def walk_on_gpu(tree: DraftTree, choices: Choices) -> VerifyOutput:
    """Accept the nodes whose whole path was chosen."""
    return VerifyOutput(walk_chosen(choices, tree.tokens, tree.parents, tree.num_nodes, tree.max_depth))
