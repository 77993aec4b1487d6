"""What an arm of a comparison is, and the one that measures: our engine with one drafting method.

An arm answers jobs and times them; it knows nothing of other arms. Not here: the yardstick (`transformers_arm`),
order and repeats (`measure`), statistics (`report`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pydantic import ValidationError

from specray.config import SpeculativeConfig
from specray.engine.request import EngineRequest
from specray.errors import ConfigError, EngineDeadError
from specray.llm import LLM
from specray.models.llama import Llama
from specray.outputs import FinishReason, RequestOutput, RequestUsage
from specray.sampling_params import SamplingParams
from specray.spec_decode import DRAFTERS
from specray.worker.local import LocalExecutor

PLAIN = "plain"
TRANSFORMERS = "transformers"


class Job(NamedTuple):
    """One prompt to answer; `params.seed` is set."""

    token_ids: list[int]
    params: SamplingParams


@dataclass(slots=True)
class Reply:
    """One job's answer and times, in seconds."""

    token_ids: list[int] = field(default_factory=list)
    ttft: float = 0.0  # from submission to the first token
    seconds: float = 0.0  # from submission to the last token
    usage: RequestUsage | None = None  # None: the arm does not verify

    @property
    def tpot(self) -> float | None:
        """Mean gap between tokens after the first; None where there is none."""
        return (self.seconds - self.ttft) / (len(self.token_ids) - 1) if len(self.token_ids) > 1 else None


@dataclass(frozen=True, slots=True)
class Run:
    """One arm's pass over some jobs."""

    replies: list[Reply]
    seconds: float
    host_shares: list[float]  # of each engine step

    @property
    def tokens_per_s(self) -> float:
        return sum(len(reply.token_ids) for reply in self.replies) / self.seconds


class Arm(Protocol):
    @property
    def name(self) -> str: ...

    def run(self, jobs: Sequence[Job], concurrency: int, cache_salt: str) -> Run:
        """Answer `jobs` in order, at most `concurrency` at once. Nothing learnt under another salt may help."""
        ...


def parse_method(name: str, configured: SpeculativeConfig = SpeculativeConfig()) -> SpeculativeConfig:  # noqa: B008
    """The speculation an arm's name stands for: `plain`, a method (`ngram`), or one with tree nodes (`ngram:8`).

    Options of `configured` hold for an arm of the same method. Raises ConfigError for an unknown name.
    """
    method, colon, nodes = name.partition(":")
    if name == PLAIN:
        return SpeculativeConfig()
    if method.upper() not in DRAFTERS or (colon and not nodes.isdecimal()):
        known = ", ".join([PLAIN, TRANSFORMERS, *(drafter.lower() for drafter in DRAFTERS)])
        raise ConfigError(f"arm {name!r} is not known; choose from {known}, with :N for N tree nodes (ngram:8)")
    same = configured if configured.algorithm == method.upper() else SpeculativeConfig(algorithm=method.upper())
    return _with_nodes(same, int(nodes)) if colon else same


def _with_nodes(config: SpeculativeConfig, num_draft_tokens: int) -> SpeculativeConfig:
    try:
        return SpeculativeConfig.model_validate({**config.model_dump(), "num_draft_tokens": num_draft_tokens})
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(f"num_draft_tokens={num_draft_tokens}: {reason}; choose another number of nodes") from None


def target_of(llm: LLM) -> Llama:
    """The target's weights behind an in-process engine."""
    executor = llm.engine.executor
    assert isinstance(executor, LocalExecutor)
    return executor.worker.model


class EngineArm:
    """Our engine, driven step by step."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self._engine = llm.engine
        self._num_jobs = 0

    def run(self, jobs: Sequence[Job], concurrency: int, cache_salt: str) -> Run:
        waiting = [self._request(job, cache_salt) for job in reversed(jobs)]
        order = [request.request_id for request in reversed(waiting)]
        replies: dict[str, Reply] = {}
        running: dict[str, float] = {}  # request id -> when it was submitted
        host_shares = []
        start = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < concurrency:
                request = waiting.pop()
                self._engine.add_request(request)
                running[request.request_id], replies[request.request_id] = time.perf_counter(), Reply()
            host_shares += self._step(running, replies)
        seconds = time.perf_counter() - start
        self._engine.step()  # give the last rows back
        return Run([replies[request_id] for request_id in order], seconds, host_shares)

    def _step(self, running: dict[str, float], replies: dict[str, Reply]) -> list[float]:
        """One engine step; its host share, if it did anything."""
        phases = self._engine.stats.labelled["specray_step_seconds_total"]
        before = dict(phases)
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            _note(replies[output.request_id], output, now - running[output.request_id])
            if output.finish_reason is not None:
                del running[output.request_id]
        spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in phases.items()}
        total = sum(spent.values())
        return [spent["host"] / total] if total else []

    def _request(self, job: Job, cache_salt: str) -> EngineRequest:
        self._num_jobs += 1
        return EngineRequest(f"{self.name}-{self._num_jobs}", job.token_ids, job.params, cache_salt)


def _note(reply: Reply, output: RequestOutput, elapsed: float) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise EngineDeadError(f"{output.request_id}: {output.error}")
    if output.token_ids and not reply.token_ids:
        reply.ttft = elapsed
    reply.token_ids += output.token_ids
    reply.seconds, reply.usage = elapsed, output.usage
