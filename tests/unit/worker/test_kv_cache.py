"""Accepted paths become prefixes; the pool is as large as was asked for."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.worker.kv_cache import KVCache, count_blocks

CPU = torch.device("cpu")


@st.composite
def paths(draw: st.DrawFn) -> list[int]:
    """Nodes of a path from the root: each comes after its parent."""
    return [0, *sorted(draw(st.sets(st.integers(1, 12), max_size=6)))]


@given(paths(), st.integers(0, 5), st.randoms(use_true_random=False))
def test_an_accepted_path_lies_behind_its_prefix_in_order(path: list[int], root: int, random: object) -> None:
    cache = KVCache(2, 1, 1, num_blocks=8, page_size=4, dtype=torch.float32, device=CPU)
    slots = np.arange(4, 32)
    random.shuffle(slots)  # type: ignore[attr-defined]
    cache.pool[:] = torch.arange(32.0).view(1, 32, 1, 1, 1)
    before = [float(cache.pool[0, slots[position], 0, 0, 0]) for position in range(len(slots))]
    cache.commit(slots, root, path)
    for layer in range(2):
        after = cache.pool[layer, slots, 0, 0, 0].tolist()
        assert after[: root + 1] == before[: root + 1]
        assert after[root : root + len(path)] == [before[root + node] for node in path]


def test_a_pool_starts_as_zeros() -> None:
    cache = KVCache(2, 3, 4, num_blocks=5, page_size=4, dtype=torch.bfloat16, device=CPU)
    assert cache.pool.shape == (2, 20, 2, 3, 4)
    assert not cache.pool.any()


@pytest.mark.parametrize(("max_total_tokens", "page_size", "blocks"), [(64, 16, 5), (70, 16, 5), (10, 1, 11)])
def test_the_pool_holds_the_tokens_asked_for_beside_its_null_block(
    max_total_tokens: int, page_size: int, blocks: int
) -> None:
    config = EngineConfig(max_total_tokens=max_total_tokens, page_size=page_size)
    assert count_blocks(config, 1000, 4096, CPU) == blocks


def test_memory_too_small_for_one_block_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="mem_fraction_static=1e-06"):
        count_blocks(EngineConfig(mem_fraction_static=1e-6), 1000, 4096, CPU)


def test_no_more_blocks_than_all_requests_could_use() -> None:
    config = EngineConfig(max_running_requests=2, page_size=16, mem_fraction_static=0.9)
    assert count_blocks(config, 1, 100, CPU) <= 2 * (100 + 16) // 16 + 1
