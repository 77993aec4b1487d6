"""Heads exported in int8: the engine and the trainer read them, and nothing is rounded twice."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.models.heads.eagle_files import HeadConfig
from specray.models.loading import Loader
from specray.models.quantized_formats import checkpoint_format
from specray.models.weights import WeightReader
from specray.ops.grouped_weight import GROUP, GroupedWeight
from specray.train.export import QUANTIZATION_CONFIG, packed
from specray.train.trainer import Trainer
from tests.support.training_data import write_answers
from tests.unit.train.test_trainer import CPU, settings


def largest_error(weight: torch.Tensor) -> torch.Tensor:
    """By element: half a step of its group, and as much again for what a scale in bfloat16 clips off."""
    steps = weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 127
    return steps.repeat_interleave(GROUP, 1) * 1.01


@pytest.mark.parametrize("kind", ["eagle3", "parallel", "eagle2", "mtp"])
def test_an_int8_head_can_be_trained_on(kind: str, tmp_path: Path) -> None:
    answers, run = write_answers(tmp_path), tmp_path / "run"
    first = Trainer(settings(kind=kind, weights="int8"), answers, run, CPU)
    assert first.run()
    head = run / "head"
    assert checkpoint_format(head) is not None
    second = Trainer(settings(kind=kind, init_head=str(head)), answers, tmp_path / "next", CPU)
    read = second.head.state_dict()
    for name, tensor in first.head.state_dict().items():
        if tensor.dim() == 2 and name.endswith(".weight") and tensor.shape[1] % GROUP == 0:
            assert ((read[name] - tensor).abs() <= largest_error(tensor)).all(), name
        else:
            torch.testing.assert_close(read[name].float(), tensor.bfloat16().float(), msg=name)


def test_the_engine_keeps_the_integers_of_an_int8_head(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(settings(weights="int8"), write_answers(tmp_path), run, CPU).run()
    HeadConfig.read(run / "head")
    stored = load_file(run / "head" / "model.safetensors")
    loader = Loader(run / "head", "auto", torch.bfloat16, CPU, quantization="int8")
    weight = loader.weight("midlayer.mlp.gate_proj.weight", (48, GROUP))
    loader.close()
    assert isinstance(weight, GroupedWeight)
    ints = stored["midlayer.mlp.gate_proj.weight_packed"].view(torch.uint8)
    assert torch.equal(weight.ints, ints)
    assert torch.equal(weight.scales, stored["midlayer.mlp.gate_proj.weight_scale"].float())


@pytest.mark.parametrize("exponent", [-30, -4, 0, 12])
def test_packed_matrices_read_back_and_pack_to_the_same(exponent: int, tmp_path: Path) -> None:
    weight = torch.randn(5, 3 * GROUP, generator=torch.Generator().manual_seed(1)) * 10.0**exponent
    weight[1] = 0
    parts = packed({"a.weight": weight, "b.weight": weight[:, :-1].contiguous(), "c": weight[0]})
    assert sorted(parts) == ["a.weight_packed", "a.weight_scale", "a.weight_shape", "b.weight", "c"]
    save_file(parts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": QUANTIZATION_CONFIG}))
    with WeightReader(tmp_path) as reader:
        read = reader.get("a.weight")
    assert ((read - weight).abs() <= largest_error(weight)).all()
    assert torch.equal(packed({"a.weight": read})["a.weight_packed"], parts["a.weight_packed"])
