"""Log probabilities of prompt tokens are the model's, whatever the chunks, the cache and the other requests are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specray.errors import InvalidRequestError
from specray.outputs import Completion, FinishReason
from specray.sampling_params import SamplingParams
from specray.testing.conformance import PREFIX, PROMPTS
from specray.worker import prompt_logprobs
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.engine import generate, make_llm, visible
from tests.support.toy import oracle_logits

PROMPT = [*PREFIX, *PREFIX[::-1], 40, 41, 42]
ALL = SamplingParams(max_tokens=0, prompt_logprobs=3)
TOLERANCE = 2e-4


def oracle(folder: Path, prompt: list[int]) -> np.ndarray:
    """float64 [tokens - 1, V]: log probabilities after each prefix of the prompt."""
    logits = oracle_logits(folder, prompt)[:-1]
    logits -= logits.max(-1, keepdims=True)
    logprobs: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs


def require_right(folder: Path, prompt: list[int], choice: Completion, start: int = 0) -> None:
    assert choice.prompt_logprobs is not None
    assert [entry.token_id for entry in choice.prompt_logprobs] == prompt[start + 1 :]
    for entry, expected in zip(choice.prompt_logprobs, oracle(folder, prompt)[start:], strict=True):
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=TOLERANCE)
        values = [value for _, value in entry.top]
        assert values == pytest.approx(sorted(expected, reverse=True)[: len(values)], abs=TOLERANCE)


SHAPES: dict[str, dict[str, Any]] = {
    "alone": {"max_running_requests": 1},
    "batch": {},
    "chunks": {"chunked_prefill_size": 5, "max_prefill_tokens": 8, "page_size": 4, "max_running_requests": 3},
    "preempted": {"max_total_tokens": 96, "page_size": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_they_equal_the_oracle_beside_other_requests(shape: str, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE_LOGITS", 64 * 3)  # three positions a slice
    prompts = [PROMPT, *PROMPTS, PROMPT]
    params = [ALL, *[SamplingParams(seed=1, max_tokens=12)] * len(PROMPTS), ALL]
    params[3] = SamplingParams(seed=1, max_tokens=12, prompt_logprobs=3)
    drafter = ScriptedDrafter(DRAWS["random"], [])
    choices = generate(toy, prompts, params, drafter, **SHAPES[shape])
    for place in (0, 3, len(prompts) - 1):
        require_right(toy, prompts[place], choices[place])
    assert choices[0].token_ids == []
    assert (choices[0].text, choices[0].finish_reason) == ("", FinishReason.LENGTH)
    assert [choice.prompt_logprobs for choice in choices[1:3]] == [None, None]


def test_a_request_that_is_preempted_after_its_first_token_reports_them_once(toy: Path) -> None:
    params = [SamplingParams(seed=index, max_tokens=30, prompt_logprobs=0) for index in range(len(PROMPTS))]
    with make_llm(toy, max_total_tokens=96, page_size=4) as llm:
        choices = [generation.choices[0] for generation in llm.generate(PROMPTS, params)]
    assert sum(choice.usage.num_preemptions for choice in choices if choice.usage) > 0
    for prompt, choice in zip(PROMPTS, choices, strict=True):
        require_right(toy, prompt, choice)


def test_the_prefix_cache_serves_only_what_is_before_their_start(toy: Path) -> None:
    with make_llm(toy, page_size=4) as llm:
        for start, num_cached in ((0, 0), (10, 8), (0, 0), (len(PROMPT), 36)):
            params = SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=start)
            choice = llm.generate([PROMPT], params)[0].choices[0]
            assert choice.usage is not None
            assert choice.usage.num_cached_tokens == num_cached
            require_right(toy, PROMPT, choice, start)


def test_they_equal_the_log_probabilities_of_the_same_tokens_when_generated(toy: Path) -> None:
    generated = generate(toy, [PREFIX], SamplingParams(seed=5, max_tokens=20, logprobs=2, ignore_eos=True))[0]
    scored = generate(toy, [PREFIX + generated.token_ids], SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
    assert generated.logprobs is not None
    assert scored.prompt_logprobs is not None
    tail = scored.prompt_logprobs[-len(generated.token_ids) :]
    assert [entry.token_id for entry in tail] == generated.token_ids
    for entry, expected in zip(tail, generated.logprobs, strict=True):
        assert entry.logprob == pytest.approx(expected.logprob, abs=TOLERANCE)


def test_asking_for_them_does_not_change_the_output(toy: Path) -> None:
    plain, scored = (
        generate(toy, PROMPTS, [SamplingParams(seed=i, max_tokens=15, prompt_logprobs=n) for i in range(len(PROMPTS))])
        for n in (None, 0)
    )
    assert [visible(choice) for choice in scored] == [visible(choice) for choice in plain]


def test_only_allowed_tokens_are_sampled(toy: Path) -> None:
    allowed = [9, 8, 40]
    params = [SamplingParams(temperature=t, seed=2, max_tokens=20, allowed_token_ids=allowed) for t in (0.0, 1.0)]
    for choice in generate(toy, [PREFIX, PREFIX], params):
        assert set(choice.token_ids) <= set(allowed)
        assert len(choice.token_ids) == 20


@pytest.mark.parametrize("rest", [{"allowed_token_ids": [9]}, {"allowed_token_ids": [9, 1], "min_tokens": 3}])
def test_options_that_allow_no_token_are_refused(rest: dict[str, Any], toy: Path) -> None:
    params = SamplingParams(seed=2, max_tokens=20, banned_sequences=[[9]], **rest)
    with pytest.raises(InvalidRequestError, match="allowed_token_ids has only tokens that bad_words forbids"):
        generate(toy, [PREFIX], [params])
