"""Outputs of requests: per step from the engine, or complete from `LLM`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

from specray.draft_trace import DraftTrace, merge_traces


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    @property
    def is_complete(self) -> bool:
        """Whether the output is all that the request asked for."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class TokenLogprob(NamedTuple):
    """Log probability of a generated or prompt token under the target's unprocessed logits."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the most likely (token id, logprob), best first
    chosen: tuple[tuple[int, float], ...] = ()  # those of the request's `logprob_token_ids`


class Undrafted(NamedTuple):
    """Verify steps without drafts, by the reason."""

    limit: int = 0  # the request's own limit, or no room left in max_tokens, the context or the KV pool
    budget: int = 0  # drafts would not have made the step's tokens come sooner
    absent: int = 0  # the drafter was gone, or failed
    late: int = 0  # the step did not wait for it
    none_found: int = 0  # it had nothing to propose, or nothing likely enough or allowed by the grammar

    def counts(self) -> dict[str, int]:
        """The counts that are not zero, by reason."""
        return {reason: count for reason, count in self._asdict().items() if count}

    def plus(self, other: "Undrafted") -> "Undrafted":
        return Undrafted(*map(sum, zip(self, other, strict=True)))


class RequestUsage(NamedTuple):
    """Counts of one request so far. Accept length = (num_accepted + num_verify_steps) / num_verify_steps.

    That is the number of output tokens per verify step: what a stop condition cuts off does not count.
    """

    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    num_completion_tokens: int
    num_verify_steps: int  # forward passes after the one that generated the first token
    num_draft_tokens: int  # proposed, without roots
    num_accepted: int  # output tokens beyond one per verify step
    num_preemptions: int
    accept_histogram: tuple[int, ...] = ()  # [k]: verified trees with drafts of which exactly k were accepted
    is_lossy: bool = False  # acceptance by thresholds or simulated: the distribution may differ from the target's
    drafter: str = ""  # its drafter, where there are several
    num_reasoning_tokens: int = 0  # completion tokens before the answer, with those of the marks around them
    undrafted: Undrafted = Undrafted()


class RequestTimes(NamedTuple):
    """When a request passed from one phase to the next: nanoseconds since 1970, on the engine's machine.

    It waits in the queue until `started`, computes its prompt until `first_token`, and decodes until `ended`. A phase
    that it never reached is None.
    """

    arrived: int
    started: int | None
    first_token: int | None
    ended: int


def add_histograms(histograms: Iterable[Sequence[int]]) -> list[int]:
    """The sum of several accept histograms."""
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def acceptance_per_depth(accept_histogram: Sequence[int]) -> list[float]:
    """For each depth d, the share of trees accepted at d that were also accepted at d + 1; depth 0 is the root.

    The list ends at the deepest accepted draft and is empty without drafts. A tree without a node below the last
    accepted one counts as rejected at the next depth.
    """
    reached = list(accumulate(reversed(accept_histogram)))[::-1]  # [d]: trees accepted to depth d or deeper
    if len(reached) == 1:
        return [0.0]
    return [deeper / above for above, deeper in pairwise(reached)]


class RequestOutput(NamedTuple):
    """New output of one request after a step. `token_ids`, `text` and `logprobs` are those of this step."""

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None  # set in the last output
    stop_reason: str | int | None  # the stop string or token id that ended the request
    error: str | None  # message that FinishReason.ERROR comes with
    usage: RequestUsage
    prompt_logprobs: list[TokenLogprob] | None = None  # part of one output: the first with tokens, or the last
    trace: DraftTrace | None = None  # only where a request asks for one
    times: RequestTimes | None = None  # part of the last output where a request asks for them


def merge_outputs(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two consecutive outputs of a request as one."""
    has_logprobs = first.logprobs is not None or second.logprobs is not None
    return second._replace(
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=(first.logprobs or []) + (second.logprobs or []) if has_logprobs else None,
        prompt_logprobs=second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
        trace=merge_traces(first.trace, second.trace),
    )


@dataclass(slots=True)
class Completion:
    """One choice of a finished generation."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    seed: int = 0
    usage: RequestUsage | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """All choices of one prompt, from `LLM.generate`."""

    prompt_token_ids: list[int]
    choices: list[Completion]
