"""Drafting methods and the verifier. This table is the only place that knows the methods' names."""

from collections.abc import Callable
from typing import NamedTuple

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.spec_decode.drafter import Drafter, TargetView
from specray.spec_decode.eagle import check_eagle, make_eagle2, make_eagle3
from specray.spec_decode.ngram import NgramDrafter


class Method(NamedTuple):
    """A drafting method: how its drafter is made, and which of the speculative options it reads."""

    make: Callable[[SpeculativeConfig, TargetView], Drafter]
    options: frozenset[str]
    check: Callable[[SpeculativeConfig], None] = lambda config: None  # noqa: ARG005  # what needs no model to be seen


_ALL = frozenset({"algorithm", "max_step_draft_tokens"})  # hold for every method
_HEAD = frozenset({"draft_model_path", "draft_model_revision", "draft_load_format", "draft_dtype"})
_TREE = frozenset({"num_steps", "eagle_topk", "num_draft_tokens"})

DRAFTERS: dict[str, Method] = {
    "EAGLE3": Method(make_eagle3, _HEAD | _TREE | {"token_map"}, check_eagle),
    "EAGLE": Method(make_eagle2, _HEAD | _TREE | {"token_map"}, check_eagle),
    "NGRAM": Method(lambda config, _: NgramDrafter(config), frozenset({"num_draft_tokens"})),
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
    for name in config.changed() - _ALL - method.options:
        raise ConfigError(
            f"speculative.{name}={getattr(config, name)!r} has no effect with algorithm={config.algorithm}; "
            f"remove it (this method reads {', '.join(sorted(method.options))})"
        )
    method.check(config)


def make_drafter(config: SpeculativeConfig, target: TargetView) -> Drafter | None:
    """The configured drafter for `target`, or None for plain decoding."""
    check_speculative(config)
    return None if config.algorithm is None else DRAFTERS[config.algorithm].make(config, target)
