"""Output for a seed does not depend on drafts, batch, prefix cache, chunks, page size or preemption.

test_conformance compares every drafting method with plain decoding.
"""

from collections.abc import Callable, Sequence
from itertools import cycle, product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from specray.engine.draft_budget.auto import AutoBudget
from specray.engine.draft_budget.budget import DraftBudget, Shares
from specray.engine.draft_budget.budget import Drafting as Drafted
from specray.engine.draft_budget.costs import StepCosts
from specray.engine.draft_budget.static import StaticBudget
from specray.llm import LLM
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.testing.conformance import DRAFT_LIMITS, PREFIX, PROMPTS, SAMPLED, SAMPLING_OPTIONS, require_equal
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.engine import generate, make_llm
from tests.support.methods import METHODS, SOME_METHODS


@pytest.fixture(scope="module")
def plain(toy: Path) -> list[Completion]:
    """Expected outputs: one request at a time, without drafts, prefix cache or chunks."""
    return [
        generate(toy, [prompt], params, disable_radix_cache=True)[0]
        for prompt, params in zip(PROMPTS, SAMPLED, strict=True)
    ]


@pytest.fixture(scope="module")
def texts(toy: Path) -> list[list[int]]:
    """Outputs without stops and limits, so that correct drafts extend beyond these."""
    unending = [
        SamplingParams(seed=100 + i, max_tokens=60, **{k: v for k, v in o.items() if k not in ("stop", "min_tokens")})
        for i, o in enumerate(SAMPLING_OPTIONS)
    ]
    return [p + c.token_ids for p, c in zip(PROMPTS, generate(toy, PROMPTS, unending), strict=True)]


class RandomBudget(StaticBudget):
    """Shares without a reason."""

    def __init__(self, seed: int) -> None:
        super().__init__(None)
        self._random = Random(seed)

    def shares(self, requests: Sequence[Drafted], num_reading: int = 0) -> Shares:  # noqa: ARG002
        counts = [self._random.choice((0, 1, 2, request.most)) for request in requests]
        return Shares(
            [min(count, request.most) for count, request in zip(counts, requests, strict=True)],
            runs_drafter=self._random.random() < 0.8,
        )


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


SCRIPTED = ["right", "random", "right-last"]
SOME_DRAFTERS = ["none", *SOME_METHODS, *SCRIPTED]
FEW_DRAFTERS = ["none", "EAGLE3", "right-last"]  # with KV of its own, and with drafts that are right
# (page size, prefill chunk); chunks within a page or across pages come with every drafter, all of them with a few.
LAYOUTS, MORE_LAYOUTS = [(4, 2), (1, 5)], [(3, None), (64, 1), (16, 16)]
IN_TURNS = zip(cycle(LAYOUTS), [name for name in SOME_DRAFTERS if name not in FEW_DRAFTERS], strict=False)


@pytest.mark.parametrize("name", ["none", *DRAWS])
def test_output_does_not_depend_on_the_drafts(
    name: str, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    require_equal(generate(toy, PROMPTS, SAMPLED, **drafting(name)), plain)


@pytest.mark.parametrize("name", ["none", *SCRIPTED])
@pytest.mark.parametrize("batch", [1, 8])
def test_output_does_not_depend_on_the_batch_size(
    name: str, batch: int, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    require_equal(generate(toy, PROMPTS, SAMPLED, **drafting(name), max_running_requests=batch), plain)


@pytest.mark.parametrize("name", ["EAGLE3", "NGRAM"])
@pytest.mark.parametrize("bound", [1, 5, 20])
def test_output_does_not_depend_on_max_step_draft_tokens(
    name: str, bound: int, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    options = drafting(name)
    speculative = options["speculative"].model_copy(update={"max_step_draft_tokens": bound})
    require_equal(generate(toy, PROMPTS, SAMPLED, **options | {"speculative": speculative}), plain)


def plan_by(llm: LLM, budget: DraftBudget) -> None:
    llm.engine.drafter.replace(llm.config.speculative, llm.engine.capacity.max_draft_tokens, budget)


@pytest.mark.parametrize("name", SOME_METHODS)
def test_output_does_not_depend_on_the_budget(
    name: str, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    """Any budget: trees of any size for each request and step, and a drafter that is left out at times."""
    options = drafting(name)
    with make_llm(toy, None, **options) as llm:
        plan_by(llm, RandomBudget(7))
        choices = [generation.choices[0] for generation in llm.generate(PROMPTS, SAMPLED)]
    require_equal(choices, plain)


@pytest.mark.parametrize("name", SOME_DRAFTERS)
def test_output_does_not_depend_on_what_a_budget_learns(
    name: str, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    options = drafting(name)
    with make_llm(toy, options.pop("drafter", None), **options) as llm:
        costs = StepCosts()
        plan_by(llm, AutoBudget(None, costs))
        for _ in range(2):  # the second time with what the first one cost and accepted
            choices = [generation.choices[0] for generation in llm.generate(PROMPTS, SAMPLED)]
            require_equal(choices, plain)
    if name != "right":  # whose answers end within a few steps, all of different sizes
        assert costs.to_json()["target"], "no step was timed"


@pytest.mark.parametrize("name", ["right", "right-last"])
def test_output_does_not_depend_on_draft_limits(
    name: str, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    options = drafting(name)
    with make_llm(toy, options.pop("drafter", None), **options) as llm:
        choices = [generation.choices[0] for generation in llm.generate(PROMPTS, SAMPLED, draft_limits=DRAFT_LIMITS)]
    require_equal(choices, plain)
    for choice, limit in zip(choices, DRAFT_LIMITS, strict=True):
        assert choice.usage is not None
        assert len(choice.usage.accept_histogram) <= min(limit.num_tokens, limit.num_steps) + 1
        assert choice.usage.num_draft_tokens <= limit.num_tokens * choice.usage.num_verify_steps
    assert sum(choice.usage.num_draft_tokens for choice in choices if choice.usage) > 0


@pytest.mark.parametrize(("layout", "name"), [*IN_TURNS, *product(LAYOUTS + MORE_LAYOUTS, FEW_DRAFTERS)])
def test_output_does_not_depend_on_the_page_size_and_the_prefill_chunk(
    name: str, layout: tuple[int, int | None], toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    page_size, chunk = layout
    chunks = {} if chunk is None else {"chunked_prefill_size": chunk, "max_prefill_tokens": chunk + 3}
    require_equal(generate(toy, PROMPTS, SAMPLED, **drafting(name), **chunks, page_size=page_size), plain)


@pytest.mark.parametrize(("page_size", "name"), [*product([1], FEW_DRAFTERS), *product([4], SOME_DRAFTERS)])
def test_output_does_not_depend_on_the_prefix_cache(
    name: str, page_size: int, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    with make_llm(toy, **drafting(name), page_size=page_size) as llm:
        for is_warm in (False, True):
            seen = [generation.choices[0] for generation in llm.generate(PROMPTS, SAMPLED)]
            require_equal(seen, plain)
            hits = sum(choice.usage.num_cached_tokens for choice in seen if choice.usage)
            assert (hits > 60) or not is_warm


@pytest.mark.parametrize(
    ("disable_radix_cache", "name"), [*product([True], FEW_DRAFTERS), *product([False], SOME_DRAFTERS)]
)
def test_output_does_not_depend_on_preemption(
    name: str, disable_radix_cache: bool, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    options = {"page_size": 4, "max_total_tokens": 96, "disable_radix_cache": disable_radix_cache}
    with make_llm(toy, **drafting(name), **options) as llm:
        seen = [generation.choices[0] for generation in llm.generate(PROMPTS, SAMPLED)]
        llm.engine.update_gauges()
        assert llm.engine.stats.snapshot()["specray_num_preemptions_total"] > 0
    require_equal(seen, plain)


@pytest.mark.parametrize("name", [*FEW_DRAFTERS, "NGRAM"])  # n-grams are kept by salt, too
def test_output_does_not_depend_on_the_cache_salt(
    name: str, toy: Path, plain: list[Completion], drafting: Drafting
) -> None:
    with make_llm(toy, **drafting(name), page_size=2) as llm:
        for salt in ("", "a", "b"):
            seen = [generation.choices[0] for generation in llm.generate(PROMPTS, SAMPLED, cache_salt=salt)]
            require_equal(seen, plain)


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


@pytest.mark.parametrize("name", ["none", *SOME_METHODS])
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
