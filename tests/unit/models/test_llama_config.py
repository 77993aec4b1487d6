"""Our class for Llama's config.json reads it as transformers' class does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from specray.models.llama_config import LlamaConfig
from tests.support.toy import write_toy

ROPES: dict[str, Any] = {
    "plain": {},
    "theta at the top": {"rope_theta": 500000.0},
    "llama3, as published": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "parameters of version 5": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
}


def fields_of(config: Any) -> dict[str, Any]:
    """All fields, and types too, because 1 and 1.0 are equal."""
    return {name: (type(value), value) for name, value in config.to_dict().items()}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "dtype": "bfloat16"},
        {"torch_dtype": "float16", "head_dim": 64, "mlp_bias": True, "eos_token_id": [1, 2], "architectures": ["A"]},
    ],
)
def test_fields_are_those_of_transformers(rope: dict[str, Any], options: dict[str, Any]) -> None:
    content = {"model_type": "llama", **options, **rope}
    ours, theirs = LlamaConfig.from_dict(dict(content)), transformers.LlamaConfig.from_dict(dict(content))
    assert fields_of(ours) == fields_of(theirs)
    assert ours.rope_parameters == theirs.rope_parameters


def test_heads_that_do_not_divide_the_hidden_size_are_refused() -> None:
    for config in (LlamaConfig, transformers.LlamaConfig):
        with pytest.raises(Exception, match="multiple of"):
            config(hidden_size=100, num_attention_heads=3)


def test_reading_a_checkpoint_imports_no_compiler_and_no_list_of_models(tmp_path: Path) -> None:
    """They would take seconds of each start; the list is made from the sources of all of transformers' models."""
    write_toy(tmp_path, "llama")
    program = f"""
import sys
from pathlib import Path
from specray.models.registry import load_config
load_config(Path({str(tmp_path)!r}))
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch._dynamo", "torch.distributed.tensor", "transformers.models"} & set(done.stdout.split())
