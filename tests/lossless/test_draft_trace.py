"""A request's trace: its tokens' depths and the verified trees agree with the output and its counters."""

from itertools import pairwise
from pathlib import Path

import pytest

from specray.draft_trace import TracedStep
from specray.engine.engine_request import EngineRequest
from specray.llm import LLM
from specray.outputs import RequestOutput
from specray.sampling_params import SamplingParams
from specray.testing.conformance import PROMPTS, SAMPLED
from tests.support.engine import make_llm
from tests.support.methods import KINDS, METHODS, SOME_METHODS

NUM_REQUESTS = len(PROMPTS)


def run(llm: LLM, traced: set[int]) -> list[list[RequestOutput]]:
    """The outputs of each of the prompts, of which `traced` ask for a trace."""
    outputs: dict[str, list[RequestOutput]] = {str(place): [] for place in range(NUM_REQUESTS)}
    for place, (prompt, params) in enumerate(zip(PROMPTS, SAMPLED, strict=True)):
        llm.engine.add_request(EngineRequest(str(place), prompt, params, traces_drafts=place in traced))
    while llm.engine.has_work:
        for output in llm.engine.step():
            outputs[output.request_id].append(output)
    return list(outputs.values())


def result(outputs: list[RequestOutput]) -> tuple[object, ...]:
    text = "".join(output.text for output in outputs)
    return [token for output in outputs for token in output.token_ids], text, outputs[-1].finish_reason


def check_trace(prompt: list[int], outputs: list[RequestOutput]) -> None:
    traces = [output.trace for output in outputs if output.trace is not None]
    assert all((output.trace is not None) == bool(output.token_ids) for output in outputs)
    assert all("".join(span.text for span in output.trace.spans) == output.text for output in outputs if output.trace)
    spans, steps = (
        [span for trace in traces for span in trace.spans],
        [step for trace in traces for step in trace.steps],
    )
    token_ids = [token for output in outputs for token in output.token_ids]
    assert sorted({span.token_index for span in spans}) == list(range(len(token_ids)))
    assert all(first.token_index <= second.token_index for first, second in pairwise(spans))
    depths = [depth for step in steps for depth in (*range(1, len(step.accepted_nodes) + 1), 0)]
    assert all(span.depth == depths[span.token_index] for span in spans)
    assert [step.token_index for step in steps] == [
        index for index in range(len(depths)) if index == 0 or not depths[index - 1]
    ]
    for step in steps:
        check_tree(step, prompt, token_ids)
    usage = outputs[-1].usage
    assert len(steps) == 1 + usage.num_verify_steps
    assert sum(len(step.tree.token_ids) - 1 for step in steps) == usage.num_draft_tokens
    ends = [*(step.token_index for step in steps[1:]), len(token_ids)]  # a stop may cut what the last step accepted
    assert sum(end - step.token_index - 1 for step, end in zip(steps, ends, strict=True)) == usage.num_accepted


def check_tree(step: TracedStep, prompt: list[int], token_ids: list[int]) -> None:
    """Its accepted path starts at the root and spells the tokens that were emitted, up to a stop."""
    tree, accepted, known = step.tree, step.accepted_nodes, [*prompt, *token_ids]
    place = len(prompt) + step.token_index
    assert tree.token_ids[0] == known[place - 1]
    assert tree.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
    assert [tree.parents[node] for node in accepted] == [0, *accepted][: len(accepted)]
    emitted = [tree.token_ids[node] for node in accepted]
    assert emitted[: len(known) - place] == known[place : place + len(emitted)]


@pytest.fixture(scope="module")
def plain(toy: Path) -> list[tuple[object, ...]]:
    """Results without drafts and traces."""
    with make_llm(toy) as llm:
        return [result(outputs) for outputs in run(llm, set())]


@pytest.mark.parametrize("method", [None, *KINDS])
def test_a_trace_agrees_with_the_output_and_its_counters(
    method: str | None, toy: Path, plain: list[tuple[object, ...]], tmp_path: Path
) -> None:
    """With two plans in flight, stop strings, penalties and logprobs."""
    options = {} if method is None else {"speculative": METHODS[method](toy, tmp_path)}
    with make_llm(toy, **options) as llm:
        llm.engine.capacity = llm.engine.capacity._replace(max_plans=2)
        outputs = run(llm, set(range(0, NUM_REQUESTS, 2)) | {NUM_REQUESTS - 1})
    assert [result(of_request) for of_request in outputs] == plain
    for place, (prompt, of_request) in enumerate(zip(PROMPTS, outputs, strict=True)):
        if place % 2 and place < NUM_REQUESTS - 1:
            assert all(output.trace is None for output in of_request)
        else:
            check_trace(prompt, of_request)


@pytest.mark.parametrize("method", SOME_METHODS)
def test_a_preempted_request_keeps_its_trace(method: str, toy: Path, tmp_path: Path) -> None:
    options = {"page_size": 4, "max_total_tokens": 96, "speculative": METHODS[method](toy, tmp_path)}
    with make_llm(toy, **options) as llm:
        outputs = run(llm, set(range(NUM_REQUESTS)))
    assert sum(of_request[-1].usage.num_preemptions for of_request in outputs) > 0
    for prompt, of_request in zip(PROMPTS, outputs, strict=True):
        check_trace(prompt, of_request)


def test_lossy_drafts_are_traced_as_they_were_accepted(toy: Path, tmp_path: Path) -> None:
    speculative = METHODS["EAGLE3-wide"](toy, tmp_path).model_copy(update={"accept_threshold_single": 0.01})
    with make_llm(toy, speculative=speculative) as llm:
        llm.engine.add_request(
            EngineRequest("lossy", [5, 6, 7], SamplingParams(seed=1, max_tokens=30), traces_drafts=True)
        )
        outputs = [output for _ in range(40) for output in llm.engine.step()]
    assert outputs[-1].usage.num_accepted > 0
    check_trace([5, 6, 7], outputs)
