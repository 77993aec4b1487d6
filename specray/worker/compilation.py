"""`enable_torch_compile`: which sizes of steps the target is compiled for when a rank starts."""

from specray.config import EngineConfig
from specray.models.compilation import compile_layers
from specray.worker.buckets import buckets
from specray.worker.loading import LoadedTarget

MAX_REQUESTS = 32  # SGLang's default for torch_compile_max_bs
NODES_OF_UNKNOWN_TREES = 16  # of a drafter that connects later and whose configuration names no number


def compile_target(config: EngineConfig, target: LoadedTarget, max_draft_tokens: int, progress: bool) -> None:
    """Compile the target's layers for decode steps, if the configuration asks for it and it changes anything.

    Graphs of decode steps are captured after this, so that they contain what was compiled. ConfigError without a
    compiler.
    """
    if config.enable_torch_compile:
        compile_layers(target.model, compiled_sizes(config, max_draft_tokens), target.has_fused_attention, progress)


def compiled_sizes(config: EngineConfig, max_draft_tokens: int) -> list[int]:
    """Numbers of tokens of a step, those of `buckets`; `max_draft_tokens` is 0 for a drafter that connects later."""
    rows = min(config.torch_compile_max_bs or MAX_REQUESTS, config.max_running_requests)
    nodes = 1 + max_draft_tokens
    if config.speculative.algorithm is not None and max_draft_tokens == 0:
        nodes = config.speculative.num_draft_tokens or NODES_OF_UNKNOWN_TREES
    return sorted({bucket.num_tokens for bucket in buckets(rows, nodes)})
