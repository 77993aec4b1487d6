"""Gemma 4's assistants: transformers' logits, one text with and without them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.llm import LLM
from specray.models.heads.gemma_assistant import GemmaAssistant
from specray.sampling_params import SamplingParams
from specray.spec_decode.model_files import check_model_files
from tests.support.decoders import write_decoder
from tests.support.engine import make_llm
from tests.support.gemma_assistant import reference_logits, write_assistant
from tests.support.toy import write_toy

PROMPTS = [[0, 10, 20, 30], [5], [0, *range(4, 40)], [7] * 7]  # one is longer than the window
GREEDY = [SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)] * len(PROMPTS)
SAMPLED = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(len(PROMPTS))]


def config(assistant: Path, steps: int, topk: int, nodes: int, algorithm: str = "MTP") -> SpeculativeConfig:
    path = str(assistant)
    return SpeculativeConfig(
        algorithm=algorithm, draft_model_path=path, num_steps=steps, eagle_topk=topk, num_draft_tokens=nodes
    )


def texts_of(llm: LLM) -> list[list[int]]:
    return [
        generation.choices[0].token_ids for params in (GREEDY, SAMPLED) for generation in llm.generate(PROMPTS, params)
    ]


@pytest.mark.parametrize("clusters", [None, 8])
def test_drafts_have_transformers_logits(clusters: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_decoder("gemma4", tmp_path)
    assistant = write_assistant(tmp_path / "assistant", "gemma4", clusters)
    seen: list[torch.Tensor] = []
    logits_of = GemmaAssistant.logits

    def logits(model: GemmaAssistant, output: torch.Tensor) -> torch.Tensor:
        seen.append(logits_of(model, output))
        return seen[-1]

    monkeypatch.setattr(GemmaAssistant, "logits", logits)
    prompt = PROMPTS[2]
    with make_llm(tmp_path, speculative=config(tmp_path / "assistant", 3, 1, 4)) as llm:
        text = llm.generate([prompt], GREEDY[0])[0].choices[0].token_ids
    num_known = 1  # tokens of the text before the draft
    for draft in (torch.cat(seen[:3]), torch.cat(seen[3:6])):
        drafted = draft.argmax(-1).tolist()
        expected = reference_logits(assistant, target, [*prompt, *text[:num_known]], drafted[:2])
        torch.testing.assert_close(draft, expected, atol=1e-4, rtol=0.0)
        num_known += 1 + sum(drafted[:count] == text[num_known:][:count] for count in (1, 2, 3))


@pytest.mark.parametrize(
    "target", ["gemma4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4-moe", "gemma4_unified"))]
)
def test_the_text_is_the_same_with_an_assistant(target: str, tmp_path: Path) -> None:
    write_decoder(target, tmp_path)
    write_assistant(tmp_path / "assistant", target, 8)
    with make_llm(tmp_path) as llm:
        plain = texts_of(llm)
        for shape, algorithm in (((3, 1, 4), "MTP"), ((3, 2, 6), "NEXTN")):
            with llm.with_speculative(config(tmp_path / "assistant", *shape, algorithm)) as drafting:
                assert texts_of(drafting) == plain


def test_an_assistant_of_another_target_is_refused(tmp_path: Path) -> None:
    write_toy(tmp_path)
    write_assistant(tmp_path / "assistant", "gemma4", None)
    with pytest.raises(ConfigError, match=r"works with the Gemma 4 checkpoint .* EAGLE3 or NGRAM"):
        make_llm(tmp_path, speculative=config(tmp_path / "assistant", 3, 1, 4))


def test_an_assistant_that_reads_some_of_the_targets_layer_types_is_refused(tmp_path: Path) -> None:
    write_decoder("gemma4", tmp_path)
    write_assistant(tmp_path / "assistant", "gemma4", None)
    path = tmp_path / "assistant" / "config.json"
    content = json.loads(path.read_text())
    content["text_config"]["layer_types"] = ["full_attention"] * 3
    path.write_text(json.dumps(content))
    engine = EngineConfig(model=str(tmp_path), speculative=config(tmp_path / "assistant", 3, 1, 4))
    with pytest.raises(ConfigError, match=r"text_config.layer_types=.* but the target has \['full_att.*', 'sliding_"):
        check_model_files(engine, has_draft_process=False)


@pytest.mark.parametrize(
    ("options", "has_process", "words"),
    [
        ({}, True, "set draft.placement: inline, or draft with EAGLE3 or NGRAM"),
        ({"tp_size": 2}, False, "set tp_size: 1, or draft with EAGLE3 or NGRAM"),
        ({"draft_dtype": "bfloat16"}, False, "speculative.draft_dtype='bfloat16' has no effect with an assistant"),
    ],
)
def test_what_an_assistant_cannot_do_is_refused_before_it_is_loaded(
    options: dict[str, Any], has_process: bool, words: str, tmp_path: Path
) -> None:
    write_decoder("gemma4", tmp_path)
    write_assistant(tmp_path / "assistant", "gemma4", None)
    drafts = config(tmp_path / "assistant", 3, 1, 4)
    own = {name: options.pop(name) for name in ("draft_dtype",) if name in options}
    engine = EngineConfig(model=str(tmp_path), speculative=drafts.model_copy(update=own), **options)
    with pytest.raises(ConfigError, match=words):
        check_model_files(engine, has_draft_process=has_process)
