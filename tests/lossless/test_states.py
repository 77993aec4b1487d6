"""Models whose layers keep states: one text with drafts that are right, wrong or accepted in part, when preempted, and
from the prefix cache.

A state that a wrong draft has touched, that lacks an accepted one or that was stored elsewhere changes the rest of the
text.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from specray.engine.engine_request import EngineRequest
from specray.llm import LLM
from specray.outputs import Generation
from specray.sampling_params import SamplingParams
from tests.support.decoders import write_decoder
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.engine import make_llm
from tests.support.graph_stand_in import recorded_graphs

PROMPTS = [[0, *range(4, 40)], [5], [0, 10, 20, 30], [7] * 19]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(len(PROMPTS))]
MODELS = [pytest.param("qwen3_5"), pytest.param("lfm2"), pytest.param("qwen3_next", marks=pytest.mark.slow)]
# A few requests at once in few blocks, and prompts in chunks that end anywhere.
TIGHT = {"page_size": 4, "max_total_tokens": 96, "chunked_prefill_size": 7, "max_prefill_tokens": 11}


@cache
def written(name: str, root: Path) -> Path:
    write_decoder(name, root / name)
    return root / name


@cache
def plain_texts(folder: Path) -> dict[str, list[list[int]]]:
    with make_llm(folder) as llm:
        return {
            "greedy": [llm.generate([prompt], GREEDY)[0].choices[0].token_ids for prompt in PROMPTS],
            "sampled": [
                llm.generate([prompt], params)[0].choices[0].token_ids
                for prompt, params in zip(PROMPTS, SAMPLED, strict=True)
            ],
        }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


# pytest sets these up again for each test that has other parameters, too.
@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, root: Path) -> Path:
    return written(request.param, root)


@pytest.fixture
def texts(folder: Path) -> dict[str, list[list[int]]]:
    """Each request alone, without drafts."""
    return plain_texts(folder)


# qwen3_next has the states of qwen3_5, beside experts.
DRAFTED = [
    *((model, kind) for model in ("qwen3_5", "lfm2") for kind in DRAWS),
    pytest.param("qwen3_next", "half-right", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("folder", "kind"), DRAFTED, indirect=["folder"])
def test_drafts_leave_no_trace_in_states(kind: str, folder: Path, texts: dict[str, list[list[int]]]) -> None:
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        known = [prompt + text for prompt, text in zip(PROMPTS, texts[name], strict=True)]
        drafter = ScriptedDrafter(DRAWS[kind], known)
        with make_llm(folder, drafter, **TIGHT) as llm:
            found = [generation.choices[0] for generation in llm.generate(PROMPTS, params)]
            assert [choice.token_ids for choice in found] == texts[name]
            usages = [choice.usage for choice in found if choice.usage is not None]
            assert sum(usage.num_preemptions for usage in usages) > 0
            assert drafter.num_proposed > 0 or kind == "empty"


# Both kinds of states, in float32 and in a type of 16 bits.
STORED = [
    *(("qwen3_5", "float32"), ("qwen3_5", "bfloat16"), ("lfm2", "float32"), ("lfm2", "float16")),
    pytest.param("qwen3_next", "float32", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("folder", "dtype"), STORED, indirect=["folder"])
def test_stored_states_give_the_text_of_a_new_prompt(dtype: str, folder: Path) -> None:
    """Two turns of conversations, side by side, and then requests that share a beginning with one of them."""
    starts = [*PROMPTS[:2], [7] * 41, [0, 10, 20, 30] * 11]  # most answers go beyond INTERVAL tokens
    beginning = [*PROMPTS[0], *range(40, 44)]
    shared = [[*beginning, question] for question in (8, 9, 10)]
    for params, kind in ((GREEDY, "half-right"), (SAMPLED[1], "right-last")):
        params = replace(params, max_tokens=30)
        with make_llm(folder, dtype=dtype, disable_radix_cache=True) as llm:
            first = together(llm, starts, params)
            prompts = [prompt + text + [9] * 6 for prompt, text in zip(starts, first, strict=True)]
            second, others = together(llm, prompts, params), together(llm, shared, params)
        known = [a + b for a, b in zip(starts + prompts + shared, first + second + others, strict=True)]
        drafter = ScriptedDrafter(DRAWS[kind], known)
        with make_llm(folder, drafter, dtype=dtype, page_size=4, chunked_prefill_size=7, max_prefill_tokens=11) as llm:
            assert together(llm, starts, params) == first
            generations = llm.generate(prompts, params)
            assert [generation.choices[0].token_ids for generation in generations] == second
            for prompt, generation in zip(starts, generations, strict=True):
                assert num_cached(generation) >= (len(prompt) - 1) // 4 * 4
            for prompt, text in zip(shared, others, strict=True):
                [last] = llm.generate([prompt], params)
                assert last.choices[0].token_ids == text
            assert num_cached(last) == len(beginning) // 4 * 4


def test_graphs_leave_no_trace_in_states(folder: Path, texts: dict[str, list[list[int]]]) -> None:
    """With preemption, and from the state that such a step has stored behind 64 tokens."""
    known = [prompt + text for prompt, text in zip(PROMPTS, texts["sampled"], strict=True)]
    drafter, layout = ScriptedDrafter(DRAWS["half-right"], known), TIGHT | {"max_running_requests": 2}
    with recorded_graphs() as graphs, make_llm(folder, drafter, **layout) as llm:
        found = [each.choices[0].token_ids for each in llm.generate(PROMPTS, SAMPLED)]
        assert found == texts["sampled"]
        has_experts = has_layers_with_experts(folder)  # no graph has these
        assert {key for key, *_ in graphs[-1].replayed} == (set() if has_experts else {"forward", "verify"})
    prompt, text = PROMPTS[0], texts["greedy"][0]
    drafter = ScriptedDrafter(DRAWS["half-right"], [prompt + text])
    with recorded_graphs(), make_llm(folder, drafter, page_size=4, max_running_requests=1) as llm:
        assert together(llm, [prompt], GREEDY) == [text]
        [again] = llm.generate([prompt + text[:32]], replace(GREEDY, max_tokens=8))
        assert again.choices[0].token_ids == text[32:]
        assert num_cached(again) == 64


def has_layers_with_experts(folder: Path) -> bool:
    return "num_experts" in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("num_sent", [1, 23])
def test_another_engine_continues_with_the_same_text(
    num_sent: int, folder: Path, texts: dict[str, list[list[int]]]
) -> None:
    """A failed engine had sent some tokens, whose states are lost. Another one computes them as part of the prompt."""
    known = [prompt + text for prompt, text in zip(PROMPTS, texts["sampled"], strict=True)]
    found = [text[:num_sent] for text in texts["sampled"]]
    with make_llm(folder, ScriptedDrafter(DRAWS["half-right"], known)) as llm:
        for place, (prompt, params) in enumerate(zip(PROMPTS, SAMPLED, strict=True)):
            llm.engine.requests.enqueue(EngineRequest(str(place), prompt, params, emitted_token_ids=list(found[place])))
        while llm.engine.has_work:
            for output in llm.engine.step():
                found[int(output.request_id)] += output.token_ids
    assert found == texts["sampled"]


def test_a_slot_begins_without_the_states_of_the_request_before(
    folder: Path, texts: dict[str, list[list[int]]]
) -> None:
    with make_llm(folder, max_running_requests=1) as llm:
        assert greedy(llm) == greedy(llm) == texts["greedy"]


def greedy(llm: LLM) -> list[list[int]]:
    return together(llm, PROMPTS, GREEDY)


def together(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [generation.choices[0].token_ids for generation in llm.generate(prompts, params)]


def num_cached(generation: Generation) -> int:
    usage = generation.choices[0].usage
    assert usage is not None
    return usage.num_cached_tokens
