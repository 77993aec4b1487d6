"""Models equal a float64 reference of their architecture, or transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specray.sampling_params import SamplingParams
from tests.support.engine import generate, make_llm
from tests.support.naive_eagle import attend_to_the_past
from tests.support.stories import expected_greedy
from tests.support.toy import VARIANTS, oracle_greedy, oracle_logits, oracle_states, write_toy

PROMPTS = [[0, 10, 20, 30], [5], [0, *range(4, 60)], [7, 7, 7, 7, 7, 7, 7]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_output_equals_the_reference(variant: str, tmp_path: Path) -> None:
    write_toy(tmp_path, variant)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    seen = [choice.token_ids for choice in generate(tmp_path, PROMPTS, params)]
    assert seen == [oracle_greedy(tmp_path, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_equal_the_reference_and_those_of_a_prompt(variant: str, tmp_path: Path) -> None:
    """Every generated token's logprob, also as the first token after a prompt that ends before it."""
    write_toy(tmp_path, variant)
    with make_llm(tmp_path, disable_radix_cache=True) as llm:
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logprobs=4)
        [choice] = [g.choices[0] for g in llm.generate([PROMPTS[0]], params)]
        assert choice.logprobs is not None
        tokens = PROMPTS[0] + choice.token_ids
        logits = oracle_logits(tmp_path, tokens)
        truth = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        again = llm.generate(
            [tokens[: len(PROMPTS[0]) + i] for i in range(20)],
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20),
        )
        for index, (entry, scored) in enumerate(zip(choice.logprobs, again, strict=True)):
            probs = truth[len(PROMPTS[0]) - 1 + index]
            assert entry.logprob == pytest.approx(probs[entry.token_id], abs=2e-4)
            assert [token for token, _ in entry.top] == np.argsort(-probs)[:4].tolist()
            [rescored] = scored.choices[0].logprobs or []
            assert dict(rescored.top).get(entry.token_id, entry.logprob) == pytest.approx(entry.logprob, abs=2e-4)


@pytest.mark.parametrize("layers", [(), (2,), (0, 1, 2), (2, 0), (1, 1)])
def test_aux_hidden_states_equal_the_reference(layers: tuple[int, ...], toy: Path) -> None:
    """The residual stream as it enters a layer; for one past the last layer, after the final norm."""
    tokens = [*PROMPTS[0], 5, 9]
    truth = oracle_states(toy, tokens)
    with make_llm(toy) as llm, torch.inference_mode():
        model = llm._executor.worker.model
        final, aux_hidden_states = model(torch.tensor(tokens), torch.arange(len(tokens)), attend_to_the_past, layers)
    assert len(aux_hidden_states) == len(layers)
    for layer, states in zip((2, *layers), (final, *aux_hidden_states), strict=True):
        np.testing.assert_allclose(states.double().numpy(), truth[layer], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {"attention_bias": True},
    ],
    ids=["linear-rope", "yarn-rope", "attention-bias"],
)
def test_less_common_checkpoint_options_equal_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    write_toy(tmp_path)
    config = LlamaConfig(**(json.loads((tmp_path / "config.json").read_text()) | changes))
    torch.manual_seed(5)
    model = LlamaForCausalLM(config).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    seen = [choice.token_ids for choice in generate(tmp_path, PROMPTS, params)]
    assert seen == [_transformers_greedy(model, prompt, 24) for prompt in PROMPTS]


def _transformers_greedy(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_stories260k_gives_its_known_output(stories: Path) -> None:
    prompt, known = expected_greedy()
    params = SamplingParams(temperature=0, max_tokens=len(known), ignore_eos=True)
    [choice] = generate(stories, [prompt], params)
    assert choice.token_ids == known
    assert choice.text.startswith("Once upon a time, there was a little girl named Lily.")
