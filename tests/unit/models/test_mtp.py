"""MTP layers of both layouts equal a reference, and are refused if they do not fit their target."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.heads.mtp import MtpHead, MtpLayers, MtpStack, holds_mtp_layers, load_mtp_layers
from specray.models.llama import Llama
from specray.models.registry import load_model
from specray.models.target_matrices import TargetMatrices
from tests.support.eagle_toy import target_matrices
from tests.support.mtp import mimo_states, write_deepseek, write_mimo_layers
from tests.support.naive_eagle import attend_to_the_past
from tests.support.toy import write_toy
from tests.unit.models.test_architectures import change_config

CPU = torch.device("cpu")
TOKENS = [5, 63, 0, 17, 17, 40, 2, 9]
HIDDEN = 32


def load_target(folder: Path) -> Llama:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu")
    return load_model(folder, config, RankGroup(), CPU, progress=False)


def load(folder: Path, target_folder: Path) -> MtpLayers:
    target = load_target(target_folder)
    shared = TargetMatrices(target.shape, 256, target_folder, "auto", torch.float32, CPU, target)
    return load_mtp_layers(folder, "auto", shared)


def some_states() -> torch.Tensor:
    return torch.randn(len(TOKENS), HIDDEN, generator=torch.Generator().manual_seed(3)) * 2


@torch.inference_mode()
def two_steps(head: MtpHead) -> list[torch.Tensor]:
    """Logits of two draft steps, the second on the first's own states."""
    tokens, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS))
    first = head(tokens, head.fuse(some_states()), positions, attend_to_the_past)
    second = head(tokens, head.recur(first), positions, attend_to_the_past)
    return [head.logits(first), head.logits(second)]


def test_mimos_layer_equals_the_reference(toy: Path, tmp_path: Path) -> None:
    folder = write_mimo_layers(tmp_path, toy)
    embedding, output = target_matrices(toy)
    states = some_states().double().numpy()
    for logits in two_steps(MtpHead(load(folder, toy))):
        states = mimo_states(folder, 0, embedding[TOKENS], states)
        np.testing.assert_allclose(logits.double().numpy(), states @ output.T, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_deepseeks_layers_are_those_of_transformers(tmp_path: Path) -> None:
    """One layer after another, at the positions that each has in training."""
    reference = write_deepseek(tmp_path, num_layers=2)
    layers = load(tmp_path, tmp_path)
    expected = ours = some_states()
    for index in range(2):
        positions = torch.arange(len(TOKENS)) + index
        expected = reference.forward_layer(index, expected[None], positions[None], None, torch.tensor([TOKENS]))[0]
        stack = MtpStack(layers, count=2)
        ours = stack.read(index, torch.tensor(TOKENS), ours, positions, _of_layer(index))
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            stack.logits(ours[:, None]), reference._project_to_logits(expected), atol=1e-3, rtol=1e-4
        )


def _of_layer(wanted: int) -> Any:
    def attend(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        assert layer == wanted, "every layer has KV of its own"
        return attend_to_the_past(layer, q, kv)

    return attend


def test_a_target_skips_its_mtp_layers(tmp_path: Path) -> None:
    """The MTP layers are stored after the target's own, under the next index."""
    write_deepseek(tmp_path, num_layers=1)
    model = load_target(tmp_path)
    assert len(model.layers) == model.shape.num_layers == 3
    tensors = {
        n: t for n, t in load_file(tmp_path / "model.safetensors").items() if not n.startswith("model.layers.3.")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    again = load_target(tmp_path)
    with torch.inference_mode():
        both = [m(torch.tensor(TOKENS), torch.arange(len(TOKENS)), attend_to_the_past)[0] for m in (model, again)]
    assert torch.equal(*both)
    assert not holds_mtp_layers(tmp_path, "auto")


def test_a_token_map_limits_the_drafted_tokens(toy: Path, tmp_path: Path) -> None:
    layers = load(write_mimo_layers(tmp_path, toy), toy)
    ids = torch.tensor([40, 3, 17])
    full, narrow = two_steps(MtpHead(layers)), two_steps(MtpHead(layers, ids))
    torch.testing.assert_close(narrow[0], full[0][:, ids])
    found = MtpHead(layers, ids).draft_token_ids
    assert found is not None
    assert found.tolist() == ids.tolist()


def test_layers_of_another_target_are_refused(toy: Path, tmp_path: Path) -> None:
    write_mimo_layers(tmp_path, toy)
    change_config(tmp_path, vocab_size=65)
    with pytest.raises(ConfigError, match=r"vocab_size=65, but the target's is 64; .*draft_model_path"):
        load(tmp_path, toy)


def test_a_checkpoint_without_layers_is_refused(toy: Path) -> None:
    assert not holds_mtp_layers(toy, "auto")
    with pytest.raises(
        ConfigError, match=r"holds no MTP layers.*eh_proj.*mtp_layers\.\*\.input_proj.*draft_model_path"
    ):
        load(toy, toy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"self_attn.q_proj.bias": None}, r"no tensor 'model\.mtp_layers\.0\.self_attn\.q_proj\.bias'"),
        ({"final_layernorm.weight": torch.ones(31)}, r"final_layernorm\.weight has shape \[31\].*implies \[32\]"),
        ({"input_proj.bias": torch.ones(32)}, r"1 tensors are not part of an MTP layer.*input_proj\.bias"),
    ],
    ids=["missing", "misshapen", "unknown"],
)
def test_a_layer_that_is_not_whole_is_refused(
    change: dict[str, torch.Tensor | None], message: str, toy: Path, tmp_path: Path
) -> None:
    path = write_mimo_layers(tmp_path, toy) / "model.safetensors"
    tensors: dict[str, Any] = load_file(path) | {f"model.mtp_layers.0.{name}": part for name, part in change.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, toy)


def test_a_mimo_checkpoint_is_target_and_draft_in_one(tmp_path: Path) -> None:
    """The target's tensors and the layers' in one file, as it is published."""
    target = write_toy(tmp_path, "qwen2")
    layers = write_mimo_layers(tmp_path / "layers", target)
    save_file(
        load_file(target / "model.safetensors") | load_file(layers / "model.safetensors"), target / "model.safetensors"
    )
    change_config(target, architectures=["MiMoForCausalLM"], model_type="mimo", intermediate_size=48)
    assert holds_mtp_layers(target, "auto")
    assert load_target(target).shape.qkv_bias
