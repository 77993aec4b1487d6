"""The embedded chat model in float32: for 16 prompts, 32 greedy tokens equal those of transformers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specray.bench.command import engine_config
from specray.config import EMBEDDED_MODEL
from specray.llm import LLM
from specray.models.files import resolve_model
from specray.outputs import Completion
from specray.sampling_params import SamplingParams

NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = [SamplingParams(temperature=1, max_tokens=24, seed=seed) for seed in range(8)]
CONFIGS = Path(__file__).parents[2] / "configs"
SERVED = {
    name: engine_config(CONFIGS / f"{name}.yaml", 1).speculative.model_copy(update={"max_step_draft_tokens": None})
    for name in ("plain", "ngram", "eagle3", "eagle2", "eagle2-frspec")
}
# Those of EAGLE-2 share a head and the shape of trees and differ in the ids that are drafted: each drafts half of the
# prompts. n-grams find matches in the prompts that ask for repetition, and are hardly ever drafted for the others.
PARTS = {"eagle2": slice(0, 8), "eagle2-frspec": slice(8, 16), "ngram": slice(1, 16, 2)}
TOPICS = [
    "the sea",
    "a clock",
    "bread",
    "the moon",
    "a bicycle",
    "rain",
    "a library",
    "salt",
]
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
    """Greedy tokens of transformers, with all prompts in one batch padded on the left."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    width = max(map(len, prompts))
    pad = llm.tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=0,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=pad,
    )
    return out[:, width:].tolist()


@pytest.fixture(scope="module")
def sampled(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Plain decoding at temperature 1."""
    return [g.choices[0].token_ids for g in llm.generate(prompts[: len(SAMPLED)], SAMPLED)]


def num_accepted(choices: Sequence[Completion]) -> int:
    return sum(choice.usage.num_accepted for choice in choices if choice.usage)


def first_difference(seen: list[list[int]], expected: list[list[int]]) -> str:
    places = [(i, j) for i in range(len(seen)) for j in range(NUM_TOKENS) if seen[i][j] != expected[i][j]]
    return f"{len({i for i, _ in places})} of {len(seen)} prompts differ, first at (prompt, token) {places[:1]}"


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_equal_transformers(
    name: str, llm: LLM, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    """Drafts of the real heads are partly right."""
    part = PARTS.get(name, slice(None))
    with llm.with_speculative(SERVED[name]) as engine:
        choices = [generation.choices[0] for generation in engine.generate(prompts[part], GREEDY)]
    seen = [choice.token_ids for choice in choices]
    assert seen == reference[part], first_difference(seen, reference[part])
    assert (num_accepted(choices) > 4 * len(choices)) == (name != "plain")


@pytest.mark.parametrize("name", ["eagle3"])
def test_sampled_output_equals_plain_decoding(
    name: str, llm: LLM, prompts: list[list[int]], sampled: list[list[int]]
) -> None:
    with llm.with_speculative(SERVED[name]) as engine:
        one_by_one = [engine.generate([prompts[i]], SAMPLED[i])[0].choices[0] for i in range(2)]
        warm = [generation.choices[0] for generation in engine.generate(prompts[: len(SAMPLED)], SAMPLED)]
    assert [choice.token_ids for choice in one_by_one] == sampled[:2]
    assert [choice.token_ids for choice in warm] == sampled
    assert num_accepted(warm) > len(warm)  # drafts share the target's noise, so some are accepted at temperature 1


def test_the_model_answers_a_question(llm: LLM) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = list(llm.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
    [generation] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20))
    assert "Paris" in generation.choices[0].text
