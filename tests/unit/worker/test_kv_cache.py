"""KV of accepted nodes is moved behind the root; the pool has the configured size."""

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.ops.cpu.library import kernels
from specray.spec_decode.verify_batch import VerifyOutput
from specray.worker.kv_cache import KVCache
from specray.worker.local import LocalExecutor
from specray.worker.memory_plan import Demand, count_blocks
from tests.support.architectures import write_architecture
from tests.support.engine import make_llm

CPU = torch.device("cpu")


@st.composite
def paths(draw: st.DrawFn) -> list[int]:
    """Nodes of a path from the root, in ascending order."""
    return [0, *sorted(draw(st.sets(st.integers(1, 12), max_size=6)))]


@given(st.lists(paths(), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_kv_of_accepted_nodes_is_moved_behind_the_root(accepted: list[list[int]], random: Random) -> None:
    cache = KVCache(2, 1, 1, num_blocks=16, page_size=4, dtype=torch.float32, device=CPU)
    slots = list(range(4, 64))
    random.shuffle(slots)
    kv_slots = torch.tensor(slots[: 13 * len(accepted)]).view(-1, 13)  # of the root and 12 drafts
    cache.pool[:, :64] = torch.arange(64.0).view(1, 64, 1, 1, 1)
    depth = max(map(len, accepted))
    nodes = torch.tensor([path + [random.randint(0, 12)] * (depth - len(path)) for path in accepted])
    counts = torch.tensor([len(path) for path in accepted])
    cache.commit(kv_slots, VerifyOutput.of(counts, torch.zeros_like(nodes), nodes).outcome)
    for layer in range(2):
        pool = cache.pool[layer, :, 0, 0, 0]
        for row, path in zip(kv_slots, accepted, strict=True):
            assert pool[row[: len(path)]].tolist() == row[path].tolist()
        untouched = set(range(64)) - {
            int(slot) for row, path in zip(kv_slots, accepted, strict=True) for slot in row[: len(path)]
        }
        assert all(float(pool[slot]) == slot for slot in untouched)


def test_the_pool_is_initialized_with_zeros() -> None:
    """It has one more block, for padding."""
    cache = KVCache(2, 3, 4, num_blocks=5, page_size=4, dtype=torch.bfloat16, device=CPU)
    assert cache.pool.shape == (2, 24, 2, 3, 4)
    assert cache.padding_slot == 20
    assert not cache.pool.any()


@pytest.mark.parametrize(("max_total_tokens", "page_size", "blocks"), [(64, 16, 5), (70, 16, 5), (10, 1, 11)])
def test_the_pool_has_max_total_tokens_and_a_null_block(max_total_tokens: int, page_size: int, blocks: int) -> None:
    config = EngineConfig(max_total_tokens=max_total_tokens, page_size=page_size)
    assert count_blocks(config, Demand(1000), 4096, CPU) == blocks


def test_too_little_memory_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="mem_fraction_static=1e-06"):
        count_blocks(EngineConfig(mem_fraction_static=1e-6), Demand(1000), 4096, CPU)


def test_the_pool_is_no_larger_than_all_requests_can_use() -> None:
    config = EngineConfig(max_running_requests=2, page_size=16, mem_fraction_static=0.9)
    assert count_blocks(config, Demand(1), 100, CPU) <= 2 * (100 + 16) // 16 + 1


@pytest.mark.skipif(kernels() is None, reason="needs the CPU kernels")
def test_kv_in_int8_takes_a_scale_and_a_byte_for_each_number(toy: Path) -> None:
    with make_llm(toy, kv_cache_dtype="int8") as llm:
        assert isinstance(llm.engine.executor, LocalExecutor)
        worker = llm.engine.executor.worker
        pool = worker._backend.runner.kv.pool
        assert pool.dtype is torch.int8
        assert pool.shape[-1] == worker.model.shape.head_dim + 4


def test_kv_in_int8_is_refused_without_the_kernels(toy: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=int8 needs .* attention_backend=torch on cpu"):
        make_llm(toy, kv_cache_dtype="int8", attention_backend="torch")


@pytest.mark.skipif(kernels() is None, reason="without them it is refused anyway")
def test_kv_in_int8_is_refused_for_latent_attention(tmp_path: Path) -> None:
    write_architecture("deepseek-v3", tmp_path)
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8 is not supported for multi-head latent attention"):
        make_llm(tmp_path, kv_cache_dtype="int8")
