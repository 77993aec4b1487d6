"""Plans and results can be serialized without torch."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specray.draft_trace import VerifiedTree
from specray.grammar import GRAMMAR_KINDS, GrammarSpec
from specray.outputs import TokenLogprob
from specray.step import (
    BucketSeconds,
    DrafterUse,
    DraftLimit,
    NewRequest,
    PromptLogprobs,
    RequestResult,
    SamplingOptions,
    ScheduledRequest,
    StepPlan,
    StepResult,
    StepTimes,
)
from specray.step_wire import pack, unpack_plan, unpack_result

ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
small = st.integers(0, 1000)
real = st.floats(-1e9, 1e9)
pair = st.tuples(small, real)

sampling = st.builds(
    SamplingOptions,
    st.integers(-(2**63), 2**63 - 1),
    real,
    real,
    small,
    real,
    real,
    real,
    real,
    st.lists(pair, max_size=3),
    small,
    ids,
    st.none() | small,
    st.none() | ids,
    st.none() | st.builds(GrammarSpec, st.sampled_from(GRAMMAR_KINDS), st.text(max_size=9)),
    st.none() | st.lists(ids, max_size=3),
    st.none() | ids,
)
prompts = st.none() | st.builds(PromptLogprobs, small, small)
salts = st.text(max_size=5)
new_row = st.builds(
    NewRequest, small, ids, small, small, ids, sampling, salts, prompts, ids, st.booleans(), salts, salts, small
)
limits = st.builds(DraftLimit, small, small, st.floats(0, 1))
copies = st.lists(st.tuples(small, small), max_size=2)
row_step = st.builds(ScheduledRequest, small, small, limits, ids, copies)
plans = st.builds(StepPlan, small, ids, st.lists(new_row, max_size=3), st.lists(row_step, max_size=3))
logprobs = st.builds(TokenLogprob, small, real, st.lists(pair, max_size=3), st.lists(pair, max_size=3).map(tuple))
some_logprobs = st.none() | st.lists(logprobs, max_size=3)
errors = st.none() | st.text(max_size=9)
trees = st.builds(VerifiedTree, ids, ids)
row_result = st.builds(
    RequestResult,
    small,
    ids,
    small,
    some_logprobs,
    errors,
    ids,
    some_logprobs,
    st.none() | trees,
    st.booleans(),
    st.lists(st.floats(0, 1), max_size=3),
    ids,
)
times = st.builds(StepTimes, real, real, real, real)
uses = st.lists(st.builds(DrafterUse, salts, real, real, *[small] * 8), max_size=2)
tiers = st.lists(st.builds(BucketSeconds, small, small, real, real), max_size=2)
results = st.builds(
    StepResult,
    small,
    st.lists(row_result, max_size=3),
    times,
    st.lists(salts, max_size=2),
    uses,
    st.booleans(),
    st.booleans(),
    tiers,
)


def tupled(value: Any) -> Any:
    """Lists for tuples: serialization does not distinguish them."""
    return tuple(tupled(item) for item in value) if isinstance(value, list | tuple) else value


@given(plans)
def test_a_plan_survives_serialization(plan: StepPlan) -> None:
    back = unpack_plan(pack(plan))
    assert tupled(back) == tupled(plan)
    assert [type(row.sampling) for row in back.new_requests] == [SamplingOptions] * len(plan.new_requests)
    assert all(isinstance(row.sampling.grammar, GrammarSpec | None) for row in back.new_requests)
    assert all(isinstance(row, ScheduledRequest) and isinstance(row.draft_limit, DraftLimit) for row in back.rows)


@given(results)
def test_a_result_survives_serialization(result: StepResult) -> None:
    back = unpack_result(pack(result))
    assert back == result
    assert all(isinstance(entry, TokenLogprob) for row in back.rows for entry in row.logprobs or [])
    assert all(isinstance(row.tree, VerifiedTree | None) for row in back.rows)
    assert isinstance(back.times, StepTimes)
