"""The endpoints that generate text or count its tokens: from a validated body to the HTTP response.

Bodies and replies of each API live in its package; what all requests pass on their way to an engine, in `submission`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Response

from specray.sampling_params import SamplingParams
from specray.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from specray.server.anthropic.replies import MessagesReply
from specray.server.chat.preparation import PreparedChat, count_prompt_tokens, prepare_chat
from specray.server.chat.protocol import ChatRequest
from specray.server.chat.replies import ChatReply
from specray.server.choices import PreparedPrompt, Truncation, seeded
from specray.server.completions.protocol import CompletionRequest
from specray.server.completions.replies import BestOfReply, CompletionReply, EchoedPrompt
from specray.server.config import ServerConfig
from specray.server.generate.protocol import GenerateRequest
from specray.server.generate.replies import GenerateReply, choice_names
from specray.server.model import ServedModel
from specray.server.replies import Reply, ReplyMetadata
from specray.server.responses.protocol import InputTokensRequest, ResponsesRequest
from specray.server.responses.replies import ResponsesReply
from specray.server.responses.store import ResponseStore
from specray.server.schemas.body import WHOLE_CONTEXT, Body, OpenAIRequest
from specray.server.submission import RequestSubmitter
from specray.server.tokenization import TextPool, Tokenization, TokenTexts, with_token_ids

IGNORED_FIELDS_HEADER = "x-specray-ignored-fields"

Json = dict[str, Any]
AnyResponsesRequest = TypeVar("AnyResponsesRequest", bound=InputTokensRequest)


class GenerationEndpoints:
    """One method for each endpoint."""

    def __init__(
        self,
        config: ServerConfig,
        model: ServedModel,
        submitter: RequestSubmitter,
        text_pool: TextPool,
        response_store: ResponseStore,
    ) -> None:
        self._config = config
        self._model = model
        self._submitter = submitter
        self._text_pool = text_pool
        self._response_store = response_store

    async def chat(self, body: ChatRequest, tenant: str) -> Response:
        """OpenAI's /v1/chat/completions."""

        def reply(metadata: ReplyMetadata, chat: PreparedChat, tokens: TokenTexts) -> Reply:
            if body.return_tokens_as_token_ids:
                tokens = with_token_ids(tokens)
            return ChatReply(metadata, chat.token_ids, chat.params, tokens, body.reply_options, chat.output)

        self._model.check_name(body.model)
        return await self._chat(body, tenant, "chatcmpl", reply, _headers(body))

    async def message(self, body: MessagesRequest, tenant: str) -> Response:
        """Anthropic's /v1/messages."""

        def reply(metadata: ReplyMetadata, chat: PreparedChat, _: TokenTexts) -> Reply:
            body.check_context_management(len(chat.token_ids))
            return MessagesReply(metadata, chat.params, chat.output, len(chat.token_ids))

        self._model.check_name(body.model)
        return await self._chat(body.for_chat(), tenant, "msg", reply, _headers(body))

    async def response(self, body: ResponsesRequest, tenant: str) -> Response:
        """OpenAI's /v1/responses."""

        def reply(metadata: ReplyMetadata, chat: PreparedChat, tokens: TokenTexts) -> Reply:
            return ResponsesReply(body, metadata, chat.params, tokens, chat.output, keep if is_stored else None)

        def keep(response: Json) -> None:
            self._response_store.add(tenant, response, whole.items)

        self._model.check_name(body.model)
        is_stored = self._response_store.is_enabled and body.store is not False
        whole = self._continued(body, tenant)
        return await self._chat(whole.for_chat(), tenant, "resp", reply, _headers(body))

    async def count_tokens(self, body: CountTokensRequest | InputTokensRequest, tenant: str) -> int:
        """The length of a conversation's prompt."""
        self._model.check_name(body.model)
        tokenization = await self._model.tokenization()
        whole = body if isinstance(body, CountTokensRequest) else self._continued(body, tenant)
        arguments = whole.for_chat(), tokenization, self._config
        num_tokens = await self._text_pool.run(tenant, count_prompt_tokens, *arguments)
        if isinstance(body, CountTokensRequest):
            body.check_context_management(num_tokens)
        return num_tokens

    async def completion(self, body: CompletionRequest, tenant: str) -> Response:
        """OpenAI's /v1/completions."""
        self._model.check_name(body.model)
        tokenization, timeout_s = await self._submitter.admit(body.timeout)
        body = body.with_defaults(self._model.sampling_defaults)
        params = seeded(body.sampling())
        add_special, truncation = body.add_special_tokens is not False, self._truncation(body, params)
        token_ids = await self._text_pool.run(tenant, tokenization.prompts, body.prompt, add_special, truncation)
        metadata = self._model.metadata("cmpl", params)
        request_id = metadata.request_id
        prompts = await self._text_pool.run(tenant, _prepared, tokenization, body, token_ids, params, request_id)
        echoed = await self._text_pool.run(tenant, _echoed, tokenization, body, token_ids, params) if body.echo else []
        tokens = with_token_ids(tokenization.token) if body.return_tokens_as_token_ids else tokenization.token
        make_text = partial(tokenization.text_stream, params)
        reply_class = BestOfReply if body.num_generated > body.num_choices else CompletionReply
        reply = reply_class(body, metadata, token_ids, params, tokens, make_text, echoed)
        return await self._submitter.submit(body, tenant, prompts, metadata, reply, _headers(body), timeout_s)

    async def generate(self, body: GenerateRequest, tenant: str) -> Response:
        """SGLang's /generate."""
        self._model.check_name(body.model)
        tokenization, timeout_s = await self._submitter.admit(body.timeout)
        body = body.with_defaults(self._model.sampling_defaults)
        params = body.sampling()
        is_list = body.prompt.is_batch or params[0].n > 1
        if not body.has_own_params:
            seed = seeded(params[0]).seed
            params = [replace(options, seed=seed) for options in params]
        params = [seeded(options) for options in params]
        token_ids = await self._text_pool.run(tenant, tokenization.prompts, body.prompt)
        metadata = self._model.metadata("gen", params[0])
        names = choice_names(metadata.request_id, body.names, params, is_list)
        prompts = [PreparedPrompt(*prompt) for prompt in zip(token_ids, params, names, strict=True)]
        shows_text = body.return_text_in_logprobs is not False
        reply = GenerateReply(metadata, prompts, tokenization.token, is_list, shows_text)
        return await self._submitter.submit(body, tenant, prompts, metadata, reply, _headers(body), timeout_s)

    async def _chat(
        self,
        request: ChatRequest,
        tenant: str,
        id_prefix: str,
        make_reply: Callable[[ReplyMetadata, PreparedChat, TokenTexts], Reply],
        headers: Mapping[str, str],
    ) -> Response:
        """Answer a conversation in the dialect of `make_reply`."""
        tokenization, timeout_s = await self._submitter.admit(request.timeout)
        request = request.with_defaults(self._model.sampling_defaults)
        chat = await self._text_pool.run(tenant, prepare_chat, request, tokenization, self._config)
        truncation = self._truncation(request, chat.params)
        chat = chat._replace(token_ids=truncation.of(chat.token_ids), params=seeded(chat.params))
        metadata = self._model.metadata(id_prefix, chat.params)
        reply = make_reply(metadata, chat, tokenization.token)
        prompts = await self._text_pool.run(
            tenant, _prepared, tokenization, request, [chat.token_ids], chat.params, metadata.request_id
        )
        return await self._submitter.submit(request, tenant, prompts, metadata, reply, headers, timeout_s)

    def _continued(self, body: AnyResponsesRequest, tenant: str) -> AnyResponsesRequest:
        """A request with the conversation before it. ApiError (404) if the previous response is not stored here."""
        if body.previous_response_id is None:
            return body
        return body.continuing(self._response_store.get(tenant, body.previous_response_id).items)

    def _truncation(self, body: OpenAIRequest, params: SamplingParams) -> Truncation:
        limit = body.truncate_prompt_tokens
        if limit == WHOLE_CONTEXT:
            limit = max(1, self._model.info.context_length - max(1, params.max_tokens or 0))
        return Truncation(limit, body.truncation_side == "right")


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
