"""What every request that generates text passes: waiting for an engine, checks of its grammars, and submission."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from fastapi import Response

from specray.server.choices import PreparedPrompt, engine_requests
from specray.server.config import ServingConfig
from specray.server.draft_trace import traced
from specray.server.errors import ApiError
from specray.server.grammar_check import GrammarCheck, check_command
from specray.server.model import ServedModel
from specray.server.monitoring.tracing import CURRENT_TRACE
from specray.server.replies import OpenAIReply, Reply, ReplyMetadata
from specray.server.routing.router_pool import RouterPool
from specray.server.schemas.body import RequestOptions
from specray.server.streams import EventStream, JsonReply
from specray.server.tokenization import Tokenization
from specray.tenants import tenant_scoped

GRAMMAR_TIMEOUT = "the request's time limit passed before its grammar was compiled; raise timeout, or send it again"


class RequestSubmitter:
    """Admits requests, and submits them to the engines of one ingress replica."""

    def __init__(self, config: ServingConfig, router_pool: RouterPool, model: ServedModel) -> None:
        self._config = config
        self._router_pool = router_pool
        self._model = model
        self._grammar_check = GrammarCheck()

    async def close(self) -> None:
        """End the process that compiles grammars, if there is one."""
        await self._grammar_check.close()

    async def admit(self, timeout_s: float | None) -> tuple[Tokenization, float]:
        """Check, before any other work, that a request would be accepted now. SpecRayError or ApiError if not.

        Returns the tokenization, and the request's time limit in seconds less the time that it waited for an engine.
        """
        most_s = self._config.server.request_timeout_s
        timeout_s = min(timeout_s or most_s, most_s)
        start = time.monotonic()
        await self._router_pool.wait_for_router(timeout_s)
        waited_s = round(time.monotonic() - start, 3)
        self._router_pool.check_queues()
        return await self._model.tokenization(), timeout_s - waited_s

    async def submit(
        self,
        body: RequestOptions,
        tenant: str,
        prompts: list[PreparedPrompt],
        metadata: ReplyMetadata,
        reply: Reply,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> Response:
        """Submit an admitted request's prompts to an engine. Returns the response, which its outputs fill."""
        timeout_s -= await self._check_grammars(prompts, tenant, timeout_s)
        speculation = self._model.speculation
        limit, drafter = speculation.draft_limit(body.speculative), speculation.drafter(body.speculative)
        requests = engine_requests(metadata.request_id, prompts, tenant, body.cache_salt or "", limit, drafter)
        if body.queue_priority:
            requests = [replace(request, priority=body.queue_priority) for request in requests]
        if body.traces_drafts:
            requests = [traced(requests, bool(body.stream) and isinstance(reply, OpenAIReply))]
        if (trace := CURRENT_TRACE.get()) is not None:
            trace.describe(self._config.model_name, metadata.request_id, prompts)
            requests = [replace(request, reports_times=True) for request in requests]
        session = tenant_scoped(tenant, body.prompt_cache_key) if body.prompt_cache_key else ""
        request_stream = await self._router_pool.submit(requests, timeout_s, session)
        return (EventStream if body.stream else JsonReply)(request_stream, reply, headers)

    async def _check_grammars(self, prompts: list[PreparedPrompt], tenant: str, timeout_s: float) -> float:
        """Check that all grammars compile; returns the seconds that it took, rounded to milliseconds.

        InvalidRequestError if one cannot be compiled within its limits, ApiError (504) if the check takes longer than
        `timeout_s`.
        """
        start = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                for grammar in {prompt.params.grammar for prompt in prompts} - {None}:
                    assert grammar is not None
                    info, tokenization = self._model.info, await self._model.tokenization()
                    command = check_command(tokenization.folder, info.vocab_size, info.eos_token_ids)
                    await self._grammar_check.check(grammar, tenant, command)
        except TimeoutError:
            raise ApiError(504, GRAMMAR_TIMEOUT) from None
        return round(time.monotonic() - start, 3)
