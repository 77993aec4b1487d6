"""Numbers in config.json that cannot be true are refused. `make fuzz` has many more of them."""

import json
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.registry import load_model
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
        {"rope_theta": "x"},
        {"architectures": 5},
        {"model_type": []},
        {"dtype": "float64"},
        {"dtype": "int8"},
        {"dtype": "float8_e4m3fn"},
    ],
)
def test_a_lying_configuration_is_a_config_error(options: dict[str, object], tmp_path: Path) -> None:
    config = json.loads((write_toy(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | options))
    with pytest.raises(ConfigError):
        load_model(tmp_path, EngineConfig(device="cpu"), RankGroup(), torch.device("cpu"), progress=False)
