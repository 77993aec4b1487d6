"""Drafting methods and the verifier. Methods are selected by name only through the table in this module.

Drafters are imported when they are made, so that a configuration can be checked without importing torch. A name with a
colon is the import path of a drafter outside this package (`custom`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.spec_decode.custom import check_attributes, check_custom, load_custom
from specray.spec_decode.ngram_rules import MERGED_OPTIONS, NGRAM_OPTIONS, check_merged, check_ngram, ngram_rules
from specray.spec_decode.tree_sizes import check_block, check_tree, check_tree_drafter

if TYPE_CHECKING:
    from specray.spec_decode.drafter import Drafter, TargetFiles, TargetView


class Method(NamedTuple):
    """A drafting method: how its drafter is made, and which of the speculative options it reads."""

    make: Callable[[SpeculativeConfig, "TargetView"], "Drafter"]
    options: frozenset[str]
    check: Callable[[SpeculativeConfig], None] = lambda config: None  # noqa: ARG005  # checks that need no model
    check_files: Callable[[SpeculativeConfig, "TargetFiles"], None] = lambda config, target: None  # noqa: ARG005
    drafts_on_every_rank: bool = True  # with equal trees; if not, on rank 0, which sends its trees to the others


_ALL = frozenset(
    {
        "algorithm",
        "budget",
        "max_step_draft_tokens",
        "verification",
        "accept_threshold_single",
        "accept_threshold_acc",
        "attention_mode",
        "simulate_accept_length",
        "simulate_accept_rates",
        "simulate_output_is_meaningless",
    }
)  # for every method
_HEAD = frozenset(
    {
        "draft_model_path",
        "draft_model_revision",
        "draft_load_format",
        "draft_dtype",
        "draft_model_quantization",
        "draft_attention_backend",
        "moe_runner_backend",
        "merged_draft_tokens",
    }
)
_TREE = frozenset({"num_steps", "eagle_topk", "num_draft_tokens"})


def _eagle3(config: SpeculativeConfig, target: "TargetView") -> "Drafter":
    from specray.spec_decode.eagle import make_eagle

    return make_eagle(config, target, version=3)


def _eagle_or_mtp(config: SpeculativeConfig, target: "TargetView") -> "Drafter":
    from specray.spec_decode.mtp import make_eagle_or_mtp

    return make_eagle_or_mtp(config, target)


def _mtp(config: SpeculativeConfig, target: "TargetView") -> "Drafter":
    from specray.spec_decode.mtp import make_mtp

    return make_mtp(config, target)


def _standalone(config: SpeculativeConfig, target: "TargetView") -> "Drafter":
    from specray.spec_decode.draft_model import make_standalone

    return make_standalone(config, target)


def _parallel(config: SpeculativeConfig, target: "TargetView") -> "Drafter":
    from specray.spec_decode.parallel import make_parallel

    return make_parallel(config, target)


def _block(config: SpeculativeConfig, target: "TargetView") -> "Drafter":
    from specray.spec_decode.block import make_block

    return make_block(config, target)


def _check_block(config: SpeculativeConfig, target: "TargetFiles") -> None:
    from specray.spec_decode.block import check_block_drafter

    check_block_drafter(config, target)


def _check_eagle3(config: SpeculativeConfig, target: "TargetFiles") -> None:
    from specray.models.heads.loading import check_head_files

    check_head_files(config, target.shape, version=3)


def _check_parallel(config: SpeculativeConfig, target: "TargetFiles") -> None:
    from specray.models.heads.loading import check_head_files

    check_head_files(config, target.shape, version=3, has_mask=True)


def _check_eagle_or_mtp(config: SpeculativeConfig, target: "TargetFiles") -> None:
    from specray.spec_decode.mtp import check_eagle_or_mtp

    check_eagle_or_mtp(config, target)


def _check_mtp(config: SpeculativeConfig, target: "TargetFiles") -> None:
    from specray.spec_decode.mtp import check_mtp

    check_mtp(config, target)


def _check_standalone(config: SpeculativeConfig, target: "TargetFiles") -> None:
    from specray.spec_decode.draft_model import check_draft_model_files

    check_draft_model_files(config, target)


def _ngram(config: SpeculativeConfig, target: "TargetView") -> "Drafter":
    from specray.spec_decode.corpus import open_corpora
    from specray.spec_decode.ngram import NgramDrafter

    return NgramDrafter(ngram_rules(config), open_corpora(config, target.folder))


def _custom(config: SpeculativeConfig, target: "TargetView") -> "Drafter":
    path = config.algorithm or ""
    drafter: Drafter = load_custom(path)(config, target)
    check_attributes(path, drafter, target.shape.num_layers)
    return drafter


DRAFTERS: dict[str, Method] = {
    "EAGLE3": Method(_eagle3, _HEAD | _TREE | {"token_map"}, check_tree_drafter, _check_eagle3),
    "EAGLE": Method(_eagle_or_mtp, _HEAD | _TREE | {"token_map"}, check_tree, _check_eagle_or_mtp),
    "NEXTN": Method(_eagle_or_mtp, _HEAD | _TREE | {"token_map"}, check_tree, _check_eagle_or_mtp),
    "MTP": Method(_mtp, _HEAD | _TREE | {"token_map"}, check_tree, _check_mtp),
    "PARALLEL": Method(_parallel, _HEAD | _TREE, check_tree_drafter, _check_parallel),
    "DFLASH": Method(_block, _HEAD | _TREE, check_block, _check_block, drafts_on_every_rank=False),
    "DSPARK": Method(_block, _HEAD | _TREE, check_block, _check_block, drafts_on_every_rank=False),
    "STANDALONE": Method(_standalone, _HEAD | _TREE | {"token_map"}, check_tree_drafter, _check_standalone),
    "NGRAM": Method(_ngram, NGRAM_OPTIONS | {"num_draft_tokens"}, check_ngram),
}

_CUSTOM = Method(
    _custom, frozenset(SpeculativeConfig.model_fields) - _ALL, check_custom, drafts_on_every_rank=False
)  # it may read any option


def method_of(algorithm: str) -> Method:
    """The method of this name or import path. Raises ConfigError if there is none."""
    if ":" in algorithm:
        return _CUSTOM
    if algorithm not in DRAFTERS:
        raise ConfigError(
            f"speculative.algorithm={algorithm!r} is not known; choose one of {', '.join(DRAFTERS)}, the import path "
            "of a drafter (package.module:Class), or null for plain decoding"
        )
    return DRAFTERS[algorithm]


def drafts_on_every_rank(config: SpeculativeConfig) -> bool:
    """Whether each rank of a tensor-parallel group drafts, and all have equal trees."""
    return all(method_of(member.algorithm or "").drafts_on_every_rank for member in config.members.values())


def splits_draft_models(config: SpeculativeConfig) -> bool:
    """Whether there is a draft model, of which each tensor-parallel rank has a part."""
    methods = [method_of(member.algorithm or "") for member in config.members.values()]
    return drafts_on_every_rank(config) and any("draft_model_path" in method.options for method in methods)


def check_speculative(config: SpeculativeConfig) -> None:
    """ConfigError if the algorithm of a drafter is unknown or contradicts its other options.

    This imports the module of a drafter that is named by its import path.
    """
    for name, member in config.members.items():
        try:
            _check_member(member)
        except ConfigError as error:
            if member is config:
                raise
            raise ConfigError(f"speculative.drafters, {name}: {error}") from None


def _check_member(config: SpeculativeConfig) -> None:
    assert config.algorithm is not None
    method = method_of(config.algorithm)
    read = _ALL | method.options
    if config.merged_draft_tokens is not None:
        read |= MERGED_OPTIONS
    for name in config.changed() - read:
        raise ConfigError(
            f"speculative.{name}={getattr(config, name)!r} has no effect with algorithm={config.algorithm}; "
            f"remove it (this method reads {', '.join(sorted(method.options))})"
        )
    method.check(config)
    check_merged(config)


def make_drafter(config: SpeculativeConfig, target: "TargetView") -> "Drafter | None":
    """The configured drafter for `target`, or None for plain decoding. Several drafters act as one."""
    from specray.spec_decode.predicted_outputs import PredictedOutputs

    check_speculative(config)
    if not config.has_drafter:
        return None
    if not config.drafters:
        return PredictedOutputs(_make_one(config, target))
    from specray.spec_decode.several import SeveralDrafters

    drafters = {name: _make_one(member, target) for name, member in config.members.items()}
    return PredictedOutputs(SeveralDrafters(drafters, num_ranks=target.group.size))


def _make_one(config: SpeculativeConfig, target: "TargetView") -> "Drafter":
    from specray.spec_decode.merged import with_ngrams

    assert config.algorithm is not None
    seen = replace(
        target,
        attention_backend=config.draft_attention_backend or target.attention_backend,
        moe_runner_backend=config.moe_runner_backend or target.moe_runner_backend,
    )
    return with_ngrams(method_of(config.algorithm).make(config, seen), config, target.folder)
