"""Two plans in flight: a step is planned before the result of the last one is known, and the output stays."""

from pathlib import Path
from typing import Any

import pytest

from specray.engine.request import EngineRequest
from specray.llm import LLM
from specray.outputs import Completion, FinishReason
from specray.sampling_params import SamplingParams
from tests.support.engine import make_llm, visible
from tests.support.methods import METHODS

PREFIX = [0, 9, 8, 7, 6, 5, 4, 30, 31, 32, 9, 8, 7, 6, 5, 4]
PROMPTS = [[*PREFIX, 40, 41, 42], [*PREFIX, 50, 41], [*PREFIX[:8], 33], [5], [0, 2, 4, 2, 4, 2, 4]]
PARAMS = [
    SamplingParams(seed=0, temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=1, temperature=1.0, max_tokens=13),
    SamplingParams(seed=2, temperature=0.8, top_p=0.9, frequency_penalty=0.5, max_tokens=20),
    SamplingParams(seed=3, temperature=4.0, max_tokens=30, stop=["a", "e"]),
    SamplingParams(seed=4, temperature=1.0, max_tokens=1, logprobs=2),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"page_size": 4, "chunked_prefill_size": 4, "max_prefill_tokens": 6},
    "preemption": {"page_size": 4, "max_total_tokens": 64},
    "one at a time": {"max_running_requests": 1},
}


def overlapped(llm: LLM) -> LLM:
    llm.engine.capacity = llm.engine.capacity._replace(max_plans=2)
    return llm


def run(llm: LLM) -> list[Completion]:
    """Twice: the second time with a warm prefix cache."""
    return [generation.choices[0] for _ in range(2) for generation in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", [None, "EAGLE3", "EAGLE3-chain", "EAGLE-map", "MTP-stack", "STANDALONE", "NGRAM"])
def test_two_plans_in_flight_do_not_change_the_output(
    method: str | None, layout: str, toy: Path, tmp_path: Path
) -> None:
    options = dict(LAYOUTS[layout])
    with make_llm(toy, **options) as plain:
        expected = run(plain)
    if method is not None:
        options["speculative"] = METHODS[method](toy, tmp_path)
    with overlapped(make_llm(toy, **options)) as llm:
        assert list(map(visible, run(llm))) == list(map(visible, expected))
        engine = llm.engine
        assert not engine.has_work
        assert engine.scheduler.pool.num_free + engine.scheduler.cache.num_idle == engine.scheduler.pool.num_usable


def test_a_plan_is_made_before_the_last_result(toy: Path) -> None:
    with overlapped(make_llm(toy)) as llm:
        in_flight = []
        collect = llm._executor.collect

        def counted() -> Any:
            in_flight.append(len(llm.engine._in_flight))
            return collect()

        llm._executor.collect = counted  # type: ignore[method-assign]
        llm.generate([[5, 6]], SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))
    # A step that may end the request is waited for.
    assert in_flight == [2] * 9 + [1] * (len(in_flight) - 9)


def test_a_request_that_ends_while_its_step_runs_leaves_nothing_behind(toy: Path) -> None:
    """Its slot and blocks go to other requests while a step that was planned for it is in flight."""
    with make_llm(toy, max_running_requests=1) as plain:
        expected = [generation.choices[0].token_ids for generation in plain.generate(PROMPTS, PARAMS)]
    with overlapped(make_llm(toy, max_running_requests=1)) as llm:
        engine = llm.engine
        engine.add_request(EngineRequest("aborted", [9, 9, 9], SamplingParams(seed=9, max_tokens=40, ignore_eos=True)))
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(EngineRequest(str(index), prompt, params))
        for _ in range(3):
            engine.step()
        engine.abort(["aborted"])
        found: dict[str, list[int]] = {}
        reasons = {}
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
                reasons[output.request_id] = output.finish_reason
    assert reasons["aborted"] is FinishReason.ABORT
    assert [found[str(index)] for index in range(len(PROMPTS))] == expected
