"""The body of /v1/chat/completions, which other chat APIs are translated to."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from specray.errors import InvalidRequestError
from specray.sampling_params import MaxTokens, NumLogprobs, SamplingParams
from specray.server.chat.messages import Message
from specray.server.chat.tools import MAX_TOOLS, Tool, ToolChoice, check_tools, named_functions
from specray.server.errors import from_validation
from specray.server.schemas.body import FROM_TEXT, OpenAIRequest, at_most

MAX_MESSAGES = 4096
MAX_TEMPLATE_VARIABLES = 16

Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
TemplateName = Annotated[str, Field(pattern=r"^[a-zA-Z][a-zA-Z0-9_]{0,63}$")]
TemplateValue = bool | int | float | Annotated[str, Field(max_length=1024)] | None
TemplateVariables = Annotated[
    dict[TemplateName, TemplateValue], Field(max_length=MAX_TEMPLATE_VARIABLES), at_most(MAX_TEMPLATE_VARIABLES)
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(OpenAIRequest):
    """Body of /v1/chat/completions."""

    synonyms: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_output_tokens", "max_new_tokens"), "max_completion_tokens"),
        **dict.fromkeys(("prompt", "input", "input_ids"), "messages"),
        **dict.fromkeys(("system", "instructions"), "a message of role system"),
        "reasoning": "reasoning_effort",
        "thinking": 'chat_template_kwargs={"enable_thinking": …}',
        "sampling_seed": "seed",
        "stop_sequences": "stop",
        "top_logprobs_num": "top_logprobs",
    }

    messages: Messages
    max_completion_tokens: Annotated[MaxTokens | None, FROM_TEXT] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the output continues the last message, an assistant's
    logprobs: bool | None = None
    top_logprobs: Annotated[NumLogprobs | None, FROM_TEXT] = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None  # SGLang's; false leaves the reasoning in the content
    include_reasoning: bool | None = None  # vLLM's; false leaves the reasoning out of the reply
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> Self:
        """A request of another API in this shape. ApiError for what only the whole request shows to be invalid."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise from_validation(error.errors()) from None

    @model_validator(mode="after")
    def _final_message_can_be_continued(self) -> Self:
        if not self.continue_final_message:
            return self
        last = self.messages[-1]
        if self.add_generation_prompt:
            raise InvalidRequestError(
                "add_generation_prompt=true opens a new answer, and continue_final_message=true continues the last "
                "message; set one of them",
                "continue_final_message",
            )
        if last.role != "assistant" or not last.content or last.tool_calls:
            raise InvalidRequestError(
                "continue_final_message=true needs a last message of role 'assistant' with text and without tool_calls",
                "continue_final_message",
            )
        return self

    @model_validator(mode="after")
    def _tools_fit_together(self) -> Self:
        check_tools(self.tools or [], self.tool_choice)
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable_tools(self) -> list[Tool]:
        """Those of the offered tools that `tool_choice` lets the model call."""
        names = named_functions(self.tool_choice)
        return [tool for tool in self.offered_tools if names is None or tool.function.name in names]

    @property
    def template_variables(self) -> dict[str, TemplateValue]:
        """Further variables of the chat template. Effort "none" also turns off the thinking of Qwen and DeepSeek."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        quiet = {"enable_thinking": False, "thinking": False} if self.reasoning_effort == "none" else {}
        return effort | quiet | (self.chat_template_kwargs or {})

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.logprob_token_ids and not self.logprobs:
            raise InvalidRequestError("logprob_token_ids requires logprobs=true; set it", "logprob_token_ids")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                f"top_logprobs={self.top_logprobs} requires logprobs=true; set logprobs=true or leave top_logprobs out",
                "top_logprobs",
            )
        return self

    def sampling(self, default_max_tokens: int | None) -> SamplingParams:
        limits = (self.max_completion_tokens, self.max_tokens, default_max_tokens)
        limit = next((limit for limit in limits if limit is not None), None)
        return self._sampling(limit, (self.top_logprobs or 0) if self.logprobs else None)
