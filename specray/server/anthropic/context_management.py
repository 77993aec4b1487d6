"""Edits of the context that a request asks for. None is made: those that would change the prompt are refused."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from specray.errors import InvalidRequestError
from specray.server.anthropic.blocks import AnthropicMessage, ToolUseBlock
from specray.server.schemas.parts import BodyPart, ByType

_FIELD = "context_management"


class Amount(BodyPart):
    """A number of tokens, tool uses or turns, as `type` says; `all` has no number."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: Annotated[int, Field(ge=0)] = 0


class ClearThinking(BodyPart):
    """Removes the thinking of all turns but the last ones."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | Amount = Amount(type="thinking_turns", value=1)

    def changes(self, messages: Sequence[AnthropicMessage], _: int) -> bool:
        if self.keep == "all" or self.keep.type == "all":
            return False
        turns = [0]
        for message in messages:
            if message.role == "user" and not message.has_results:
                turns.append(0)
            turns[-1] |= message.thinks
        return sum(turns) > self.keep.value


class ClearToolUses(BodyPart):
    """Removes the results of all tool uses but the last ones, once the prompt is long."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Amount = Amount(type="input_tokens", value=100_000)
    keep: Amount = Amount(type="tool_uses", value=3)

    def changes(self, messages: Sequence[AnthropicMessage], num_tokens: int) -> bool:
        num_uses = sum(isinstance(block, ToolUseBlock) for message in messages for block in message.blocks)
        amount = num_tokens if self.trigger.type == "input_tokens" else num_uses
        return amount >= self.trigger.value and num_uses > self.keep.value


class Compact(BodyPart):
    """Summarizes a prompt once it is long."""

    type: Literal["compact_20260112"]
    trigger: Amount | None = None

    def changes(self, _: Sequence[AnthropicMessage], num_tokens: int) -> bool:
        return num_tokens >= (self.trigger.value if self.trigger else 150_000)


Edit = Annotated[
    ClearThinking | ClearToolUses | Compact,
    ByType("expected an edit of type clear_thinking_20251015, clear_tool_uses_20250919 or compact_20260112"),
]


class ContextManagement(BodyPart):
    edits: Annotated[list[Edit], Field(max_length=16, fail_fast=True)] | None = None

    def check_unchanged(self, messages: Sequence[AnthropicMessage], num_tokens: int) -> None:
        """InvalidRequestError if an edit would change a prompt of `num_tokens` tokens."""
        for index, edit in enumerate(self.edits or []):
            if edit.changes(messages, num_tokens):
                raise InvalidRequestError(
                    f"{_FIELD}.edits.{index} ({edit.type}) would change this prompt of {num_tokens} tokens, and this "
                    "server does not edit prompts; remove the edit, or keep more",
                    _FIELD,
                )
