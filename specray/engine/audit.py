"""Audits: finished requests are computed again without drafts while nothing else is to be done.

One seed gives one text whatever drafts it. Tests show that for the drafters and machines that they run on; an audit
shows it for the requests that a server answers. An audit shares no KV with other requests, changes no statistics but
its own, and makes way for any other request: it continues later, after the tokens that were compared. It computes its
tokens so far again then, so audits do not begin in the short pauses between the requests of a busy server. Several run
at once, because steps of a few requests without drafts cost little more than those of one.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from random import Random

from specray.engine.engine_request import EngineRequest
from specray.engine.request import Request
from specray.engine.stats import EngineStats
from specray.outputs import FinishReason, RequestOutput
from specray.step import DraftLimit

MAX_PENDING = 16  # finished requests that wait for an audit; further ones are not sampled
MAX_RUNNING = 4  # audits that are computed at once
IDLE_S = 0.25  # since a client's last request, before an audit begins

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Audit:
    """A finished request and what was computed again of it."""

    request: Request
    drafter: str
    request_id: str  # of the request that computes it again
    expected: Sequence[int]  # the output with drafts
    token_ids: list[int]  # the output without drafts so far; equal to the start of `expected` until `is_over`
    is_over: bool = False

    @property
    def spec(self) -> EngineRequest:
        """The request that computes the rest of it."""
        spec = self.request.spec
        return replace(
            spec,
            request_id=self.request_id,
            params=replace(spec.params, logprobs=None, prompt_logprobs=None),
            tenant="",
            name="",
            timeout_s=inf,
            num_deaths=0,
            draft_limit=DraftLimit(0, 0),
            emitted_token_ids=list(self.token_ids),
            predicted_token_ids=(),
            traces_drafts=False,
            reports_times=False,
            is_probe=True,
            is_audit=True,
        )


class Auditor:
    """The requests to be audited. Used in the engine's thread."""

    def __init__(
        self,
        share: float,
        stats: EngineStats,
        random: Random,
        on_mismatch: Callable[[Request, str, list[int]], object],
        idle_s: float = IDLE_S,
    ) -> None:
        """Sample `share` of the requests, 0 to 1, and compute them when no client's request was there for `idle_s`.

        `on_mismatch` is called with a request whose text depended on its drafts, its drafter, and the tokens without
        drafts, up to the first that differs.
        """
        self._share = share
        self._stats = stats
        self._random = random
        self._on_mismatch = on_mismatch
        self._idle_s = idle_s
        self._not_before = 0.0
        self._pending: deque[Audit] = deque()
        self._numbers = count()
        self.running: dict[str, Audit] = {}  # by the IDs of the requests that compute them

    @property
    def wait_s(self) -> float | None:
        """Seconds until there is something to compute, if no client's request arrives; None if there is nothing."""
        if self.running:
            return 0.0
        return max(0.0, self._not_before - time.monotonic()) if self._pending else None

    def sample(self, request: Request, drafter: str) -> None:
        """Perhaps audit a request that has ended: one with a whole text that drafts may not change."""
        assert request.finish_reason is not None
        spec = request.spec
        if not spec.is_probe:
            self._not_before = time.monotonic() + self._idle_s
        is_own = not spec.is_probe and not spec.emitted_token_ids  # another engine has made no part of the text
        is_comparable = is_own and request.finish_reason.is_complete and not request.is_lossy
        if not is_comparable or not any(drafts for drafts, _ in request.verified):
            return
        if len(self._pending) < MAX_PENDING and self._random.random() < self._share:
            name = drafter if request.drafter is None else request.drafter.name
            # From 0 on, because a rate misses the increment that a series begins with.
            self._stats.add_labelled("specray_audit_mismatches_total", name, 0)
            expected = request.token_ids[request.num_prompt_tokens :]
            self._pending.append(Audit(request, name, f"audit-{next(self._numbers)}", expected, []))

    def start(self) -> EngineRequest | None:
        """One more request to compute now; None if there is none, or a client's has ended a moment ago."""
        if not self._pending or self.wait_s or len(self.running) == MAX_RUNNING:
            return None
        audit = self._pending.popleft()
        self.running[audit.request_id] = audit
        return audit.spec

    def take(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Compare what was computed again; returns the other outputs."""
        others = []
        for output in outputs:
            if (audit := self.running.get(output.request_id)) is not None:
                self._compare(audit, output)
            else:
                others.append(output)
        return others

    def _compare(self, audit: Audit, output: RequestOutput) -> None:
        audit.token_ids += output.token_ids
        known, ended = audit.expected[: len(audit.token_ids)], output.finish_reason
        is_complete = ended is not None and ended.is_complete
        is_shorter = is_complete and len(audit.token_ids) < len(audit.expected)
        if not audit.is_over and (audit.token_ids != known or is_shorter):
            audit.is_over = True
            self._report(audit)
        if ended is None:
            return
        del self.running[audit.request_id]
        if is_complete or audit.is_over:
            self._stats.add("specray_audit_requests_total")
        elif ended is FinishReason.ABORT:  # it made way
            self._pending.appendleft(audit)

    def _report(self, audit: Audit) -> None:
        pairs = zip(audit.token_ids, audit.expected, strict=False)
        place = next((i for i, (token, known) in enumerate(pairs) if token != known), len(audit.token_ids))
        self._stats.add_labelled("specray_audit_mismatches_total", audit.drafter)
        logger.error(
            "the text of %s depended on its drafts: output token %d of %d differs without them (drafter %s, seed %s)",
            audit.request.request_id,
            place,
            len(audit.expected),
            audit.drafter,
            audit.request.spec.params.seed,
        )
        self._on_mismatch(audit.request, audit.drafter, audit.token_ids[: place + 1])
