"""Limits that end a request inside accepted drafts: context, max_tokens, end tokens, KV pool."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.outputs import Completion, FinishReason
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import NONE, TreeLists
from tests.support.drafters import DRAWS, MAX_DRAFTS, ScriptedDrafter
from tests.support.engine import generate, make_llm, visible
from tests.support.methods import METHODS, SOME_METHODS
from tests.support.toy import CONTEXT, VOCAB_SIZE

PROMPT = [0, 5, 9, 14]
NAMES = ["right", "right-last", "random", *SOME_METHODS]


@pytest.fixture(scope="module")
def story(toy: Path) -> list[int]:
    """A long greedy output."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    return generate(toy, [PROMPT], params)[0].token_ids


Drafting = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def drafting(toy: Path, story: list[int], tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    """Options of a run with a drafter, by its name and the texts that it drafts from."""

    def options(name: str, *texts: list[int]) -> dict[str, Any]:
        if name in METHODS:
            return {"speculative": METHODS[name](toy, tmp_path_factory.mktemp(name))}
        return {"drafter": ScriptedDrafter(DRAWS[name], texts or [PROMPT + story])}

    return options


def one(toy: Path, drafting: dict[str, Any], prompt: list[int], **options: Any) -> Completion:
    return generate(toy, [prompt], SamplingParams(temperature=0, **options), **drafting)[0]


@pytest.mark.parametrize("name", NAMES)
def test_max_tokens_can_end_inside_accepted_drafts(name: str, toy: Path, story: list[int], drafting: Drafting) -> None:
    bounds = range(1, MAX_DRAFTS + 3)
    params = [SamplingParams(temperature=0, max_tokens=bound, ignore_eos=True) for bound in bounds]
    choices = generate(toy, [PROMPT] * len(bounds), params, **drafting(name))
    for bound, choice in zip(bounds, choices, strict=True):
        assert choice.token_ids == story[:bound]
        assert choice.finish_reason is FinishReason.LENGTH
        assert choice.usage is not None
        assert choice.usage.num_completion_tokens == bound


@pytest.mark.parametrize("name", NAMES)
def test_an_end_token_can_be_at_every_offset_of_accepted_drafts(
    name: str, toy: Path, story: list[int], drafting: Drafting
) -> None:
    ends = story[: MAX_DRAFTS + 3]
    params = [SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[end], logprobs=0) for end in ends]
    choices = generate(toy, [PROMPT] * len(ends), params, **drafting(name))
    for end, choice in zip(ends, choices, strict=True):
        first = story.index(end)
        assert choice.token_ids == story[: first + 1]
        assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, end)
        assert choice.logprobs is not None
        assert len(choice.logprobs) == first + 1


@pytest.fixture(scope="module")
def at_the_end(toy: Path) -> list[tuple[list[int], Completion]]:
    """Prompts that leave room for one token, for two, …, each with its plain output."""
    prompts = [[*[7] * (CONTEXT - left - len(PROMPT)), *PROMPT] for left in range(1, MAX_DRAFTS + 3)]
    plain = generate(toy, prompts, SamplingParams(temperature=0, ignore_eos=True))
    for left, choice in enumerate(plain, 1):
        assert len(choice.token_ids) == left
        assert choice.finish_reason is FinishReason.LENGTH
    return list(zip(prompts, plain, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_context_can_end_inside_accepted_drafts(
    name: str, toy: Path, drafting: Drafting, at_the_end: list[tuple[list[int], Completion]]
) -> None:
    texts = [prompt + plain.token_ids + [3] * 20 for prompt, plain in at_the_end]
    params = SamplingParams(temperature=0, ignore_eos=True)
    drafted = generate(toy, [prompt for prompt, _ in at_the_end], params, **drafting(name, *texts))
    assert [visible(choice)[:-1] for choice in drafted] == [visible(plain)[:-1] for _, plain in at_the_end]


@pytest.mark.parametrize("name", ["right", *SOME_METHODS])
@pytest.mark.parametrize("page_size", [1, 16])
def test_one_request_can_fill_the_kv_pool(
    name: str, page_size: int, toy: Path, story: list[int], drafting: Drafting
) -> None:
    """At the end no block is left for drafts."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    options = {"page_size": page_size, "max_total_tokens": 48}
    [choice] = generate(toy, [PROMPT], params, **drafting(name), **options)
    assert choice.token_ids == story[: 48 - len(PROMPT)]


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, CONTEXT + 100])
def test_a_prompt_that_fills_the_context_is_refused(length: int, toy: Path) -> None:
    with make_llm(toy) as llm, pytest.raises(InvalidRequestError, match=f"{length} in the prompt"):
        llm.generate([[5] * length])


def test_the_longest_prompt_gets_one_token(toy: Path) -> None:
    [choice] = generate(toy, [[5] * (CONTEXT - 1)], SamplingParams(temperature=0, ignore_eos=True))
    assert len(choice.token_ids) == 1


@pytest.mark.parametrize("name", ["right", *SOME_METHODS])
def test_a_configured_context_length_ends_requests(name: str, toy: Path, story: list[int], drafting: Drafting) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True)
    [choice] = generate(toy, [PROMPT], params, **drafting(name), context_length=20)
    assert choice.token_ids == story[:16]


def test_no_request_runs_if_one_of_the_prompts_is_invalid(toy: Path) -> None:
    with make_llm(toy) as llm:
        with pytest.raises(InvalidRequestError, match="request 1"):
            llm.generate([PROMPT, [VOCAB_SIZE], PROMPT])
        assert not llm.engine.has_work


def test_drafts_outside_the_vocabulary_do_not_change_the_output(toy: Path, story: list[int]) -> None:
    """The tree is discarded before the target reads it."""
    invalid = ScriptedDrafter(lambda root, *_: TreeLists([root, VOCAB_SIZE, -5, 2**40], [NONE, 0, 1, 2]))
    assert one(toy, {"drafter": invalid}, PROMPT, max_tokens=10, ignore_eos=True).token_ids == story[:10]
