"""Selection of the sampler for verification."""

import logging

from specray.config import SpeculativeConfig
from specray.spec_decode.node_sampler import NodeSampler, coupled
from specray.spec_decode.rejection import sample_by_rejection
from specray.spec_decode.simulation import SimulatedAcceptance, rates_of
from specray.spec_decode.thresholds import ThresholdSampler

logger = logging.getLogger(__name__)


def make_sampler(config: SpeculativeConfig) -> NodeSampler:
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
