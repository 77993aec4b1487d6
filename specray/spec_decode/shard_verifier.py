"""Verification where each tensor-parallel rank has the logits of a part of the vocabulary.

Ranks exchange the best token of each node, three numbers, instead of its logits. Requests with filters, penalties,
logprobs or a grammar, and samplers that depend on the drafts, need all logits of a node and gather them. Finding
filters by bisection over shards would take an exchange for every pass, and the logits take one.
"""

import torch

from specray.layers.linear import VocabHead
from specray.layers.parallel import RankGroup
from specray.ops.sampling_state import SamplingState, TokenMask
from specray.ops.shard_sampling import best_of, none_of, packed
from specray.ops.step_tensors import Choices
from specray.spec_decode.node_sampler import NodeSampler, coupled
from specray.spec_decode.step_ops import step_ops
from specray.spec_decode.verifier import verify
from specray.spec_decode.verify_batch import PaddedVerifyInput, VerifyInput, VerifyOutput, in_order


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
        outputs.append(_choose_and_walk(inputs.select(others), head))
    if whole:
        selected = inputs.select(whole)
        logits = head.gathered(selected.logits)
        if leads:
            if mask is not None:  # requests with a grammar are among `whole`
                mask = mask._replace(rows=torch.searchsorted(inputs.places(whole), mask.rows))
            outputs.append(verify(selected._replace(logits=logits), sampler, mask))
    return in_order(outputs, others + whole) if leads else None


def verify_padded_shards(
    inputs: PaddedVerifyInput, sampler: NodeSampler, head: VocabHead, is_filtered: bool
) -> VerifyOutput:
    """`TorchStepOps.verify_padded` where the logits are this rank's columns of `head`; rank 0's outcome on all ranks.

    Unless `is_filtered`, no sampled request has filters.
    """
    if (inputs.is_sampled and is_filtered) or sampler is not coupled:
        whole = inputs._replace(logits=head.gathered(inputs.logits).contiguous())
        verified = step_ops(whole.logits.device).verify_padded(whole, sampler)
    else:
        verified = _choose_and_walk(inputs, head)
    return VerifyOutput(head.group.broadcast(verified.outcome))


def exchanged(own: Choices, group: RankGroup) -> Choices:
    """The best choices of all ranks, on all ranks."""
    return best_of(group.gather(packed(own)).view(-1, group.size, 3))


def _needs_all_logits(state: SamplingState) -> bool:
    return state.options.grammar is not None or state.needs_walk or (state.is_sampled and state.is_filtered)


def _choose_and_walk(inputs: VerifyInput | PaddedVerifyInput, head: VocabHead) -> VerifyOutput:
    """Choose at all nodes on all ranks alike, then walk."""
    logits, ops = inputs.logits, step_ops(inputs.logits.device)
    own = none_of(len(logits), logits.device)  # the last ranks may have no column
    if logits.shape[1]:
        own = ops.choose(inputs, head.first_id)
    return ops.accept(inputs.tree, exchanged(own, head.group))
