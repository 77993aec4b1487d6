"""Messages between the scheduler and the worker in a step: plain, immutable data without tensors.

The types are NamedTuples because msgpack serializes a tuple directly; `step_wire` does.
A plan holds only deltas. The worker owns the request table, which is indexed by slot.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from specray.draft_trace import VerifiedTree
from specray.grammar import GrammarSpec
from specray.outputs import TokenLogprob


class DraftFault(StrEnum):
    """Why a step had no drafts, or too few. A remote drafter is dropped for all of these except TOLERATED_FAULTS."""

    LATE = "late"
    FROZEN = "frozen"  # no reply for seconds
    GONE = "gone"  # the connection was closed
    NONSENSE = "nonsense"  # the reply is malformed; a label value of a public metric
    NOT_A_NUMBER = "nan"  # the drafter's own logits are not finite
    MEMBER_NOT_A_NUMBER = "member_nan"  # the same, of one of several drafters; the others go on
    NO_HANDSHAKE = "no_handshake"  # a process connected but sent no valid handshake


TOLERATED_FAULTS = {DraftFault.LATE, DraftFault.MEMBER_NOT_A_NUMBER, DraftFault.NO_HANDSHAKE}


class DrafterUse(NamedTuple):
    """What one of several drafters did for a step, as a shadow included."""

    drafter: str
    seconds: float  # spent on drafts for the requests that it drafts for
    shadow_seconds: float = 0.0
    num_shadow_trees: int = 0  # trees of earlier steps that were compared with the text
    num_shadow_drafts: int = 0  # nodes of these trees, the roots not counted
    num_shadow_accepted: int = 0
    # Of requests that ended, by trees that were compared with those verified in their place (see PairedGain):
    num_shadow_requests: int = 0
    num_shadow_pairs: int = 0
    shadow_gain: int = 0
    shadow_gain_squares: int = 0
    num_faults: int = 0  # 1 if it could not draft


class DraftLimit(NamedTuple):
    """The largest draft tree that may be verified for a request. If either number is 0, there is none."""

    num_tokens: int  # nodes, the root not counted
    num_steps: int  # levels below the root
    min_score: float = 0.0  # nodes with lower `DraftTree.scores` are not verified


UNLIMITED = DraftLimit(2**31 - 1, 2**31 - 1)  # the drafter's tree and the free KV slots still bound it


class SamplingOptions(NamedTuple):
    """The sampling options of a request that the worker needs. `seed` is always set."""

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
    eos_token_ids: list[int]  # end the request; masked until min_tokens tokens were generated
    logprobs: int | None
    allowed_token_ids: list[int] | None = None  # no other token is sampled
    grammar: GrammarSpec | None = None
    banned_sequences: list[list[int]] | None = None  # token sequences whose last token is not sampled after the others
    logprob_token_ids: list[int] | None = None  # reported with each token's log probability


class PromptLogprobs(NamedTuple):
    """The log probabilities of a request's prompt tokens after position `start`, each given the tokens before it."""

    start: int
    num_top: int  # alternatives reported per token


WARM_UP_SALT = "\0warm-up"  # cache_salt of warm-up requests; drafters learn nothing from their texts


class NewRequest(NamedTuple):
    """A request enters slot `slot`. After preemption `token_ids` includes the tokens generated before it."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int  # prefix cache hit: the KV of these tokens is in `block_ids`
    block_ids: list[int]
    sampling: SamplingOptions
    cache_salt: str
    prompt_logprobs: PromptLogprobs | None = None
    predicted_token_ids: Sequence[int] = ()  # the client expects this output: a source of drafts
    traces_drafts: bool = False  # its results have `tree`
    drafter: str = ""  # the one of several drafters that drafts for it
    shadow: str = ""  # another one, which drafts without being verified
    stored_state: int = -1  # prefix cache hit of a model with states: the row of the state pools that has the states


class ScheduledRequest(NamedTuple):
    """One request's work in a step: compute up to `num_tokens` known tokens; if none is left, verify its draft tree."""

    slot: int
    num_tokens: int
    draft_limit: DraftLimit  # limit of this step's tree, by the request's own one and the reserved KV slots
    new_block_ids: list[int]  # appended to the request's blocks before the step
    # (n, row of the state pools): once the first n tokens are committed, the row receives the states behind them
    state_copies: Sequence[tuple[int, int]] = ()


class StepPlan(NamedTuple):
    """One step. The worker frees slots, enters new requests, extends their blocks and runs `rows`, in this order."""

    step_id: int
    freed_slots: list[int]
    new_requests: list[NewRequest]
    rows: list[ScheduledRequest]
    runs_drafter: bool = True  # False: the drafter is not called after this step


class RequestResult(NamedTuple):
    """Tokens that one request emitted: accepted drafts and the bonus token; none after a non-final prompt chunk."""

    slot: int
    token_ids: list[int]
    num_draft_tokens: int  # nodes verified, the root not counted
    logprobs: list[TokenLogprob] | None  # one for each of token_ids
    error: str | None  # set if no token can be sampled; the scheduler must end the request
    accepted_nodes: Sequence[int] = ()  # accepted nodes of the verified tree, one for each of token_ids but the last
    prompt_logprobs: list[TokenLogprob] | None = None  # logprobs of the prompt tokens that follow the computed ones
    tree: VerifiedTree | None = None  # set for NewRequest.traces_drafts, if tokens were emitted
    # Nothing was computed, because the request's grammar is still compiled; or the request ended in the step before.
    # What was computed after that is dropped.
    is_deferred: bool = False
    draft_scores: Sequence[float] = ()  # the drafts' if DraftLimit.min_score is set, those below it included
    forced_nodes: Sequence[int] = ()  # nodes of the verified tree that a grammar added to the drafter's


class StepTimes(NamedTuple):
    """Seconds spent in the worker's phases of a step."""

    prepare: float  # request table, draft trees and input tensors
    forward: float  # the target's forward
    verify: float  # sampling, walk and KV commit
    draft: float  # drafting of the trees verified in this step


class BucketSeconds(NamedTuple):
    """What a step in CUDA graphs of these sizes takes, measured before the first request."""

    num_requests: int
    num_nodes: int  # of each request's tree, the root included
    target: float  # of forward and verification
    draft: float  # of drafting for the next step; 0.0 where no graph of the target's process drafts

    @property
    def seconds(self) -> float:
        return self.target + self.draft


class StepResult(NamedTuple):
    """Results of a plan's rows, in the plan's order."""

    step_id: int
    rows: list[RequestResult]
    times: StepTimes
    draft_faults: Sequence[str] = ()  # values of DraftFault
    drafters: Sequence[DrafterUse] = ()  # use of each of several drafters that drafted for this step
    drafter_is_new: bool = False  # it took over since the step before, and hidden states before that are lost to it
    drafter_is_absent: bool = False  # none was connected, so no request has drafts
    bucket_seconds: Sequence[BucketSeconds] = ()  # if they were measured since the step before
