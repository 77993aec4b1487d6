"""KV of accepted nodes is moved behind the root; the pool has the configured size."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.ops.cpu.library import kernels
from specray.sampling_params import SamplingParams
from specray.spec_decode.head_drafter import HeadDrafter
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.spec_decode.merged import MergedDrafter
from specray.spec_decode.verify_batch import VerifyOutput
from specray.worker.kv_cache import KVCache
from specray.worker.local import LocalExecutor
from specray.worker.memory_plan import KV_TYPES, Demand, count_blocks
from tests.support.architectures import write_architecture
from tests.support.decoders import write_decoder
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.engine import generate, make_llm
from tests.support.methods import METHODS
from tests.support.mtp import write_deepseek

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
        pool = worker.backend.runner.kv.pool
        assert pool.dtype is torch.int8
        assert pool.shape[-1] == worker.model.shape.head_dim + 4


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_kv_in_float8_takes_a_byte_for_each_number_and_that_of_heads_stays(
    kind: str, toy: Path, tmp_path: Path
) -> None:
    speculative = METHODS["EAGLE3"](toy, tmp_path)
    plain, rounded = (
        loaded(toy, kv_cache_dtype=dtype, dtype="bfloat16", speculative=speculative) for dtype in ("auto", kind)
    )
    assert rounded.pool.dtype is KV_TYPES[kind]
    assert 2 * rounded.pool.nbytes == plain.pool.nbytes
    assert rounded.draft_pool.dtype is plain.draft_pool.dtype is torch.bfloat16


class Pools(NamedTuple):
    pool: Tensor
    draft_pool: Tensor


def loaded(folder: Path, **options: Any) -> Pools:
    """The KV pools of a target and of its head."""
    with make_llm(folder, **options) as llm:
        assert isinstance(llm.engine.executor, LocalExecutor)
        worker = llm.engine.executor.worker
        assert isinstance(worker.drafts, InlineDrafts)
        assert isinstance(worker.drafts.drafter, MergedDrafter)
        head = worker.drafts.drafter.drafter
        assert isinstance(head, HeadDrafter)
        return Pools(worker.backend.runner.kv.pool, head._kv.attention.pool)


@pytest.mark.parametrize(
    ("kind", "write"),
    [("fp8_e4m3", write_deepseek), ("fp8_e5m2", partial(write_decoder, "qwen3_5"))],
    ids=["latent", "states"],
)
def test_drafts_do_not_change_a_text_with_kv_in_float8(
    kind: str, write: Callable[[Path], object], tmp_path: Path
) -> None:
    """Latents and states are served, too: each number is rounded alone, and states stay as they are."""
    write(tmp_path)
    prompts = [[0, *range(10, 40)], [5], [0, 20, 21, 22, 20, 21]]
    params = [SamplingParams(temperature=heat, seed=1, max_tokens=24, ignore_eos=True) for heat in (0.0, 0.8, 0.0)]
    plain = generate(tmp_path, prompts, params, kv_cache_dtype=kind)
    texts = [completion.token_ids for completion in plain]
    known = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    drafter = ScriptedDrafter(DRAWS["half-right"], known)
    layout = {"kv_cache_dtype": kind, "page_size": 4, "chunked_prefill_size": 8, "max_prefill_tokens": 12}
    with make_llm(tmp_path, drafter, **layout) as llm:
        assert llm._executor.worker.backend.runner.kv.pool.dtype is KV_TYPES[kind]
        for _ in range(2):  # again from the prefix cache
            assert [each.choices[0].token_ids for each in llm.generate(prompts, params)] == texts
    assert drafter.num_proposed


def test_scales_of_the_kv_cache_are_refused_with_kv_in_float8(toy: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy, tmp_path / "scaled"))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.k_scale": torch.ones(1)}, folder / "model.safetensors")
    make_llm(folder, kv_cache_dtype="fp8_e4m3").close()
    save_file(weights | {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}, folder / "model.safetensors")
    make_llm(folder).close()  # it computes in float32, as without scales
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8_e4m3 rounds .* scales .*layers.0.self_attn.k_scale"):
        make_llm(folder, kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize("backend", ["flashinfer", "fa"])
def test_kv_in_float8_is_refused_with_libraries(backend: str, toy: Path) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend={backend} does not read kv_cache_dtype=fp8;"):
        make_llm(toy, kv_cache_dtype="fp8", attention_backend=backend)


def test_kv_in_int8_is_refused_without_the_kernels(toy: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=int8 needs .* attention_backend=torch on cpu"):
        make_llm(toy, kv_cache_dtype="int8", attention_backend="torch")


@pytest.mark.skipif(kernels() is None, reason="without them it is refused anyway")
def test_kv_in_int8_is_refused_for_latent_attention(tmp_path: Path) -> None:
    write_architecture("deepseek-v3", tmp_path)
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8 is not supported for multi-head latent attention"):
        make_llm(tmp_path, kv_cache_dtype="int8")
