"""The embedded chat model, in float32: 32 prompts, 64 greedy tokens each, equal to transformers' token for token."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specray.config import EMBEDDED_MODEL, SpeculativeConfig
from specray.llm import LLM
from specray.models.files import resolve_model
from specray.sampling_params import SamplingParams
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.methods import METHODS

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
TOPICS = [
    "the sea", "a clock", "bread", "the moon", "a bicycle", "rain", "a library", "salt", "a bridge", "wolves", "tea",
    "a mirror", "snow", "a lighthouse", "bees", "paper",
]  # fmt: skip
QUESTIONS = ["Write two sentences about {}.", "Repeat these words five times, each time on a new line: {} and {}."]
PROMPTS = [question.format(topic, topic) for topic in TOPICS for question in QUESTIONS]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    pytest.importorskip("gguf")
    return resolve_model(EMBEDDED_MODEL, None, "auto", progress=False)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), dtype="float32", device="cpu", max_total_tokens=8192) as llm:
        yield llm
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [list(llm.tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"]) for c in chats]


@pytest.fixture(scope="module")
def reference(folder: Path, llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' own greedy tokens, all prompts in one batch padded on the left."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    width = max(map(len, prompts))
    pad = llm.tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, min_new_tokens=0, do_sample=False, eos_token_id=None,
        pad_token_id=pad,
    )  # fmt: skip
    return out[:, width:].tolist()


def first_difference(seen: list[list[int]], expected: list[list[int]]) -> str:
    places = [(i, j) for i in range(len(seen)) for j in range(NUM_TOKENS) if seen[i][j] != expected[i][j]]
    return f"{len({i for i, _ in places})} of {len(seen)} prompts differ, first at (prompt, token) {places[:1]}"


@pytest.mark.parametrize("name", ["none", "NGRAM"])
def test_greedy_tokens_equal_transformers(
    name: str, llm: LLM, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    speculative = SpeculativeConfig(algorithm=None if name == "none" else name)
    with llm.with_speculative(speculative) as engine:
        choices = [generation.choices[0] for generation in engine.generate(prompts, GREEDY)]
    seen = [choice.token_ids for choice in choices]
    assert seen == reference, first_difference(seen, reference)
    accepted = sum(choice.usage.num_accepted for choice in choices if choice.usage)
    assert (accepted > 100) == (name != "none")


@pytest.mark.parametrize("name", ["EAGLE3", "EAGLE-map"])
def test_drafts_of_a_head_that_learnt_nothing_change_nothing(
    name: str, folder: Path, llm: LLM, prompts: list[list[int]], reference: list[list[int]], tmp_path: Path
) -> None:
    with llm.with_speculative(METHODS[name](folder, tmp_path)) as engine:
        choices = [generation.choices[0] for generation in engine.generate(prompts[:4], GREEDY)]
    seen = [choice.token_ids for choice in choices]
    assert seen == reference[:4], first_difference(seen, reference[:4])
    assert all(choice.usage.num_draft_tokens > 6 * NUM_TOKENS for choice in choices if choice.usage)


@pytest.mark.parametrize("name", ["right-last", "half-right"])
def test_drafts_that_are_partly_right_change_nothing(
    name: str, llm: LLM, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    texts = [prompt + text for prompt, text in zip(prompts, reference, strict=True)]
    with llm.with_speculative(SpeculativeConfig(), ScriptedDrafter(DRAWS[name], texts[:8])) as engine:
        seen = [generation.choices[0].token_ids for generation in engine.generate(prompts[:8], GREEDY)]
    assert seen == reference[:8], first_difference(seen, reference[:8])


def test_it_answers_a_question(llm: LLM) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = list(llm.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
    [generation] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20))
    assert "Paris" in generation.choices[0].text
