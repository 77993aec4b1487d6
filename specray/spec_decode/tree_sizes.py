"""Sizes of trees as they are configured. Names and rules are SGLang's.

Imports no torch, so that configurations are checked quickly.
"""

import logging
import sys
from dataclasses import replace

from specray.config import MAX_TREE_NODES, SpeculativeConfig
from specray.errors import ConfigError
from specray.spec_decode.tree_shape import TreeShape

logger = logging.getLogger(__name__)

# SGLang's automatic (num_steps, eagle_topk, num_draft_tokens) by the target's architecture.
_AUTO = {"LlamaForCausalLM": (5, 4, 8)}
_AUTO_OTHERS = (3, 1, 4)


def configured_shape(config: SpeculativeConfig, architecture: str) -> TreeShape:
    """The configured shape, or the automatic one for a target of `architecture` if nothing is set.

    A num_draft_tokens that the other two cannot reach is lowered, with a warning. ConfigError if only some of the
    three are set.
    """
    wanted = {
        "num_steps": config.num_steps,
        "eagle_topk": config.eagle_topk,
        "num_draft_tokens": config.num_draft_tokens,
    }
    steps, topk, nodes = wanted.values()
    if steps is None and topk is None and nodes is None:
        steps, topk, nodes = _AUTO.get(architecture, _AUTO_OTHERS)
    if steps is None or topk is None or nodes is None:
        missing = ", ".join(name for name, value in wanted.items() if value is None)
        raise ConfigError(
            f"of speculative.num_steps, eagle_topk and num_draft_tokens, {missing} is not set; "
            "set all three, or none for automatic values"
        )
    if topk == 1 and nodes != steps + 1:
        logger.warning("eagle_topk=1 drafts a chain: num_draft_tokens=%d becomes num_steps + 1 = %d", nodes, steps + 1)
        nodes = steps + 1
    shape = TreeShape(steps, topk, nodes, returns_draft_probs=topk == 1 and config.verification == "rejection")
    most = shape.pool_size + 1
    if nodes <= most:
        return shape
    logger.warning(
        "num_steps=%d and eagle_topk=%d make %d candidates: num_draft_tokens=%d becomes %d",
        steps,
        topk,
        shape.pool_size,
        nodes,
        most,
    )
    return replace(shape, num_draft_tokens=most)


def block_shape(config: SpeculativeConfig, most_steps: int) -> TreeShape:
    """The configured shape for a head that predicts `most_steps` tokens in one pass.

    num_draft_tokens alone, as other engines have it, or nothing, drafts a chain: by default of all tokens. ConfigError
    if the trees would be deeper.
    """
    if config.num_steps is None and config.eagle_topk is None:
        nodes = config.num_draft_tokens or min(most_steps + 1, MAX_TREE_NODES)
        shape = TreeShape(nodes - 1, 1, nodes, returns_draft_probs=config.verification == "rejection")
    else:
        shape = configured_shape(config, architecture="")
    if shape.num_steps > most_steps:
        name = "num_draft_tokens" if shape.topk == 1 else "num_steps"
        most = most_steps + 1 if name == "num_draft_tokens" else most_steps
        raise ConfigError(
            f"speculative.{name}={getattr(config, name)} is more than the block of {config.draft_model_path}, which "
            f"predicts {most_steps} tokens; set it to at most {most}"
        )
    return shape


def check_width(shape: TreeShape, vocab_size: int) -> None:
    """ConfigError if a drafter of `vocab_size` tokens has too few children for a node."""
    if shape.topk > vocab_size:
        raise ConfigError(
            f"speculative.eagle_topk={shape.topk} is more than the drafter's {vocab_size} tokens; set it to at most "
            f"{vocab_size}"
        )


def check_tree(config: SpeculativeConfig) -> None:
    """ConfigError for sizes that are invalid for every target."""
    configured_shape(config, architecture="")


def check_block(config: SpeculativeConfig) -> None:
    """ConfigError for sizes of a head that drafts a block which are invalid for every head."""
    block_shape(config, most_steps=sys.maxsize)
    _check_has_model(config)


def check_tree_drafter(config: SpeculativeConfig) -> None:
    """`check_tree` for a method with a draft model."""
    check_tree(config)
    _check_has_model(config)


def _check_has_model(config: SpeculativeConfig) -> None:
    if config.draft_model_path is None:
        raise ConfigError(
            f"speculative.algorithm={config.algorithm} needs a draft model, but "
            "speculative.draft_model_path is null; set it to the folder or hub name of a draft head or draft model"
        )
