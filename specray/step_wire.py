"""Plans and results as bytes, for other processes: msgpack serializes the NamedTuples of `step` directly."""

from typing import Any

import msgpack

from specray.draft_trace import VerifiedTree
from specray.grammar import GrammarSpec
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


def pack(message: StepPlan | StepResult) -> bytes:
    """Serialize a plan or a result."""
    data: bytes = msgpack.packb(message)
    return data


def unpack_plan(data: bytes) -> StepPlan:
    """Inverse of `pack` for a plan."""
    plan = StepPlan(*msgpack.unpackb(data))
    new_requests, rows = [_new_request(*new) for new in plan.new_requests], [_scheduled_request(*r) for r in plan.rows]
    return plan._replace(new_requests=new_requests, rows=rows)


def unpack_result(data: bytes) -> StepResult:
    """Inverse of `pack` for a result."""
    result = StepResult(*msgpack.unpackb(data))
    rows, uses = [_request_result(*row) for row in result.rows], [DrafterUse(*use) for use in result.drafters]
    buckets = [BucketSeconds(*bucket) for bucket in result.bucket_seconds]
    return result._replace(rows=rows, times=StepTimes(*result.times), drafters=uses, bucket_seconds=buckets)


def _new_request(*fields: Any) -> NewRequest:
    """A NewRequest from unpacked fields."""
    request = NewRequest(*fields)
    wanted = request.prompt_logprobs and PromptLogprobs(*request.prompt_logprobs)
    sampling = SamplingOptions(*request.sampling)
    if sampling.grammar is not None:
        sampling = sampling._replace(grammar=GrammarSpec(*sampling.grammar))
    return request._replace(sampling=sampling, prompt_logprobs=wanted)


def _scheduled_request(*fields: Any) -> ScheduledRequest:
    row = ScheduledRequest(*fields)
    return row._replace(draft_limit=DraftLimit(*row.draft_limit))


def _request_result(*fields: Any) -> RequestResult:
    result = RequestResult(*fields)
    logprobs, prompt_logprobs = _token_logprobs(result.logprobs), _token_logprobs(result.prompt_logprobs)
    tree = None if result.tree is None else VerifiedTree(*result.tree)
    return result._replace(logprobs=logprobs, prompt_logprobs=prompt_logprobs, tree=tree)


def _token_logprobs(entries: list[Any] | None) -> list[TokenLogprob] | None:
    if entries is None:
        return None
    return [
        TokenLogprob(token, value, [(id_, at) for id_, at in top], tuple((id_, at) for id_, at in chosen))
        for token, value, top, chosen in entries
    ]
