"""The body of /v1/responses, and its translation to a chat request."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator

from cluster.api.messages import BY_CHOICE, MAX_TOOLS, ChoiceName, FunctionName, Part, check_number_of_parts
from cluster.api.protocol import Body, ChatRequest, ModelName, ReasoningEffort, RequestName, RequestOptions, Sampling
from cluster.api.request_fields import GENERATION, REFUSED, Refusal, Refusals
from cluster.api.responses.items import Input, chat_messages
from specray.sampling_params import MaxTokens, NumLogprobs, Seed

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"

# Fields that need what this server does not have.
_STATELESS: Refusals = {
    "previous_response_id": Refusal((), "responses are not stored, so send the whole conversation in input"),
    "conversation": Refusal((), "conversations are not stored, so send the whole conversation in input"),
    "store": Refusal((False,), "any replica may answer the next request, so responses are not stored; set store=false"),
    "background": Refusal((False,), "responses are not stored, so none can be fetched later; set background=false"),
    "prompt": Refusal((), "there are no stored prompts; send instructions and input"),
    "truncation": Refusal(("disabled",), "input is never dropped silently; shorten it and set truncation='disabled'"),
    "context_management": Refusal(([],), "input is never compacted; leave context_management out"),
    "moderation": Refusal((), "there is no moderation; leave it out"),
}


class FunctionTool(Part):
    """A function of the client's. Tools that OpenAI runs, such as web search, have other types."""

    type: Literal["function"]
    name: FunctionName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def for_chat(self) -> Json:
        return {
            "type": "function",
            "function": self.model_dump(include={"name", "description", "parameters", "strict"}),
        }


class ChosenFunction(Part):
    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(Part):
    """A `tool_choice` that lets the model see all functions and call some of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, max_length=MAX_TOOLS)]


FunctionChoice = Annotated[
    ChoiceName | Annotated[ChosenFunction, Tag("[function]")] | Annotated[AllowedFunctions, Tag("[allowed_tools]")],
    BY_CHOICE,
]


class Reasoning(Part):
    effort: ReasoningEffort | None = None


class TextFormat(Part):
    """`schema`, `name` and the rest of a format are passed on to `response_format`."""

    type: Literal["text", "json_object", "json_schema"]

    def for_chat(self) -> Json:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": self.model_extra}


class TextOptions(Part):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class InputTokensRequest(Sampling, RequestOptions):
    """Body of /v1/responses/input_tokens: what becomes part of the prompt."""

    refusals = REFUSED | _STATELESS

    model: ModelName | None = None
    input: Input
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_parts(cls, value: object) -> object:
        if isinstance(value, dict):
            check_number_of_parts(value.get("input"), "input")
        return value

    @property
    def ignored_fields(self) -> list[str]:
        summarizes = self.reasoning is not None and (self.reasoning.model_extra or {}).get("summary") is not None
        return super().ignored_fields + (["reasoning.summary"] if summarizes else [])

    def for_chat(self) -> ChatRequest:
        """The same request for chat completions. Raises ApiError."""
        return ChatRequest.translated(self._chat_fields())

    def _chat_fields(self) -> Json:
        own = {name: getattr(self, name) for name in {**Sampling.model_fields, **RequestOptions.model_fields}}
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        turns = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else chat_messages(self.input)
        return own | {
            "tool_choice": _choice_for_chat(self.tool_choice),
            "messages": [*system, *turns],
            "tools": [tool.for_chat() for tool in self.tools or []] or None,
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
    max_output_tokens: MaxTokens | None = None
    top_logprobs: NumLogprobs | None = None
    # Encrypted reasoning is accepted, because clients without a store ask for it; it is always null.
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    metadata: dict[str, str] | None = None
    stream_options: Body | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or []) or bool(self.top_logprobs)

    def _chat_fields(self) -> Json:
        return super()._chat_fields() | {
            "seed": self.seed,
            "rid": self.rid,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
        }


def _choice_for_chat(choice: str | ChosenFunction | AllowedFunctions | None) -> object:
    if isinstance(choice, ChosenFunction):
        return _named(choice)
    if isinstance(choice, AllowedFunctions):
        tools = [_named(tool) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _named(choice: ChosenFunction) -> Json:
    return {"type": "function", "function": {"name": choice.name}}
