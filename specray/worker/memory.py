"""How much of a device's memory is used, and the error that says which options to lower where it is not enough.

The advice has SGLang's order and values: a smaller draft tree, a smaller pool, graphs of fewer requests, fewer
requests, quantization of the target or of the draft model alone, 16-bit weights, FR-Spec. It names only options that
this configuration can still lower.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError, EngineDeadError
from specray.spec_decode import method_of

STARTING = "loading the model and making its KV pool"
STEPPING = "computing a step"
_SMALL_TREE = (3, 1, 4)  # num_steps, eagle_topk, num_draft_tokens
_FEW_REQUESTS = 4
_SHORT_CHUNK = 128
_QUIET_S = 5.0  # without newly freed memory, after which the rest belongs to running processes
_POLL_S = 0.1
_HIGH_FRACTION, _LOW_FRACTION = 0.5, 0.1


@contextlib.contextmanager
def enough_memory(config: EngineConfig, while_: str, error: type[ConfigError | EngineDeadError]) -> Iterator[None]:
    """Raise `error` with the options to lower instead of an out-of-memory error."""
    try:
        yield
    except (MemoryError, RuntimeError) as failure:
        if not _is_out_of_memory(failure):
            raise
        raise error(f"out of memory while {while_}: {failure}; {advice(config)}") from failure


def advice(config: EngineConfig) -> str:
    """The first option to lower, followed by further ones."""
    first, *others = options_to_lower(config)
    return f"next, {first}" + (f" (after that: {'; '.join(others)})" if others else "")


def options_to_lower(config: EngineConfig) -> list[str]:
    """Options to lower, in the order in which to try them."""
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    options = [*_trees(config), *_pool(config, on_gpu), *_steps(config, on_gpu), *weight_options(config)]
    return options or ["take a smaller model or a machine with more memory"]


def memory_fraction(config: EngineConfig, is_gpu: bool) -> float:
    """Share of the device's memory for weights and KV pool."""
    return config.mem_fraction_static or (0.85 if is_gpu else 0.4)


def await_freed_memory(
    config: EngineConfig,
    free_and_total: Callable[[], tuple[int, int]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until a GPU has `mem_fraction_static` of its memory free, or no more of it becomes free.

    After a failover, the GPU's driver still frees what an engine's killed processes held. One that loads meanwhile
    would get a small pool, or none. `free_and_total`: bytes of the device.
    """
    most, total = free_and_total()
    changed_at = clock()
    while most < memory_fraction(config, is_gpu=True) * total and clock() - changed_at < _QUIET_S:
        sleep(_POLL_S)
        free, _ = free_and_total()
        if free > most:
            most, changed_at = free, clock()


def weight_options(config: EngineConfig) -> Iterator[str]:
    """Options that make the weights smaller, those of the draft models included."""
    with_models = [(place, now, method_of(now.algorithm or "").options) for place, now in _drafters(config)]
    if config.quantization is None:
        yield "replace quantization=null by int8 on a CPU or fp8 on a GPU"
    for place, now, options in with_models:
        kind = now.draft_model_quantization or config.quantization or "unquant"  # null takes the target's
        if "draft_model_quantization" in options and kind == "unquant":
            was = now.draft_model_quantization or "null"
            yield f"replace {place}.draft_model_quantization={was} by int8 on a CPU or fp8 on a GPU"
    if config.dtype == "float32":
        yield "replace dtype=float32 by bfloat16 or float16"
    for place, now, options in with_models:
        # An EAGLE-3 head has a small vocabulary of its own.
        if "token_map" in options and now.algorithm != "EAGLE3" and now.token_map is None:
            yield f"set {place}.token_map, so that the drafter has the output rows of frequent tokens only (FR-Spec)"


def _is_out_of_memory(failure: BaseException) -> bool:
    """Whether memory ran out; torch's CPU allocator raises a plain RuntimeError."""
    is_named = isinstance(failure, MemoryError | torch.OutOfMemoryError)
    return is_named or "not enough memory" in str(failure) or "can't allocate memory" in str(failure)


def _drafters(config: EngineConfig) -> Iterator[tuple[str, SpeculativeConfig]]:
    """Each drafter's options, and the name of the option that holds them."""
    for name, drafter in config.speculative.members.items():
        yield ("speculative" if config.speculative.algorithm is not None else f"speculative.drafters.{name}"), drafter


def _trees(config: EngineConfig) -> Iterator[str]:
    steps, topk, nodes = _SMALL_TREE
    for place, now in _drafters(config):
        if now.eagle_topk is not None and (now.eagle_topk > topk or (now.num_draft_tokens or 0) > nodes):
            yield (
                f"draft less than {place}.num_steps={now.num_steps}, eagle_topk={now.eagle_topk}, num_draft_tokens="
                f"{now.num_draft_tokens}, such as {steps}, {topk}, {nodes}"
            )
        elif now.eagle_topk is None and (now.num_draft_tokens or 0) > nodes:
            yield f"lower {place}.num_draft_tokens={now.num_draft_tokens} to {nodes}"


def _pool(config: EngineConfig, on_gpu: bool) -> Iterator[str]:
    if config.max_total_tokens is not None:
        if config.max_total_tokens > config.page_size:
            yield f"lower max_total_tokens={config.max_total_tokens} to {config.max_total_tokens // 2}"
        return
    fraction = memory_fraction(config, on_gpu)
    if fraction > _LOW_FRACTION:
        lower = _HIGH_FRACTION if fraction > _HIGH_FRACTION else fraction / 2
        yield f"lower mem_fraction_static={fraction:g} to {lower:g}"


def _steps(config: EngineConfig, on_gpu: bool) -> Iterator[str]:
    most, captured = config.max_running_requests, config.cuda_graph_max_bs
    if on_gpu and not config.disable_cuda_graph and (largest := min(captured or most, most)) > _FEW_REQUESTS:
        now = "null" if captured is None else captured
        yield f"lower cuda_graph_max_bs={now} to {max(_FEW_REQUESTS, largest // 4)}"
    if most > _FEW_REQUESTS:
        yield f"lower max_running_requests={most} to {max(_FEW_REQUESTS, most // 4)}"
    if (chunk := config.chunked_prefill_size) > _SHORT_CHUNK:
        short = max(_SHORT_CHUNK, chunk // 4)
        yield f"lower chunked_prefill_size={chunk} and max_prefill_tokens={config.max_prefill_tokens} to {short}"
