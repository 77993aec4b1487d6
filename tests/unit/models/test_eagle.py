"""EAGLE heads of every layout equal a float64 reference, and share equal matrices with their target."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.layers.linear import VocabEmbedding
from specray.layers.parallel import RankGroup
from specray.models.heads.eagle_files import HeadConfig
from specray.models.heads.loading import ALGORITHMS, load_eagle_head
from specray.models.heads.served import EagleHead
from specray.models.llama import Llama
from specray.models.registry import load_model
from specray.models.target_matrices import TargetMatrices
from specray.models.target_model import BEFORE_FINAL_NORM
from specray.ops.attention import torch_dtype
from tests.support.eagle_toy import DRAFT_VOCAB, LAYOUTS, NUM_LAYERS, TARGET_SIZE, ToyHead, target_matrices, toy_head
from tests.support.toy import CONTEXT, VOCAB_SIZE, write_toy

CPU = torch.device("cpu")
TOKENS = [5, 63, 0, 17, 17, 40, 2]
ALL_STATES = (0, 1, BEFORE_FINAL_NORM)
AUX_LAYERS = {"eagle3-two-layers": (0, 1), "eagle3-last-state": (NUM_LAYERS,)}  # unlike the other EAGLE-3 layouts


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Llama:
    return load_target(target_folder)


def load_target(folder: Path, **options: Any) -> Llama:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", **options)
    return load_model(folder, config, RankGroup(), CPU, progress=False)


def load(
    folder: Path, target_folder: Path, target: Llama, version: int, token_map: Tensor | None = None, **options: Any
) -> EagleHead:
    algorithm = ALGORITHMS[version]  # type: ignore[index]
    speculative = SpeculativeConfig(algorithm=algorithm, draft_model_path=str(folder), **options)
    dtype = torch.float32 if speculative.draft_dtype == "auto" else torch_dtype(speculative.draft_dtype)
    shared = TargetMatrices(target.shape, target.max_positions, target_folder, "auto", dtype, CPU, target)
    return load_eagle_head(speculative, shared, version, token_map)  # type: ignore[arg-type]


def causal(layer: int, q: Tensor, kv: Tensor) -> Tensor:
    """One row without a past, head by head."""
    assert layer in (0, 1)
    num_tokens, heads, dim = q.shape
    mask = torch.full((num_tokens, num_tokens), float("-inf")).triu(1)
    out = torch.zeros(num_tokens, heads, dim, dtype=q.dtype)
    for head in range(heads):
        k, v = kv[:, 0, head * kv.shape[2] // heads], kv[:, 1, head * kv.shape[2] // heads]
        out[:, head] = ((q[:, head] @ k.T / dim**0.5).float() + mask).softmax(-1).to(q.dtype) @ v
    return out.reshape(num_tokens, -1)


def aux_hidden_states_for(head: EagleHead, seed: int = 3) -> Tensor:
    width = len(head.aux_hidden_state_layers) * TARGET_SIZE
    return torch.randn(len(TOKENS), width, generator=torch.Generator().manual_seed(seed)) * 2


@torch.inference_mode()
def ours(head: EagleHead, first_position: int = 0) -> dict[str, np.ndarray]:
    """Two draft steps, the second on the first's own states."""
    tokens, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS)) + first_position
    found = {"states": head.fuse(aux_hidden_states_for(head))}
    for step in (1, 2):
        found[f"output {step}"] = output = head(tokens, found["states"], positions, causal)
        found[f"logits {step}"] = head.logits(output)
        found["states"] = found[f"recurred {step}"] = head.recur(output)
    return {name: value.double().numpy() for name, value in found.items()}


def reference(
    toy: ToyHead, aux_hidden_states: np.ndarray, embeds: np.ndarray, target_head: np.ndarray
) -> dict[str, np.ndarray]:
    found = {"states": toy.fuse(aux_hidden_states)}
    for step in (1, 2):
        found[f"output {step}"] = output = toy.step(embeds, found["states"])
        found[f"logits {step}"] = toy.logits(output, target_head)
        found["states"] = found[f"recurred {step}"] = toy.recur(output)
    return found


def expected(toy: ToyHead, head: EagleHead, target_folder: Path) -> dict[str, np.ndarray]:
    embedding, target_head = target_matrices(target_folder)
    own = toy.weights.get("embed_tokens.weight", embedding)
    return reference(toy, aux_hidden_states_for(head).double().numpy(), own[TOKENS], target_head)


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].shape == values.shape, name
        error = np.abs(found[name] - values).max() / np.abs(values).max()
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_the_reference(name: str, tmp_path: Path, target_folder: Path, target: Llama) -> None:
    toy = toy_head(name)
    head = load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version)
    assert_close(ours(head), expected(toy, head, target_folder), 1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_attributes_of_a_loaded_head(name: str, tmp_path: Path, target_folder: Path, target: Llama) -> None:
    toy = toy_head(name)
    head = load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version)
    heads = (3, 3) if name == "eagle3-indivisible-heads" else (2, 1)
    assert (head.num_heads, head.num_kv_heads, head.head_dim, head.dtype) == (*heads, 16, torch.float32)
    assert head.num_layers == (2 if "stacked" in name else 1)
    assert head.aux_hidden_state_layers == AUX_LAYERS.get(
        name, ALL_STATES if name.startswith("eagle3") else (NUM_LAYERS,)
    )
    has_own_vocabulary = "d2t" in toy.tensors
    assert head.vocab_size == (DRAFT_VOCAB if has_own_vocabulary else VOCAB_SIZE)
    columns = torch.arange(head.vocab_size)
    offsets = toy.tensors["d2t"] if has_own_vocabulary else torch.zeros_like(columns)
    assert (head.draft_token_ids is not None) == has_own_vocabulary
    ids = columns if head.draft_token_ids is None else head.draft_token_ids
    assert ids.tolist() == (columns + offsets).tolist()


@pytest.mark.parametrize("name", ["eagle3-safeailab", "eagle2"])
def test_positions_reach_the_targets_context(name: str, tmp_path: Path, target_folder: Path, target: Llama) -> None:
    """The head's own max_position_embeddings is far shorter. Attention is relative, so a shifted row is the same."""
    toy = toy_head(name)
    head = load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version)
    assert_close(ours(head, CONTEXT - len(TOKENS)), expected(toy, head, target_folder), 1e-4)


@pytest.mark.parametrize("name", ["eagle3-safeailab", "eagle3-target-head", "eagle3-fc-norm", "eagle2"])
def test_draft_type_is_independent_of_the_targets(
    name: str, tmp_path: Path, target_folder: Path, target: Llama
) -> None:
    toy = toy_head(name)
    head = load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version, draft_dtype="bfloat16")
    tokens, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS))
    output = head(tokens, head.fuse(aux_hidden_states_for(head)), positions, causal)
    assert head.dtype == output.dtype == torch.bfloat16
    wanted = expected(toy, head, target_folder)["logits 1"]
    assert np.abs(head.logits(output).double().numpy() - wanted).max() / np.abs(wanted).max() < 0.05


@pytest.mark.parametrize("name", ["eagle3-target-head", "eagle2"])
@pytest.mark.parametrize("variant", ["llama", "tied"])
def test_a_target_rank_with_part_of_the_vocabulary_is_not_shared(name: str, variant: str, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target_folder = write_toy(tmp_path / "target", variant)
    target = load_target(target_folder)
    target.embedding = VocabEmbedding(target.embedding.weight[: VOCAB_SIZE // 2], RankGroup())
    toy = toy_head(name)
    head = load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version)
    assert_close(ours(head), expected(toy, head, target_folder), 1e-5)


@pytest.mark.parametrize("name", ["eagle3-target-head", "eagle2"])
def test_the_targets_matrices_are_shared_not_read_again(name: str, tmp_path: Path, target: Llama) -> None:
    toy = toy_head(name)
    head = load(toy.write(tmp_path / "head"), tmp_path / "nothing here", target, toy.layout.version)
    assert head.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("name", ["eagle3-own-full-head", "eagle2", "eagle2-speculators"])
@pytest.mark.parametrize("variant", ["llama", "tied"])
def test_a_copy_of_the_targets_matrices_is_not_kept(name: str, variant: str, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target_folder = write_toy(tmp_path / "target", variant)
    target, toy = load_target(target_folder), toy_head(name)
    matrices = target_matrices(target_folder)
    for matrix, values in zip(("embed_tokens.weight", "lm_head.weight"), matrices, strict=True):
        if matrix in toy.tensors:
            toy.tensors[matrix] = torch.from_numpy(values).float()
    head = load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version)
    assert head._embedding is target.embedding  # type: ignore[attr-defined]
    assert head.vocab_head is target.head


@pytest.mark.parametrize("token_ids", [None, [9, 2, 63]])
def test_an_own_output_matrix_of_eagle2_is_used(
    token_ids: list[int] | None, tmp_path: Path, target_folder: Path, target: Llama
) -> None:
    """Also for the rows of a token map."""
    toy = toy_head("eagle2-speculators")
    ids = None if token_ids is None else torch.tensor(token_ids)
    head = load(toy.write(tmp_path / "head"), target_folder, target, 2, ids)
    output = torch.randn(3, TARGET_SIZE, generator=torch.Generator().manual_seed(1))
    rows = toy.tensors["lm_head.weight"] if ids is None else toy.tensors["lm_head.weight"][ids]
    torch.testing.assert_close(head.logits(output), output @ rows.T)


@pytest.mark.parametrize("variant", ["llama", "tied"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_token_map_takes_rows_of_the_targets_output_matrix(variant: str, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target_folder = write_toy(tmp_path / "target", variant)
    ids = torch.tensor([9, 2, 63, 30, 1])
    target, toy = load_target(target_folder), toy_head("eagle2")
    toy.write(tmp_path / "head")
    head = load(tmp_path / "head", target_folder, target, 2, ids, draft_dtype=dtype)
    whole = load(tmp_path / "head", target_folder, target, 2, draft_dtype=dtype)
    assert (head.vocab_size, head.draft_token_ids.tolist() if head.draft_token_ids is not None else None) == (
        len(ids),
        ids.tolist(),
    )
    output = torch.randn(3, TARGET_SIZE, generator=torch.Generator().manual_seed(1)).to(head.dtype)
    torch.testing.assert_close(head.logits(output), whole.logits(output)[:, ids], rtol=1e-2, atol=1e-5)


def test_token_map_is_ignored_by_eagle3_with_a_warning(
    tmp_path: Path, target_folder: Path, target: Llama, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("eagle3-target-head", "eagle3-safeailab"):
        folder = toy_head(name).write(tmp_path / name)
        plain = load(folder, target_folder, target, 3)
        assert not caplog.records
        mapped = load(folder, target_folder, target, 3, torch.tensor([1, 2]))
        assert "token_map is ignored" in caplog.text
        assert mapped.vocab_size == plain.vocab_size
        caplog.clear()


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("settings", "num_layers", "layers"),
    [
        ({}, 30, (2, 15, 27)),
        ({}, 33, (2, 16, 30)),
        ({"eagle_config": {IDS: [-1, 3, 20]}}, 30, (0, 4, 21)),
        ({"eagle_config": {IDS: [1, 14, 29]}}, 30, (2, 15, BEFORE_FINAL_NORM)),
        ({IDS: [2, 18, 33]}, 36, (2, 18, 33)),  # speculators since April 2026
        ({IDS: [0, 15, 30]}, 30, (0, 15, BEFORE_FINAL_NORM)),
        ({IDS: [1, 15, 28]}, 32, (2, 16, 29)),  # converted from SafeAILab's by speculators
        ({IDS: [1, 14, 26]}, 32, (1, 14, 26)),
        ({"eagle_config": {IDS: [4, 5, 6]}, IDS: [0, 1, 2]}, 30, (0, 1, 2)),
    ],
)
def test_aux_ids_are_outputs_when_nested_and_inputs_at_top_level(
    settings: dict[str, Any], num_layers: int, layers: tuple[int, ...], tmp_path: Path
) -> None:
    toy = toy_head("eagle3-safeailab")
    del toy.config["eagle_config"]
    toy.config |= settings
    config = HeadConfig.read(toy.write(tmp_path))
    assert config.aux_hidden_state_layers(tmp_path, num_layers) == layers


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 2048, "use_sliding_window": True}, 2048),
        ({"layer_types": ["sliding_attention"], "sliding_window": 2048}, 2048),
        ({"layer_types": ["full_attention"], "sliding_window": 2048}, None),
        ({"layer_types": ["sliding_attention"], "sliding_window": 2048, "use_sliding_window": False}, None),
        ({"layer_types": ["sliding_attention"], "sliding_window": None}, None),
        ({"sliding_window": 4096}, None),
    ],
)
@pytest.mark.parametrize("name", ["eagle3-speculators", "eagle3-layers", "eagle2"])
def test_the_window_of_sliding_layers_is_read(
    name: str, settings: dict[str, Any], window: int | None, tmp_path: Path, target_folder: Path, target: Llama
) -> None:
    toy = toy_head(name)
    toy.config.get("transformer_layer_config", toy.config).update(settings)
    head = load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version)
    assert head.layer_attention is not None
    assert [layer.window for layer in head.layer_attention] == [window]


def test_the_state_before_the_final_norm_is_that_of_the_last_layer(target: Llama) -> None:
    """The aux hidden states of a target: entering each layer, leaving the last one, after the final norm."""
    tokens, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS))

    def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
        return causal(0, q, kv) if layer >= 0 else q

    with torch.inference_mode():
        final, states = target(tokens, positions, attend, [0, 1, BEFORE_FINAL_NORM, NUM_LAYERS])
        torch.testing.assert_close(states[0], target.embedding(tokens))
        torch.testing.assert_close(target.norm(states[2]), final)
    torch.testing.assert_close(states[3], final)


# ---- settings that public configs and their tensors disagree on ---------------------------------------------------

Break = Callable[[ToyHead], object]


def setting(**changes: Any) -> Break:
    return lambda toy: toy.config.update(changes)


def without(*names: str) -> Break:
    """Remove tensors from the checkpoint and from the reference."""

    def apply(toy: ToyHead) -> None:
        for name in names:
            del toy.tensors[toy.stored(name)], toy.weights[name]

    return apply


def unset_vocabulary(mask: bool) -> Break:
    """The buffers of a head without a draft vocabulary, as SafeAILab (False) and SpecForge (True) create them."""

    def apply(toy: ToyHead) -> None:
        toy.tensors["d2t"] = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
        toy.tensors["t2d"] = torch.full((VOCAB_SIZE,), mask)

    return apply


_BIASES = [f"layer.self_attn.{part}_proj.bias" for part in "qkvo"]
LENIENT: dict[str, tuple[str, list[Break]]] = {
    "attention_bias of the target, no biases": ("eagle3-safeailab", [setting(attention_bias=True)]),
    "attention_bias without an output bias": ("eagle3-biases", [without(_BIASES[3])]),
    "qkv_bias": ("eagle2-qkv-bias-omitted", [setting(qkv_bias=True)]),
    "qkv_bias beside attention_bias": ("eagle2-qkv-bias-omitted", [setting(qkv_bias=True, attention_bias=False)]),
    "bias of EAGLE-2 in EAGLE-3": ("eagle3-safeailab", [setting(bias=True)]),
    "unset full vocabulary, SafeAILab": ("eagle3-full-vocabulary", [unset_vocabulary(False)]),
    "unset full vocabulary, SpecForge": ("eagle3-full-vocabulary", [unset_vocabulary(True)]),
    "truncated_vocab_size of the whole vocabulary": ("eagle2", [setting(truncated_vocab_size=VOCAB_SIZE)]),
    "truncated_vocab_size beside draft_vocab_size": ("eagle3-layers", [setting(truncated_vocab_size=DRAFT_VOCAB)]),
    "truncated_vocab_size in place of draft_vocab_size": (
        "eagle3-layers",
        [setting(truncated_vocab_size=DRAFT_VOCAB, draft_vocab_size=None)],
    ),
    "layers of the target beside a midlayer": ("eagle3-safeailab", [setting(num_hidden_layers=32)]),
    "rope_type default": ("eagle3-safeailab", [setting(rope_scaling={"rope_type": "default"})]),
}


@pytest.mark.parametrize("case", LENIENT)
def test_settings_that_the_original_code_ignores_are_ignored(
    case: str, tmp_path: Path, target_folder: Path, target: Llama
) -> None:
    name, changes = LENIENT[case]
    toy = toy_head(name)
    for change in changes:
        change(toy)
    head = load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version)
    assert_close(ours(head), expected(toy, head, target_folder), 1e-5)


# ---- what is refused -----------------------------------------------------------------------------------------------


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Break:
    def apply(toy: ToyHead) -> None:
        toy.tensors[toy.stored(name)] = change(toy.tensors[toy.stored(name)]).contiguous()

    return apply


def with_extra(name: str) -> Break:
    return lambda toy: toy.tensors.update({name: torch.zeros(3)})


def no_aux_ids(toy: ToyHead) -> None:
    toy.config.pop("eagle_config", None)


REFUSED: dict[str, tuple[str, Break, str]] = {
    "vocabulary": ("eagle3-safeailab", setting(vocab_size=65), r"config.json: vocab_size=65, but the target's is 64"),
    "vocabulary, EAGLE-2": ("eagle2", setting(vocab_size=65), r"vocab_size=65, but the target's is 64"),
    "hidden size": ("eagle3-safeailab", setting(hidden_size=40), r"hidden_size=40, but the target's is 32"),
    "target hidden size": ("eagle3-layers", setting(target_hidden_size=40), r"target_hidden_size=40, .* is 32"),
    "another width, EAGLE-2": ("eagle2", setting(hidden_size=40, target_hidden_size=32), r"cannot use the output"),
    "d2t beyond the vocabulary": (
        "eagle3-layers",
        tensor("d2t", lambda t: t + 30),
        r"safetensors: tensor d2t .* 24 di",
    ),
    "d2t below 0": ("eagle3-layers", tensor("d2t", lambda t: t - 2), r"d2t .* -1 …"),
    "d2t doubled": (
        "eagle3-no-mask",
        tensor("d2t", lambda t: t - torch.arange(24).eq(3).int() * 2),
        r"d2t .*different",
    ),
    "t2d disagrees": ("eagle3-layers", tensor("t2d", lambda t: t.roll(1)), r"d2t .* mask t2d"),
    "t2d of another length": ("eagle3-layers", tensor("t2d", lambda t: t[:63]), r"t2d has shape \[63\], .* \[64\]"),
    "draft vocabulary": ("eagle3-layers", setting(draft_vocab_size=25), r"d2t has shape \[24\], .* \[25\]"),
    "a copy of another size": (
        "eagle2",
        tensor("embed_tokens.weight", lambda t: t[:60]),
        r"pytorch_model.bin: tensor embed_tokens.weight has shape \[60, 32\], .* \[64, 32\]",
    ),
    "extra tensor": ("eagle2", with_extra("layers.1.x"), r"pytorch_model.bin: 1 tensors are not part .*layers.1.x"),
    "EAGLE-3 norm in EAGLE-2": ("eagle2", with_extra("norm.weight"), r"not part of an EAGLE-2 head .*norm.weight"),
    "bias denied": ("eagle2-bias-omitted", setting(bias=False), r"not part of .*fc.bias"),
    "bias claimed": ("eagle2", setting(bias=True), r"no tensor 'fc.bias' in pytorch_model.bin"),
    "fc_norm not configured": ("eagle3-fc-norm", setting(fc_norm=False), r"3 tensors .*fc_norm.0.weight"),
    "fc_norm claimed": ("eagle3-layers", setting(fc_norm=True), r"no tensor 'fc_norm.0.weight'"),
    "no aux ids": ("eagle3-safeailab", no_aux_ids, r"no outputs of layers \[1, 0, -2\] .*without eagle_aux"),
    "ids past the target": (
        "eagle3-layers",
        setting(eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        r"no inputs of layers \[0, 1, 3\] \(2 layers, by eagle_aux.* each from 0 to 2",
    ),
    "number of aux layers": ("eagle3-layers", setting(num_aux_hidden_states=2), r"num_aux_hidden_states=2, but .* 3"),
    "two layers": ("eagle2", setting(num_hidden_layers=2), r"no tensor 'layers.1.input_layernorm.weight'"),
    "layer types": (
        "eagle3-stacked",
        setting(layer_types=["full_attention", "sliding_attention"]),
        r"layer_types=.* differ",
    ),
    "layer type": ("eagle2", setting(layer_types=["chunked_attention"]), r"layer_types.0: Input should be 'full_at"),
    "activation": ("eagle2", setting(hidden_act="gelu"), r"hidden_act='gelu' is not supported"),
    "mlp bias": ("eagle2", setting(mlp_bias=True), r"mlp_bias=True is not supported"),
    "quantized": ("eagle3-layers", setting(quantization_config={"bits": 4}), r"quant_method=None, which is not sup"),
    "heads": ("eagle2", setting(num_key_value_heads=3), r"2 heads, 3 KV heads"),
    "rope kind": (
        "eagle2",
        setting(rope_scaling={"rope_type": "proportional", "factor": 2.0}),
        r"rope_type='proportional'",
    ),
    "rope kind, old spelling": (
        "eagle2",
        setting(rope_scaling={"type": "proportional", "factor": 2.0}),
        r"config.json: .*rope_type='proportional'.* choose another head",
    ),
    "rope by layer type": (
        "eagle2",
        setting(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        r"config.json: its RoPE settings",
    ),
    "rope of a wrong type": ("eagle2", setting(rope_parameters={"rope_type": "yarn", "factor": "2"}), r"RoPE settings"),
    "two draft vocabularies": ("eagle3-layers", setting(truncated_vocab_size=40), r"truncated_vocab_size=40 .*=24"),
    "truncated vocabulary": ("eagle2", setting(truncated_vocab_size=40), r"vocabulary of 40 tokens .*token_map"),
    "no biases for qkv_bias": ("eagle2", setting(qkv_bias=True), r"no tensor 'layers.0.self_attn.q_proj.bias'"),
    "some biases": ("eagle2-qkv-bias-omitted", without(_BIASES[1]), r"no tensor 'layers.0.self_attn.k_proj.bias'"),
    "biases denied": ("eagle2-qkv-bias-omitted", setting(attention_bias=False), r"3 tensors .*k_proj.bias"),
    "unset draft vocabulary": (
        "eagle3-layers",
        lambda toy: toy.tensors.update(d2t=torch.zeros(24, dtype=torch.int64), t2d=torch.zeros(64, dtype=torch.bool)),
        r"d2t .* mask t2d",
    ),
    "hidden size and heads": (
        "eagle2",
        setting(num_attention_heads=3, num_key_value_heads=3, head_dim=None),
        r"3 heads",
    ),
    "rope settings": ("eagle2", setting(rope_scaling={"rope_type": "llama3"}), r"config.json: its RoPE settings"),
    "a word for a number": ("eagle2", setting(hidden_size="32"), r"hidden_size: Input should be a valid integer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_heads_that_do_not_fit_are_refused(case: str, tmp_path: Path, target_folder: Path, target: Llama) -> None:
    name, change, message = REFUSED[case]
    toy = toy_head(name)
    change(toy)
    with pytest.raises(ConfigError, match=message):
        load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version)


def _needed(name: str) -> list[str]:
    return [n for n in toy_head(name).tensors if n not in ("t2d", "embed_tokens.weight")]


MATRICES = [(name, n) for name in ("eagle3-safeailab", "eagle3-prefixed", "eagle2") for n in _needed(name)]


@pytest.mark.parametrize(("name", "missing"), MATRICES)
def test_a_missing_tensor_is_named(name: str, missing: str, tmp_path: Path, target_folder: Path, target: Llama) -> None:
    toy = toy_head(name)
    del toy.tensors[missing]
    with pytest.raises(ConfigError, match=rf"{missing.removeprefix('model.')}") as caught:
        load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version)
    assert str(tmp_path / "head") in str(caught.value)


@pytest.mark.parametrize(("name", "misshapen"), MATRICES)
def test_a_misshapen_tensor_is_named_with_both_shapes(
    name: str, misshapen: str, tmp_path: Path, target_folder: Path, target: Llama
) -> None:
    toy = toy_head(name)
    whole = toy.tensors[misshapen]
    toy.tensors[misshapen] = whole[:-1].contiguous()
    shapes = rf"\[{len(whole) - 1}.*\], but config.json implies \[{len(whole)}"
    with pytest.raises(ConfigError, match=rf"head/\S+: tensor {misshapen} has shape {shapes}"):
        load(toy.write(tmp_path / "head"), target_folder, target, toy.layout.version)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "last-state" not in name])
def test_a_head_of_the_other_algorithm_is_refused(
    name: str, tmp_path: Path, target_folder: Path, target: Llama
) -> None:
    toy = toy_head(name)
    kind = toy.layout.version
    with pytest.raises(ConfigError, match=rf"EAGLE-{kind} head, .*set speculative.algorithm: {ALGORITHMS[kind]} "):  # type: ignore[index]
        load(toy.write(tmp_path / "head"), target_folder, target, 5 - kind)


def test_a_folder_without_a_head_is_refused(tmp_path: Path, target_folder: Path, target: Llama) -> None:
    with pytest.raises(ConfigError, match=r"holds no draft head"):
        load(target_folder, target_folder, target, 3)
    folder = toy_head("eagle3-safeailab").write(tmp_path / "head")
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list instead of an object"):
        load(folder, target_folder, target, 3)
    toy = toy_head("eagle2")
    toy.tensors = {"model.norm.weight": torch.zeros(32)}
    with pytest.raises(ConfigError, match=r"holds no draft head: expected fc.weight .*found model.norm.weight"):
        load(toy.write(tmp_path / "other"), target_folder, target, 2)


@pytest.mark.parametrize("name", ["eagle2", "eagle3-safeailab"])
def test_draft_load_format_chooses_the_files(name: str, tmp_path: Path, target_folder: Path, target: Llama) -> None:
    toy = toy_head(name)
    folder = toy.write(tmp_path / "head")
    load(folder, target_folder, target, toy.layout.version, draft_load_format="bin")
    with pytest.raises(ConfigError, match="load_format=safetensors"):
        load(folder, target_folder, target, toy.layout.version, draft_load_format="safetensors")
