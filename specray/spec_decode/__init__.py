"""Drafting methods and the verifier. This table is the only place that knows the methods' names."""

from collections.abc import Callable

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.spec_decode.drafter import Drafter
from specray.spec_decode.ngram import NgramDrafter

DRAFTERS: dict[str, Callable[[SpeculativeConfig], Drafter]] = {
    "NGRAM": NgramDrafter,
}


def check_algorithm(config: SpeculativeConfig) -> None:
    """ConfigError if `speculative.algorithm` is not a method we have."""
    if config.algorithm is not None and config.algorithm not in DRAFTERS:
        raise ConfigError(
            f"speculative.algorithm={config.algorithm!r} is not known; choose one of {', '.join(DRAFTERS)}, "
            "or null to decode plainly"
        )


def make_drafter(config: SpeculativeConfig) -> Drafter | None:
    """The configured drafter, or None for plain decoding."""
    check_algorithm(config)
    return None if config.algorithm is None else DRAFTERS[config.algorithm](config)
