"""Which of transformers' modules are replaced by kernels, and what the replacements compute."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Gemma2Config, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specray.models.transformers_layers import (
    FlatGatedUnits,
    as_rms_norm,
    computes_gated_units,
    computes_rotary_attention,
)
from specray.models.transformers_skeleton import AttentionCall, attention_calls, build_skeleton
from specray.ops.cpu.library import kernels
from tests.support.decoders import decoder_config

needs_kernels = pytest.mark.skipif(kernels() is None, reason="the CPU kernels are not compiled")


class SwappedMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return result


class OtherRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.normalize(hidden_states, dim=-1) * self.weight


def small_config() -> LlamaConfig:
    return LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4)


def test_gated_units_are_found_by_what_a_module_computes() -> None:
    config = small_config()
    assert computes_gated_units(LlamaMLP(config))
    assert not computes_gated_units(SwappedMLP(config))
    assert not computes_gated_units(Gemma2MLP(Gemma2Config(hidden_size=32, intermediate_size=64)))  # gelu
    assert not computes_gated_units(LlamaMLP(LlamaConfig(hidden_size=32, num_attention_heads=4, mlp_bias=True)))
    assert not computes_gated_units(nn.Linear(2, 2))


@torch.no_grad()
def test_gated_units_equal_the_module() -> None:
    mlp = LlamaMLP(small_config())
    weights = (mlp.gate_proj.weight.data, mlp.up_proj.weight.data, mlp.down_proj.weight.data)
    x = torch.randn(1, 5, 32)
    torch.testing.assert_close(FlatGatedUnits(*weights, None, torch.float32)(x), mlp(x), atol=1e-5, rtol=1e-5)


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
def test_norms_equal_the_module(kind: type[nn.Module]) -> None:
    module = kind(16, eps=1e-5)
    module.get_parameter("weight").copy_(torch.randn(16))
    norm = as_rms_norm(module)
    assert norm is not None
    x = torch.randn(1, 3, 2, 16)
    torch.testing.assert_close(norm(x), module(x), atol=1e-5, rtol=1e-5)


def test_another_norm_is_kept() -> None:
    assert as_rms_norm(OtherRMSNorm(16)) is None
    assert as_rms_norm(nn.LayerNorm(16)) is None


def test_rotary_attention_is_found_by_what_a_module_computes() -> None:
    calls = {name: calls_of(name) for name in ("llama", "qwen3", "olmo2", "smollm3", "gpt_oss", "glm4_moe")}
    found = {name: [computes_rotary_attention(*each) for each in pairs] for name, pairs in calls.items()}
    assert found == {
        "llama": [True, True],
        "qwen3": [True, True],  # norms of the heads of queries and keys
        "olmo2": [False, False],  # norms of all heads together
        "smollm3": [True, False, True, False],  # every second layer without rotary positions
        "gpt_oss": [False, False, False],  # sinks
        "glm4_moe": [False, False],  # half of each head is rotated
    }


def calls_of(name: str) -> list[tuple[nn.Module, AttentionCall]]:
    skeleton = build_skeleton(decoder_config(name), torch.float32)
    modules = (layer.self_attn for layer in skeleton.model.layers)
    return list(zip(modules, attention_calls(skeleton).values(), strict=True))
