"""Output for a seed does not depend on drafter, batch, prefix cache, chunks, page size or preemption."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.step import UNLIMITED, DraftLimit
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.engine import generate, make_llm, visible
from tests.support.methods import METHODS, SOME_METHODS

PREFIX = [0, 9, 8, 7, 6, 5, 4, 30, 31, 32, 9, 8, 7, 6, 5, 4, 30, 31]  # repetitive, so that NGRAM finds matches
PROMPTS = [[*PREFIX[: 3 + 2 * (i % 8)], 4 + i, 9, 8] for i in range(12)]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 8, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {10: 4.0, 11: -100.0}},
    {"temperature": 1.0, "min_tokens": 10, "logit_bias": {1: 3.0}},
    {"temperature": 1.0, "stop": ["a", "th"], "logprobs": 3},
    {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 30,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {12: 2.0},
        "min_tokens": 5,
        "stop": ["on"],
        "logprobs": 0,
    },
]
PARAMS = [SamplingParams(seed=100 + i, max_tokens=30, **options) for i, options in enumerate(OPTIONS)]


@pytest.fixture(scope="module")
def plain(toy: Path) -> list[Completion]:
    """Expected outputs: one request at a time, without drafts, prefix cache or chunks."""
    return [
        generate(toy, [prompt], params, disable_radix_cache=True)[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


@pytest.fixture(scope="module")
def texts(toy: Path) -> list[list[int]]:
    """Outputs without stops and limits, so that correct drafts extend beyond these."""
    unending = [
        SamplingParams(seed=100 + i, max_tokens=60, **{k: v for k, v in o.items() if k not in ("stop", "min_tokens")})
        for i, o in enumerate(OPTIONS)
    ]
    return [p + c.token_ids for p, c in zip(PROMPTS, generate(toy, PROMPTS, unending), strict=True)]


def assert_same(seen: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [visible(choice) for choice in seen] == [visible(choice) for choice in expected]
    for actual, truth in zip(seen, expected, strict=True):
        assert (actual.logprobs is None) == (truth.logprobs is None)
        for entry, true_entry in zip(actual.logprobs or [], truth.logprobs or [], strict=True):
            assert entry.token_id == true_entry.token_id
            assert entry.logprob == pytest.approx(true_entry.logprob, abs=2e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in true_entry.top]


Drafting = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def drafting(toy: Path, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    """Options of a run with a drafter, by the drafter's name."""

    def options(name: str) -> dict[str, Any]:
        if name == "none":
            return {}
        if name in METHODS:
            return {"speculative": METHODS[name](toy, tmp_path_factory.mktemp(name))}
        return {"drafter": ScriptedDrafter(DRAWS[name], texts)}

    return options


EVERY_DRAFTER = ["none", *METHODS, *DRAWS]
SOME_DRAFTERS = ["none", *SOME_METHODS, "right", "random", "right-last"]


@pytest.mark.parametrize("name", EVERY_DRAFTER)
def test_output_does_not_depend_on_the_drafter(
    name: str, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    assert_same(generate(toy, PROMPTS, PARAMS, **drafting(name)), plain)


@pytest.mark.parametrize("name", SOME_DRAFTERS)
@pytest.mark.parametrize("batch", [1, 8])
def test_output_does_not_depend_on_the_batch_size(
    name: str, batch: int, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    assert_same(generate(toy, PROMPTS, PARAMS, **drafting(name), max_running_requests=batch), plain)


@pytest.mark.parametrize("name", ["EAGLE3", "NGRAM"])
@pytest.mark.parametrize("bound", [1, 5, 20])
def test_output_does_not_depend_on_max_step_draft_tokens(
    name: str, bound: int, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    options = drafting(name)
    speculative = options["speculative"].model_copy(update={"max_step_draft_tokens": bound})
    assert_same(generate(toy, PROMPTS, PARAMS, **options | {"speculative": speculative}), plain)


@pytest.mark.parametrize("name", [*METHODS, "right", "right-last"])
def test_output_does_not_depend_on_draft_limits(
    name: str, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    kinds = [DraftLimit(0, 0), DraftLimit(1, 1), DraftLimit(2, 9), DraftLimit(9, 2), DraftLimit(9, 0), UNLIMITED]
    draft_limits = [kinds[i % len(kinds)] for i in range(len(PROMPTS))]
    options = drafting(name)
    with make_llm(toy, options.pop("drafter", None), **options) as llm:
        choices = [generation.choices[0] for generation in llm.generate(PROMPTS, PARAMS, draft_limits=draft_limits)]
    assert_same(choices, plain)
    for choice, limit in zip(choices, draft_limits, strict=True):
        assert choice.usage is not None
        assert len(choice.usage.accept_histogram) <= min(limit) + 1
        assert choice.usage.num_draft_tokens <= limit.num_tokens * choice.usage.num_verify_steps
    assert sum(choice.usage.num_draft_tokens for choice in choices if choice.usage) > 0


@pytest.mark.parametrize("name", SOME_DRAFTERS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_output_does_not_depend_on_the_page_size(
    name: str, page_size: int, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    assert_same(generate(toy, PROMPTS, PARAMS, **drafting(name), page_size=page_size), plain)


@pytest.mark.parametrize("name", SOME_DRAFTERS)
@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
def test_output_does_not_depend_on_the_prefill_chunk(
    name: str, chunk: int, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    options = {"chunked_prefill_size": chunk, "max_prefill_tokens": chunk + 3, "page_size": 4}
    assert_same(generate(toy, PROMPTS, PARAMS, **drafting(name), **options), plain)


@pytest.mark.parametrize("name", SOME_DRAFTERS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_output_does_not_depend_on_the_prefix_cache(
    name: str, page_size: int, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    with make_llm(toy, **drafting(name), page_size=page_size) as llm:
        for is_warm in (False, True, True):
            seen = [generation.choices[0] for generation in llm.generate(PROMPTS, PARAMS)]
            assert_same(seen, plain)
            hits = sum(choice.usage.num_cached_tokens for choice in seen if choice.usage)
            assert (hits > 60) or not is_warm


@pytest.mark.parametrize("name", SOME_DRAFTERS)
@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_output_does_not_depend_on_preemption(
    name: str, disable_radix_cache: bool, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    options = {"page_size": 4, "max_total_tokens": 96, "disable_radix_cache": disable_radix_cache}
    with make_llm(toy, **drafting(name), **options) as llm:
        seen = [generation.choices[0] for generation in llm.generate(PROMPTS, PARAMS)]
        llm.engine.update_gauges()
        assert llm.engine.stats.snapshot()["specray_num_preemptions_total"] > 0
    assert_same(seen, plain)


@pytest.mark.parametrize("name", SOME_DRAFTERS)
def test_output_does_not_depend_on_the_cache_salt(
    name: str, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    with make_llm(toy, **drafting(name), page_size=2) as llm:
        for salt in ("", "a", "b"):
            seen = [generation.choices[0] for generation in llm.generate(PROMPTS, PARAMS, cache_salt=salt)]
            assert_same(seen, plain)


def test_correct_drafts_are_accepted_and_wrong_ones_rejected(toy: Path) -> None:
    """Shows that the tests above do not compare plain decoding with itself."""
    usages = {}
    for name in ("right", "right-last", "wrong"):
        params = [SamplingParams(seed=100 + i, max_tokens=30, temperature=0) for i in range(12)]
        truth = [p + c.token_ids for p, c in zip(PROMPTS, generate(toy, PROMPTS, params), strict=True)]
        choices = generate(toy, PROMPTS, params, ScriptedDrafter(DRAWS[name], truth))
        usages[name] = [choice.usage for choice in choices if choice.usage and choice.usage.num_completion_tokens == 30]
    assert all(usage.num_verify_steps <= 4 for usage in usages["right"])
    assert all(usage.num_verify_steps <= 12 for usage in usages["right-last"])
    assert all(usage.num_accepted == 0 and usage.num_draft_tokens > 30 for usage in usages["wrong"])


@pytest.mark.parametrize("name", ["none", *METHODS])
def test_every_choice_equals_the_output_for_its_seed(name: str, toy: Path, drafting: Drafting) -> None:
    params = SamplingParams(seed=5, n=4, max_tokens=20, ignore_eos=True)
    with make_llm(toy, **drafting(name)) as llm:
        [generation] = llm.generate([PREFIX], params)
        assert len({tuple(choice.token_ids) for choice in generation.choices}) == 4
        for choice in generation.choices:
            alone = SamplingParams(seed=choice.seed, max_tokens=20, ignore_eos=True)
            assert llm.generate([PREFIX], alone)[0].choices[0].token_ids == choice.token_ids


def test_different_seeds_give_different_outputs(toy: Path) -> None:
    params = [SamplingParams(seed=seed, max_tokens=14, ignore_eos=True) for seed in range(300)]
    choices = generate(toy, [PREFIX] * 300, params, max_running_requests=64)
    assert len({tuple(choice.token_ids) for choice in choices}) > 297


def test_a_request_without_a_seed_reports_the_seed_it_got(toy: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = generate(toy, [PREFIX] * 2, params)
    assert first.seed != second.seed
    again = generate(toy, [PREFIX], SamplingParams(seed=first.seed, max_tokens=12, ignore_eos=True))
    assert again[0].token_ids == first.token_ids
