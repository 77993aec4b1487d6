"""Mixtures of experts and latent attention, compared with transformers, alone and in the engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.llama import Llama
from specray.models.registry import load_config, load_model
from specray.models.target_model import BEFORE_FINAL_NORM
from specray.ops.cpu.library import kernels
from tests.support.architectures import ARCHITECTURES, write_architecture
from tests.support.naive_eagle import attend_to_the_past
from tests.support.toy import write_toy

CPU = torch.device("cpu")
TOKENS = [0, 5, 63, 17, 17, 40, 2, 9, 9, 31, 50, 8]
PROMPTS = [[0, 10, 20, 30], [5], [0, *range(4, 40)], [7] * 7, [3, 1, 4], [60, 61], [2] * 3, [0, 33]]


def load(folder: Path, dtype: str = "float32") -> Llama:
    config = EngineConfig(model=str(folder), dtype=dtype, device="cpu")
    return load_model(folder, config, RankGroup(), CPU, progress=False)


@torch.inference_mode()
def logits(model: Llama, tokens: list[int]) -> torch.Tensor:
    hidden, _ = model(torch.tensor(tokens), torch.arange(len(tokens)), attend_to_the_past)
    return model.logits(hidden)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = write_architecture(name, tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.3
    torch.testing.assert_close(logits(load(tmp_path), TOKENS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(kernels() is None, reason="torch's sums depend on the batch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_batch(name: str, dtype: str, tmp_path: Path) -> None:
    def attend(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        return kv[:, 1].repeat_interleave(q.shape[1] // kv.shape[2], 1).flatten(1)

    write_architecture(name, tmp_path)
    model = load(tmp_path, dtype)
    assert model.is_row_wise
    tokens, positions = torch.arange(41) * 7 % 64, torch.arange(41) * 5 % 32
    together = model.logits(model(tokens, positions, attend)[0])
    for start, count in [(0, 1), (17, 1), (3, 2), (8, 5), (1, 16), (7, 33)]:
        part = slice(start, start + count)
        assert torch.equal(model.logits(model(tokens[part], positions[part], attend)[0]), together[part])


@pytest.mark.parametrize("kernels_of", ["auto", "torch", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # Triton's interpreter does not round bfloat16 as a GPU does
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "llama"])
@torch.inference_mode()
def test_sums_in_the_norm_behind_them_are_those_of_whole_layers(
    name: str, dtype: str, kernels_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels_of == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("SPECRAY_KERNELS", kernels_of)
    if name == "llama":
        write_toy(tmp_path)
    else:
        write_architecture(name, tmp_path)
    model, tokens, positions = load(tmp_path, dtype), torch.tensor(TOKENS), torch.arange(len(TOKENS))
    expected = [model.embedding(tokens)]
    for layer in model.layers:
        expected.append(layer(expected[-1], *model.rotary.at(positions), attend_to_the_past))
    expected.append(model.norm(expected[-1]))
    places = (*range(len(model.layers)), BEFORE_FINAL_NORM, len(model.layers))
    found = model(tokens, positions, attend_to_the_past, places)[1]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_experts_output_of_a_token_does_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    write_architecture(name, tmp_path)
    model = load(tmp_path)
    layer = model.layers[-1].ffn
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    together = layer(x)
    torch.testing.assert_close(torch.cat([layer(row[None]) for row in x]), together, atol=1e-5, rtol=1e-5)


def test_kv_pool_stores_one_latent_head(tmp_path: Path) -> None:
    write_architecture("deepseek-v3", tmp_path)
    shape = load(tmp_path).shape
    assert (shape.num_local_kv_heads, shape.head_dim, shape.num_local_heads) == (1, 12 + 4, 4)


def test_mimo_equals_qwen2_without_its_mtp_layers(tmp_path: Path) -> None:
    """The target reads only its own tensors."""
    plain = write_toy(tmp_path, "qwen2")
    expected = logits(load(plain), TOKENS)
    change_config(
        tmp_path, architectures=["MiMoForCausalLM"], model_type="mimo", attention_bias=True, num_nextn_predict_layers=1
    )
    torch.testing.assert_close(logits(load(tmp_path), TOKENS), expected)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v3", {"topk_method": "aux_tc"}, "topk_method='aux_tc'.*'noaux_tc'"),
        ("deepseek-v2", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "eetq"}}, "quant_method=eetq.*bfloat16"),
    ],
)
def test_unsupported_settings_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_architecture(name, tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_error_for_a_missing_expert_names_its_tensor(tmp_path: Path) -> None:
    write_architecture("mixtral", tmp_path)
    change_config(tmp_path, num_local_experts=5)
    with pytest.raises(ConfigError, match=r"no tensor 'model.layers.0.block_sparse_moe.experts.4.w2.weight'"):
        load(tmp_path)


def test_written_checkpoints_have_the_layout_of_the_hub(tmp_path: Path) -> None:
    """The tests above must not read a layout that only newer versions of transformers write."""
    write_architecture("mixtral", tmp_path / "a")
    write_architecture("deepseek-v3", tmp_path / "b")
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in load_file(tmp_path / "a" / "model.safetensors")
    names = set(load_file(tmp_path / "b" / "model.safetensors"))
    assert {"model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"} <= names
    assert load_config(tmp_path / "b").architectures == ["DeepseekV3ForCausalLM"]


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
