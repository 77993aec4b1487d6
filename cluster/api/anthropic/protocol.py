"""Bodies of /v1/messages, and their translation to a chat request."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.api.messages import MAX_PARTS, MAX_TOOLS, CallId, FunctionName, check_number_of_parts
from cluster.api.protocol import MAX_MESSAGES, Body, ChatRequest, ModelName, ReasoningEffort, Stop
from specray.errors import InvalidRequestError
from specray.sampling_params import MaxTokens, TopK, TopP

Json = dict[str, Any]

_HOSTED = ("container", "context_management", "mcp_servers")  # would change the answer
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # Anthropic's -> OpenAI's


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())


class TextBlock(_Part):
    type: Literal["text"]
    text: str


class ThinkingBlock(_Part):
    """Reasoning of an earlier message. The signature is not checked, because this server does not sign."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(_Part):
    """Reasoning that only Anthropic can read; it is dropped."""

    type: Literal["redacted_thinking"]


Texts = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ToolUseBlock(_Part):
    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: Json


class ToolResultBlock(_Part):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | Texts | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class AnthropicMessage(_Part):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]

    def for_chat(self) -> Iterator[Json]:
        """The same in OpenAI's shape, where each tool result is a message of its own, before the user's text."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
        text = _text([block for block in blocks if isinstance(block, TextBlock)])
        calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
        if self.role == "assistant":
            yield {
                "role": "assistant",
                "content": text,
                "reasoning_content": "\n".join(thoughts) or None,
                "tool_calls": calls or None,
            }
        elif text or not any(isinstance(block, ToolResultBlock) for block in blocks):
            yield {"role": "user", "content": text}


class AnthropicTool(_Part):
    """A function of the client's. Tools that Anthropic runs, such as web search, have other types."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    input_schema: Json

    def for_chat(self) -> Json:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class AnthropicToolChoice(_Part):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> object:
        return _TOOL_CHOICES[self.type]


class AnthropicNamedToolChoice(_Part):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> object:
        return {"type": "function", "function": {"name": self.name}}


class Thinking(_Part):
    """Whether the model reasons first. Its budget is not enforced: max_tokens limits reasoning and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(_Part):
    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]

    def for_chat(self) -> Json:
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": self.schema_}}


class OutputConfig(_Part):
    """How much the model reasons, and the JSON schema of its answer."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """Body of /v1/messages/count_tokens: what becomes part of the prompt."""

    model: ModelName
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Texts | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[AnthropicToolChoice | AnthropicNamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_hosted_features(cls, value: object) -> object:
        for name in _HOSTED if isinstance(value, dict) else ():
            if isinstance(value, dict) and value.get(name):
                raise InvalidRequestError(f"{name} needs a service of Anthropic's; leave it out", name)
        if isinstance(value, dict):
            check_number_of_parts(value.get("messages"), "messages")
        return value

    @property
    def ignored_fields(self) -> list[str]:
        has_budget = self.thinking is not None and "budget_tokens" in (self.thinking.model_extra or {})
        return super().ignored_fields + (["thinking.budget_tokens"] if has_budget else [])

    def for_chat(self) -> ChatRequest:
        """The same request in OpenAI's shape. Raises ApiError."""
        return ChatRequest.translated(self._chat_fields())

    def _chat_fields(self) -> Json:
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        return {
            "messages": [*system, *(part for message in self.messages for part in message.for_chat())],
            "tools": [tool.for_chat() for tool in self.tools or []] or None,
            "tool_choice": choice.for_chat() if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": _thinking_variables(self.thinking),
            "reasoning_effort": config.effort,
            "response_format": config.format.for_chat() if config.format else None,
        }


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages."""

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: Stop | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None

    def _chat_fields(self) -> Json:
        names = ("max_tokens", "stream", "temperature", "top_k", "top_p")
        own = {name: getattr(self, name) for name in names}
        return super()._chat_fields() | own | {"stop": self.stop_sequences}


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _call(block: ToolUseBlock) -> Json:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _thinking_variables(thinking: Thinking | None) -> Json | None:
    """Variables of the templates of Qwen and DeepSeek; without the option, the template's default holds."""
    if thinking is None:
        return None
    is_on = thinking.type != "disabled"
    return {"enable_thinking": is_on, "thinking": is_on}
