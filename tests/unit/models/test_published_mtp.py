"""MTP layers around transformers' decoder layers, in the layouts of published checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.heads.mtp import MtpHead, MtpLayers, MtpStack, check_mtp_files, holds_mtp_layers, load_mtp_layers
from specray.models.registry import load_config, shape_of
from specray.models.target_matrices import TargetMatrices
from specray.models.target_model import ModelShape
from tests.support.naive_eagle import attend_to_the_past
from tests.support.published_mtp import FAMILIES, write_published
from tests.unit.models.test_architectures import change_config

TOKENS = torch.tensor([7 * place % 64 for place in range(40)])  # more than the windows of 16
SHAPE = ModelShape(2, 32, 64, 1e-6, False, 4, 2, 8)  # of all targets here, as far as a head reads it


def load(folder: Path, shape: ModelShape = SHAPE) -> MtpLayers:
    shared = TargetMatrices(shape, 256, folder, "auto", torch.float32, torch.device("cpu"), None)
    return load_mtp_layers(folder, "auto", shared)


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_layers_equal_transformers_eager_modules(name: str, tmp_path: Path) -> None:
    """One layer after another, each with the attention that its family has."""
    target, references = write_published(name, tmp_path)
    assert holds_mtp_layers(tmp_path, "auto")
    layers = load(tmp_path)
    assert len(layers.layers) == len(references) == FAMILIES[name].num_layers
    embeds = target.get_input_embeddings()(TOKENS)
    expected = ours = torch.randn(len(TOKENS), 32, generator=torch.Generator().manual_seed(3)) * 2

    def attend(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        assert layer == number, "every layer has KV of its own"
        return attend_to_the_past(layer, q, kv, layers.attention[layer])

    head = MtpHead(layers) if len(references) == 1 else MtpStack(layers, len(references))
    for number, reference in enumerate(references):
        expected, expected_logits = reference(embeds, expected)
        ours = layers.layers[number](embeds, ours, torch.arange(len(TOKENS)), attend)
        assert expected.std() > 0.3
        torch.testing.assert_close(ours, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0.0)
        left = len(references) - number
        logits = head.logits(ours if len(references) == 1 else ours[:, None].expand(-1, left, -1))
        torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0.0)


def test_layers_of_a_target_with_states_have_none(tmp_path: Path) -> None:
    write_published("qwen3_next", tmp_path)
    target = shape_of(load_config(tmp_path), RankGroup())
    shape = load(tmp_path, target).shape
    assert target.num_state_layers == 3
    assert (shape.num_kv_layers, shape.states) == (1, ())


def test_a_window_and_sinks_are_those_of_the_family(tmp_path: Path) -> None:
    write_published("mimo_v2_flash", tmp_path)
    layers = load(tmp_path)
    assert [layer.window for layer in layers.attention] == [16] * 3
    sinks = [layer.sinks for layer in layers.attention]
    assert len({tuple(each.tolist()) for each in sinks if each is not None}) == 3


def test_layers_have_the_heads_of_their_type(tmp_path: Path) -> None:
    """As Step-3.5-Flash is published: lists that go on behind the target's layers."""
    write_published("step3p7", tmp_path)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())["text_config"]
    del text["per_layer_config"], text["num_sliding_attention_heads"]
    text["layer_types"] += ["sliding_attention"] * 3
    text["mlp_layer_types"] += ["dense"] * 3
    published = {"architectures": ["Step3p5ForCausalLM"], "dtype": "float32", "num_nextn_predict_layers": 3}
    published["attention_other_setting"] = {"attention_type": "sliding_attention", "num_attention_heads": 8}
    path.write_text(json.dumps(text | published))
    layers = load(tmp_path)
    assert [(layer.num_heads, layer.window) for layer in layers.attention] == [(8, 16)] * 3
    assert len(layers.outputs) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.2.mlp.gate.weight": None}, r"lacks 1 tensors of an MTP layer: model\.layers\.2\.mlp\.gate\.w"),
        ({"model.layers.2.shared_head.norm.weight": None}, r"no tensor 'model\.layers\.2\.shared_head\.norm\.weight'"),
        ({"model.layers.2.self_attn.q_proj.weight": torch.ones(3, 32)}, r"q_proj\.weight has shape \[3, 32\].*implies"),
        ({"model.layers.2.eh_proj.weight": torch.ones(32, 32)}, r"eh_proj\.weight has shape \[32, 32\].*\[32, 64\]"),
        ({"model.layers.2.mlp.extra.weight": torch.ones(3)}, r"1 tensors are not part of an MTP layer.*extra\.weight"),
    ],
    ids=["missing", "no-norm", "misshapen", "misshapen-projection", "unknown"],
)
def test_a_layer_that_is_not_whole_is_refused(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    write_published("glm4_moe", tmp_path)
    tensors: dict[str, Any] = load_file(tmp_path / "model.safetensors") | change
    save_file({name: part for name, part in tensors.items() if part is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_layers_of_another_target_are_refused(tmp_path: Path) -> None:
    write_published("glm4_moe", tmp_path)
    change_config(tmp_path, hidden_size=40)
    with pytest.raises(ConfigError, match=r"hidden_size=40, but the target's is 32; .*draft_model_path"):
        check_mtp_files(tmp_path, "auto", SHAPE)
