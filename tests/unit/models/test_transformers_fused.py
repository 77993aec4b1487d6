"""Which of transformers' decoders run in one call of the CPU kernels, and that they are the native classes' bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from specray.config import EngineConfig
from specray.layers.parallel import RankGroup
from specray.models.fused_forward import FusibleModel
from specray.models.registry import load_model
from specray.models.target_model import BEFORE_FINAL_NORM
from specray.ops.attention import AttentionBatch, make_pool
from specray.ops.backends import make_backend
from specray.ops.cpu.library import kernels
from tests.support.decoders import logits_in_chunks, write_decoder

pytestmark = pytest.mark.skipif(kernels() is None, reason="the CPU kernels are not compiled")
TOKENS = [0, 5, 63, 17, 17, 40, 2, 9, 9, 31, 50, 8]


def load(folder: Path, model_impl: str = "transformers", **options: Any) -> FusibleModel:
    config = EngineConfig.model_validate({"model": str(folder), "device": "cpu", "model_impl": model_impl, **options})
    model = load_model(folder, config, RankGroup(), torch.device("cpu"), progress=False)
    assert isinstance(model, FusibleModel)
    return model


@pytest.mark.parametrize("name", ["qwen2-window", "qwen3", "seed_oss", "cwm", "internvl", "qwen3_vl"])
def test_decoders_of_llamas_layers_are_found(name: str, tmp_path: Path) -> None:
    write_decoder(name, tmp_path)
    assert load(tmp_path).fused_forward is not None


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("granite", {}),  # factors around layers and embeddings
        ("granite", {"embedding_multiplier": 1.0, "logits_scaling": 1.0}),
        ("granite", {"residual_multiplier": 1.0, "logits_scaling": 1.0}),
        ("gemma", {}),
        ("olmo2", {}),
        ("smollm3", {}),  # no rotary positions in every second layer
        ("dots1", {}),
    ],
)
def test_other_decoders_are_not(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_decoder(name, tmp_path, **changes)
    assert load(tmp_path).fused is None


def test_logits_that_are_scaled_leave_the_layers_fused(tmp_path: Path) -> None:
    write_decoder("granite", tmp_path, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=2.0)
    model = load(tmp_path)
    assert model.fused is not None
    assert model.fused_forward is None


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3", "mistral"])
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_bits_are_those_of_the_native_class(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    write_decoder(name, tmp_path)
    ours, native = (logits_in_chunks(load(tmp_path, impl, **options), TOKENS, 5) for impl in ("transformers", "native"))
    assert torch.equal(ours, native)


def test_aux_hidden_states_are_those_of_the_native_class(tmp_path: Path) -> None:
    write_decoder("llama", tmp_path)
    layers, found = [2, 0, 1, BEFORE_FINAL_NORM, 1], []
    for impl in ("transformers", "native"):
        model = load(tmp_path, impl, dtype="float32")
        pool = make_pool(2, 4, 2, 8, torch.float32, torch.device("cpu"))
        batch = AttentionBatch([3], [3], torch.arange(1, 4)[None], torch.arange(1, 4), [(0, 0)])
        attend = make_backend("auto", pool, 4).plan(batch)
        found.append(model(torch.tensor([5, 9, 7]), torch.arange(3), attend, layers)[1])
    assert len(found[0]) == len(layers)
    assert all(map(torch.equal, *found))


def test_layers_that_compute_something_else_are_not_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same modules: the feed-forward beside attention, and a decoder that halves its embeddings."""
    write_decoder("llama", tmp_path)

    def beside(layer: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        mixed, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
        result: Tensor = hidden_states + mixed + layer.mlp(layer.post_attention_layernorm(hidden_states))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(LlamaDecoderLayer, "forward", beside)
        assert load(tmp_path).fused is None
    forward: Any = LlamaModel.forward

    def halved(body: Any, input_ids: Tensor, **options: Any) -> Any:
        return forward(body, inputs_embeds=body.embed_tokens(input_ids) * 0.5, **options)

    monkeypatch.setattr(LlamaModel, "forward", halved)
    assert load(tmp_path).fused is None
