"""The body of SGLang's /generate."""

from typing import Self

from pydantic import model_validator

from cluster.api.prompts import PromptField, PromptSet, check_choices
from cluster.api.protocol import RequestOptions, Sampling
from specray.errors import InvalidRequestError
from specray.sampling_params import MaxTokens, MinTokens, NumLogprobs, SamplingParams, Seed

GENERATE_MAX_TOKENS = 128  # SGLang's default


class GenerateSampling(Sampling):
    """SGLang's `sampling_params` object."""

    sampling_seed: Seed | None = None
    max_new_tokens: MaxTokens | None = None
    min_new_tokens: MinTokens | None = None
    no_stop_trim: bool | None = None

    def sampling(self, logprobs: int | None) -> SamplingParams:
        return self._params(
            seed=self.sampling_seed,
            max_tokens=self.max_new_tokens or GENERATE_MAX_TOKENS,
            min_tokens=self.min_new_tokens,
            include_stop_str_in_output=self.no_stop_trim,
            logprobs=logprobs,
        )


class GenerateRequest(RequestOptions):
    """Body of SGLang's /generate: exactly one of `text` and `input_ids`."""

    text: PromptField | None = None
    input_ids: PromptField | None = None
    sampling_params: GenerateSampling = GenerateSampling()
    return_logprob: bool | None = None
    top_logprobs_num: NumLogprobs | None = None

    @model_validator(mode="after")
    def _one_prompt_field(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequestError("send exactly one of text and input_ids", "text")
        check_choices(len(self.prompt.items), self.sampling_params.n or 1)
        return self

    @property
    def prompt(self) -> PromptSet:
        prompt = self.text or self.input_ids
        assert prompt is not None
        return prompt

    def sampling(self) -> SamplingParams:
        return self.sampling_params.sampling((self.top_logprobs_num or 0) if self.return_logprob else None)
