"""The KV pool of one rank: its size, and the compaction of accepted paths."""

import os
import resource
from pathlib import Path

import torch
from torch import Tensor

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.ops.attention import make_pool, move_kv
from specray.worker.memory import memory_fraction, weight_rungs


class KVCache:
    """Pool [layers, KV slots, 2, kv_heads, dim]. Block 0 stays zero and is read as padding."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pool = make_pool(num_layers, num_blocks * page_size, num_kv_heads, head_dim, dtype, device)

    def commit(self, kv_slots: Tensor, nodes: Tensor, num_tokens: Tensor) -> None:
        """Move the KV of accepted paths behind their prefixes.

        `kv_slots` int64 [B, N] are the KV slots of the trees' nodes as they were written, `nodes` int64 [B, D + 1] the
        accepted nodes by depth, of which the first `num_tokens` int64 [B] count. Node n at depth d moves to the KV
        slot of node d.
        """
        depths = torch.arange(1, nodes.shape[1], device=nodes.device)
        is_moved = (depths < num_tokens[:, None]) & (nodes[:, 1:] != depths)
        # Where nothing moves, KV slot 0 (zeros) is copied to itself, so that no shape depends on the outcome.
        source = torch.where(is_moved, kv_slots.gather(1, nodes[:, 1:]), 0)
        target = torch.where(is_moved, kv_slots[:, 1 : nodes.shape[1]], 0)
        move_kv(self.pool, source.flatten(), target.flatten())


def count_blocks(config: EngineConfig, bytes_per_token: int, context_length: int, device: torch.device) -> int:
    """Blocks of this rank's pool, the null block included: `max_total_tokens`, or what memory leaves after the weights.

    Never more than all running requests could use. ConfigError if not even one block fits.
    """
    useful = config.max_running_requests * (context_length + config.page_size)
    if config.max_total_tokens is not None:
        return config.max_total_tokens // config.page_size + 1
    total, used = _memory(device)
    fraction = memory_fraction(config, device.type == "cuda")
    room = int(total * fraction) - used
    tokens = min(room // bytes_per_token, useful)
    if tokens < config.page_size:
        smaller = "; ".join(["raise it", *weight_rungs(config), "or set max_total_tokens"])
        raise ConfigError(
            f"mem_fraction_static={fraction} of {total / 2**30:.1f} GiB leaves {room / 2**30:.2f} GiB for the KV pool "
            f"after {used / 2**30:.1f} GiB already in use, less than one block of {config.page_size} tokens; "
            f"{smaller}"
        )
    return tokens // config.page_size + 1


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
