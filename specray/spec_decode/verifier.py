"""The verifier: walk each draft tree from its root, and sample a token at every node on the way.

If the token is a child of the node, the walk continues there; otherwise it is the bonus token and the walk ends. With
coupled sampling the target samples its own token, so the output does not depend on the drafts. Most requests are
verified at once (`TorchStepOps.verify`). Requests whose logits depend on the path (penalties), that need logprobs, or
whose sampler depends on the drafts are walked depth by depth (`depth_walk`). So are sampled requests on a CPU without
the kernels, where noise for unvisited nodes costs more than the depths.
"""

import logging
from collections.abc import Sequence

from specray.config import SpeculativeConfig
from specray.ops.device_ops import ops_on
from specray.ops.sampling_state import SamplingState, TokenMask
from specray.spec_decode.depth_walk import walk_by_depth
from specray.spec_decode.node_sampler import NodeSampler, PaddedSampler, coupled
from specray.spec_decode.rejection import sample_by_rejection
from specray.spec_decode.simulation import SimulatedAcceptance, rates_of
from specray.spec_decode.step_ops import step_ops
from specray.spec_decode.thresholds import ThresholdSampler
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput, in_order

logger = logging.getLogger(__name__)


def verify(inputs: VerifyInput, sampler: NodeSampler = coupled, mask: TokenMask | None = None) -> VerifyOutput:
    """Verify all trees. `mask` has the tokens that grammars allow; it is applied to the logits in place."""
    states, device = inputs.sampling.states, inputs.logits.device
    if mask is not None:
        if any(state.options.logprobs is not None for state in states):
            inputs = inputs._replace(unmasked=inputs.logits.clone())
        ops_on(device).forbid(inputs.logits, *mask)
    ops = step_ops(device)
    walked = [
        row
        for row, state in enumerate(states)
        if sampler is not coupled or state.needs_walk or (ops.walks_sampled and state.is_sampled)
    ]
    if not walked:
        return ops.verify(inputs)
    if len(walked) == len(states):
        return walk_by_depth(inputs, sampler)
    others = sorted(set(range(len(states))) - set(walked))
    outputs = [ops.verify(inputs.select(others)), walk_by_depth(inputs.select(walked), sampler)]
    return in_order(outputs, others + walked)


def make_sampler(config: SpeculativeConfig) -> NodeSampler:
    """How verification chooses the tokens at a tree's nodes; a warning where that changes the output."""
    if config.is_simulated:
        rates = config.simulate_accept_rates or rates_of(config.simulate_accept_length or 1.0)
        logger.warning("SIMULATED acceptance at rates %s by depth: the output is MEANINGLESS", rates)
        return SimulatedAcceptance(rates)
    if config.verification == "rejection":
        return sample_by_rejection
    if not config.is_lossy:
        return coupled
    single, acc = config.accept_threshold_single, config.accept_threshold_acc
    logger.warning("accept_threshold_single=%s, accept_threshold_acc=%s: output is LOSSY where sampled", single, acc)
    return ThresholdSampler(single, acc)


def can_verify_padded(states: Sequence[SamplingState], sampler: NodeSampler) -> bool:
    """Whether `verify_padded` can verify these requests."""
    return is_padded(sampler) and not any(state.needs_walk for state in states)


def is_padded(sampler: NodeSampler) -> bool:
    """Whether the sampler can choose in a CUDA graph."""
    return sampler is coupled or isinstance(sampler, PaddedSampler)
