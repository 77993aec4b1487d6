"""The body of /v1/completions."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from specray.errors import InvalidRequestError
from specray.sampling_params import NumChoices, NumLogprobs, SamplingParams
from specray.server.schemas.body import FROM_TEXT, OpenAIRequest
from specray.server.schemas.prompts import PromptField, check_choices

COMPLETION_MAX_TOKENS = 16  # OpenAI's default


class CompletionRequest(OpenAIRequest):
    """Body of /v1/completions."""

    synonyms: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_completion_tokens", "max_new_tokens", "max_output_tokens"), "max_tokens"),
        **dict.fromkeys(("input", "text", "input_ids"), "prompt"),
        "messages": "prompt, or use /v1/chat/completions",
        "sampling_seed": "seed",
        "stop_sequences": "stop",
        "top_logprobs": "logprobs",
    }

    prompt: PromptField
    logprobs: Annotated[NumLogprobs | None, FROM_TEXT] = None
    echo: bool | None = None
    best_of: NumChoices | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _chosen_logprobs_need_logprobs(self) -> Self:
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequestError("logprob_token_ids requires logprobs; set logprobs=0", "logprob_token_ids")
        return self

    @model_validator(mode="after")
    def _choices_are_bounded(self) -> Self:
        check_choices(len(self.prompt.items), self.num_generated)
        return self

    @model_validator(mode="after")
    def _best_of_leaves_a_choice(self) -> Self:
        if self.best_of is None:
            return self
        if self.best_of < self.num_choices:
            raise InvalidRequestError(
                f"best_of={self.best_of} is less than n={self.num_choices}; raise best_of or lower n", "best_of"
            )
        if self.best_of > self.num_choices and self.stream:
            raise InvalidRequestError(
                f"best_of={self.best_of} cannot be streamed: the best choices are known at the end; set stream=false",
                "best_of",
            )
        return self

    @property
    def num_choices(self) -> int:
        """Choices in the reply, per prompt."""
        return self.n or 1

    @property
    def num_generated(self) -> int:
        """Choices to generate per prompt."""
        return self.best_of or self.num_choices

    def sampling(self) -> SamplingParams:
        """The options of all choices to generate; choosing among them needs their log probabilities."""
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        ranks = self.num_generated > self.num_choices
        logprobs = 0 if self.logprobs is None and ranks else self.logprobs
        prompt_logprobs = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        return self._sampling(max_tokens, logprobs, n=self.num_generated, prompt_logprobs=prompt_logprobs)
