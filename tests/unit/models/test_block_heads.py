"""DFlash, JetSpec and DSpark heads of every layout equal a float64 reference; files that do not fit are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.heads.block import BlockHead
from specray.models.heads.loading import load_block_head
from specray.models.registry import load_config, shape_of
from specray.models.target_matrices import TargetMatrices
from specray.models.target_model import BEFORE_FINAL_NORM
from tests.support.block_toy import LAYOUTS, MASK_TOKEN, BlockToy, block_toy
from tests.support.toy import CONTEXT, write_toy

CPU = torch.device("cpu")
ROOT, NUM_CONTEXT = 17, 9


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("target"))


def load(toy: BlockToy, folder: Path, algorithm: str | None = None) -> BlockHead:
    toy.write(folder)
    speculative = SpeculativeConfig(algorithm=algorithm or toy.algorithm, draft_model_path=str(folder))
    shape = shape_of(load_config(toy.target), RankGroup())
    return load_block_head(
        speculative, TargetMatrices(shape, CONTEXT, toy.target, "auto", torch.float32, CPU, target=None)
    )


def attend(head: BlockHead, context: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
    """Attention of one block behind `context` [layers, n, 2, kv_heads, dim], query by query."""

    def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
        mask, kv = head.config.masks[layer], torch.cat((context[layer], kv))
        out = torch.zeros_like(q)
        for row in range(len(q)):
            place = len(context[layer]) + row
            last = place if mask.is_causal else len(kv) - 1
            seen = [key for key in range(last + 1) if mask.window is None or abs(place - key) < mask.window]
            for number in range(q.shape[1]):
                k, v = kv[seen, :, number * kv.shape[2] // q.shape[1]].unbind(1)
                out[row, number] = (k @ q[row, number] * q.shape[2] ** -0.5).softmax(0) @ v
        return out.flatten(1)

    return attend


@torch.inference_mode()
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_the_reference(name: str, target: Path, tmp_path: Path) -> None:
    toy = block_toy(name, target)
    head, num_rows = load(toy, tmp_path), toy.config["block_size"]
    states = torch.randn(NUM_CONTEXT, len(toy.layout.aux) * 32, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(NUM_CONTEXT + num_rows)
    context = head.context_kv(head.fuse(states), positions[:NUM_CONTEXT])
    token_ids = torch.tensor([ROOT] + [MASK_TOKEN] * (num_rows - 1))
    found = head(token_ids, positions[NUM_CONTEXT:], attend(head, context))  # type: ignore[arg-type]
    assert head.config.num_predicted == num_rows - (not toy.layout.samples_from_anchor)
    found = found[num_rows - head.config.num_predicted :]
    expected = toy.outputs(states, ROOT, num_rows)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    logits, path, state = head.logits(found), [ROOT], None
    for level in range(len(found)):
        bias, confidence, state = head.after_tokens(torch.tensor(path[-1:]), found[level : level + 1], state)
        wanted, sure = toy.predictions(expected, path)
        row = logits[level] if bias is None else logits[level] + bias[0]
        torch.testing.assert_close(row.double(), wanted, atol=1e-4, rtol=1e-4)
        assert sure == pytest.approx(1.0 if confidence is None else float(confidence), abs=1e-4)
        path.append(int(toy.draft_ids[wanted.argmax()]))
    ids = torch.arange(head.vocab_size) if head.draft_token_ids is None else head.draft_token_ids
    assert ids.tolist() == toy.draft_ids.tolist()
    layers = tuple(layer + 1 if layer < 1 else BEFORE_FINAL_NORM for layer in toy.layout.aux)
    assert head.aux_hidden_state_layers == layers


def changed(**settings: Any) -> Callable[[BlockToy], None]:
    return lambda toy: toy.config.update(settings)


def without_mask(toy: BlockToy) -> None:
    del toy.config["dflash_config"]["mask_token_id"]


def with_tensor(toy: BlockToy) -> None:
    toy.tensors["layers.0.attention_conv.base_kernel"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("z-lab", without_mask, r"mask_token_id=None, but .* need a token below vocab_size=64; set it"),
        ("deepspec-vanilla", changed(mask_token_id=64), r"mask_token_id=64, but .* below vocab_size=64"),
        ("z-lab", changed(hidden_size=48), r"hidden_size=48, but the target's is 32; a draft head works"),
        ("z-lab", changed(vocab_size=128), r"vocab_size=128, but the target's is 64"),
        ("z-lab", changed(target_layer_ids=[0, 7]), r"no outputs of layers \[0, 7\] \(2 layers, by target"),
        (
            "speculators-dspark",
            changed(aux_hidden_state_layer_ids=[3]),
            r"no inputs of layers \[3\] .*from 0 to 2",
        ),
        ("z-lab", changed(layer_types=["sliding_attention"] * 2), r"sliding_window is not set"),
        ("z-lab", changed(layer_types=["full_attention"]), r"1 entries for num_hidden_layers=2"),
        ("z-lab", changed(projector_type="domino"), r"projector_type='domino' is not supported in a DFlash or DSpark"),
        ("z-lab", changed(block_size=1), r"block_size: Input should be greater than or equal to 2"),
        ("z-lab", with_tensor, r"1 tensors are not part of a DFlash or DSpark head .*attention_conv"),
        ("deepspec-vanilla", changed(markov_rank=0), r"confidence_head_with_markov=true needs a markov_rank"),
        ("deepspec-vanilla", changed(markov_rank=9), r"markov_w1.weight has shape \[64, 5\], but .*\[64, 9\]"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    layout: str, change: Callable[[BlockToy], None], message: str, target: Path, tmp_path: Path
) -> None:
    toy = block_toy(layout, target)
    change(toy)
    with pytest.raises(ConfigError, match=message):
        load(toy, tmp_path)


@pytest.mark.parametrize(("layout", "algorithm"), [("z-lab", "DSPARK"), ("deepspec-vanilla", "DFLASH")])
def test_the_algorithm_is_that_of_the_head(layout: str, algorithm: str, target: Path, tmp_path: Path) -> None:
    toy = block_toy(layout, target)
    with pytest.raises(ConfigError, match=f"algorithm={algorithm}; set speculative.algorithm: {toy.algorithm}"):
        load(toy, tmp_path, algorithm)


def test_the_default_layers_are_spread_over_the_target(target: Path, tmp_path: Path) -> None:
    config = load(block_toy("z-lab", target), tmp_path).config.model_copy(update={"target_layer_ids": []})
    assert config.aux_hidden_state_layers(tmp_path, 36) == (2, 34)
    deep = config.model_copy(update={"num_hidden_layers": 5})
    assert deep.aux_hidden_state_layers(tmp_path, 36) == (2, 10, 18, 26, 34)
