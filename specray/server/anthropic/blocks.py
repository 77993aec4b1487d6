"""Messages of a conversation in Anthropic's shape: their content blocks, and their translation to a chat's messages."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from specray.server.chat.messages import CallId
from specray.server.chat.tools import FunctionName
from specray.server.schemas.parts import BY_SHAPE, MAX_PARTS, BodyPart, ByType, Text

Json = dict[str, Any]

_ONLY_TEXT = "images, files and the blocks of tools that Anthropic runs are not supported"


class TextBlock(BodyPart):
    type: Literal["text"]
    text: str


Texts = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True), Tag("[list]")]
TextOrBlocks = Annotated[Text | Texts, BY_SHAPE]


class ThinkingBlock(BodyPart):
    """Reasoning of an earlier message. The signature is not checked, because this server does not sign."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BodyPart):
    """Reasoning that only Anthropic can read; it is dropped."""

    type: Literal["redacted_thinking"]


class SearchResultBlock(BodyPart):
    type: Literal["search_result"]
    source: str
    title: str
    content: Texts

    @property
    def text(self) -> str:
        return f"{self.title} ({self.source})\n{joined(self.content)}"


class PlainTextSource(BodyPart):
    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        return self.data


class BlocksSource(BodyPart):
    type: Literal["content"]
    content: TextOrBlocks

    @property
    def text(self) -> str:
        return joined(self.content)


class DocumentBlock(BodyPart):
    """A document that is sent as text."""

    type: Literal["document"]
    source: Annotated[
        PlainTextSource | BlocksSource,
        ByType("only documents whose source is of type 'text' or 'content' are supported; send the text itself"),
    ]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class ToolReferenceBlock(BodyPart):
    """A tool that the client's tool search has found; the model is offered it from here on."""

    type: Literal["tool_reference"]
    tool_name: FunctionName

    @property
    def text(self) -> str:
        return self.tool_name


class ToolUseBlock(BodyPart):
    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: Json

    def for_chat(self) -> Json:
        function = {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


ResultBlock = Annotated[
    TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock,
    ByType(f"a tool's result may have blocks of type text, search_result, document and tool_reference; {_ONLY_TEXT}"),
]
ResultBlocks = Annotated[list[ResultBlock], Field(max_length=MAX_PARTS, fail_fast=True), Tag("[list]")]


class ToolResultBlock(BodyPart):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Annotated[Text | ResultBlocks, BY_SHAPE] | None = None
    is_error: bool | None = None


class AnthropicTool(BodyPart):
    """A function of the client's. With `defer_loading` it is offered once a block of the conversation refers to it."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    input_schema: Json
    defer_loading: bool | None = None

    def for_chat(self) -> Json:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class NamedTool(BodyPart):
    type: Literal["tool_reference"]
    name: FunctionName


class DefinedTool(BodyPart):
    type: Literal["tool_definition"]
    definition: AnthropicTool

    @property
    def name(self) -> str:
        return self.definition.name


class ToolChangeBlock(BodyPart):
    """From here on a tool is offered, or no longer offered."""

    type: Literal["tool_addition", "tool_removal"]
    tool: Annotated[
        NamedTool | DefinedTool,
        ByType("expected a tool of type tool_reference or tool_definition; MCP servers are not supported"),
    ]


Block = Annotated[
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | SearchResultBlock
    | DocumentBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolChangeBlock,
    ByType(
        "expected a block of type text, thinking, redacted_thinking, search_result, document, tool_use, tool_result, "
        f"tool_addition or tool_removal; {_ONLY_TEXT}"
    ),
]
Blocks = Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True), Tag("[list]")]


class AnthropicMessage(BodyPart):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Blocks, BY_SHAPE]

    @property
    def blocks(self) -> Sequence[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        shown = (TextBlock, SearchResultBlock, DocumentBlock)
        return joined([block for block in self.blocks if isinstance(block, shown)])

    @property
    def uses_tools(self) -> bool:
        return any(isinstance(block, ToolUseBlock) for block in self.blocks)

    @property
    def thinks(self) -> bool:
        return any(isinstance(block, ThinkingBlock | RedactedThinkingBlock) for block in self.blocks)

    @property
    def has_results(self) -> bool:
        return any(isinstance(block, ToolResultBlock) for block in self.blocks)

    def for_chat(self) -> Iterator[Json]:
        """The message in OpenAI's shape, where each tool result is a message of its own, before the user's text."""
        for block in self.blocks:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content or "")}
        if self.role == "assistant":
            thoughts = [block.thinking for block in self.blocks if isinstance(block, ThinkingBlock)]
            yield {
                "role": "assistant",
                "content": self.text,
                "reasoning_content": "\n".join(thoughts) or None,
                "tool_calls": [block.for_chat() for block in self.blocks if isinstance(block, ToolUseBlock)] or None,
            }
        elif self.text or (self.role == "user" and not self.has_results):
            yield {"role": self.role, "content": self.text}


def joined(content: str | Sequence[TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def offered_tools(tools: Sequence[AnthropicTool], messages: Sequence[AnthropicMessage]) -> list[AnthropicTool]:
    """The tools that the model may see after `messages`, whose blocks load, add and remove tools by name."""
    added: dict[str, AnthropicTool] = {}
    is_offered: dict[str, bool] = {}
    for message in messages:
        for block in message.blocks:
            if isinstance(block, ToolChangeBlock):
                if isinstance(block.tool, DefinedTool):
                    added[block.tool.name] = block.tool.definition
                is_offered[block.tool.name] = block.type == "tool_addition"
            elif isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                found = [part.tool_name for part in block.content or [] if isinstance(part, ToolReferenceBlock)]
                is_offered |= dict.fromkeys(found, True)
    return [tool for tool in [*tools, *added.values()] if is_offered.get(tool.name, not tool.defer_loading)]
