"""Request handling behind the routes: from a validated body to submitted engine requests and the HTTP response.

Routes live in `app`, request and response shapes in `protocol` and `replies`.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Response

from specray.engine.request import EngineRequest
from specray.metrics import Snapshot, number
from specray.models.tokenizer import sampling_defaults
from specray.sampling_params import SamplingParams
from specray.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from specray.server.anthropic.replies import MessagesReply
from specray.server.chat.preparation import PreparedChat, count_prompt_tokens, prepare_chat
from specray.server.chat.replies import ChatReply
from specray.server.choices import PreparedPrompt, Truncation, engine_requests, seeded, tenant_scoped
from specray.server.completions.protocol import CompletionRequest
from specray.server.completions.replies import EchoedPrompt, completion_reply
from specray.server.config import ServingConfig
from specray.server.draft_trace import traced
from specray.server.errors import ApiError, short_repr
from specray.server.generate.protocol import GenerateRequest
from specray.server.generate.replies import GenerateReply, choice_names
from specray.server.grammar_check import GrammarCheck, check_command
from specray.server.protocol import WHOLE_CONTEXT, Body, ChatRequest, OpenAIRequest, RequestOptions
from specray.server.replies import OpenAIReply, Reply, ReplyMetadata
from specray.server.responses.protocol import InputTokensRequest, ResponsesRequest
from specray.server.responses.replies import ResponsesReply
from specray.server.responses.store import ResponseStore
from specray.server.routing.client import NOT_READY
from specray.server.routing.messages import RouterInfo
from specray.server.routing.rollout import DrafterRollout
from specray.server.routing.router_pool import DRAINING, RouterPool
from specray.server.speculation import SpeculationCapabilities
from specray.server.streams import EventStream, JsonReply
from specray.server.text_pool import TextPool
from specray.server.tokenization import Tokenization, TokenTexts, with_token_ids
from specray.server.trace_context import CURRENT_TRACE, check_tracing_packages

if TYPE_CHECKING:
    from specray.server.tracing import Tracer  # its packages are optional

GENERATION_TIMEOUT_S = 20.0  # of /health_generate, as SGLang's
MAX_TOKEN_AGE_S = 5.0  # /readyz; an idle engine generates a probe token every few seconds
GRAMMAR_TIMEOUT = "the request's time limit passed before its grammar was compiled; raise timeout, or send it again"
IGNORED_FIELDS_HEADER = "x-specray-ignored-fields"

Json = dict[str, Any]
AnyResponsesRequest = TypeVar("AnyResponsesRequest", bound=InputTokensRequest)


class Service:
    """The request handlers of one ingress replica.

    `load` builds the tokenization for a context length. It is called once, after a router is connected.
    """

    def __init__(self, config: ServingConfig, router_pool: RouterPool, load: Callable[[int], Tokenization]) -> None:
        self.config = config
        self._router_pool = router_pool
        self._load = load
        self._loading = asyncio.Lock()
        self._tokenization: Tokenization | None = None
        self._sampling_defaults: Mapping[str, float | int] = {}  # set with it
        self._grammar_check = GrammarCheck()
        self.response_store = ResponseStore(config.server.response_store_mib * 2**20)
        self.text_pool = TextPool()
        self.tracer = make_tracer(config.server.otlp_traces_endpoint)
        self._created = int(time.time())
        digest = hashlib.sha256(config.engine.model_dump_json().encode()).hexdigest()
        self._fingerprint = f"fp_{digest[:12]}"

    @property
    def drafter_rollout(self) -> DrafterRollout:
        return self._router_pool.drafter_rollout

    async def close(self) -> None:
        """End the process that compiles grammars, if there is one, and send the last traces."""
        await self._grammar_check.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    async def chat(self, body: ChatRequest, tenant: str) -> Response:
        def reply(metadata: ReplyMetadata, chat: PreparedChat, tokens: TokenTexts) -> Reply:
            if body.return_tokens_as_token_ids:
                tokens = with_token_ids(tokens)
            return ChatReply(metadata, chat.token_ids, chat.params, tokens, body.reply_options, chat.output)

        self.check_model(body.model)
        return await self._chat(body, tenant, "chatcmpl", reply, _headers(body))

    async def message(self, body: MessagesRequest, tenant: str) -> Response:
        """Anthropic's /v1/messages."""

        def reply(metadata: ReplyMetadata, chat: PreparedChat, _: TokenTexts) -> Reply:
            body.check_context_management(len(chat.token_ids))
            return MessagesReply(metadata, chat.params, chat.output, len(chat.token_ids))

        self.check_model(body.model)
        return await self._chat(body.for_chat(), tenant, "msg", reply, _headers(body))

    async def response(self, body: ResponsesRequest, tenant: str) -> Response:
        """OpenAI's /v1/responses."""

        def reply(metadata: ReplyMetadata, chat: PreparedChat, tokens: TokenTexts) -> Reply:
            return ResponsesReply(body, metadata, chat.params, tokens, chat.output, keep if is_stored else None)

        def keep(response: Json) -> None:
            self.response_store.add(tenant, response, whole.items)

        self.check_model(body.model)
        is_stored = self.response_store.is_enabled and body.store is not False
        whole = self._continued(body, tenant)
        return await self._chat(whole.for_chat(), tenant, "resp", reply, _headers(body))

    async def count_tokens(self, body: CountTokensRequest | InputTokensRequest, tenant: str) -> int:
        """The length of a conversation's prompt."""
        self.check_model(body.model)
        tokenization = await self._ready()
        whole = body if isinstance(body, CountTokensRequest) else self._continued(body, tenant)
        arguments = whole.for_chat(), tokenization, self.config.server
        num_tokens = await self.text_pool.run(tenant, count_prompt_tokens, *arguments)
        if isinstance(body, CountTokensRequest):
            body.check_context_management(num_tokens)
        return num_tokens

    def _continued(self, body: AnyResponsesRequest, tenant: str) -> AnyResponsesRequest:
        """A request with the conversation before it. ApiError (404) if the previous response is not stored here."""
        if body.previous_response_id is None:
            return body
        return body.continuing(self.response_store.get(tenant, body.previous_response_id).items)

    async def completion(self, body: CompletionRequest, tenant: str) -> Response:
        self.check_model(body.model)
        tokenization, timeout_s = await self._admit(body.timeout)
        body = body.with_defaults(self._sampling_defaults)
        params = seeded(body.sampling())
        add_special, truncation = body.add_special_tokens is not False, self._truncation(body, params)
        token_ids = await self.text_pool.run(tenant, tokenization.prompts, body.prompt, add_special, truncation)
        metadata = self._metadata("cmpl", params)
        request_id = metadata.request_id
        prompts = await self.text_pool.run(tenant, _prepared, tokenization, body, token_ids, params, request_id)
        echoed = await self.text_pool.run(tenant, _echoed, tokenization, body, token_ids, params) if body.echo else []
        tokens = with_token_ids(tokenization.token) if body.return_tokens_as_token_ids else tokenization.token
        make_text = partial(tokenization.text_stream, params)
        reply = completion_reply(body, metadata, token_ids, params, tokens, make_text, echoed)
        return await self._respond(body, tenant, prompts, metadata, reply, _headers(body), timeout_s)

    async def generate(self, body: GenerateRequest, tenant: str) -> Response:
        self.check_model(body.model)
        tokenization, timeout_s = await self._admit(body.timeout)
        body = body.with_defaults(self._sampling_defaults)
        params = body.sampling()
        is_list = body.prompt.is_batch or params[0].n > 1
        if not body.has_own_params:
            seed = seeded(params[0]).seed
            params = [replace(options, seed=seed) for options in params]
        params = [seeded(options) for options in params]
        token_ids = await self.text_pool.run(tenant, tokenization.prompts, body.prompt)
        metadata = self._metadata("gen", params[0])
        names = choice_names(metadata.request_id, body.names, params, is_list)
        prompts = [PreparedPrompt(*prompt) for prompt in zip(token_ids, params, names, strict=True)]
        shows_text = body.return_text_in_logprobs is not False
        reply = GenerateReply(metadata, prompts, tokenization.token, is_list, shows_text)
        return await self._respond(body, tenant, prompts, metadata, reply, _headers(body), timeout_s)

    async def tokenization(self) -> Tokenization:
        """The tokenizer, once an engine is connected. ApiError (503) before."""
        return await self._ready()

    @property
    def info(self) -> RouterInfo:
        """The engines' model and limits. ApiError (503) before one is connected."""
        return self._info()

    async def check_health(self) -> Json:
        """The reply of /health. ApiError (503) unless a request would be served now."""
        self._check_not_draining()
        if not self._router_pool.is_connected:
            raise ApiError(503, NOT_READY)
        await self._ready()
        absent = self._router_pool.absent_drafters
        return {"status": "ok"} | ({"absent_drafters": absent} if absent else {})

    async def check_generation(self) -> None:
        """Generate one token. SpecRayError or ApiError if no engine can."""
        _, timeout_s = await self._admit(GENERATION_TIMEOUT_S)
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        request = EngineRequest(f"health-{uuid.uuid4().hex}", [0], params, is_probe=True)
        request_stream = await self._router_pool.submit([request], timeout_s)
        try:
            async for _ in request_stream.outputs():
                pass
        finally:
            request_stream.close()

    async def abort(self, tenant: str, name: str | None) -> None:
        """End a tenant's requests of this name, or all of them, on every engine. Their replies end with `abort`."""
        await self._router_pool.abort(tenant, name)

    async def flush_caches(self) -> list[str]:
        """Empty the prefix cache of every engine, apart from what running requests use. Returns their replica IDs."""
        return await self._router_pool.flush_caches()

    def check_ready(self) -> None:
        """Raise ApiError (503) if the server is draining or no engine generated a token recently."""
        self._check_not_draining()
        if (seconds := self._router_pool.since_token_s) > MAX_TOKEN_AGE_S:
            last = "none has been generated yet" if seconds == inf else f"the last one was {seconds:.0f} s ago"
            raise ApiError(503, f"no engine is generating tokens: {last}; try again later")

    async def stats(self) -> dict[str, Snapshot]:
        """Metrics of every connected engine, by its router's replica ID."""
        return await self._router_pool.stats()

    async def num_requests(self) -> int:
        """Requests that are computed or wait, on all engines."""
        names = ("specray_num_requests_running", "specray_num_requests_waiting")
        return int(sum(number(snapshot, name) for snapshot in (await self.stats()).values() for name in names))

    def models(self) -> Json:
        names = self.config.server.served_model_name or [self.config.model_name]
        return {"object": "list", "data": [self.model(name) for name in names]}

    def model(self, name: str) -> Json:
        self.check_model(name)
        info = self._router_pool.info
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "specray",
            "root": self.config.model,
            "parent": None,
            "max_model_len": info.context_length if info else self.config.context_length,
        }

    async def model_info(self) -> Json:
        """SGLang's /get_model_info."""
        info = self._info()
        await self._ready()
        return {
            "model_path": self.config.model,
            "tokenizer_path": self.config.model,
            "served_model_name": self.config.model_name,
            "is_generation": True,
            "max_model_len": info.context_length,
            "vocab_size": info.vocab_size,
            "eos_token_ids": info.eos_token_ids,
            "preferred_sampling_params": dict(self._sampling_defaults),
        }

    def capabilities(self) -> Json:
        """The speculation options a request may set, and how speculation affects its output."""
        without = list(self._info().without_graphs)
        return {"model": self.config.model_name, **self._speculation().capabilities(), "without_cuda_graphs": without}

    async def server_info(self) -> Json:
        """SGLang's /server_info: all options in effect but the paths of key files, and the state of the engines."""
        info = self._info()
        speculative = self.drafter_rollout.speculative.model_dump()
        return {
            **self.config.model_dump(exclude={"speculative": True, "server": {"api_key_file", "admin_key_file"}}),
            **{f"speculative_{name}": value for name, value in speculative.items()},
            "max_total_num_tokens": info.num_kv_tokens,
            "max_draft_tokens": info.max_draft_tokens,
            "since_token_s": self._router_pool.token_ages,
            "rank_nodes": self._router_pool.rank_nodes,
            "absent_drafters": self._router_pool.absent_drafters,
            "num_failovers": self._router_pool.num_failovers,  # of this ingress replica
            "internal_states": list((await self.stats()).values()),
        }

    async def _chat(
        self,
        request: ChatRequest,
        tenant: str,
        id_prefix: str,
        make_reply: Callable[[ReplyMetadata, PreparedChat, TokenTexts], Reply],
        headers: Mapping[str, str],
    ) -> Response:
        """Answer a conversation in the dialect of `make_reply`."""
        tokenization, timeout_s = await self._admit(request.timeout)
        request = request.with_defaults(self._sampling_defaults)
        chat = await self.text_pool.run(tenant, prepare_chat, request, tokenization, self.config.server)
        truncation = self._truncation(request, chat.params)
        chat = chat._replace(token_ids=truncation.of(chat.token_ids), params=seeded(chat.params))
        metadata = self._metadata(id_prefix, chat.params)
        reply = make_reply(metadata, chat, tokenization.token)
        prompts = await self.text_pool.run(
            tenant, _prepared, tokenization, request, [chat.token_ids], chat.params, metadata.request_id
        )
        return await self._respond(request, tenant, prompts, metadata, reply, headers, timeout_s)

    async def _respond(
        self,
        body: RequestOptions,
        tenant: str,
        prompts: list[PreparedPrompt],
        metadata: ReplyMetadata,
        reply: Reply,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> Response:
        timeout_s -= await self._check_grammars(prompts, tenant, timeout_s)
        speculation = self._speculation()
        limit, drafter = speculation.draft_limit(body.speculative), speculation.drafter(body.speculative)
        requests = engine_requests(metadata.request_id, prompts, tenant, body.cache_salt or "", limit, drafter)
        if body.traces_drafts:
            requests = [traced(requests, bool(body.stream) and isinstance(reply, OpenAIReply))]
        if (trace := CURRENT_TRACE.get()) is not None:
            trace.describe(self.config.model_name, metadata.request_id, prompts)
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
                    info, tokenization = self._info(), await self._ready()
                    command = check_command(tokenization.folder, info.vocab_size, info.eos_token_ids)
                    await self._grammar_check.check(grammar, tenant, command)
        except TimeoutError:
            raise ApiError(504, GRAMMAR_TIMEOUT) from None
        return round(time.monotonic() - start, 3)

    async def _admit(self, timeout_s: float | None) -> tuple[Tokenization, float]:
        """Check, before any other work, that a request would be accepted now. SpecRayError or ApiError if not.

        Returns the tokenization, and the request's time limit in seconds less the time that it waited for an engine.
        """
        most_s = self.config.server.request_timeout_s
        timeout_s = min(timeout_s or most_s, most_s)
        start = time.monotonic()
        await self._router_pool.wait_for_router(timeout_s)
        waited_s = round(time.monotonic() - start, 3)
        self._router_pool.check_queues()
        return await self._ready(), timeout_s - waited_s

    async def _ready(self) -> Tokenization:
        info = self._info()
        async with self._loading:
            if self._tokenization is None:
                tokenization = await asyncio.to_thread(self._load, info.context_length)
                if self.config.server.generation_config == "auto":
                    self._sampling_defaults = sampling_defaults(Path(tokenization.folder))
                self._tokenization = tokenization
        return self._tokenization

    def _truncation(self, body: OpenAIRequest, params: SamplingParams) -> Truncation:
        limit = body.truncate_prompt_tokens
        if limit == WHOLE_CONTEXT:
            limit = max(1, self._info().context_length - max(1, params.max_tokens or 0))
        return Truncation(limit, body.truncation_side == "right")

    def _check_not_draining(self) -> None:
        if self._router_pool.is_draining:
            raise ApiError(503, DRAINING)

    def _info(self) -> RouterInfo:
        if self._router_pool.info is None:
            raise ApiError(503, NOT_READY)
        return self._router_pool.info

    def _speculation(self) -> SpeculationCapabilities:
        info = self._info()
        arithmetic = " and ".join(filter(None, (self.config.quantization, info.dtype)))
        speculative, most = self.drafter_rollout.speculative, info.max_draft_tokens
        return SpeculationCapabilities(speculative, most, arithmetic, info.has_one_text)

    def _metadata(self, prefix: str, params: SamplingParams) -> ReplyMetadata:
        assert params.seed is not None
        request_id, is_simulated = f"{prefix}-{uuid.uuid4().hex}", self.config.speculative.is_simulated
        return ReplyMetadata(request_id, self.config.model_name, self._fingerprint, params.seed, is_simulated)

    def check_model(self, name: str | None) -> None:
        """ApiError (404) unless a request's `model` is this server's."""
        if name is not None and name not in self.config.model_names and not self.config.server.any_model_name:
            message = f"model={short_repr(name)} is not served here; use {self.config.model_name!r}"
            raise ApiError(404, message, "model", "model_not_found")


def make_tracer(endpoint: str | None) -> "Tracer | None":
    """None without an endpoint. ConfigError if a package is missing."""
    if endpoint is None:
        return None
    check_tracing_packages(endpoint)
    from specray.server.tracing import Tracer, exporting_to

    return Tracer(exporting_to(endpoint))


def _prepared(
    tokenization: Tokenization, body: OpenAIRequest, prompts: list[list[int]], params: SamplingParams, request_id: str
) -> list[PreparedPrompt]:
    names = [body.rid or request_id] * params.n
    if body.bad_words:
        params = replace(params, banned_sequences=tokenization.banned_sequences(body.bad_words))
    predicted: list[int] = []
    if body.prediction is not None:
        predicted = tokenization.encode(body.prediction.content, "prediction", add_special_tokens=False)
    return [PreparedPrompt(token_ids, params, names, predicted) for token_ids in prompts]


def _echoed(
    tokenization: Tokenization, body: CompletionRequest, prompts: Sequence[list[int]], params: SamplingParams
) -> list[EchoedPrompt]:
    """The prompts to repeat: texts as sent, or decoded if truncated; token ids decoded with special tokens."""
    echoed = []
    for item, token_ids in zip(body.prompt.items, prompts, strict=True):
        options = params if isinstance(item, str) else replace(params, skip_special_tokens=False)
        is_sent = isinstance(item, str) and body.truncate_prompt_tokens is None
        text = item if is_sent else tokenization.decode(token_ids, options.skip_special_tokens)
        lengths = tokenization.text_stream(options, ()).feed(token_ids).text_lengths
        echoed.append(EchoedPrompt(str(text), token_ids, lengths))
    return echoed


def _headers(body: Body) -> Mapping[str, str]:
    """The header that names ignored fields, escaped to ASCII because the names come from the client."""
    names = [ascii(name)[1:-1] for name in body.ignored_fields]
    return {IGNORED_FIELDS_HEADER: ", ".join(names)} if names else {}
