"""What a request gets back, as plain data: step by step from the engine, or whole from `LLM`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple


class FinishReason(StrEnum):
    """Why a request ended; each request has exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprob(NamedTuple):
    """Natural-log probability of one emitted token under the target's unprocessed logits."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the most likely (token id, logprob), best first


class RequestUsage(NamedTuple):
    """Counts of one request so far. Accept length = (num_accepted + num_verify_steps) / num_verify_steps."""

    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens found in the request's own cache namespace
    num_completion_tokens: int
    num_verify_steps: int  # target forwards after the one that gave the first token
    num_draft_tokens: int  # proposed, root not counted
    num_accepted: int  # accepted drafts, bonus not counted
    num_preemptions: int
    accept_histogram: tuple[int, ...] = ()  # [k]: verified trees with drafts of which exactly k were accepted
    is_lossy: bool = False  # drafts were accepted by thresholds or by lot: tokens may differ from the target's own


def add_histograms(histograms: Iterable[Sequence[int]]) -> list[int]:
    """The accept histogram of several requests together."""
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def acceptance_per_depth(accept_histogram: Sequence[int]) -> list[float]:
    """Share of the trees accepted to depth d that were accepted to depth d + 1 as well; depth 0 is the root.

    The list ends at the deepest draft ever accepted; where a tree had no node below the accepted one, the next depth
    counts as not accepted. Empty without drafts.
    """
    reached = list(accumulate(reversed(accept_histogram)))[::-1]  # [d]: trees accepted to depth d or deeper
    if len(reached) == 1:
        return [0.0]
    return [deeper / above for above, deeper in pairwise(reached)]


class RequestOutput(NamedTuple):
    """News of one request after one step; concatenate `token_ids`, `text` and `logprobs` over steps."""

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None  # set in the last output only
    stop_reason: str | int | None  # the stop string or token id that ended it, where one did
    error: str | None  # set with FinishReason.ERROR
    usage: RequestUsage


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


@dataclass(frozen=True, slots=True)
class Generation:
    """All choices of one prompt, from `LLM.generate`."""

    prompt_token_ids: list[int]
    choices: list[Completion]
