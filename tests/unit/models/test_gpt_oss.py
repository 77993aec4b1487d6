"""gpt-oss checkpoints as they are published: MXFP4 experts, and every key of their configuration."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.quantized_matrices import Mxfp4Experts
from specray.models.registry import context_length, load_config, shape_of
from specray.models.tokenizer import eos_token_ids, sampling_defaults
from specray.ops.cpu.library import kernels
from specray.ops.quantised_weight import QuantisedWeight
from specray.worker.memory_plan import demand_of
from tests.support.decoders import logits_in_chunks, logits_of
from tests.support.engine import make_llm
from tests.support.gpt_oss import GENERATION, expanded, harmony_tokenizer, published_config, write_gpt_oss

TOKENS = [0, *(7 * place % 64 for place in range(80))]  # beyond the windows and YaRN's original context
GATES, DOWNS = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mxfp4_experts_are_those_of_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    random = np.random.default_rng(0)
    blocks = random.permutation(np.tile(np.arange(256, dtype=np.uint8), 18)).reshape(3, 16, 6, 16)
    scales = random.integers(0, 253, (3, 16, 6), dtype=np.uint8)  # larger ones overflow
    stored = Mxfp4Experts.of("experts", torch.from_numpy(blocks), torch.from_numpy(scales))
    whole = stored.part(slice(None), slice(None), torch.device("cpu"), dtype)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=dtype)
    assert whole.shape == stored.shape == (3, 192, 16)
    assert whole.dtype is dtype
    assert torch.equal(whole, theirs)
    assert torch.equal(torch.signbit(whole), torch.signbit(theirs))
    assert np.array_equal(
        stored.part(slice(None), slice(None), torch.device("cpu"), torch.float32), expanded(blocks, scales)
    )
    part = stored.part(slice(1, 3), slice(40, 100), torch.device("cpu"), dtype)
    assert torch.equal(part, whole[1:3, 40:100])


def test_logits_are_those_of_the_expanded_weights(tmp_path: Path) -> None:
    """With YaRN, windows, sinks, clamped units and all biases."""
    reference = write_gpt_oss(tmp_path)
    expected = logits_of(reference, TOKENS)
    assert expected.std() > 0.3
    with make_llm(tmp_path) as llm:
        model = llm._executor.worker.model
        assert model.max_positions == 1024
        for size in (len(TOKENS), 7):
            torch.testing.assert_close(logits_in_chunks(model, TOKENS, size), expected, atol=1e-4, rtol=0.0)


def test_experts_keep_the_bytes_of_their_file(tmp_path: Path) -> None:
    """And give the bits of the expanded weights in float32."""
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    quantised.mkdir()
    reference = write_gpt_oss(quantised, hidden_size=128, intermediate_size=128)
    stored = load_file(quantised / "model.safetensors")
    in_file = sum(part.nbytes for name, part in stored.items() if name.endswith(("_blocks", "_scales")))
    copytree(quantised, plain)
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(reference.state_dict(), plain / "model.safetensors")
    seen = []
    for folder in (quantised, plain):
        with make_llm(folder) as llm:
            model: Any = llm._executor.worker.model
            experts = [part.packed_experts for part in model.modules() if hasattr(part, "packed_experts")]
            if folder == quantised and kernels() is not None:
                assert sum(run.num_bytes for each in experts for run in (*each._ups, *each._downs)) <= 1.05 * in_file
            seen.append(logits_in_chunks(model, TOKENS, 7))
    assert len(experts) == 2
    assert torch.equal(*seen)


def test_experts_run_in_the_grouped_product(tmp_path: Path) -> None:
    """In Triton's interpreter, with biases, as they are stored."""
    pytest.importorskip("triton")
    expected = logits_of(write_gpt_oss(tmp_path), TOKENS)
    with make_llm(tmp_path, moe_runner_backend="triton") as llm:
        model: Any = llm._executor.worker.model
        torch.testing.assert_close(logits_in_chunks(model, TOKENS, len(TOKENS)), expected, atol=1e-3, rtol=0.0)
        experts = [part.packed_experts for part in model.modules() if hasattr(part, "packed_experts")]
    assert all(isinstance(run.matrix, QuantisedWeight) for each in experts for run in (each._ups, each._downs))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("swiglu_limit", 3.0),
        ("sliding_window", 40),
        ("rope_theta", 10000),
        ("rope_scaling", {"rope_type": "default"}),
        ("layer_types", ["full_attention", "full_attention"]),
        ("num_experts_per_tok", 1),
        ("rms_norm_eps", 0.1),
    ],
)
def test_keys_of_the_configuration_are_honoured(key: str, value: Any, tmp_path: Path) -> None:
    reference = write_gpt_oss(tmp_path)
    before = logits_of(reference, TOKENS)
    changed = write_gpt_oss(tmp_path, **{key: value})
    expected = logits_of(changed, TOKENS)
    assert (expected - before).abs().max() > 1e-2, "the key changes the logits"
    with make_llm(tmp_path) as llm:
        torch.testing.assert_close(logits_in_chunks(llm._executor.worker.model, TOKENS, 7), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("ends", [["<|return|>", "<|endoftext|>"], ["<|return|>", "<|endoftext|>", "<|call|>"]])
def test_a_call_ends_the_output_with_any_published_generation_config(ends: list[str], tmp_path: Path) -> None:
    tokenizer = harmony_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    config = GENERATION | {"eos_token_id": [ids(token) for token in ends]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert eos_token_ids(tmp_path, tokenizer) == sorted(map(ids, ("<|endoftext|>", "<|return|>", "<|call|>")))
    assert sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(("num_layers", "num_experts"), [(24, 32), (36, 128)])
def test_published_configurations_are_read(num_layers: int, num_experts: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config(num_layers, num_experts)))
    config = load_config(tmp_path)
    shape = shape_of(config, RankGroup())
    assert (shape.num_layers, shape.num_local_heads, shape.num_local_kv_heads, shape.head_dim) == (
        num_layers,
        64,
        8,
        64,
    )
    assert context_length(config, None) == 131072
    kv = demand_of(
        EngineConfig(model=str(tmp_path)),
        config,
        shape,
        tmp_path,
        torch.bfloat16,
        torch.device("cpu"),
        RankGroup(),
        "inline",
    )
    assert kv.token == num_layers * 2 * 8 * 64 * 2  # layers, K and V, KV heads, head dim, bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{GATES}_scales"), f"has no tensor '{GATES}_scales'"),
        (lambda t: t.pop(f"{DOWNS}_blocks"), f"lacks 1 tensors of GptOssForCausalLM: {DOWNS}"),
        (lambda t: t.update({f"{GATES}_scales": t[f"{GATES}_scales"][:, :-1].clone()}), f"matrix {GATES} has blocks"),
        (lambda t: t.update({f"{GATES}_blocks": t[f"{GATES}_blocks"][..., :8].clone()}), f"matrix {GATES} has blocks"),
        (lambda t: t.update({f"{GATES}_blocks": t[f"{GATES}_blocks"].float()}), f"matrix {GATES} has blocks"),
        (
            lambda t: t.update({f"{GATES}_{part}": t[f"{GATES}_{part}"][:3].clone() for part in ("blocks", "scales")}),
            rf"{GATES} has shape \[3, 64, 64\], but config.json implies \[4, 64, 64\]",
        ),
    ],
)
def test_damaged_experts_give_one_error(change: Any, message: str, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        make_llm(tmp_path)
