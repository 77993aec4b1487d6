"""A request on the host: its token ids, status, KV blocks and finish reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from specray.engine.cache_nodes import CacheNode
from specray.engine.draft_budget.acceptance import RequestAcceptance
from specray.engine.drafter_selection.bandit import DrafterChoice
from specray.engine.engine_request import PROBATION_STEPS, EngineRequest
from specray.outputs import FinishReason, RequestUsage, TokenLogprob, Undrafted
from specray.step import UNLIMITED, RequestResult


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Planned(NamedTuple):
    """One request's part of a step whose result is not known yet."""

    num_tokens: int  # known tokens to compute
    samples: bool  # it emits 1 … num_drafts + 1 tokens
    num_drafts: int
    no_drafts: str = ""  # why it may have none: a field of Undrafted
    state_copies: Sequence[tuple[int, int]] = ()  # see ScheduledRequest


@dataclass(slots=True, eq=False)
class Request:
    """One queued or running request. `token_ids` is the prompt and the tokens generated so far."""

    spec: EngineRequest
    max_length: int  # token_ids never grows beyond it: max_tokens, context and pool
    arrival: float  # seconds on the engine's clock
    token_ids: list[int]
    num_prompt_tokens: int
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None

    slot: int = -1  # place in the worker's request table, while running
    num_computed_tokens: int = 0  # committed tokens whose KV is written
    in_flight: list[Planned] = field(default_factory=list)  # oldest first
    block_ids: list[int] = field(default_factory=list)
    shared_path: list[CacheNode] = field(default_factory=list)  # locked; block i is cached iff its node holds it
    is_detached: bool = False  # the drafter has not read its first tokens, and the cache has only what it has read
    # Of models with states, see StoredStates:
    stored_state: int = -1  # row of the state pools with the states behind the cached tokens that it starts from
    state_places: set[int] = field(default_factory=set)  # numbers of tokens behind which states are stored
    latest_state: CacheNode | None = None  # where they were last stored beside these places

    prompt_logprobs: list[TokenLogprob] | None = None  # so far, until they are reported; None: not wanted
    started: float | None = None  # when it first left the queue
    first_token: float | None = None
    last_token: float | None = None
    num_cached_tokens: int = 0
    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    undrafted: Counter[str] = field(default_factory=Counter)  # number of undrafted steps by field of Undrafted
    accept_histogram: list[int] = field(default_factory=list)  # see RequestUsage
    verified: list[tuple[int, int]] = field(default_factory=list)  # (drafts, accepted) of each verified tree, in order
    acceptance: RequestAcceptance = field(default_factory=RequestAcceptance)  # by its latest trees, for the budget
    drafter: DrafterChoice | None = None  # None: there are not several
    num_preemptions: int = 0
    num_reasoning_tokens: int = 0  # see RequestUsage
    is_lossy: bool = False  # see RequestUsage

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def is_typical(self) -> bool:
        """Whether its acceptance measures the drafter alone: no draft limit, prediction, grammar or probe."""
        return self.has_usual_trees and not self.has_grammar

    @property
    def has_usual_trees(self) -> bool:
        """Whether its trees are the drafter's, as large as the server allows; a grammar may refuse and add tokens."""
        spec = self.spec
        return spec.draft_limit == UNLIMITED and not spec.predicted_token_ids and not spec.is_probe

    @property
    def has_grammar(self) -> bool:
        return self.spec.params.grammar is not None

    @property
    def is_suspect(self) -> bool:
        """Whether it may have ended an engine, so that its first steps must run it alone."""
        return self.spec.num_deaths > 0 and self.num_verify_steps < PROBATION_STEPS

    @property
    def shares_prefix(self) -> bool:
        """Whether it takes KV from the prefix cache and leaves its own there."""
        return not self.spec.is_audit and not self.is_detached

    @property
    def deadline(self) -> float:
        return self.arrival + self.spec.timeout_s

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are known once all planned steps are done, and that none of them computes; 1 when decoding."""
        pending = len(self.token_ids) - self.num_computed_tokens
        for planned in self.in_flight:
            if planned.samples:
                return 1
            pending -= planned.num_tokens
        return pending

    @property
    def most_tokens(self) -> int:
        """The most tokens that it can have once all planned steps are done."""
        return len(self.token_ids) + sum(1 + planned.num_drafts for planned in self.in_flight if planned.samples)

    @property
    def max_useful_drafts(self) -> int:
        """Draft tokens that could be emitted before the bonus token reaches `max_length`, if planned drafts fail."""
        least = len(self.token_ids) + sum(planned.samples for planned in self.in_flight)
        return self.max_length - least - 1

    def count_verify(self, num_draft_tokens: int, num_accepted: int, no_drafts: str) -> None:
        """Count one verified tree. A tree without drafts counts as a step, but not in the accept histogram.

        `no_drafts` is the reason if it has none, a field of Undrafted. The step that ends the prompt is not counted: it
        samples the first token and verifies nothing.
        """
        if self.num_output_tokens == 0:
            return
        self.num_verify_steps += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted
        self.verified.append((num_draft_tokens, num_accepted))
        if num_draft_tokens:
            self.accept_histogram += [0] * (num_accepted + 1 - len(self.accept_histogram))
            self.accept_histogram[num_accepted] += 1
        else:
            self.undrafted[no_drafts] += 1

    def private_blocks(self) -> list[int]:
        """Blocks that the cache does not hold; they return to the pool with the request."""
        shared = [node.block_id for node in self.shared_path]
        return [b for i, b in enumerate(self.block_ids) if i >= len(shared) or shared[i] != b]

    def usage(self) -> RequestUsage:
        return RequestUsage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_completion_tokens=self.num_output_tokens,
            num_verify_steps=self.num_verify_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted=self.num_accepted,
            num_preemptions=self.num_preemptions,
            accept_histogram=tuple(self.accept_histogram),
            is_lossy=self.is_lossy,
            drafter="" if self.drafter is None else self.drafter.name,
            num_reasoning_tokens=self.num_reasoning_tokens,
            undrafted=Undrafted(**self.undrafted),
        )


class Emitted(NamedTuple):
    """What one step computed and emitted for one request, before it is cut at stop conditions."""

    request: Request
    num_tokens: int  # known tokens the plan asked for
    result: RequestResult
    no_drafts: str  # why it has none, if it might have had some: a field of Undrafted
