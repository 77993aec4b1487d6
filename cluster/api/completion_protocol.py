"""The body of /v1/completions."""

from typing import Self

from pydantic import model_validator

from cluster.api.prompts import PromptField, check_choices
from cluster.api.protocol import OpenAIRequest
from specray.sampling_params import NumLogprobs, SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default


class CompletionRequest(OpenAIRequest):
    """Body of /v1/completions."""

    prompt: PromptField
    logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _choices_are_bounded(self) -> Self:
        check_choices(len(self.prompt.items), self.n or 1)
        return self

    def sampling(self) -> SamplingParams:
        return self._sampling(self.max_tokens or COMPLETION_MAX_TOKENS, self.logprobs)
