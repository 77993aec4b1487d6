"""The size of a rank's KV pool."""

import os
import resource
from pathlib import Path

import torch

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.worker.memory_advice import memory_fraction, weight_options
from specray.worker.memory_plan import Demand, pool_bytes


def count_blocks(config: EngineConfig, demand: Demand, context_length: int, device: torch.device) -> int:
    """Blocks of this rank's pool, the null block included: `max_total_tokens`, or what memory leaves for it.

    Never more than all running requests could use. ConfigError if not even one block fits.
    """
    useful = config.max_running_requests * (context_length + config.page_size)
    if config.max_total_tokens is not None:
        return config.max_total_tokens // config.page_size + 1
    total, used = _memory(device)
    fraction = memory_fraction(config, device.type == "cuda")
    available = pool_bytes(total, used, fraction, demand)
    tokens = min(available // demand.token, useful)
    if tokens < config.page_size:
        smaller = "; ".join(["raise it", *weight_options(config), "or set max_total_tokens"])
        raise ConfigError(
            f"mem_fraction_static={fraction} of {total / 2**30:.1f} GiB leaves {available / 2**30:.2f} GiB for the KV "
            f"pool after {used / 2**30:.1f} GiB already in use, {demand.weights / 2**30:.1f} GiB of draft weights and "
            f"{demand.dynamic / 2**30:.1f} GiB for steps, less than one block of {config.page_size} tokens; {smaller}"
        )
    return tokens // config.page_size + 1


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of the target's KV pool, where the model computes in `dtype`."""
    return torch.int8 if config.kv_cache_dtype == "int8" else dtype


def _memory(device: torch.device) -> tuple[int, int]:
    """(total, used) bytes of the device; on CPU the machine's or the container's limit, and this process's peak."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
