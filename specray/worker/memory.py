"""Out-of-memory errors of any allocator, turned into one that says which options to lower.

The advice has SGLang's order and values for this configuration: first the KV pool, then the memory of a step (drafts,
requests, prompts), then the weights.
"""

import contextlib
from collections.abc import Iterator

import torch

from specray.config import EngineConfig
from specray.errors import ConfigError, EngineDeadError

STARTING = "loading the model and making its KV pool"
STEPPING = "computing a step"
_SMALL_TREE = (3, 1, 4)  # num_steps, eagle_topk, num_draft_tokens
_FEW_REQUESTS = 4
_SHORT_CHUNK = 128
_HIGH_FRACTION, _LOW_FRACTION = 0.5, 0.1


@contextlib.contextmanager
def enough_memory(config: EngineConfig, while_: str, error: type[ConfigError | EngineDeadError]) -> Iterator[None]:
    """Raise `error` with the options to lower instead of an out-of-memory error."""
    try:
        yield
    except (MemoryError, RuntimeError) as failure:
        raise_if_out_of_memory(failure, config, while_, error)
        raise


def raise_if_out_of_memory(
    failure: Exception, config: EngineConfig, while_: str, error: type[ConfigError | EngineDeadError]
) -> None:
    """Raise `error` with the options to lower if memory ran out."""
    if _is_out_of_memory(failure):
        raise error(f"out of memory while {while_}: {failure}; {advice(config)}") from failure


def _is_out_of_memory(failure: BaseException) -> bool:
    """Whether memory ran out; torch's CPU allocator raises a plain RuntimeError."""
    is_named = isinstance(failure, MemoryError | torch.OutOfMemoryError)
    return is_named or "not enough memory" in str(failure) or "can't allocate memory" in str(failure)


def advice(config: EngineConfig) -> str:
    """The first option to lower, followed by further ones."""
    first, *others = options_to_lower(config)
    return f"next, {first}" + (f" (after that: {'; '.join(others)})" if others else "")


def options_to_lower(config: EngineConfig) -> list[str]:
    """Options to lower, in the order in which to try them."""
    options = [*_pool(config), *_drafts(config), *_steps(config), *weight_options(config)]
    return options or ["take a smaller model or a machine with more memory"]


def memory_fraction(config: EngineConfig, is_gpu: bool) -> float:
    """Share of the device's memory for weights and KV pool."""
    return config.mem_fraction_static or (0.85 if is_gpu else 0.4)


def _pool(config: EngineConfig) -> Iterator[str]:
    if config.max_total_tokens is not None:
        if config.max_total_tokens > config.page_size:
            yield f"lower max_total_tokens={config.max_total_tokens} to {config.max_total_tokens // 2}"
        return
    is_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    fraction = memory_fraction(config, is_gpu)
    if fraction > _LOW_FRACTION:
        lower = _HIGH_FRACTION if fraction > _HIGH_FRACTION else fraction / 2
        yield f"lower mem_fraction_static={fraction:g} to {lower:g}"


def _drafts(config: EngineConfig) -> Iterator[str]:
    steps, topk, nodes = _SMALL_TREE
    now = config.speculative
    if now.eagle_topk is not None and (now.eagle_topk > topk or (now.num_draft_tokens or 0) > nodes):
        yield (
            f"draft less than num_steps={now.num_steps}, eagle_topk={now.eagle_topk}, num_draft_tokens="
            f"{now.num_draft_tokens}, such as {steps}, {topk}, {nodes}"
        )
    elif now.eagle_topk is None and (now.num_draft_tokens or 0) > nodes:
        yield f"lower speculative.num_draft_tokens={now.num_draft_tokens} to {nodes}"


def _steps(config: EngineConfig) -> Iterator[str]:
    if (most := config.max_running_requests) > _FEW_REQUESTS:
        yield f"lower max_running_requests={most} to {max(_FEW_REQUESTS, most // 4)}"
    if (chunk := config.chunked_prefill_size) > _SHORT_CHUNK:
        short = max(_SHORT_CHUNK, chunk // 4)
        yield f"lower chunked_prefill_size={chunk} and max_prefill_tokens={config.max_prefill_tokens} to {short}"


def weight_options(config: EngineConfig) -> Iterator[str]:
    """Options that make the weights smaller."""
    if config.dtype == "float32":
        yield "replace dtype=float32 by bfloat16"
    if config.quantization is None:
        yield "replace quantization=null by int8 on a CPU or fp8 on a GPU"
