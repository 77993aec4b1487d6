"""Verification where each tensor-parallel rank has the logits of a part of the vocabulary.

Ranks exchange the best token of each node, three numbers, instead of its logits. Requests with filters, penalties,
logprobs or a grammar, and samplers that depend on the drafts, need all logits of a node and gather them. Finding
filters by bisection over shards would take an exchange for every pass, and the logits take one.
"""

import torch
from torch import Tensor

from specray.layers.linear import VocabHead
from specray.ops.gpu import uses_triton
from specray.ops.noise import noise_keys
from specray.ops.sampling_state import SamplingBatch, SamplingState
from specray.ops.shard_sampling import Choices, best_of, choose_greedily, choose_in_shard, none_of, packed
from specray.ops.token_mask import TokenMask
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.node_sampler import NodeSampler, coupled
from specray.spec_decode.node_verifier import accept, verify_padded
from specray.spec_decode.verifier import needs_walk, verify
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput, in_order


def verify_shards(
    inputs: VerifyInput, head: VocabHead, sampler: NodeSampler = coupled, mask: TokenMask | None = None
) -> VerifyOutput | None:
    """`verify` where `inputs.logits` are this rank's columns of `head`. Call it on all ranks; None but on rank 0.

    `mask` is needed on rank 0 only.
    """
    states, leads, outputs = inputs.sampling.states, head.group.leads, []
    whole = [row for row, state in enumerate(states) if sampler is not coupled or _needs_all_logits(state)]
    others = sorted(set(range(len(states))) - set(whole))
    if others:
        outputs.append(_verify_at_once(inputs.select(others), head))
    if whole:
        selected = inputs.select(whole)
        logits = head.gathered(selected.logits)
        if leads:
            if mask is not None:  # requests with a grammar are among `whole`
                mask = mask._replace(rows=torch.searchsorted(inputs.places(whole), mask.rows))
            outputs.append(verify(selected._replace(logits=logits), sampler, mask))
    return in_order(outputs, others + whole) if leads else None


def verify_padded_shards(
    logits: Tensor,
    tree: DraftTree,
    sampling: SamplingBatch | None,
    lengths: Tensor,
    is_sampled: bool,
    sampler: NodeSampler,
    head: VocabHead,
    is_filtered: bool,
) -> VerifyOutput:
    """`verify_padded` where `logits` are this rank's columns of `head`; rank 0's outcome on all ranks.

    Unless `is_filtered`, no sampled request has filters.
    """
    if (is_sampled and is_filtered) or sampler is not coupled:
        verified = verify_padded(head.gathered(logits).contiguous(), tree, sampling, lengths, is_sampled, sampler)
    else:
        own = _choose_padded(logits, tree, sampling if is_sampled else None, lengths, head.first_id)
        verified = _accept(tree, _exchanged(own, head))
    return VerifyOutput(head.group.broadcast(verified.outcome))


def _choose_padded(
    logits: Tensor, tree: DraftTree, sampling: SamplingBatch | None, lengths: Tensor, first_id: int
) -> Choices:
    """This rank's best token at every place of padded trees; all requests are greedy without `sampling`."""
    if not logits.shape[1]:
        return none_of(tree.tokens.numel(), logits.device)
    if uses_triton(logits.device):
        from specray.spec_decode.gpu_verifier import choose_padded_on_gpu

        return choose_padded_on_gpu(logits, tree, sampling, lengths, first_id)
    if sampling is None:
        return choose_greedily(logits, first_id)
    keys = noise_keys(sampling.seeds[:, None], lengths[:, None] + tree.ancestors().sum(-1) - 1)
    temperature = sampling.temperature.repeat_interleave(tree.tokens.shape[1])
    return choose_in_shard(logits, temperature, keys.flatten(0, 1), first_id)


def _needs_all_logits(state: SamplingState) -> bool:
    return state.options.grammar is not None or needs_walk(state) or (state.is_sampled and state.is_filtered)


def _verify_at_once(inputs: VerifyInput, head: VocabHead) -> VerifyOutput:
    """Choose at every place on all ranks alike, then walk."""
    tree = inputs.tree
    if not inputs.logits.shape[1]:
        own = none_of(tree.tokens.numel(), inputs.logits.device)
    elif uses_triton(inputs.logits.device):
        from specray.spec_decode.gpu_verifier import choose_on_gpu

        own = choose_on_gpu(inputs, head.first_id)
    else:
        own = _choose(inputs, head.first_id)
    return _accept(tree, _exchanged(own, head))


def _exchanged(own: Choices, head: VocabHead) -> Choices:
    """The best choices of all ranks."""
    return best_of(head.group.gather(packed(own)).view(-1, head.group.size, 3))


def _accept(tree: DraftTree, best: Choices) -> VerifyOutput:
    """Walk trees of any number of places by the tokens chosen there."""
    shape = tree.tokens.shape
    if uses_triton(tree.tokens.device):
        from specray.spec_decode.gpu_verifier import walk_on_gpu

        return walk_on_gpu(tree, best)
    return accept(tree, tree.ancestors(), best.tokens.view(shape), best.is_finite.view(shape) > 0)


def _choose(inputs: VerifyInput, first_id: int) -> Choices:
    """This rank's best token at every place of the trees, [B * N]."""
    tree, num_logits, sampling = inputs.tree, len(inputs.logits), inputs.sampling
    keys = noise_keys(sampling.seeds[:, None], inputs.lengths[:, None] + tree.ancestors().sum(-1) - 1)
    starts, nodes = tree.num_nodes.cumsum(0) - tree.num_nodes, torch.arange(tree.tokens.shape[1], device=keys.device)
    places = (starts[:, None] + nodes).clamp(max=num_logits - 1).flatten()  # any row where there is no node
    is_sampled = any(state.is_sampled for state in sampling.states)
    temperature = sampling.temperature.repeat_interleave(len(nodes)) if is_sampled else None
    return choose_in_shard(inputs.logits.index_select(0, places), temperature, keys.flatten(0, 1), first_id)
