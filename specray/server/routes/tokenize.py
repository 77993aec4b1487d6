"""/tokenize and /detokenize, in the shapes of vLLM and of SGLang, and what a client needs to call them."""

from typing import Any, Self

from fastapi import FastAPI
from pydantic import model_validator

from specray.errors import InvalidRequestError
from specray.server.access.auth import Tenant
from specray.server.chat.preparation import prepare_chat
from specray.server.chat.protocol import ChatRequest, Messages, TemplateVariables, Tools
from specray.server.schemas.body import Body, ModelName
from specray.server.schemas.prompts import PromptField, PromptSet
from specray.server.service import Service
from specray.server.tokenization import Tokenization

Json = dict[str, Any]


class TokenizeRequest(Body):
    """Text to tokenize: exactly one of `prompt` and `messages`, which the chat template renders."""

    model: ModelName | None = None
    prompt: PromptField | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("send exactly one of prompt and messages", "prompt")
        if self.prompt is not None and not isinstance(self.prompt.items[0], str):
            raise InvalidRequestError("prompt has token ids already; send a string, or use /detokenize", "prompt")
        return self

    def as_chat(self) -> ChatRequest:
        """The chat request whose prompt is asked for."""
        assert self.messages is not None
        return ChatRequest(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(Body):
    model: ModelName | None = None
    tokens: PromptField
    skip_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _has_token_ids(self) -> Self:
        if isinstance(self.tokens.items[0], str):
            raise InvalidRequestError("tokens has text; send token ids, or use /tokenize", "tokens")
        return self


def add_tokenize_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, tenant: Tenant) -> Json:
        return await _tokenize(service, body, tenant)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, tenant: Tenant) -> Json:
        return await _detokenize(service, body, tenant)


async def _tokenize(service: Service, body: TokenizeRequest, tenant: str) -> Json:
    service.model.check_name(body.model)
    tokenization = await service.model.tokenization()
    if body.messages is not None:
        chat = await service.text_pool.run(tenant, prepare_chat, body.as_chat(), tokenization, service.config.server)
        rows = [chat.token_ids]
    else:
        assert body.prompt is not None
        add_special = body.add_special_tokens is not False
        rows = await service.text_pool.run(tenant, tokenization.prompts, body.prompt, add_special)
    is_batch = body.prompt is not None and body.prompt.is_batch
    strings = [[tokenization.piece(token_id) for token_id in row] for row in rows] if body.return_token_strs else None
    return {
        "tokens": rows if is_batch else rows[0],
        "count": [len(row) for row in rows] if is_batch else len(rows[0]),
        "max_model_len": service.model.info.context_length,
        "token_strs": strings if strings is None or is_batch else strings[0],
    }


async def _detokenize(service: Service, body: DetokenizeRequest, tenant: str) -> Json:
    """vLLM's `prompt` has special tokens; SGLang's `text` has none unless the request wants them."""
    service.model.check_name(body.model)
    tokenization = await service.model.tokenization()
    rows = await service.text_pool.run(tenant, _token_ids, tokenization, body.tokens, service.model.info.vocab_size)
    skips = body.skip_special_tokens
    prompts = await service.text_pool.run(tenant, _decoded, tokenization, rows, skips is True)
    texts = await service.text_pool.run(tenant, _decoded, tokenization, rows, skips is not False)
    is_batch = body.tokens.is_batch
    return {"prompt": prompts if is_batch else prompts[0], "text": texts if is_batch else texts[0]}


def _decoded(tokenization: Tokenization, rows: list[list[int]], skips_special_tokens: bool) -> list[str]:
    return [tokenization.decode(row, skips_special_tokens) for row in rows]


def _token_ids(tokenization: Tokenization, tokens: PromptSet, vocab_size: int) -> list[list[int]]:
    rows = tokenization.prompts(tokens)
    if (largest := max(map(max, rows))) >= vocab_size:
        raise InvalidRequestError(
            f"tokens has token id {largest}, but the vocabulary has {vocab_size} tokens", "tokens"
        )
    return rows
