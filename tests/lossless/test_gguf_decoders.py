"""GGUF files of every architecture: the logits of transformers' model with the same weights, one text with drafts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from specray.config import SpeculativeConfig
from specray.models import gguf_files
from specray.models.gguf_architectures import ARCHITECTURES
from specray.models.gguf_files import convert_gguf
from specray.sampling_params import SamplingParams
from tests.support.decoders import logits_in_chunks, logits_of
from tests.support.engine import make_llm
from tests.support.gguf_decoders import GGUF_DECODERS, write_gguf_decoder

TOKENS = [0, *(7 * place % 64 for place in range(40))]  # longer than the windows, which are of 16 tokens
PROMPTS = [[0, 10, 20, 30], [0, *range(4, 40)], [7] * 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NGRAM = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=6)
# Together they have every layout that the converter changes, and both ways to compute a model.
_QUICK = {"llama", "mixtral", "gemma3", "gpt_oss", "phi3", "granitemoeshared", "deepseek_v3", "llama4", "qwen3_moe"}
NAMES = [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in GGUF_DECODERS]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "cache_root", lambda: tmp_path / "cache")  # kernels stay where they are


@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_transformers_logits_and_one_text_with_drafts(name: str, tmp_path: Path) -> None:
    reference = write_gguf_decoder(name, tmp_path / "model.gguf")
    expected = logits_of(reference, TOKENS)
    assert expected.std() > 0.3
    for impl in ("auto", "transformers"):
        with make_llm(tmp_path / "model.gguf", model_impl=impl) as llm:
            logits = logits_in_chunks(llm._executor.worker.model, TOKENS, 23)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)
    with make_llm(tmp_path / "model.gguf") as llm:
        texts = [generation.choices[0].token_ids for generation in llm.generate(PROMPTS, GREEDY)]
        with llm.with_speculative(NGRAM) as drafting:
            drafted = [generation.choices[0].token_ids for generation in drafting.generate(PROMPTS, GREEDY)]
    assert drafted == texts
    assert logits_of(reference, [*PROMPTS[1], *texts[1]])[len(PROMPTS[1]) - 1 : -1].argmax(-1).tolist() == texts[1]


_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE |= {"long_factor": [1.5, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3], "attention_factor": 1.2}


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("qwen2", _YARN),
        ("deepseek_v3", _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}),
    ],
)
def test_scaled_positions_are_those_of_transformers(name: str, rope: dict[str, Any], tmp_path: Path) -> None:
    reference = write_gguf_decoder(name, tmp_path / "model.gguf", rope_parameters=rope)
    with make_llm(tmp_path / "model.gguf", context_length=64) as llm:
        logits = logits_in_chunks(llm._executor.worker.model, TOKENS, len(TOKENS))
    torch.testing.assert_close(logits, logits_of(reference, TOKENS), atol=1e-4, rtol=0.0)


def test_factors_for_long_contexts_are_those_of_the_file(tmp_path: Path) -> None:
    changes = {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}
    reference = write_gguf_decoder("phi3", tmp_path / "model.gguf", **changes)
    folder = convert_gguf(tmp_path / "model.gguf", progress=False)
    found = json.loads((folder / "config.json").read_text())["rope_parameters"]
    for key, value in _LONGROPE.items():
        assert found[key] == pytest.approx(value), key
    with make_llm(folder, context_length=64) as llm:
        logits = logits_in_chunks(llm._executor.worker.model, TOKENS, len(TOKENS))
    torch.testing.assert_close(logits, logits_of(reference, TOKENS), atol=1e-4, rtol=0.0)


def test_every_architecture_has_a_file() -> None:
    assert {decoder.arch for decoder in GGUF_DECODERS.values()} == ARCHITECTURES.keys() - {"mistral"}


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3", "granitemoe"])
def test_quantised_experts_and_joined_tensors_are_expanded_to_the_files_numbers(name: str, tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "q_lora_rank": 32}
    sizes = {"hidden_size": 64, **(latent if name == "deepseek_v3" else {"head_dim": 16})}
    reference = write_gguf_decoder(name, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0, **sizes)
    converted = load_file(convert_gguf(tmp_path / "model.gguf", progress=False) / "model.safetensors")
    plain = load_file(tmp_path / "model" / "model.safetensors")
    assert converted.keys() == plain.keys()
    for tensor, values in converted.items():
        assert (values - plain[tensor]).abs().max() < 0.02 * plain[tensor].abs().max(), tensor
    assert reference.config.model_type == name
