"""Bodies of /v1/messages, and their translation to a chat request."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from specray.errors import InvalidRequestError
from specray.sampling_params import MaxTokens, TopK, TopP
from specray.server.anthropic.blocks import AnthropicMessage, AnthropicTool, TextOrBlocks, joined, offered_tools
from specray.server.anthropic.context_management import ContextManagement
from specray.server.chat.protocol import MAX_MESSAGES, ChatRequest, ReasoningEffort
from specray.server.chat.tools import MAX_TOOLS, FunctionName
from specray.server.schemas.body import Body, ModelName, Stop
from specray.server.schemas.parts import BodyPart, ByType, HostedTool, check_number_of_parts
from specray.server.schemas.request_fields import GENERATION, REFUSED, FieldRefusal

Json = dict[str, Any]

_HOSTED = dict.fromkeys(
    ("container", "mcp_servers"), FieldRefusal(({}, []), "it needs a service of Anthropic's; leave it out")
)
_HOSTED_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "advisor", "mcp_toolset")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # Anthropic's -> OpenAI's


Tool = Annotated[
    AnthropicTool | HostedTool,
    ByType(
        "the model does not know Anthropic's own tools; send a tool with name, description and input_schema",
        default="custom",
        hosted=_HOSTED_TOOLS,
    ),
]


class AnthropicToolChoice(BodyPart):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> object:
        return _TOOL_CHOICES[self.type]


class AnthropicNamedToolChoice(BodyPart):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> object:
        return {"type": "function", "function": {"name": self.name}}


class Thinking(BodyPart):
    """Whether the model reasons first. Its budget is not enforced: max_tokens limits reasoning and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(BodyPart):
    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]

    def for_chat(self) -> Json:
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": self.schema_}}


class OutputConfig(BodyPart):
    """How much the model reasons, and the JSON schema of its answer."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """Body of /v1/messages/count_tokens: what becomes part of the prompt."""

    refusals = REFUSED | _HOSTED

    model: ModelName
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextOrBlocks | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[AnthropicToolChoice | AnthropicNamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    context_management: ContextManagement | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_parts(cls, value: object) -> object:
        if isinstance(value, dict):
            check_number_of_parts(value.get("messages"), "messages")
        return value

    def _ignored_parts(self) -> list[str]:
        options = {"thinking": self.thinking, "output_config": self.output_config}
        inner = [f"{name}.{key}" for name, part in options.items() if part for key in part.model_extra or {}]
        hosted = [f"tools.{tool.type}" for tool in self.tools or [] if isinstance(tool, HostedTool)]
        edits = ["context_management"] if self.context_management else []
        return inner + hosted + edits

    def check_context_management(self, num_prompt_tokens: int) -> None:
        """InvalidRequestError if the requested edits of the context would change the prompt."""
        if self.context_management is not None:
            self.context_management.check_unchanged(self.messages, num_prompt_tokens)

    def for_chat(self) -> ChatRequest:
        """The request in OpenAI's shape. Raises ApiError."""
        return ChatRequest.translated(self._chat_fields())

    def _chat_fields(self) -> Json:
        system = [{"role": "system", "content": joined(self.system)}] if self.system else []
        choice, config, last = self.tool_choice, self.output_config or OutputConfig(), self.messages[-1]
        answer_format = self._format()
        is_begun = last.role == "assistant" and bool(last.text)
        if last.role == "assistant" and last.uses_tools:
            raise InvalidRequestError(
                "the last message uses tools; add a message of the user's with a tool_result for each use", "messages"
            )
        if is_begun and answer_format:
            raise InvalidRequestError(
                "an answer that the last message begins cannot have a format; send a last message of the user's, or "
                "leave the format out",
                "messages",
            )
        turns = self.messages if is_begun or last.role != "assistant" else self.messages[:-1]
        return {
            "messages": [*system, *(part for message in turns for part in message.for_chat())],
            "continue_final_message": is_begun,
            "tools": [tool.for_chat() for tool in self._offered_tools()] or None,
            "tool_choice": choice.for_chat() if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": _thinking_variables(self.thinking),
            "reasoning_effort": config.effort,
            "response_format": answer_format.for_chat() if answer_format else None,
        }

    def _format(self) -> OutputFormat | None:
        newer = self.output_config.format if self.output_config else None
        if newer and self.output_format and newer != self.output_format:
            raise InvalidRequestError(
                "output_format and output_config.format differ; send output_config.format only", "output_format"
            )
        return newer or self.output_format

    def _offered_tools(self) -> list[AnthropicTool]:
        own = [tool for tool in self.tools or [] if isinstance(tool, AnthropicTool)]
        hosted = [tool for tool in self.tools or [] if isinstance(tool, HostedTool)]
        if hosted and not own:
            raise InvalidRequestError(
                f"tools has only tools that Anthropic runs ({hosted[0].type}), which this server cannot run; send "
                "tools with input_schema, or leave tools out",
                "tools",
            )
        chosen = self.tool_choice.name if isinstance(self.tool_choice, AnthropicNamedToolChoice) else None
        if chosen is not None and any((tool.model_extra or {}).get("name") == chosen for tool in hosted):
            raise InvalidRequestError(
                f"tool_choice names {chosen!r}, which Anthropic runs and this server cannot run; name another tool",
                "tool_choice",
            )
        if own and all(tool.defer_loading for tool in own):
            raise InvalidRequestError(
                "all tools have defer_loading; at least one must not, to find the others", "tools"
            )
        return offered_tools(own, self.messages)


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages."""

    refusals = CountTokensRequest.refusals | GENERATION
    synonyms: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences", "response_format": "output_config.format"}

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


def _thinking_variables(thinking: Thinking | None) -> Json | None:
    """Variables of the templates of Qwen and DeepSeek; without the option, the template's default holds."""
    if thinking is None:
        return None
    is_on = thinking.type != "disabled"
    return {"enable_thinking": is_on, "thinking": is_on}
