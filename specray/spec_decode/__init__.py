"""Drafting methods and the verifier. This table is the only place that knows the methods' names."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.spec_decode.choice import Choose, coupled
from specray.spec_decode.combined import check_override, with_override
from specray.spec_decode.draft_model import make_standalone
from specray.spec_decode.drafter import Drafter, TargetView
from specray.spec_decode.eagle import make_eagle3
from specray.spec_decode.mtp import check_mtp, make_eagle_or_mtp, make_mtp
from specray.spec_decode.ngram import NGRAM_OPTIONS, NgramDrafter, check_ngram
from specray.spec_decode.rejection import by_rejection
from specray.spec_decode.simulation import Simulated, rates_of
from specray.spec_decode.thresholds import Thresholds
from specray.spec_decode.tree_growth import check_tree_drafter

logger = logging.getLogger(__name__)


class Method(NamedTuple):
    """A drafting method: how its drafter is made, and which of the speculative options it reads."""

    make: Callable[[SpeculativeConfig, TargetView], Drafter]
    options: frozenset[str]
    check: Callable[[SpeculativeConfig], None] = lambda config: None  # noqa: ARG005  # what needs no model to be seen


_ALL = frozenset(
    {
        "algorithm", "max_step_draft_tokens", "verification", "accept_threshold_single", "accept_threshold_acc",
        "simulate_accept_length", "simulate_accept_rates", "simulate_output_is_meaningless",
    }
)  # fmt: skip  # hold for every method
_HEAD = frozenset(
    {
        "draft_model_path", "draft_model_revision", "draft_load_format", "draft_dtype", "draft_model_quantization",
        "draft_attention_backend", "ngram_override_min_match",
    }
)  # fmt: skip
_TREE = frozenset({"num_steps", "eagle_topk", "num_draft_tokens"})

DRAFTERS: dict[str, Method] = {
    "EAGLE3": Method(make_eagle3, _HEAD | _TREE | {"token_map"}, check_tree_drafter),
    "EAGLE": Method(make_eagle_or_mtp, _HEAD | _TREE | {"token_map"}, check_mtp),
    "NEXTN": Method(make_eagle_or_mtp, _HEAD | _TREE | {"token_map"}, check_mtp),
    "MTP": Method(make_mtp, _HEAD | _TREE | {"token_map"}, check_mtp),
    "STANDALONE": Method(make_standalone, _HEAD | _TREE | {"token_map"}, check_tree_drafter),
    "NGRAM": Method(lambda config, _: NgramDrafter.of(config), NGRAM_OPTIONS | {"num_draft_tokens"}, check_ngram),
}


def check_speculative(config: SpeculativeConfig) -> None:
    """ConfigError if `speculative.algorithm` is not a method we have, or does not go with the other options."""
    if config.algorithm is None:
        return
    method = DRAFTERS.get(config.algorithm)
    if method is None:
        raise ConfigError(
            f"speculative.algorithm={config.algorithm!r} is not known; choose one of {', '.join(DRAFTERS)}, "
            "or null to decode plainly"
        )
    read = _ALL | method.options
    if config.ngram_override_min_match is not None:
        read |= NGRAM_OPTIONS
    for name in config.changed() - read:
        raise ConfigError(
            f"speculative.{name}={getattr(config, name)!r} has no effect with algorithm={config.algorithm}; "
            f"remove it (this method reads {', '.join(sorted(method.options))})"
        )
    method.check(config)
    check_override(config)


def make_choice(config: SpeculativeConfig) -> Choose:
    """How tokens are chosen when drafts are verified."""
    if config.is_simulated:
        rates = config.simulate_accept_rates or rates_of(config.simulate_accept_length or 1.0)
        logger.warning("SIMULATED acceptance at rates %s by depth: the output is MEANINGLESS", rates)
        return Simulated(rates)
    if config.verification == "rejection":
        return by_rejection
    if not config.is_lossy:
        return coupled
    single, acc = config.accept_threshold_single, config.accept_threshold_acc
    logger.warning("accept_threshold_single=%s, accept_threshold_acc=%s: output is LOSSY where sampled", single, acc)
    return Thresholds(single, acc)


def make_drafter(config: SpeculativeConfig, target: TargetView) -> Drafter | None:
    """The configured drafter for `target`, or None for plain decoding."""
    check_speculative(config)
    if config.algorithm is None:
        return None
    seen = replace(target, attention_backend=config.draft_attention_backend or target.attention_backend)
    return with_override(DRAFTERS[config.algorithm].make(config, seen), config)
