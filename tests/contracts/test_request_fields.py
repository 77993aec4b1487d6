"""Every field of the SDKs' and the engines' request models is honoured, refused or known to be harmless.

`tests/data/engine_fields.json` has the fields of vLLM's and SGLang's published request models, by endpoint.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_completion_create_params
from openai.types.responses import response_create_params
from pydantic import ValidationError

from specray.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from specray.server.chat.protocol import ChatRequest
from specray.server.completions.protocol import CompletionRequest
from specray.server.errors import from_validation
from specray.server.generate.protocol import GenerateRequest, GenerateSampling
from specray.server.responses.protocol import ResponsesRequest
from specray.server.routes.engine import AbortRequest
from specray.server.routes.tokenize import DetokenizeRequest, TokenizeRequest
from specray.server.schemas.body import Body, StreamOptions
from specray.server.schemas.request_fields import GENERATION, HARMLESS, REFUSED

ENGINES: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parents[1] / "data/engine_fields.json").read_text(encoding="utf-8")
)
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/generate": GenerateRequest,
    "sampling_params": GenerateSampling,
    "stream_options": StreamOptions,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort_request": AbortRequest,
}
SDKS: dict[str, tuple[Any, ...]] = {
    "/v1/chat/completions": (chat_completion_create_params.CompletionCreateParamsBase,),
    "/v1/completions": (completion_create_params.CompletionCreateParamsBase,),
    "/v1/responses": (response_create_params.ResponseCreateParamsBase,),
    "/v1/messages": (
        message_create_params.MessageCreateParamsBase,
        beta_message_create_params.MessageCreateParamsBase,
    ),
    "/v1/messages/count_tokens": (message_count_tokens_params.MessageCountTokensParams,),
    "stream_options": (ChatCompletionStreamOptionsParam,),
}
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")


def published_fields() -> Iterator[tuple[str, str]]:
    """Endpoint and name of each field of a published request model."""
    for endpoints in ENGINES.values():
        for endpoint, names in endpoints.items():
            yield from ((endpoint, name) for name in names.split())
    for endpoint, models in SDKS.items():
        yield from ((endpoint, name) for model in models for name in model.__annotations__)


def refused_name(body: type[Body], fields: dict[str, Any]) -> str | None:
    """The field that the first error of a body names; a body that lacks a required field is refused too."""
    try:
        body.model_validate(fields)
    except ValidationError as error:
        return from_validation(error.errors()).param
    return None


def test_the_published_models_were_found() -> None:
    fields = set(published_fields())
    assert len(fields) > 400
    assert {("/v1/chat/completions", "web_search_options"), ("/generate", "token_ids_logprob")} <= fields
    assert BODIES.keys() == {endpoint for endpoint, _ in fields}


@pytest.mark.parametrize("endpoint", BODIES)
def test_every_published_field_is_honoured_refused_or_harmless(endpoint: str) -> None:
    body = BODIES[endpoint]
    known = body.model_fields.keys() | body.refused_fields().keys() | HARMLESS.keys()
    published = {name for place, name in published_fields() if place == endpoint}
    assert sorted(published - known) == []


@pytest.mark.parametrize("endpoint", GENERATING)
def test_a_field_that_another_endpoint_honours_is_not_ignored_in_silence(endpoint: str) -> None:
    body = BODIES[endpoint]
    known = body.model_fields.keys() | body.refused_fields().keys() | HARMLESS.keys()
    honoured = {name for place in GENERATING for name in BODIES[place].model_fields}
    assert sorted(honoured - known) == []


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_refused_field_gets_a_400_that_names_it_unless_it_is_turned_off(endpoint: str) -> None:
    body = BODIES[endpoint]
    for name, refusal in body.refused_fields().items():
        assert refused_name(body, {name: {"type": "something"}}) == name
        for value in (None, *refusal.accepted):
            assert refused_name(body, {name: value}) != name


def test_no_field_is_in_two_tables() -> None:
    assert not REFUSED.keys() & GENERATION.keys()
    assert not (REFUSED | GENERATION).keys() & HARMLESS.keys()
