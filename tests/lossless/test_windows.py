"""Sliding windows in the fused CPU kernels: transformers' logits, and one text however it is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import SpeculativeConfig
from specray.ops.cpu.library import kernels
from specray.sampling_params import SamplingParams
from tests.lossless.test_every_decoder import logits_in_chunks, logits_of
from tests.support.decoders import write_decoder
from tests.support.engine import make_llm
from tests.support.heads import write_random_head

LONG = [0, *(11 * place % 61 for place in range(99))]  # more than six windows of 16 tokens
PROMPTS = [LONG, [5, 9], LONG[:40], LONG[:70] + LONG[:20]]
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=40, ignore_eos=True)
    for seed, temperature in enumerate((0.0, 0.0, 0.8, 0.8))
]
NAMES = ["mistral", "qwen2-window", "cwm"]  # every layer in a window, or some; the last one of transformers' modules


@pytest.mark.parametrize("name", NAMES)
def test_a_long_prompt_has_transformers_logits(name: str, tmp_path: Path) -> None:
    reference = write_decoder(name, tmp_path)
    with make_llm(tmp_path) as llm:
        model = llm._executor.worker.model
        assert llm._executor.worker.capacity.context_length > len(LONG)
        for size in (len(LONG), 7):
            logits = logits_in_chunks(model, LONG, size)
            torch.testing.assert_close(logits, logits_of(reference, LONG), atol=1e-4, rtol=0.0)
            assert (logits[:16] - logits[-16:]).abs().max() > 0.1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_one_text_with_any_drafts_chunks_and_prefixes(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    if options and kernels() is None:
        pytest.skip("needs the compiled kernels")
    write_decoder(name, tmp_path)
    head = write_random_head(tmp_path / "head", tmp_path, 3)
    tree = {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6}
    with make_llm(tmp_path, **options) as llm:
        texts = [generation.choices[0].token_ids for generation in llm.generate(PROMPTS, PARAMS)]
        for prompt, params, text in zip(PROMPTS, PARAMS, texts, strict=True):  # alone, from the prefix cache
            assert llm.generate([prompt], params)[0].choices[0].token_ids == text
        for drafts in (
            SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=8),
            SpeculativeConfig(algorithm="EAGLE3", draft_model_path=str(head), **tree),
            SpeculativeConfig(algorithm="STANDALONE", draft_model_path=str(tmp_path), **tree),
        ):
            with llm.with_speculative(drafts) as drafting:
                assert [each.choices[0].token_ids for each in drafting.generate(PROMPTS, PARAMS)] == texts, drafts
    with make_llm(tmp_path, chunked_prefill_size=16, **options) as llm:
        assert [each.choices[0].token_ids for each in llm.generate(PROMPTS, PARAMS)] == texts
