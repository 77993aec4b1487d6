"""Grouped products of experts, in Triton's interpreter, against one expert at a time."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.layers.moe import Expert, ExpertList
from specray.layers.parallel import RankGroup
from specray.models.registry import load_model
from specray.ops.device_ops import groups_experts
from specray.ops.gpu.experts import ROWS, GroupedExperts, expert_blocks
from specray.ops.quantised_weight import QuantisedWeight
from specray.spec_decode import mtp
from tests.support.architectures import write_architecture
from tests.support.coded import FORMATS, weight_of
from tests.support.engine import make_llm
from tests.support.mtp import write_deepseek


@given(st.lists(st.integers(0, 6), max_size=60))
@settings(max_examples=100)
def test_blocks_hold_every_pair_once_with_its_expert(chosen: list[int]) -> None:
    experts, pairs = expert_blocks(torch.tensor(chosen, dtype=torch.int64), 7)
    assert pairs.shape == (len(experts), ROWS)
    found = [
        (pair, expert)
        for expert, row in zip(experts.tolist(), pairs.tolist(), strict=True)
        for pair in row
        if pair < len(chosen)
    ]
    assert sorted(found) == list(enumerate(chosen))
    assert len(found) == len(set(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_chosen"), [(1, 4, 2), (5, 3, 1), (40, 3, 2), (7, 16, 4)])
def test_the_sum_equals_that_of_one_expert_at_a_time(
    num_tokens: int, num_experts: int, num_chosen: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    hidden, ffn = 24, 70  # not multiples of the kernel's blocks
    weights = [
        (torch.randn(ffn, hidden) / 5, torch.randn(ffn, hidden) / 5, torch.randn(hidden, ffn) / 8)
        for _ in range(num_experts)
    ]
    x = torch.randn(num_tokens, hidden).to(dtype)
    chosen = torch.rand(num_tokens, num_experts).topk(num_chosen).indices
    shares = torch.rand(num_tokens, num_chosen)
    expected = ExpertList([Expert(*(part.to(dtype).float() for part in expert)) for expert in weights])(
        x.float(), shares, chosen
    )
    cast = [(gate.to(dtype), up.to(dtype), down.to(dtype)) for gate, up, down in weights]
    seen = GroupedExperts(cast)(x, shares, chosen)
    assert seen.dtype is torch.float32
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(seen, expected, atol=tolerance, rtol=tolerance)


def test_other_tokens_do_not_change_a_result() -> None:
    torch.manual_seed(0)
    experts = GroupedExperts([(torch.randn(32, 16), torch.randn(32, 16), torch.randn(16, 32)) for _ in range(4)])
    x, chosen, shares = torch.randn(20, 16), torch.rand(20, 4).topk(2).indices, torch.rand(20, 2)
    whole = experts(x, shares, chosen)
    alone = torch.cat([experts(x[i : i + 1], shares[i : i + 1], chosen[i : i + 1]) for i in range(20)])
    assert torch.equal(whole, alone)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_experts_are_not_expanded(name: str) -> None:
    hidden, ffn, x = 64, 32, torch.randn(9, 64) / 64  # whose products exp can take
    experts = [
        (
            weight_of(name, ffn, hidden, 3 * index),
            weight_of(name, ffn, hidden, 3 * index + 1),
            weight_of(name, hidden, ffn, 3 * index + 2),
        )
        for index in range(4)
    ]
    chosen, shares = torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    expected = ExpertList([Expert(*(part.float() for part in expert)) for expert in experts])(x, shares, chosen)
    grouped = GroupedExperts(experts)
    seen = grouped(x, shares, chosen)
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert torch.equal(grouped(x[3:4], shares[3:4], chosen[3:4]), seen[3:4])
    assert isinstance(grouped._gate_up.matrix, QuantisedWeight)
    mixed = GroupedExperts([(gate.float(), up, down) for gate, up, down in experts])
    torch.testing.assert_close(mixed(x, shares, chosen), seen, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_no_tokens_and_experts_without_tokens() -> None:
    experts = GroupedExperts([(torch.randn(8, 16), torch.randn(8, 16), torch.randn(16, 8)) for _ in range(3)])
    none = experts(torch.empty(0, 16), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64))
    assert none.shape == (0, 16)
    same = torch.full((4, 1), 2)
    assert experts(torch.randn(4, 16), torch.ones(4, 1), same).isfinite().all()


@pytest.mark.parametrize(("backend", "kind"), [("auto", ExpertList), ("torch", ExpertList), ("triton", GroupedExperts)])
def test_moe_runner_backend_chooses_the_kernels(backend: str, kind: type, tmp_path: Path) -> None:
    write_architecture("qwen3-moe", tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", moe_runner_backend=backend)
    model = load_model(tmp_path, config, RankGroup(), torch.device("cpu"), progress=False)
    assert [type(layer.ffn._experts) for layer in model.layers] == [kind] * 2


@pytest.mark.parametrize(
    ("drafts", "kind"), [(None, GroupedExperts), ("torch", ExpertList), ("triton", GroupedExperts)]
)
def test_the_draft_model_takes_its_own_kernels_or_the_targets(
    drafts: str | None, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deepseek(tmp_path)
    seen: list[object] = []
    load = mtp.load_mtp_layers
    monkeypatch.setattr(mtp, "load_mtp_layers", lambda *args: seen.append(load(*args)) or seen[0])
    speculative = SpeculativeConfig(algorithm="MTP", moe_runner_backend=drafts)
    make_llm(tmp_path, moe_runner_backend="triton", speculative=speculative).close()
    [layers] = seen
    assert isinstance(layers.layers[0].layers._block.ffn._experts, kind)  # type: ignore[attr-defined]


def test_the_grouped_product_is_refused_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"moe_runner_backend=triton multiplies .* quantization=fp8"):
        groups_experts("triton", "fp8", cpu)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="moe_runner_backend=triton needs an NVIDIA GPU, and the device is cpu"):
        groups_experts("triton", None, cpu)
