"""Numbers in config.json that cannot be true are refused. `make fuzz` has many more of them."""

import json
import math
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.registry import _check_content, load_model
from tests.support.decoders import write_decoder
from tests.support.toy import write_toy


@pytest.mark.parametrize(
    "options",
    [
        {"num_hidden_layers": 2**53},  # transformers makes a list of them
        {"num_hidden_layers": "2"},
        {"num_hidden_layers": None},
        {"hidden_size": None},
        {"max_position_embeddings": None},
        {"hidden_size": -1},
        {"vocab_size": 2**31},
        {"num_key_value_heads": 3},
        {"rms_norm_eps": "x"},
        {"rms_norm_eps": {}},
        {"rms_norm_eps": 0},
        {"rope_theta": "x"},
        {"architectures": 5},
        {"dtype": "float64"},
        {"dtype": "int8"},
        {"dtype": "float8_e4m3fn"},
    ],
)
def test_a_lying_configuration_is_a_config_error(options: dict[str, object], tmp_path: Path) -> None:
    write_toy(tmp_path)
    with pytest.raises(ConfigError):
        load(tmp_path, options)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "model_type", {"a": "b"}),
        ("llama", "dtype", 1e300),
        ("llama", "dtype", "__class__"),
        ("qwen3", "dtype", "fp16"),
        ("llama", "tie_word_embeddings", "yes"),
        ("llama", "attention_bias", "no"),
        ("qwen2_5_vl", "text_config.use_sliding_window", "false"),
        ("llama", "vocab_size", {}),
        ("llama", "hidden_size", -1),
        ("gemma4", "head_dim", 2**40),
        ("qwen2_5_vl", "text_config.num_hidden_layers", 2**53),
        ("qwen2_5_vl", "text_config", 3),
        ("qwen2", "quantization_config", 3),
        ("granite", "embedding_multiplier", math.nan),
        ("gemma3", "query_pre_attn_scalar", -1),
        ("qwen3", "rope_parameters", {"rope_type": "default", "rope_theta": False}),
    ],
)
def test_the_key_and_the_value_are_named_before_memory_is_taken(
    name: str, key: str, value: object, tmp_path: Path
) -> None:
    write_decoder(name, tmp_path)
    *outer, last = key.split(".")
    config = json.loads((tmp_path / "config.json").read_text())
    content = config | {last: value} if not outer else config | {outer[0]: config[outer[0]] | {last: value}}
    *_, named = [last, *value] if isinstance(value, dict) and last == "rope_parameters" else [last]
    with pytest.raises(ConfigError, match=rf"config\.json.*{named}=.*; correct it$") as found:
        load(tmp_path, content)
    assert len(str(found.value)) < 300


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "yarn", "factor": False},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e39},
    ],
)
def test_rotary_positions_that_are_not_finite_are_a_config_error(rope: dict[str, object], tmp_path: Path) -> None:
    write_toy(tmp_path)
    with pytest.raises(ConfigError, match="rope"):
        load(tmp_path, {"rope_parameters": {"rope_theta": 10000.0, **rope}})


def test_heads_too_narrow_to_be_rotated_are_a_config_error(tmp_path: Path) -> None:
    write_decoder("qwen3_next", tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json implies \[1\]"):
        load(tmp_path, {"head_dim": 1})


def test_what_a_class_computes_itself_and_other_parts_are_not_judged() -> None:
    """As in published files: zeros that the model's class replaces, types by part, sizes of an image encoder."""
    content = {
        "dtype": {"text_config": "bfloat16"},
        "text_config": {"head_dim": 0, "intermediate_size": 0},
        "vision_config": {"hidden_size": "any", "dtype": 5},
    }
    _check_content(Path("config.json"), content)


def load(folder: Path, options: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | options))
    load_model(folder, EngineConfig(device="cpu"), RankGroup(), torch.device("cpu"), progress=False)
