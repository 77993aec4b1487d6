"""One seed, one text in every type: output does not depend on drafts, batch, cache, chunks, preemption or threads.

The other tests of this folder compute in float32, where a different order of summation hardly ever changes a token. In
the types below it does within a few tokens. The prompts are longer than a block of keys of the attention kernels.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specray.engine.engine_request import EngineRequest
from specray.ops.cpu.library import kernels
from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.testing.conformance import require_equal
from tests.support.colocated import Colocated
from tests.support.drafters import DRAWS, ScriptedDrafter
from tests.support.engine import generate, make_llm
from tests.support.methods import METHODS
from tests.support.toy import VOCAB_SIZE

pytestmark = pytest.mark.skipif(kernels() is None, reason="torch's operations promise this in float32 only")

TYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4-float32": {"dtype": "float32", "quantization": "int4"},
    "KV in int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "KV in fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
}
# The trees of a method do not depend on the types, so one of these gets every method and the others every second kind
# of tree in turns; likewise for the tokens that a failed engine had sent.
SHAPES = ("EAGLE3", "EAGLE3-wide", "EAGLE-deep", "PARALLEL", "STANDALONE-tree", "NGRAM")
SENT = (1, 10, 23)
CASES, CONTINUED = [("bfloat16", name) for name in METHODS], [("bfloat16", num_sent) for num_sent in SENT]
for turn, kind in enumerate(kind for kind in TYPES if kind != "bfloat16"):
    CASES += [(kind, name) for name in SHAPES[turn % 2 :: 2]]
    CONTINUED.append((kind, SENT[turn % len(SENT)]))
LENGTHS = [3, 20, 61, 62, 63, 64, 65, 100, 127, 140]
PROMPTS = [[(7 * place * place + length) % (VOCAB_SIZE - 4) + 4 for place in range(length)] for length in LENGTHS]
PARAMS = [
    SamplingParams(seed=place, temperature=place % 2, max_tokens=24, ignore_eos=True) for place in range(len(PROMPTS))
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "batch of 1": {"max_running_requests": 1},
    "batch of 8": {"max_running_requests": 8},
    "chunks of 16": {"chunked_prefill_size": 16, "max_prefill_tokens": 40, "page_size": 4},
    "preempted": {"max_total_tokens": 384, "page_size": 4},
    "two threads": {"num_threads": 2},
}


@pytest.fixture(scope="module", params=TYPES)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return TYPES[request.param]


@cache
def plain_output(toy: Path, kind: str) -> list[Completion]:
    """One request at a time, without drafts, prefix cache or chunks."""
    return [
        generate(toy, [prompt], params, disable_radix_cache=True, **TYPES[kind])[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


@pytest.fixture(scope="module")
def plain(toy: Path, options: dict[str, Any]) -> list[Completion]:
    """Computed once for each type; pytest may set up this fixture more often."""
    return plain_output(toy, next(kind for kind, of_kind in TYPES.items() if of_kind is options))


@pytest.fixture(scope="module")
def right(plain: list[Completion]) -> ScriptedDrafter:
    """Trees with the true continuation, so that long paths are accepted."""
    texts = [prompt + completion.token_ids for prompt, completion in zip(PROMPTS, plain, strict=True)]
    return ScriptedDrafter(DRAWS["right-last"], texts)


@pytest.mark.parametrize(("options", "name"), CASES, indirect=["options"])
def test_output_does_not_depend_on_the_method(
    name: str, toy: Path, options: dict[str, Any], plain: list[Completion], tmp_path: Path
) -> None:
    require_equal(generate(toy, PROMPTS, PARAMS, speculative=METHODS[name](toy, tmp_path), **options), plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_does_not_depend_on_the_layout_of_steps(
    layout: str, toy: Path, options: dict[str, Any], plain: list[Completion], right: ScriptedDrafter
) -> None:
    for drafter in (None, right):
        require_equal(generate(toy, PROMPTS, PARAMS, drafter, **options | LAYOUTS[layout]), plain)


def test_output_does_not_depend_on_the_prefix_cache(
    toy: Path, options: dict[str, Any], plain: list[Completion], right: ScriptedDrafter
) -> None:
    with make_llm(toy, right, **options, page_size=4) as llm:
        for _ in range(2):
            choices = [generation.choices[0] for generation in llm.generate(PROMPTS, PARAMS)]
            require_equal(choices, plain)
        assert sum(choice.usage.num_cached_tokens for choice in choices if choice.usage) > 400
        assert sum(choice.usage.num_accepted for choice in choices if choice.usage) > 100


def test_output_does_not_depend_on_the_process_that_drafts(
    toy: Path, options: dict[str, Any], plain: list[Completion], tmp_path: Path
) -> None:
    with make_llm(toy, speculative=METHODS["EAGLE3"](toy, tmp_path), **options) as llm:
        colocated = Colocated(llm, tmp_path)
        colocated.start()
        choices = [generation.choices[0] for generation in llm.generate(PROMPTS, PARAMS)]
        colocated.close()
    require_equal(choices, plain)
    assert sum(choice.usage.num_draft_tokens for choice in choices if choice.usage) > 100


@pytest.mark.parametrize(("options", "num_sent"), CONTINUED, indirect=["options"])
def test_another_engine_continues_with_the_same_text(
    num_sent: int, toy: Path, options: dict[str, Any], plain: list[Completion], right: ScriptedDrafter
) -> None:
    """A failed engine had sent some tokens. Another one computes them as part of the prompt."""
    texts = {place: completion.token_ids[:num_sent] for place, completion in enumerate(plain)}
    with make_llm(toy, right, **options) as llm:
        for place, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            llm.engine.requests.enqueue(EngineRequest(str(place), prompt, params, emitted_token_ids=list(texts[place])))
        while llm.engine.has_work:
            for output in llm.engine.step():
                texts[int(output.request_id)] += output.token_ids
    assert list(texts.values()) == [completion.token_ids for completion in plain]
