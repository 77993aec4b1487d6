"""The last tokens of everything: context, max_tokens, ends inside accepted runs, prompts as long as can be."""

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
    """A long greedy text."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    return generate(toy, [PROMPT], params)[0].token_ids


Drafting = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def drafting(toy: Path, story: list[int], tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    """A drafter's name, and the text it is told -> options of a run with it."""

    def options(name: str, text: list[int] | None = None) -> dict[str, Any]:
        if name in METHODS:
            return {"speculative": METHODS[name](toy, tmp_path_factory.mktemp(name))}
        return {"drafter": ScriptedDrafter(DRAWS[name], [text or PROMPT + story])}

    return options


def one(toy: Path, drafting: dict[str, Any], prompt: list[int], **options: Any) -> Completion:
    return generate(toy, [prompt], SamplingParams(temperature=0, **options), **drafting)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_tokens", range(1, MAX_DRAFTS + 3))
def test_max_tokens_inside_a_run(name: str, max_tokens: int, toy: Path, story: list[int], drafting: Drafting) -> None:
    choice = one(toy, drafting(name), PROMPT, max_tokens=max_tokens, ignore_eos=True)
    assert choice.token_ids == story[:max_tokens]
    assert choice.finish_reason is FinishReason.LENGTH
    assert choice.usage is not None
    assert choice.usage.num_completion_tokens == max_tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offset", range(MAX_DRAFTS + 3))
def test_an_end_token_at_every_offset_of_a_run(
    name: str, offset: int, toy: Path, story: list[int], drafting: Drafting
) -> None:
    first = story.index(story[offset])
    choice = one(toy, drafting(name), PROMPT, max_tokens=40, stop_token_ids=[story[offset]], logprobs=0)
    assert choice.token_ids == story[: first + 1]
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, story[offset])
    assert choice.logprobs is not None
    assert len(choice.logprobs) == first + 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("room", range(1, MAX_DRAFTS + 3))
def test_the_last_tokens_of_the_context(name: str, room: int, toy: Path, drafting: Drafting) -> None:
    prompt = [*[7] * (CONTEXT - room - len(PROMPT)), *PROMPT]
    params = SamplingParams(temperature=0, ignore_eos=True)
    [plain] = generate(toy, [prompt], params)
    assert len(plain.token_ids) == room
    drafted = generate(toy, [prompt], params, **drafting(name, prompt + plain.token_ids + [3] * 20))
    assert visible(drafted[0])[:-1] == visible(plain)[:-1]
    assert plain.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["right", *SOME_METHODS])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_whole_pool_is_one_request(
    name: str, page_size: int, toy: Path, story: list[int], drafting: Drafting
) -> None:
    """No block is left for drafts at the end, and none is needed."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    options = {"page_size": page_size, "max_total_tokens": 48}
    [choice] = generate(toy, [PROMPT], params, **drafting(name), **options)
    assert choice.token_ids == story[: 48 - len(PROMPT)]


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, CONTEXT + 100])
def test_a_prompt_without_room_for_one_token_is_refused(length: int, toy: Path) -> None:
    with make_llm(toy) as llm, pytest.raises(InvalidRequestError, match=f"{length} tokens"):
        llm.generate([[5] * length])


def test_the_longest_prompt_gets_its_one_token(toy: Path) -> None:
    [choice] = generate(toy, [[5] * (CONTEXT - 1)], SamplingParams(temperature=0, ignore_eos=True))
    assert len(choice.token_ids) == 1


@pytest.mark.parametrize("name", ["right", *SOME_METHODS])
def test_a_shorter_context_is_kept(name: str, toy: Path, story: list[int], drafting: Drafting) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True)
    [choice] = generate(toy, [PROMPT], params, **drafting(name), context_length=20)
    assert choice.token_ids == story[:16]


def test_a_bad_prompt_among_good_ones_is_named_and_runs_none(toy: Path) -> None:
    with make_llm(toy) as llm:
        with pytest.raises(InvalidRequestError, match="request 1"):
            llm.generate([PROMPT, [VOCAB_SIZE], PROMPT])
        assert not llm.engine.has_work


def test_drafts_past_the_vocabulary_cost_speed_and_no_token(toy: Path, story: list[int]) -> None:
    """A drafter's nonsense is refused before the target reads it."""
    absurd = ScriptedDrafter(lambda root, *_: TreeLists([root, VOCAB_SIZE, -5, 2**40], [NONE, 0, 1, 2]))
    assert one(toy, {"drafter": absurd}, PROMPT, max_tokens=10, ignore_eos=True).token_ids == story[:10]
