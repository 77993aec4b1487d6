"""Preparing a chat request: its prompt, its sampling options, and how its output is read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from specray.errors import InvalidRequestError
from specray.sampling_params import SamplingParams
from specray.server.chat.output import ChatOutput, call_grammar, chat_output
from specray.server.chat.prompt import ChatPrompt, chat_prompt, tool_format, with_one_system_message
from specray.server.chat.protocol import ChatRequest
from specray.server.config import ServerConfig
from specray.server.model_output.channels import Channels
from specray.server.model_output.reasoning import REASONING_FORMATS, ReasoningFormat
from specray.server.schemas.body import WHOLE_CONTEXT
from specray.server.tokenization import Tokenization
from specray.server.tool_calls.formats import HARMONY, ToolFormat


class PreparedChat(NamedTuple):
    token_ids: list[int]  # the prompt's
    params: SamplingParams
    output: ChatOutput


class ChatFormats(NamedTuple):
    """The formats of the served model's output."""

    calls: ToolFormat | None  # None: the model's own format is not in the table
    reasoning: ReasoningFormat | None  # None: reasoning is not separated

    @classmethod
    def of(cls, config: ServerConfig, tokenization: Tokenization) -> "ChatFormats":
        calls = tool_format(config.tool_call_parser, tokenization.template)
        reasoning = REASONING_FORMATS[config.reasoning_parser] if config.reasoning_parser else None
        if calls is HARMONY or isinstance(reasoning, Channels):  # either of them implies the other
            return cls(HARMONY, Channels())
        return cls(calls, reasoning)


def prepare_chat(body: ChatRequest, tokenization: Tokenization, config: ServerConfig) -> PreparedChat:
    """InvalidRequestError if the model's chat template does not accept the messages or tools."""
    formats = ChatFormats.of(config, tokenization)
    token_ids = _token_ids(chat_prompt(body, formats.calls, tokenization.template), tokenization)
    if body.continue_final_message:
        formats = formats._replace(reasoning=None)  # the answer has begun
    prompt_end = tokenization.end_of(token_ids)
    params = body.sampling(_default_max_tokens(body, token_ids, tokenization, config))
    forced = call_grammar(body, formats.calls)
    if (grammar := forced or params.grammar) is not None and formats.reasoning is not None:
        formats = formats._replace(reasoning=formats.reasoning.before_grammar())
    output = chat_output(body, *formats, prompt_end)
    if _reads_special_tokens(output, body):
        params = replace(params, skip_special_tokens=False)
    if output.reasoning is not None:
        grammar = grammar and output.reasoning.with_reasoning(
            grammar, prompt_end, tokenization.template, forced is not None
        )
        params = replace(params, reasoning=output.reasoning.marks(prompt_end))
    params = replace(params, grammar=grammar)
    return PreparedChat(token_ids, params, output)


def _reads_special_tokens(output: ChatOutput, body: ChatRequest) -> bool:
    """Whether special tokens stay in the text because the parsers read them. Those of reasoning always end there."""
    if output.reasoning is not None and output.reasoning.has_special_tokens:
        return True
    return output.calls is not None and output.calls.has_special_tokens and body.skip_special_tokens is None


def _default_max_tokens(
    body: ChatRequest, token_ids: Sequence[int], tokenization: Tokenization, config: ServerConfig
) -> int | None:
    """The server's limit for a request without one. It ends with the context, so that prompts that fit are taken."""
    if config.default_max_tokens is None:
        return None
    cut = body.truncate_prompt_tokens
    num_prompt = 1 if cut == WHOLE_CONTEXT else min(len(token_ids), cut or len(token_ids))
    return min(config.default_max_tokens, max(1, tokenization.context_length - num_prompt))


def _token_ids(prompt: ChatPrompt, tokenization: Tokenization) -> list[int]:
    """The rendered prompt. Some templates accept a system message at the start only; they get one there."""
    try:
        return tokenization.chat(prompt)
    except InvalidRequestError:
        messages = with_one_system_message(prompt.messages)
        if messages == prompt.messages:
            raise
        return tokenization.chat(prompt._replace(messages=messages))


def count_prompt_tokens(body: ChatRequest, tokenization: Tokenization, config: ServerConfig) -> int:
    """The length of the prompt in tokens."""
    return len(prepare_chat(body, tokenization, config).token_ids)
