"""The body of /v1/responses, and its translation to a chat request."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specray.errors import InvalidRequestError
from specray.sampling_params import AllowedTokenIds, MaxTokens, MinTokens, NumLogprobs, Seed
from specray.server.chat.protocol import ChatRequest, ReasoningEffort
from specray.server.responses.items import AnyItem, HostedItem, Input, MessageItem, chat_messages
from specray.server.responses.tools import FunctionChoice, ResponseTools, ToolSet
from specray.server.schemas.body import Body, ModelName, Priority, RequestName, RequestOptions, Sampling, ServiceTier
from specray.server.schemas.parts import BodyPart, check_number_of_parts
from specray.server.schemas.request_fields import GENERATION, REFUSED, FieldRefusal, Refusals

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
# All but log probabilities belong to items that this server never generates. Encrypted reasoning is always null.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
]

# Fields for which this server has no counterpart.
_UNAVAILABLE: Refusals = {
    "conversation": FieldRefusal((), "conversations are not stored, so send the whole conversation in input"),
    "background": FieldRefusal((False,), "a response is generated while its client waits; set background=false"),
    "prompt": FieldRefusal((), "there are no stored prompts; send instructions and input"),
    "truncation": FieldRefusal(
        ("disabled",), "input is never dropped silently; shorten it and set truncation='disabled'"
    ),
    "context_management": FieldRefusal(([],), "input is never compacted; leave context_management out"),
    "moderation": FieldRefusal((), "there is no moderation; leave it out"),
}


class ReasoningOptions(BodyPart):
    effort: ReasoningEffort | None = None


class TextFormat(BodyPart):
    """`schema`, `name` and the rest of a format are passed on to `response_format`."""

    type: Literal["text", "json_object", "json_schema"]

    def for_chat(self) -> Json:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": self.model_extra}


class TextOptions(BodyPart):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no chat template has it


class InputTokensRequest(Sampling, RequestOptions):
    """Body of /v1/responses/input_tokens: what becomes part of the prompt."""

    refusals = REFUSED | _UNAVAILABLE

    model: ModelName | None = None
    input: Input = Field(default_factory=list)
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    instructions: str | None = None
    tools: ResponseTools | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_parts(cls, value: object) -> object:
        if isinstance(value, dict):
            check_number_of_parts(value.get("input"), "input")
        return value

    @cached_property
    def tool_set(self) -> ToolSet:
        return ToolSet(self.tools or [])

    def _ignored_parts(self) -> list[str]:
        reasoning = (self.reasoning.model_extra if self.reasoning else None) or {}
        has_verbosity = self.text is not None and self.text.verbosity not in (None, "medium")
        hosted = [f"input.{item.type}" for item in self.items if isinstance(item, HostedItem)]
        return [
            *(f"reasoning.{key}" for key, value in reasoning.items() if value is not None),
            *(["text.verbosity"] if has_verbosity else []),
            *(f"tools.{kind}" for kind in self.tool_set.hosted),
            *(f"tools.{name}.format" for name in self.tool_set.with_grammars),
            *dict.fromkeys(hosted),
        ]

    @property
    def items(self) -> list[AnyItem]:
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def continuing(self, conversation: Sequence[AnyItem]) -> Self:
        """A copy with the whole conversation in `input`."""
        return self.model_copy(update={"input": [*conversation, *self.items]})

    def for_chat(self) -> ChatRequest:
        """The request for chat completions. Raises ApiError."""
        return ChatRequest.translated(self._chat_fields())

    def _chat_fields(self) -> Json:
        own = {name: getattr(self, name) for name in {**Sampling.model_fields, **RequestOptions.model_fields}}
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = [*system, *chat_messages(self.items)]
        if not messages:
            raise InvalidRequestError("input has no message; send one, or instructions", "input")
        return own | {
            "tool_choice": self.tool_set.choice_for_chat(self.tool_choice),
            "messages": messages,
            "tools": self.tool_set.for_chat() or None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": self.text.format.for_chat() if self.text and self.text.format else None,
        }


class ResponsesRequest(InputTokensRequest):
    """Body of /v1/responses."""

    refusals = InputTokensRequest.refusals | GENERATION
    synonyms: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), "max_output_tokens"),
        "messages": "input",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    n: Literal[1] | None = None
    seed: Seed | None = None
    rid: RequestName | None = None
    priority: Priority | None = None
    service_tier: ServiceTier | None = None
    max_output_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    store: bool | None = None
    top_logprobs: NumLogprobs | None = None
    include: Annotated[list[Included], Field(max_length=16, fail_fast=True)] | None = None
    metadata: dict[str, str] | None = None
    stream_options: Body | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or []) or bool(self.top_logprobs)

    def _chat_fields(self) -> Json:
        return super()._chat_fields() | {
            "seed": self.seed,
            "rid": self.rid,
            "priority": self.priority,
            "service_tier": self.service_tier,
            "max_completion_tokens": self.max_output_tokens,
            "min_tokens": self.min_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "allowed_token_ids": self.allowed_token_ids,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
        }
