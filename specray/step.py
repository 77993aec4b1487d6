"""All that crosses between the host and the worker in a step: plain, immutable, torch-free data.

NamedTuples, because msgpack writes a tuple as it is: `pack` and `unpack_*` are the whole wire
format. A plan carries deltas only; the worker owns rows by slot. Not here: any behaviour.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgpack

from specray.outputs import TokenLogprob


class DraftFault(StrEnum):
    """What can be wrong with a drafter. Each costs a step its trees; all but the first and the last end the drafter."""

    LATE = "late"
    FROZEN = "frozen"  # no answer for seconds
    GONE = "gone"
    NONSENSE = "nonsense"  # an answer that is none
    NOT_A_NUMBER = "nan"  # by its own account
    NO_HANDSHAKE = "no_hello"  # it knocked and said nothing


class DraftLimit(NamedTuple):
    """Most of a tree that is verified."""

    num_tokens: int  # nodes beside the root
    num_steps: int  # levels below the root


UNLIMITED = DraftLimit(2**31 - 1, 2**31 - 1)  # but by what the drafter makes and the step has room for


class SamplingOptions(NamedTuple):
    """The part of a request's sampling options that the worker needs; `seed` is always set."""

    seed: int
    temperature: float
    top_p: float
    top_k: int  # 0: off
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: list[tuple[int, float]]
    min_tokens: int
    eos_token_ids: list[int]  # held back until min_tokens tokens were generated
    logprobs: int | None


class NewRequest(NamedTuple):
    """A request enters slot `slot`; on resumption `token_ids` holds what it had generated, too."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache; their KV is in `block_ids`
    block_ids: list[int]
    sampling: SamplingOptions
    cache_salt: str
    max_draft_steps: int = UNLIMITED.num_steps  # levels of its trees to verify


class ScheduledRow(NamedTuple):
    """One row's work in a step: compute up to `num_tokens` known tokens; if none is left, verify a tree."""

    slot: int
    num_tokens: int
    max_draft_tokens: int  # most tree nodes beside the root that the KV reserve and the limits allow
    new_block_ids: list[int]  # appended to the row's blocks before the step


class StepPlan(NamedTuple):
    """One step. Order of application: free slots, enter new rows, extend blocks, run rows."""

    step_id: int
    freed_slots: list[int]
    new_requests: list[NewRequest]
    rows: list[ScheduledRow]


class RequestResult(NamedTuple):
    """What one row emitted: nothing for a prompt's non-final chunk, else accepted drafts and the bonus token."""

    slot: int
    token_ids: list[int]
    num_draft_tokens: int  # nodes verified, root not counted
    logprobs: list[TokenLogprob] | None  # one for each of token_ids
    error: str | None  # set if the row is broken (NaN logits); it must be ended


class StepTimes(NamedTuple):
    """Seconds of the worker's parts of a step."""

    prepare: float  # state, trees and input tensors
    forward: float  # the target's forward
    verify: float  # sampling, walk and KV commit
    draft: float  # of the drafts verified in this step


class StepResult(NamedTuple):
    """Results of a plan's rows, in the plan's order."""

    step_id: int
    rows: list[RequestResult]
    times: StepTimes
    draft_faults: Sequence[str] = ()  # values of DraftFault


def pack(message: StepPlan | StepResult) -> bytes:
    """Bytes of a plan or result."""
    data: bytes = msgpack.packb(message)
    return data


def unpack_plan(data: bytes) -> StepPlan:
    """Inverse of `pack` for a plan."""
    step_id, freed, new_requests, rows = msgpack.unpackb(data)
    return StepPlan(step_id, freed, [_new_request(*row) for row in new_requests], [ScheduledRow(*row) for row in rows])


def unpack_result(data: bytes) -> StepResult:
    """Inverse of `pack` for a result."""
    step_id, rows, times, faults = msgpack.unpackb(data)
    return StepResult(step_id, [_row_result(*row) for row in rows], StepTimes(*times), faults)


def _new_request(*fields: Any) -> NewRequest:
    row = NewRequest(*fields)
    return row._replace(sampling=SamplingOptions(*row.sampling))


def _row_result(*fields: Any) -> RequestResult:
    slot, token_ids, num_draft_tokens, logprobs, error = fields
    if logprobs is not None:
        logprobs = [TokenLogprob(token, value, [tuple(pair) for pair in top]) for token, value, top in logprobs]
    return RequestResult(slot, token_ids, num_draft_tokens, logprobs, error)
