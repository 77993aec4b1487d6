"""Loading transformers' modules: language models of image models, quantised weights, and what is refused."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup, SilentRank
from specray.models.registry import load_model
from specray.models.target_model import TargetModel
from specray.models.transformers_model import transformers_shape
from specray.models.transformers_parallel import split_skeleton
from specray.models.transformers_skeleton import AttentionCall, attention_calls, attention_of_pass, build_skeleton
from specray.models.transformers_states import GatedDeltaNet, state_layers
from specray.ops.cpu.library import kernels
from specray.spec_decode.model_files import check_model_files
from tests.support.decoders import SMALL, decoder_config, logits_in_chunks, logits_of, write_decoder

TOKENS = [0, 5, 63, 17, 17, 40, 2, 9, 9, 31, 50, 8]


def load(folder: Path, **options: Any) -> TargetModel:
    options = {"dtype": "float32", "device": "cpu", "model_impl": "transformers"} | options
    config = EngineConfig(model=str(folder), **options)
    return load_model(folder, config, RankGroup(), torch.device("cpu"), progress=False)


def logits(model: TargetModel) -> torch.Tensor:
    return logits_in_chunks(model, TOKENS, len(TOKENS))


@pytest.mark.skipif(kernels() is None, reason="int8 needs the CPU kernels")
def test_quantised_linears_are_those_of_the_native_class(tmp_path: Path) -> None:
    write_decoder("llama", tmp_path)
    plain = logits(load(tmp_path))
    ours, native = (logits(load(tmp_path, quantization="int8", model_impl=impl)) for impl in ("transformers", "native"))
    rounding = (native - plain).abs().max()
    assert 0.0 < (ours - plain).abs().max() < 2 * rounding


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_decoder("olmo2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"lacks 1 tensors of Olmo2ForCausalLM: model.layers.1.self_attn.q_norm.wei"):
        load(tmp_path)


def test_a_language_model_that_transformers_has_within_an_image_model_only_is_served_alone(tmp_path: Path) -> None:
    """As Step-3.5-Flash is published."""
    reference = write_decoder("step3p7", tmp_path)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())["text_config"]
    path.write_text(json.dumps(text | {"architectures": ["Step3p5ForCausalLM"], "dtype": "float32"}))
    torch.testing.assert_close(logits(load(tmp_path)), logits_of(reference, TOKENS), atol=1e-4, rtol=0.0)


def test_a_language_model_is_served_without_the_packages_that_its_encoders_need(tmp_path: Path) -> None:
    """Gemma 3n's encoder of images needs timm."""
    reference = write_decoder("gemma3n", tmp_path)
    whole = transformers.Gemma3nConfig(text_config=decoder_config("gemma3n").to_dict())
    whole.architectures, whole.tie_word_embeddings = ["Gemma3nForConditionalGeneration"], False
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    renamed = {re.sub("^model.", "model.language_model.", name): part for name, part in load_file(file).items()}
    save_file(renamed, file, {"format": "pt"})
    torch.testing.assert_close(logits(load(tmp_path)), logits_of(reference, TOKENS), atol=1e-4, rtol=0.0)


def test_attention_that_is_asked_for_more_than_it_computes_is_refused() -> None:
    """Inkling's layers pass a bias of their own, here without the layers that keep a state."""
    config = transformers.InklingTextConfig(**SMALL, layer_types=["full_attention"] * 2)
    with pytest.raises(ConfigError, match="InklingAttention asks attention for position_bias"):
        attention_calls(build_skeleton(config, torch.float32))


def test_skeletons_that_are_built_at_the_same_time_leave_torch_as_it_was() -> None:
    """transformers exchanges torch's functions while it builds a model, and puts back what it found."""
    config, initialize = decoder_config("llama"), nn.init.kaiming_uniform_
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda place: build_skeleton(config, (torch.bfloat16, torch.float16)[place % 2]), range(40)))
    try:
        assert nn.init.kaiming_uniform_ is initialize
        assert torch.get_default_dtype() is torch.float32
    finally:
        nn.init.kaiming_uniform_ = initialize
        torch.set_default_dtype(torch.float32)


class FakeGroup(RankGroup):
    """One of two ranks, that never speak."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = 1, 2


def test_layers_that_share_kv_read_it_and_write_none(tmp_path: Path) -> None:
    write_decoder("gemma4", tmp_path)
    model = load(tmp_path)
    seen: list[tuple[int, bool]] = []

    def attend(layer: int, q: torch.Tensor, kv: torch.Tensor | None) -> torch.Tensor:
        seen.append((layer, kv is None))
        return torch.zeros_like(q).flatten(1)

    model(torch.tensor([5, 9]), torch.arange(2), attend)
    assert seen == [(0, False), (1, False), (2, False), (1, True), (2, True)]
    assert model.shape.num_layers == 5
    assert model.layer_attention is not None
    assert model.shape.num_kv_layers == len(model.layer_attention) == 3


@pytest.mark.parametrize(("value", "is_served"), [("vision", True), ("all", False)])
def test_text_of_a_model_whose_images_are_not_causal_is_served(value: str, is_served: bool) -> None:
    config = transformers.Gemma4TextConfig(
        **decoder_config("gemma4").to_dict() | {"use_bidirectional_attention": value}
    )
    skeleton = build_skeleton(config, torch.float32)
    with nullcontext() if is_served else pytest.raises(ConfigError, match="attends to later tokens"):
        attention_calls(skeleton)


ONE_KIND = "no layer of model_type={} attends to earlier tokens"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        *(
            (name, {"hidden_act": "gelu"}, "asks for gelu, .* silu only")
            for name in ("qwen3_5", "qwen3_next", "olmo_hybrid")
        ),
        (
            "qwen3_5",
            {"linear_num_key_heads": 4, "linear_num_value_heads": 2},
            "4 key heads .* 2 value heads .*; value heads must be a mul",
        ),
        (
            "olmo_hybrid",
            {"linear_num_key_heads": 2, "linear_num_value_heads": 3},
            "2 key heads .* 3 value heads .*; value heads must be a mul",
        ),
        ("qwen3_5", {"linear_num_key_heads": 0}, "0 key heads .* all positive"),
        ("qwen3_next", {"linear_key_head_dim": 0}, "key heads of 0 .* all positive"),
        ("lfm2", {"conv_L_cache": 0}, "a convolution over 0 tokens"),
        ("qwen3_5", {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}, ONE_KIND.format("qwen3_5_text")),
        ("lfm2", {"layer_types": ["conv"] * 3}, ONE_KIND.format("lfm2")),
    ],
)
def test_layers_with_states_are_refused_where_we_would_compute_something_else(
    name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        transformers_shape(decoder_config(name, **changes), RankGroup())


def test_swish_is_silu_and_another_gate_is_refused() -> None:
    module: Any = Qwen3_5GatedDeltaNet(decoder_config("qwen3_5", hidden_act="swish"), 0)  # type: ignore[arg-type]
    GatedDeltaNet(module)
    module.norm.activation = "sigmoid"
    with pytest.raises(ConfigError, match="asks for sigmoid, but"):
        GatedDeltaNet(module)


class SharingAttention(nn.Module):
    """Asks for attention to a key that other layers have as well."""

    def __init__(self, key: torch.Tensor, window: int | None) -> None:
        super().__init__()
        self._key, self._call = key, AttentionCall(1, 1, 8, 8, None, window, None, None)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        attention_of_pass()(self._key, self._key, self._key, self._call)
        return hidden_states, None


def test_a_layer_that_reads_another_kv_otherwise_is_named_among_layers_with_states() -> None:
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    skeleton = build_skeleton(decoder_config("qwen3_5", layer_types=types), torch.float32)
    key = torch.empty(1, 1, 2, 8, device="meta")
    for layer, window in ((1, None), (3, 16)):
        skeleton.model.layers[layer].self_attn = SharingAttention(key, window)
    with pytest.raises(ConfigError, match="layer 3 of model_type=qwen3_5_text reads the KV of layer 1, but"):
        attention_calls(skeleton)


def test_a_rank_has_half_of_the_heads_and_a_plan_is_needed() -> None:
    skeleton = build_skeleton(decoder_config("llama"), torch.float32)
    split = split_skeleton(skeleton, FakeGroup())
    assert split.tensors["model.layers.0.self_attn.o_proj.weight"] == (1, (slice(16, 32),), 32)
    assert {(call.num_heads, call.num_kv_heads) for call in attention_calls(skeleton).values()} == {(2, 1)}
    with pytest.raises(ConfigError, match="tp_size=2: transformers has no plan that splits model_type=gpt2"):
        split_skeleton(build_skeleton(decoder_config("gpt2"), torch.float32), FakeGroup())


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "olmo_hybrid", "lfm2"])
def test_a_rank_has_half_of_the_states(name: str) -> None:
    whole, half = (build_skeleton(decoder_config(name), torch.float32) for _ in range(2))
    split_skeleton(half, FakeGroup())
    sizes = [
        sum(operation.shape.num_bytes for layer in state_layers(model) for operation in layer.operations)
        for model in (whole, half)
    ]
    assert sizes[0] == 2 * sizes[1] > 0


def test_a_layer_with_states_that_cannot_be_split_is_refused() -> None:
    group = SilentRank(3)
    with pytest.raises(ConfigError, match="tp_size=3 does not divide the 2 key heads of a layer with states"):
        split_skeleton(build_skeleton(decoder_config("qwen3_5"), torch.float32), group)
    with pytest.raises(ConfigError, match="tp_size=3 does not divide the 32 channels of a layer with states"):
        split_skeleton(build_skeleton(decoder_config("lfm2"), torch.float32), group)


def test_ranks_that_cannot_share_a_model_are_refused_before_it_is_loaded(tmp_path: Path) -> None:
    for name, tp_size, problem in (
        ("gpt2", 2, "no plan that splits model_type=gpt2"),
        ("smollm3", 3, "cannot share 4 q"),
    ):
        write_decoder(name, tmp_path / name)
        with pytest.raises(ConfigError, match=f"tp_size={tp_size}.*{problem}"):
            check_model_files(EngineConfig(model=str(tmp_path / name), tp_size=tp_size), progress=False)


def test_layers_that_mix_tokens_beside_attention_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a shift by one token, which no key of the configuration names."""
    write_decoder("llama", tmp_path)

    def shifted(module: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x.roll(1, 1)))

    monkeypatch.setattr(LlamaMLP, "forward", shifted)
    with pytest.raises(ConfigError, match="mix tokens in another way than by attention"):
        load(tmp_path)
