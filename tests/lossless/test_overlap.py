"""Two plans in flight: a step is planned before the result of the last one is known, and the output stays."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specray.engine.engine_request import EngineRequest
from specray.errors import EngineDeadError
from specray.llm import LLM
from specray.ops.cpu.library import kernels
from specray.ops.sampling_state import SamplingState
from specray.outputs import Completion, FinishReason
from specray.sampling_params import SamplingParams
from specray.step import DraftLimit, StepPlan
from specray.worker.step_backend import Pass
from specray.worker.worker import Worker
from tests.support.distributions import OPTIONS
from tests.support.engine import make_llm, visible
from tests.support.methods import METHODS
from tests.support.toy import VOCAB_SIZE

PREFIX = [0, 9, 8, 7, 6, 5, 4, 30, 31, 32, 9, 8, 7, 6, 5, 4]
PROMPTS = [[*PREFIX, 40, 41, 42], [*PREFIX, 50, 41], [*PREFIX[:8], 33], [5], [0, 2, 4, 2, 4, 2, 4]]
PARAMS = [
    SamplingParams(seed=0, temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=1, temperature=1.0, max_tokens=13),
    SamplingParams(seed=2, temperature=0.8, top_p=0.9, frequency_penalty=0.5, max_tokens=20),
    SamplingParams(seed=3, temperature=4.0, max_tokens=30, stop=["a", "e"]),
    SamplingParams(seed=4, temperature=1.0, max_tokens=1, logprobs=2),
]
GREEDY_PARAMS = [
    SamplingParams(seed=0, temperature=0.0, max_tokens=params.max_tokens, stop=params.stop) for params in PARAMS
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"page_size": 4, "chunked_prefill_size": 4, "max_prefill_tokens": 6},
    "preemption": {"page_size": 4, "max_total_tokens": 64},
    "one at a time": {"max_running_requests": 1},
}


def run(llm: LLM, params: Sequence[SamplingParams] = PARAMS) -> list[Completion]:
    """Twice: the second time with a warm prefix cache."""
    return [generation.choices[0] for _ in range(2) for generation in llm.generate(PROMPTS, params)]


@cache
def plain_output(toy: Path, layout: str) -> list[Any]:
    with make_llm(toy, disable_overlap_schedule=True, **LAYOUTS[layout]) as plain:
        return list(map(visible, run(plain)))


# Every layout with the ways that differ most, and two of them, in turns, with others.
OTHERS = product(["EAGLE3-chain", "EAGLE-map", "MTP-stack", "STANDALONE"], LAYOUTS)
CASES = [
    *product([None, "EAGLE3", "NGRAM"], LAYOUTS),
    *(case for turn, case in enumerate(OTHERS) if turn // 4 % 2 == turn % 2),
]


@pytest.mark.parametrize(("method", "layout"), CASES)
def test_two_plans_in_flight_do_not_change_the_output(
    method: str | None, layout: str, toy: Path, tmp_path: Path
) -> None:
    options = dict(LAYOUTS[layout])
    if method is not None:
        options["speculative"] = METHODS[method](toy, tmp_path)
    with make_llm(toy, **options) as llm:
        assert list(map(visible, run(llm))) == plain_output(toy, layout)
        engine = llm.engine
        assert not engine.has_work
        assert engine.scheduler.pool.num_free + engine.scheduler.cache.num_idle == engine.scheduler.pool.num_usable


@pytest.mark.parametrize("layout", LAYOUTS)
def test_passes_that_follow_each_other_do_not_change_the_output(layout: str, toy: Path) -> None:
    """Only greedy requests without drafts let a pass begin before the one before it is finished."""
    with make_llm(toy, disable_overlap_schedule=True, **LAYOUTS[layout]) as plain:
        expected = run(plain, GREEDY_PARAMS)
    with make_llm(toy, **LAYOUTS[layout]) as llm:
        assert list(map(visible, run(llm, GREEDY_PARAMS))) == list(map(visible, expected))
        engine = llm.engine
        assert engine.scheduler.pool.num_free + engine.scheduler.cache.num_idle == engine.scheduler.pool.num_usable


@pytest.mark.skipif(kernels() is None, reason="torch's operations start no pass ahead")
def test_a_plan_is_made_before_the_last_result(toy: Path) -> None:
    with make_llm(toy) as llm:
        in_flight = []
        collect = llm._executor.collect

        def counted() -> Any:
            in_flight.append(len(llm.engine._in_flight))
            return collect()

        llm._executor.collect = counted  # type: ignore[method-assign]
        llm.generate([[5, 6]], SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))
    # A step that may end the request is waited for.
    assert in_flight == [2] * 9 + [1] * (len(in_flight) - 9)


@pytest.mark.parametrize("params", [PARAMS, GREEDY_PARAMS], ids=["mixed", "greedy"])
def test_a_request_that_ends_while_its_step_runs_leaves_nothing_behind(
    params: Sequence[SamplingParams], toy: Path
) -> None:
    """Its slot and blocks go to other requests while a step that was planned for it is in flight."""
    with make_llm(toy, max_running_requests=1, disable_overlap_schedule=True) as plain:
        expected = [generation.choices[0].token_ids for generation in plain.generate(PROMPTS, params)]
    with make_llm(toy, max_running_requests=1) as llm:
        engine = llm.engine
        options = replace(params[0], seed=9, max_tokens=40, ignore_eos=True)
        engine.add_request(EngineRequest("aborted", [9, 9, 9], options))
        for index, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True)):
            engine.add_request(EngineRequest(str(index), prompt, each))
        for _ in range(3):
            engine.step()
        engine.requests.abort(["aborted"])
        found: dict[str, list[int]] = {}
        reasons = {}
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
                reasons[output.request_id] = output.finish_reason
    assert reasons["aborted"] is FinishReason.ABORT
    assert [found[str(index)] for index in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("method", [None, "EAGLE3", "NGRAM"])
def test_a_request_takes_no_part_in_steps_after_its_last_token(
    method: str | None, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next step was planned, with another request's, before its last result was known.

    Its next pass may have begun by then, unless it has drafts, which wait for the result.
    """
    options: dict[str, Any] = {} if method is None else {"speculative": METHODS[method](toy, tmp_path)}
    prompts, long = [[5, 6], [7, 8]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    num_rows = []

    def counted(start: Callable[..., Pass], *step: Any) -> Pass:
        started = start(*step)
        num_rows.append(len(started.computed.roots))
        return started

    with make_llm(toy, **options) as llm:
        expected = [generation.choices[0].token_ids for generation in llm.generate(prompts, long)]
        last = next(place for place, token in enumerate(expected[0]) if token not in expected[0][:place] and place >= 3)
        short = replace(long, stop_token_ids=[expected[0][last]])
        backend = llm._executor.worker.backend
        for name in ("begin", "begin_after"):
            monkeypatch.setattr(backend, name, partial(counted, getattr(backend, name)))
        first, second = (generation.choices[0] for generation in llm.generate(prompts, [short, long]))
        has_begun = method is None and kernels() is not None
    assert (first.token_ids, first.finish_reason) == (expected[0][: last + 1], FinishReason.STOP)
    assert second.token_ids == expected[1]
    assert first.usage is not None
    assert second.usage is not None
    assert sum(num_rows) == sum(1 + usage.num_verify_steps for usage in (first.usage, second.usage)) + has_begun


@pytest.mark.skipif(kernels() is None, reason="needs the CPU kernels")
@pytest.mark.parametrize("method", [None, "EAGLE3", "NGRAM"])
@pytest.mark.parametrize("overlaps", [True, False])
def test_steps_without_drafts_begin_before_the_last_one_is_finished(
    method: str | None, overlaps: bool, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {} if method is None else {"speculative": METHODS[method](toy, tmp_path)}
    greedy, begin, num_started = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), Worker.begin, []

    def counted(worker: Worker, plan: StepPlan) -> None:
        begin(worker, plan)
        num_started.append(worker.num_started)

    with make_llm(toy) as plain:
        expected = plain.generate(PROMPTS, greedy)
    monkeypatch.setattr(Worker, "begin", counted)
    with make_llm(toy, **options, disable_overlap_schedule=not overlaps) as llm:
        found = llm.generate(PROMPTS, greedy, draft_limits=[DraftLimit(0, 0)] * len(PROMPTS))
    assert [each.choices[0].token_ids for each in found] == [each.choices[0].token_ids for each in expected]
    num_ahead = 11 if method is None else 10  # a drafter reads the prompt
    assert num_started.count(2) == (num_ahead if overlaps else 0)


def test_a_step_that_cannot_begin_does_not_take_the_result_before_it(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(toy) as llm:
        engine, worker = llm.engine, llm._executor.worker
        engine.add_request(EngineRequest("r", [5, 6], SamplingParams(seed=0, max_tokens=9, ignore_eos=True)))
        begin = worker.begin

        def failing(plan: StepPlan) -> None:
            if plan.step_id == 3:
                raise MemoryError
            begin(plan)

        monkeypatch.setattr(worker, "begin", failing)
        assert [len(output.token_ids) for _ in range(2) for output in engine.step()] == [1, 1]
        with pytest.raises(EngineDeadError, match="out of memory"):
            engine.step()


def test_a_token_that_may_not_end_a_request_yet_does_not(toy: Path, tmp_path: Path) -> None:
    """Simulated acceptance emits tokens that are masked."""
    simulated = METHODS["EAGLE3"](toy, tmp_path).model_copy(
        update={"simulate_accept_length": 3.0, "simulate_output_is_meaningless": True}
    )
    stops = [token for token in range(VOCAB_SIZE) if token % 2]
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=8, stop_token_ids=stops, seed=0)
    with make_llm(toy, speculative=simulated) as llm:
        [generation] = llm.generate([[5, 6, 5, 6, 5, 6]], params)
    assert len(generation.choices[0].token_ids) >= 8


@pytest.mark.parametrize(("num_before", "token_ids", "ends"), [(0, [3, 9], True), (0, [9, 3], False), (1, [9], True)])
def test_the_first_tokens_cannot_end_a_request(num_before: int, token_ids: list[int], ends: bool) -> None:
    options = OPTIONS._replace(min_tokens=2, eos_token_ids=[9])
    assert SamplingState(options).end_with(token_ids, num_before) == ends
