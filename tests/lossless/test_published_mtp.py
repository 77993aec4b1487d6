"""Targets that transformers' modules compute, with their own MTP layers: one text with chains, trees and none."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from specray.config import SpeculativeConfig
from specray.llm import LLM
from specray.sampling_params import SamplingParams
from tests.support.engine import make_llm
from tests.support.published_mtp import FAMILIES, write_published

PROMPTS = [[0, *range(4, 40)], [5], [0, 10, 20, 30], [0, *range(4, 36), 9]]  # of other lengths, and a common prefix
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=8, ignore_eos=True)
    for seed, temperature in enumerate([0.8, 0.8, 1.0, 1.0])
]
QUICK = {"glm4_moe", "mimo_v2_flash", "qwen3_5"}
SERVED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
SHAPES = {"chain": (3, 1, 4), "tree": (3, 3, 9)}


@pytest.mark.parametrize("name", SERVED)
def test_a_targets_own_layers_do_not_change_its_text(name: str, tmp_path: Path) -> None:
    write_published(name, tmp_path)
    with make_llm(tmp_path) as llm:
        greedy, sampled = texts_of(llm, GREEDY), texts_of(llm, SAMPLED)
        for steps, topk, nodes in SHAPES.values():
            shape = {"num_steps": steps, "eagle_topk": topk, "num_draft_tokens": nodes}
            with llm.with_speculative(SpeculativeConfig(algorithm="NEXTN", budget="static", **shape)) as drafting:
                for _ in range(2):  # the second time from the prefix cache
                    assert texts_of(drafting, GREEDY, has_drafts=True) == greedy
                    assert texts_of(drafting, SAMPLED, has_drafts=True) == sampled
                [last] = drafting.generate([PROMPTS[0]], GREEDY)
                assert last.choices[0].token_ids == greedy[0], "alone"
                assert last.choices[0].usage.num_cached_tokens > 0
                assert last.choices[0].usage.num_draft_tokens > 0


def texts_of(llm: LLM, params: SamplingParams | Sequence[SamplingParams], has_drafts: bool = False) -> list[list[int]]:
    choices = [generation.choices[0] for generation in llm.generate(PROMPTS, params)]
    assert all((choice.usage.num_draft_tokens > 0) is has_drafts for choice in choices)
    return [choice.token_ids for choice in choices]
