"""The progress of one request over several engines: what the next one continues, and whether it ended the last ones."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

from specray.engine.engine_request import PROBATION_STEPS, EngineRequest
from specray.outputs import RequestOutput, RequestUsage, add_histograms
from specray.server.routing.client import RouterLostError

# A request is the cause if so many engines have ended while they computed it, or one that computed nothing else.
MAX_DEATHS = 3


class EngineDeath(NamedTuple):
    """The end of an engine that computed a request."""

    replica_id: str
    node_id: str  # its router's node
    was_alone: bool  # the engine computed nothing else, because the request was a suspect


class RequestProgress:
    """One request of a `router_pool.RequestStream`, its output so far, and the engines that ended while they had it."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self.deaths: list[EngineDeath] = []  # engines that ended while they computed it
        self._emitted: list[int] = []
        self._has_prompt_logprobs = False
        self._drafter = request.drafter  # the next engine keeps it, if it has such a drafter
        self._usage: RequestUsage | None = None
        self._usage_before: RequestUsage | None = None  # of earlier attempts
        self._has_begun, self._num_steps = False, 0  # of this attempt

    def attempt(self, number: int, timeout_s: float) -> EngineRequest:
        """The request for the next engine, with the remaining time and its own request id."""
        self._has_begun, self._num_steps = False, 0
        if number == 0:
            return replace(self._request, timeout_s=timeout_s)
        self._usage_before = self._usage
        request_id = f"{self._request.request_id}~{number}"
        emitted = tuple(self._emitted)
        params = self._request.params
        if self._has_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)
        return replace(
            self._request,
            request_id=request_id,
            params=params,
            emitted_token_ids=emitted,
            timeout_s=timeout_s,
            drafter=self._drafter,
            num_deaths=len(self.deaths),
        )

    @property
    def request_id(self) -> str:
        return self._request.request_id

    def dies_with(self, lost: RouterLostError) -> bool:
        """Record that an engine was lost while it computed this request, and return whether that may be the cause."""
        self.deaths = [death for death in self.deaths if death.replica_id != lost.replica_id]  # was only silent
        is_known = lost.end.request_ids is not None
        # A router that ended without a ConnectionEnd computed only its first suspect, unless it had none.
        was_alone = lost.end.was_alone if is_known else self._has_begun and self._num_steps < PROBATION_STEPS
        self.deaths.append(EngineDeath(lost.replica_id, lost.node_id, was_alone and bool(self.deaths)))
        return self.deaths[-1].was_alone or len(self.deaths) >= MAX_DEATHS

    def is_poison(
        self, lost_nodes: Collection[str], running: Collection[str], has_cause: Callable[[str], bool]
    ) -> bool:
        """Whether no other engine may get the request: it is proven to be the cause, or is one too often.

        Engines do not count if they ended with their nodes, or are `running` again because they were only silent. Those
        that another request has ended (`has_cause`) count only as the first of two.
        """
        self.deaths = [
            death for death in self.deaths if death.node_id not in lost_nodes and death.replica_id not in running
        ]
        return self.is_proven or sum(not has_cause(death.replica_id) for death in self.deaths) >= MAX_DEATHS

    @property
    def is_proven(self) -> bool:
        """Whether two engines have ended while they computed it, the last one alone."""
        return len(self.deaths) > 1 and self.deaths[-1].was_alone

    def add(self, output: RequestOutput) -> RequestOutput:
        """Record an output, and return it with the usage of all attempts."""
        self._emitted += output.token_ids
        self._has_begun, self._num_steps = True, output.usage.num_verify_steps
        self._has_prompt_logprobs = self._has_prompt_logprobs or output.prompt_logprobs is not None
        self._usage = _merge_usage(self._usage_before, output.usage)
        self._drafter = output.usage.drafter or self._drafter
        return output._replace(usage=self._usage)


def _merge_usage(before: RequestUsage | None, now: RequestUsage) -> RequestUsage:
    """Usage over all attempts. The last engine counts the tokens of earlier ones as its own completion tokens."""
    if before is None:
        return now
    return now._replace(
        num_cached_tokens=before.num_cached_tokens,
        num_verify_steps=before.num_verify_steps + now.num_verify_steps,
        num_draft_tokens=before.num_draft_tokens + now.num_draft_tokens,
        num_accepted=before.num_accepted + now.num_accepted,
        num_preemptions=before.num_preemptions + now.num_preemptions,
        accept_histogram=tuple(add_histograms((before.accept_histogram, now.accept_histogram))),
        is_lossy=before.is_lossy or now.is_lossy,
        undrafted=before.undrafted.plus(now.undrafted),
    )
