"""A request's life on the host: the one owner of its token ids, status and finish reason.

Not here: its text (`detokenizer`), its KV rows and its drafts (the worker's).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from specray.engine.radix_cache import CacheNode
from specray.outputs import FinishReason, RequestUsage
from specray.sampling_params import SamplingParams
from specray.step import UNLIMITED, DraftLimit, RequestResult


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a caller submits: one choice of one prompt. `params.seed` is set; `params.n` plays no part."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""  # tenants with different salts share no cached prefix
    tenant: str = ""  # whose share of the engine it uses: the operator's name for a client, never the client's choice
    timeout_s: float = inf  # it is aborted so long after its arrival, wherever it is
    draft_limit: DraftLimit = UNLIMITED  # what its caller allows; (0, 0) decodes plainly. The text is the same
    is_probe: bool = False  # asked by the server itself, to see that a token can be made: no metric counts it
    emitted_token_ids: Sequence[int] = ()  # by an engine that was lost: this one goes on behind them, without a seam


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One admitted request. `token_ids` is the prompt and what was generated after it."""

    spec: EngineRequest
    max_length: int  # token_ids never grows beyond it: max_tokens, context and pool
    arrival: float  # seconds on the engine's clock
    token_ids: list[int]
    num_prompt_tokens: int
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None

    slot: int = -1  # the worker's row, while running
    num_computed_tokens: int = 0  # committed tokens whose KV is written
    block_ids: list[int] = field(default_factory=list)
    shared_path: list[CacheNode] = field(default_factory=list)  # locked; block i is cached iff its node holds it

    first_token: float | None = None
    num_cached_tokens: int = 0
    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accept_histogram: list[int] = field(default_factory=list)  # see RequestUsage
    num_preemptions: int = 0
    is_lossy: bool = False  # see RequestUsage

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def deadline(self) -> float:
        return self.arrival + self.spec.timeout_s

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens still to compute; 1 when decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_useful_drafts(self) -> int:
        """Drafts that could still be emitted before the bonus token fills the request up."""
        return self.max_length - len(self.token_ids) - 1

    def count_verify(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Note one verified tree; one without drafts is a step, and says nothing of a drafter.

        The step that ends the prompt samples the first token and had nothing to verify: it does not count.
        """
        if self.num_output_tokens == 0:
            return
        self.num_verify_steps += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted
        if num_draft_tokens:
            self.accept_histogram += [0] * (num_accepted + 1 - len(self.accept_histogram))
            self.accept_histogram[num_accepted] += 1

    def private_blocks(self) -> list[int]:
        """Blocks the cache does not hold; they go back to the pool with the request."""
        shared = [node.block_id for node in self.shared_path]
        return [b for i, b in enumerate(self.block_ids) if i >= len(shared) or shared[i] != b]

    def usage(self) -> RequestUsage:
        return RequestUsage(
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.num_output_tokens,
            self.num_verify_steps,
            self.num_draft_tokens,
            self.num_accepted,
            self.num_preemptions,
            tuple(self.accept_histogram),
            self.is_lossy,
        )


@dataclass(frozen=True, slots=True)
class Emitted:
    """What one step computed and emitted for one request, before stop conditions cut it."""

    request: Request
    num_tokens: int  # known tokens the plan asked for
    result: RequestResult
