"""Checkpoints in fp8, AWQ, GPTQ and compressed-tensors give the weights of an independent quantiser."""

import json
import math
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.linear import ColumnParallelLinear, GatedLinear, RowParallelLinear
from specray.layers.parallel import RankGroup
from specray.models.heads.mtp import load_mtp_layers
from specray.models.loading import Loader
from specray.models.quantized_formats import checkpoint_format
from specray.models.quantized_matrices import Mxfp4Experts, ScaledMatrix
from specray.models.registry import load_config, load_model, resolve_dtype
from specray.models.target_matrices import TargetMatrices
from specray.models.weights import WeightReader
from specray.ops.cpu.library import kernels
from specray.ops.cpu.matrix import PackedMatrix
from specray.ops.linear import concat, make_gated, make_linear
from specray.ops.quantised_weight import QuantisedWeight
from specray.sampling_params import SamplingParams
from tests.support.architectures import write_architecture
from tests.support.decoders import logits_in_chunks, logits_of, write_decoder
from tests.support.engine import generate
from tests.support.methods import METHODS as DRAFTING
from tests.support.mtp import write_deepseek
from tests.support.naive_eagle import attend_to_the_past
from tests.support.quantised import METHODS, Method, awq, compressed_ints, fp8_blocks, gptq, published, quantise_model
from tests.support.toy import write_toy

CPU = torch.device("cpu")
LINEARS = (ColumnParallelLinear, GatedLinear, RowParallelLinear)
OUTS, INS = 40, 64
NAME, STEM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj."
TOKENS = [0, 5, 63, 17, 17, 40, 2, 9, 9, 31, 50, 8]


def matrix(outs: int = OUTS, ins: int = INS) -> np.ndarray:
    return np.random.default_rng(outs).normal(size=(outs, ins)).astype(np.float32)


def write_matrix(folder: Path, method: Method, weights: np.ndarray) -> np.ndarray:
    """A checkpoint of one matrix; returns what it stands for, rounded once to float32."""
    done = method.quantise(weights)
    config = json.dumps({"model_type": "llama", "quantization_config": method.config})
    (folder / "config.json").write_text(config)
    save_file({STEM + suffix: part for suffix, part in done.parts.items()}, folder / "model.safetensors")
    return done.weights.astype(np.float32)


def loader(folder: Path, quantization: str | None = None) -> Loader:
    return Loader(folder, "auto", torch.float32, CPU, quantization=quantization)


@pytest.mark.parametrize("name", METHODS)
def test_a_matrix_is_what_its_parts_stand_for(name: str, tmp_path: Path) -> None:
    weights = matrix()
    expected = write_matrix(tmp_path, METHODS[name], weights)
    assert np.abs(expected - weights).max() < 0.6, "the quantiser rounds, and does not change the weights otherwise"
    reading = loader(tmp_path)
    assert np.array_equal(reading.tensor(NAME, (OUTS, INS)), expected)
    assert np.array_equal(reading.stored(NAME, (OUTS, INS)), expected)
    assert NAME in reading
    assert reading.names() == [NAME]
    assert not reading.unused()
    assert reading.path(NAME) == tmp_path / "model.safetensors"


@pytest.mark.parametrize("name", METHODS)
def test_a_rank_expands_its_own_part(name: str, tmp_path: Path) -> None:
    expected = write_matrix(tmp_path, METHODS[name], matrix())
    reading = loader(tmp_path)

    @given(st.sampled_from([0, 1]), st.integers(0, OUTS - 1), st.integers(1, OUTS))
    @settings(max_examples=15, database=None)
    def part_is_that_of_the_whole(dim: int, start: int, count: int) -> None:
        part = slice(start, min(start + count, (OUTS, INS)[dim]))
        read = reading.tensor(NAME, (OUTS, INS), part, dim)
        assert np.array_equal(read, expected[part] if dim == 0 else expected[:, part])

    part_is_that_of_the_whole()


def test_blocks_at_the_edge_are_smaller(tmp_path: Path) -> None:
    expected = write_matrix(tmp_path, METHODS["fp8 in blocks"], matrix(19, 33))
    assert np.array_equal(loader(tmp_path).tensor(NAME, (19, 33)), expected)


KEPT: dict[str, Method] = {
    "awq": Method(METHODS["awq"].config | {"group_size": 32}, lambda weights: awq(weights, 32)),
    "gptq": Method(METHODS["gptq"].config | {"group_size": 64}, lambda weights: gptq(weights, 4, 64, True, False, 1)),
    "gptq of 8 bits": Method(
        METHODS["gptq of 8 bits"].config | {"group_size": 32, "sym": False},
        lambda weights: gptq(weights, 8, 32, False, False, 1),
    ),
    "compressed int8": METHODS["compressed int8"],
    "compressed int4": Method(
        {
            **METHODS["compressed int4"].config,
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}}
            },
        },
        lambda weights: compressed_ints(weights, 4, INS, symmetric=True),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_groups_of_32_inputs_stay_as_they_are_on_a_cpu(name: str, tmp_path: Path) -> None:
    expected = write_matrix(tmp_path, KEPT[name], matrix())
    weight = loader(tmp_path, "auto").weight(NAME, (OUTS, INS))
    assert not isinstance(weight, torch.Tensor)
    assert weight.bits == (8 if "8" in name else 4)
    assert np.array_equal(weight.float(), expected)
    half = loader(tmp_path, "auto").weight(NAME, (OUTS, INS), slice(32, 64), 1)
    assert not isinstance(half, torch.Tensor)
    assert np.array_equal(half.float(), expected[:, 32:])


@pytest.mark.parametrize("name", KEPT)
def test_the_kernels_compute_with_the_kept_groups(name: str, tmp_path: Path) -> None:
    """Activations of three values, which rounding to 8 or to 16 bits keeps."""
    expected = torch.from_numpy(write_matrix(tmp_path, KEPT[name], matrix()))
    weight = loader(tmp_path, "auto").weight(NAME, (OUTS, INS))
    x = 127.0 * torch.randint(-1, 2, (3, INS), generator=torch.Generator().manual_seed(0))
    x[:, ::32] = 127
    run = make_linear(weight, quantization="auto")
    assert isinstance(run, PackedMatrix) or kernels() is None
    torch.testing.assert_close(run(x), x @ expected.t(), atol=1e-3, rtol=1e-5)
    gated = make_gated(weight, weight, "auto")(x / 100)
    once = x / 100 @ expected.t()
    torch.testing.assert_close(gated, torch.nn.functional.silu(once) * once, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("name", METHODS)
def test_a_matrix_stays_as_it_is_stored_and_so_do_its_parts(name: str, tmp_path: Path) -> None:
    expected = torch.from_numpy(write_matrix(tmp_path, METHODS[name], matrix()))
    reading = loader(tmp_path)
    weight = reading.weight(NAME, (OUTS, INS))
    if "activation" in name:  # whose groups are not of neighbours
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(weight, expected)
        assert reading.expanded == [NAME]
        return
    assert isinstance(weight, QuantisedWeight)
    assert torch.equal(weight.float(), expected)
    parts = [reading.weight(NAME, (OUTS, INS), slice(8, 24)), reading.weight(NAME, (OUTS, INS), slice(32, 64), 1)]
    for part, numbers in zip(parts, (expected[8:24], expected[:, 32:]), strict=True):
        assert isinstance(part, QuantisedWeight)
        assert torch.equal(part.float(), numbers)
    assert not reading.expanded
    both = concat(*parts[:1], parts[0])
    assert isinstance(both, QuantisedWeight)
    assert torch.equal(both.float(), expected[8:24].repeat(2, 1))


def test_a_part_that_begins_within_a_group_has_smaller_groups(tmp_path: Path) -> None:
    method = Method(METHODS["awq"].config | {"group_size": 32}, lambda weights: awq(weights, 32))
    expected = torch.from_numpy(write_matrix(tmp_path, method, matrix()))
    part = loader(tmp_path).weight(NAME, (OUTS, INS), slice(16, 56), 1)
    assert isinstance(part, QuantisedWeight)
    assert part.group == 16
    assert torch.equal(part.float(), expected[:, 16:56])
    reading = loader(tmp_path)
    assert isinstance(reading.weight(NAME, (OUTS, INS), slice(8, 40), 1), torch.Tensor), "no kernel has groups of 8"
    assert reading.expanded == [NAME]


PUBLISHED = published(128)


def write_wide(folder: Path) -> Path:
    """A model of two layers whose matrices have 128 inputs or more."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_loaded_model_takes_no_more_memory_than_its_file(name: str, tmp_path: Path) -> None:
    plain = write_wide(tmp_path)
    quantised = quantise_model(plain, tmp_path / "quantised", PUBLISHED[name])
    stored = load_file(quantised / "model.safetensors")
    names = [part for part in stored if "_proj." in part and not part.endswith(("g_idx", "weight_shape"))]
    in_file = sum(stored[part].numel() * stored[part].itemsize for part in names)
    model: Any = model_of(quantised)
    linears = [part.run for part in model.modules() if isinstance(part, LINEARS)]
    assert len(linears) == 4 * model.shape.num_layers
    if kernels() is not None:
        assert sum(part.num_bytes for part in linears) <= 1.05 * in_file
    assert torch.equal(logits(quantised), logits(plain)), "the bits of the expanded weights in float32"


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float64, torch.float16])
def test_scales_may_be_of_any_type_of_floats(dtype: torch.dtype) -> None:
    codes, scales = torch.randn(32, 64).to(torch.float8_e4m3fn), (2.0 ** torch.arange(-1, 1))[:, None].to(dtype)
    stored = ScaledMatrix.of("weight", codes, scales, (16, 64))
    packed = stored.packed()
    assert packed is not None
    expected = stored.part(slice(None), slice(None), torch.device("cpu"), torch.float32)
    assert torch.equal(packed.float(), expected)
    x = torch.randn(3, 64)
    torch.testing.assert_close(make_linear(packed)(x), x @ expected.T)


def test_a_damaged_matrix_is_refused(tmp_path: Path) -> None:
    write_matrix(tmp_path, METHODS["fp8 of a tensor"], matrix())
    whole = load_file(tmp_path / "model.safetensors")
    whole[NAME].view(torch.uint8)[3, 5] = 0x7F
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="has NaN; the file is damaged"):
        loader(tmp_path).weight(NAME, (OUTS, INS))
    with pytest.raises(ConfigError, match="has NaN"):
        loader(tmp_path).tensor(NAME, (OUTS, INS))
    with pytest.raises(ConfigError, match="has NaN"):
        loader(tmp_path).any_shape(NAME)


def test_a_matrix_that_overflows_when_it_is_expanded_is_refused(tmp_path: Path) -> None:
    write_matrix(tmp_path, METHODS["fp8 of a tensor"], matrix())
    whole = load_file(tmp_path / "model.safetensors")
    scale = next(name for name in whole if name.endswith("weight_scale"))
    save_file(whole | {scale: torch.full_like(whole[scale], 1e38)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"matrix .* too large for float32"):
        loader(tmp_path).tensor(NAME, (OUTS, INS))


@pytest.mark.parametrize("scale", [torch.tensor(math.nan), torch.tensor(math.inf), torch.tensor(1), torch.tensor(1j)])
def test_scales_that_cannot_be_true_are_refused(scale: torch.Tensor) -> None:
    codes = torch.randn(32, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="the quantised matrix weight has scales"):
        ScaledMatrix.of("weight", codes, scale, None)


def test_mxfp4_scales_that_are_not_numbers_are_refused() -> None:
    blocks, scales = torch.zeros(1, 2, 1, 16, dtype=torch.uint8), torch.full((1, 2, 1), 255, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="scales that are not finite"):
        Mxfp4Experts.of("experts", blocks, scales)


def test_scales_under_two_names_are_refused(tmp_path: Path) -> None:
    write_matrix(tmp_path, METHODS["fp8 of a tensor"], matrix())
    whole = load_file(tmp_path / "model.safetensors")
    scale = next(name for name in whole if name.endswith("weight_scale"))
    save_file(whole | {f"{scale}_inv": whole[scale].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="scales under two names"):
        loader(tmp_path)


def test_a_fused_matrix_may_be_quantised_in_part(tmp_path: Path) -> None:
    expected = torch.from_numpy(write_matrix(tmp_path, KEPT["awq"], matrix()))
    plain = torch.ones(8, INS)
    both = concat(loader(tmp_path, "auto").weight(NAME, (OUTS, INS)), plain)
    assert isinstance(both, torch.Tensor)
    assert torch.equal(both, torch.cat((expected, plain)))


@pytest.mark.parametrize("name", ["fp8 in blocks", "awq", "gptq by activation", "compressed int8"])
def test_a_model_is_that_of_its_expanded_weights(name: str, tmp_path: Path) -> None:
    plain = write_toy(tmp_path)
    quantised = quantise_model(plain, tmp_path / "quantised", METHODS[name])
    assert run(quantised) == run(plain)


def test_a_model_in_groups_of_32_gives_one_text_with_and_without_drafts(tmp_path: Path) -> None:
    method = Method(METHODS["awq"].config | {"group_size": -1}, lambda weights: awq(weights, weights.shape[1]))
    quantised = quantise_model(write_toy(tmp_path), tmp_path / "quantised", method)
    options = DRAFTING["NGRAM"](quantised, tmp_path)
    assert run(quantised, quantization="auto") == run(quantised, quantization="auto", speculative=options)


def test_experts_and_latent_attention_are_expanded(tmp_path: Path) -> None:
    """DeepSeek-V3 as it is published: blocks of fp8, and MTP layers in the same files."""
    write_deepseek(tmp_path)
    quantised = quantise_model(tmp_path, tmp_path / "quantised", METHODS["fp8 in blocks"])
    names = load_file(quantised / "model.safetensors").keys()
    assert {f"model.layers.3.{part}_proj.weight_scale_inv" for part in ("self_attn.o", "mlp.experts.7.down")} <= names
    both = [logits(folder) for folder in (tmp_path, quantised)]
    assert torch.equal(*both)
    states = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    outputs = []
    for folder in (tmp_path, quantised):
        config = load_config(folder)
        shape = model_of(folder).shape
        matrices = TargetMatrices(shape, 64, folder, "auto", torch.float32, CPU, None)
        layers = load_mtp_layers(folder, "auto", matrices)
        positions = torch.arange(1, 5)
        outputs.append(layers.layers[0](states, states.flip(0), positions, attend_to_the_past))
        assert resolve_dtype("auto", config, CPU) in (torch.float32, torch.bfloat16)
    assert torch.equal(*outputs)


def test_a_mixture_in_awq_leaves_its_router_alone(tmp_path: Path) -> None:
    write_architecture("qwen3-moe", tmp_path)
    method = Method(METHODS["awq of whole columns"].config, METHODS["awq of whole columns"].quantise)
    assert torch.equal(logits(quantise_model(tmp_path, tmp_path / "quantised", method)), logits(tmp_path))


IN_MODULES: dict[str, Method] = {
    "fp8": METHODS["fp8 in blocks"],
    "awq": METHODS["awq of whole columns"],
    "gptq": Method(
        METHODS["gptq"].config | {"group_size": -1},
        lambda weights: gptq(weights, 4, weights.shape[1], True, False, 1),
    ),
    "compressed-tensors": METHODS["compressed int8"],
}


def module_logits(folder: Path, **options: Any) -> torch.Tensor:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", model_impl="transformers", **options)
    return logits_in_chunks(load_model(folder, config, RankGroup(), CPU, progress=False), TOKENS, len(TOKENS))


@pytest.mark.parametrize("decoder", ["smollm3", "glm4_moe"])
@pytest.mark.parametrize("name", IN_MODULES)
def test_transformers_modules_and_experts_stay_as_they_are_stored(
    name: str, decoder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In float32 they give the bits of the expanded weights."""
    write_decoder(decoder, tmp_path)
    before = module_logits(tmp_path)
    quantised = quantise_model(tmp_path, tmp_path / "quantised", IN_MODULES[name])
    caplog.set_level("INFO")
    assert torch.equal(module_logits(quantised), expanded := module_logits(tmp_path))
    assert "are expanded" not in caplog.text
    assert not torch.equal(expanded, before), "the quantiser changes the weights"


def test_an_image_models_text_config_may_say_how_it_is_quantised(tmp_path: Path) -> None:
    """As Kimi-K2.5's does, with its names: transformers writes others."""
    reference = write_decoder("kimi_k25", tmp_path)
    before = logits_of(reference, TOKENS)
    file = tmp_path / "model.safetensors"
    published = {name.replace("model.blocks.", "model.layers."): part for name, part in load_file(file).items()}
    assert "language_model.model.layers.1.mlp.experts.5.down_proj.weight" in published
    save_file(published, file)
    torch.testing.assert_close(module_logits(tmp_path), before, atol=1e-4, rtol=0.0)
    quantised = quantise_model(tmp_path, tmp_path / "quantised", METHODS["compressed int8"])
    path = quantised / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    assert torch.equal(module_logits(quantised), module_logits(tmp_path))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "quant_method=bitsandbytes, which is not supported.*awq"),
    "no method": ({"bits": 4}, "quant_method=None"),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3}, r"gptq and bits=3, .*\(only 4, 8\)"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    "bits by module": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*down.*": {"bits": 8}}},
        r"dynamic\['\+:.*down.*'\]",
    ),
    "awq for vectors": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'"),
    "llm-awq": ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "backend='llm-awq'"),
    "no number": ({"quant_method": "awq", "bits": 4, "group_size": "all"}, "group_size='all'"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
    "odd blocks": ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks of \[128\]"),
    "nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "format='nvfp4-pack-quantized'",
    ),
    "sparse": (
        METHODS["compressed int8"].config | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config.format='sparse-24-bitmask'",
    ),
    "two groups": (METHODS["compressed int8"].config | {"config_groups": {"a": {}, "b": {}}}, "config_groups"),
    "a list": ({"quant_method": ["awq"]}, r"quant_method=\['awq'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_methods_are_refused_before_weights_are_read(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    write_toy(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats(allow_nan=False)
    | st.sampled_from(["4", "dense", "gptq"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["weights", "a", "-:b"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.sampled_from(list(METHODS)), st.data())
@settings(max_examples=150)
def test_a_damaged_quantization_config_is_one_error(name: str, data: st.DataObject) -> None:
    config = json.loads(json.dumps(METHODS[name].config))
    place = config
    while isinstance(inner := place.get(data.draw(st.sampled_from(sorted(place)))), dict) and data.draw(st.booleans()):
        place = inner
    place[data.draw(st.sampled_from([*sorted(place), "dynamic", "sparsity_config", "weight_block_size"]))] = data.draw(
        JSON
    )
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"quantization_config": config}))
        with suppress(ConfigError):
            assert checkpoint_format(Path(folder)) is not None


@pytest.mark.parametrize("name", METHODS)
def test_parts_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    write_matrix(tmp_path, METHODS[name], matrix())
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    for part, tensor in whole.items():
        if part.endswith(("weight_shape", "input_scale")):
            continue
        save_file(whole | {part: tensor.flatten()[: tensor.numel() // 2].contiguous()}, path)
        with pytest.raises(ConfigError, match=r"quantised matrix model.layers.0.mlp.up_proj.weight"):
            loader(tmp_path).tensor(NAME, (OUTS, INS))
    save_file(whole, path)
    with pytest.raises(ConfigError, match=r"has shape \[40, 64\], but config.json implies \[40, 72\]"):
        loader(tmp_path).tensor(NAME, (OUTS, 72))


def test_groups_past_the_scales_are_refused(tmp_path: Path) -> None:
    write_matrix(tmp_path, METHODS["gptq"], matrix())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[STEM + "g_idx"][5] = 4
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="groups 0 … 4 and 4 scales"):
        loader(tmp_path).tensor(NAME, (OUTS, INS))


def test_missing_zeros_are_named(tmp_path: Path) -> None:
    write_matrix(tmp_path, METHODS["awq"], matrix())
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "qzeros" not in name}, path)
    with pytest.raises(ConfigError, match=r"no tensor 'model.layers.0.mlp.up_proj.qzeros'"):
        loader(tmp_path).tensor(NAME, (OUTS, INS))


def test_bytes_without_a_quantization_config_are_no_weights(tmp_path: Path) -> None:
    write_matrix(tmp_path, METHODS["fp8 in blocks"], matrix())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"stored in torch.float8_e4m3fn without a scale"):
        loader(tmp_path).tensor(NAME, (OUTS, INS))


def test_other_tensors_of_a_quantised_checkpoint_are_read_as_they_are(tmp_path: Path) -> None:
    write_matrix(tmp_path, METHODS["awq"], matrix())
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(4), STEM + "bias": torch.zeros(40)}, path)
    with WeightReader(tmp_path) as reader:
        assert set(reader.names()) == {NAME, "model.norm.weight", STEM + "bias"}
        assert reader.get("model.norm.weight").tolist() == [1, 1, 1, 1]


def test_the_reference_packs_as_the_formats_say() -> None:
    """A few values by hand, so that reader and reference cannot share a mistake."""
    column = np.zeros((8, 1), np.float32)
    weights = np.concatenate((column, 15 * np.ones((8, 1), np.float32)), 1)[:, :1] + np.arange(8)[:, None]
    done = awq(np.concatenate((weights, np.full((8, 1), 15, np.float32)), 1).astype(np.float32), 2)
    # Scales of 1 and zeros of 0: the word of input 0 holds outputs 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on.
    assert done.parts["scales"].tolist() == [[1.0] * 8]
    assert done.parts["qweight"][0].item() & 0xFFFFFFFF == 0x75316420
    block = fp8_blocks(np.array([[448.0, 1.0], [0.0, -2.0]], np.float32), 128)
    assert block.parts["weight_scale_inv"].tolist() == [[1.0]]
    assert block.parts["weight"].view(torch.uint8).tolist() == [[0x7E, 0x38], [0x00, 0xC0]]


def run(folder: Path, **options: Any) -> list[list[int]]:
    prompts = [[0, 10, 20, 30, 10, 20], [5], [0, *range(4, 40)]]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=10, ignore_eos=True) for i in range(3)]
    return [choice.token_ids for choice in generate(folder, prompts, params, **options)]


def model_of(folder: Path) -> Any:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu")
    return load_model(folder, config, RankGroup(), CPU, progress=False)


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    model = model_of(folder)
    hidden, _ = model(torch.tensor(TOKENS), torch.arange(len(TOKENS)), attend_to_the_past)
    result: torch.Tensor = model.logits(hidden)
    return result
