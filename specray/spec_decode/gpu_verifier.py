"""Verification by Triton's kernels: the target's token at all nodes, then the walk, without a read by the host."""

import torch
from torch import Tensor

from specray.ops.gpu.sampling import Rows, choose, follow, keys_of_nodes
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
    rows, keys = _padded_rows(logits, tree), None
    if is_sampled:
        assert sampling is not None
        keys = keys_of_nodes(sampling.seeds, lengths, tree.parents, tree.max_depth)
    choices = choose(rows, sampling if is_sampled else None, keys)
    if isinstance(sampler, PaddedSampler):
        assert sampling is not None
        chosen = choices.tokens.view(num_trees, width)
        chosen = sampler.at_nodes(chosen, tree, sampling.seeds, lengths, logits.shape[-1])
        choices = choices._replace(tokens=chosen.flatten())
    return walk_on_gpu(tree, choices)


def choose_greedily_on_gpu(logits: Tensor, tree: DraftTree, first_id: int) -> Choices:
    """The largest logit at every place of padded trees; `logits` are those of `verify_padded`."""
    return choose(_padded_rows(logits, tree), None, None, first_id)


def _padded_rows(logits: Tensor, tree: DraftTree) -> Rows:
    num_trees, width = tree.tokens.shape
    starts = torch.arange(0, num_trees * width, width, device=logits.device)
    return Rows(logits, starts, tree.num_nodes.contiguous(), width)


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
    return VerifyOutput(*follow(choices, tree.tokens, tree.parents, tree.num_nodes, tree.max_depth), {})
