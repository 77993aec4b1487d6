"""The body of SGLang's /generate."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from specray.errors import InvalidRequestError, did_you_mean
from specray.sampling_params import LogprobTokenIds, MaxTokens, MinTokens, NumLogprobs, SamplingParams, Seed
from specray.server.schemas.body import FROM_TEXT, GrammarFields, ModelName, RequestName, RequestOptions, Sampling
from specray.server.schemas.prompts import MAX_PROMPTS, PromptField, PromptSet, check_choices
from specray.server.schemas.request_fields import GENERATION, HARMLESS, REFUSED

GENERATE_MAX_TOKENS = 128  # SGLang's default
FROM_THE_END = -1  # logprob_start_len: no log probabilities of the prompt

T = TypeVar("T")
# One value for all prompts, or a list with one for each. The tags keep pydantic's error locations apart.
PerPrompt = Annotated[
    Annotated[T, Tag("[one]")] | Annotated[list[T], Field(min_length=1, max_length=MAX_PROMPTS), Tag("[each]")],
    Discriminator(lambda value: "[each]" if isinstance(value, list) else "[one]"),
]


class GenerateSampling(Sampling, GrammarFields):
    """SGLang's `sampling_params` object. A key that is not known is an error, because it may be a misspelled option."""

    model_config = ConfigDict(extra="ignore")

    sampling_seed: Annotated[Seed | None, FROM_TEXT] = None
    max_new_tokens: Annotated[MaxTokens | None, FROM_TEXT] = None
    min_new_tokens: Annotated[MinTokens | None, FROM_TEXT] = None
    no_stop_trim: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: object) -> object:
        known = (*cls.model_fields, *REFUSED, *HARMLESS)
        for name in value if isinstance(value, Mapping) else ():
            if name not in known:
                hint = did_you_mean(str(name)[:64], cls.model_fields, 0.4) or "; leave it out"
                raise InvalidRequestError(
                    f"sampling_params has no option {str(name)[:64]!r}{hint}", f"sampling_params.{str(name)[:64]}"
                )
        return value

    def sampling(
        self, logprobs: int | None, prompt_logprobs_start: int | None, logprob_token_ids: list[int]
    ) -> SamplingParams:
        """`prompt_logprobs_start` is None without log probabilities of the prompt."""
        if logprob_token_ids and prompt_logprobs_start is not None:
            raise InvalidRequestError(
                "token_ids_logprob is reported for the output only; leave logprob_start_len out", "token_ids_logprob"
            )
        return self._params(
            seed=self.sampling_seed,
            max_tokens=GENERATE_MAX_TOKENS if self.max_new_tokens is None else self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            include_stop_str_in_output=self.no_stop_trim,
            logprobs=logprobs,
            logprob_token_ids=logprob_token_ids,
            grammar=self.grammar,
            prompt_logprobs=None if prompt_logprobs_start is None else logprobs,
            prompt_logprobs_start=prompt_logprobs_start,
        )


class GenerateRequest(RequestOptions):
    """Body of SGLang's /generate: exactly one of `text` and `input_ids`.

    Options that are lists have one element per prompt.
    """

    refusals = REFUSED | GENERATION
    synonyms: ClassVar[Mapping[str, str]] = {
        **{name: f"sampling_params with {name}" for name in GenerateSampling.model_fields},
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "sampling_params with max_new_tokens"),
        "seed": "sampling_params with sampling_seed",
        "prompt": "text or input_ids",
        "logprobs": "return_logprob",
        "top_logprobs": "top_logprobs_num",
    }

    model: ModelName | None = None

    text: PromptField | None = None
    input_ids: PromptField | None = None
    sampling_params: PerPrompt[GenerateSampling] = GenerateSampling()
    return_logprob: PerPrompt[bool] | None = None
    logprob_start_len: PerPrompt[Annotated[int, Field(ge=FROM_THE_END, le=10_000_000)]] | None = None
    top_logprobs_num: PerPrompt[NumLogprobs] | None = None
    token_ids_logprob: LogprobTokenIds | list[LogprobTokenIds] | None = None  # one list for all prompts, or one each
    return_text_in_logprobs: bool | None = None
    rid: PerPrompt[RequestName] | None = None

    @model_validator(mode="after")
    def _one_prompt_field(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequestError("send exactly one of text and input_ids", "text")
        return self

    @model_validator(mode="after")
    def _lists_fit_the_prompts(self) -> Self:
        num_prompts = len(self.prompt.items)
        for name in ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "rid"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != num_prompts:
                raise InvalidRequestError(
                    f"{name} has {len(value)} elements for {num_prompts} prompts; send one for each, or one for all",
                    name,
                )
        if (num_lists := len(self._chosen_token_ids())) != num_prompts:
            raise InvalidRequestError(
                f"token_ids_logprob has {num_lists} lists for {num_prompts} prompts; send one for each, or one for all",
                "token_ids_logprob",
            )
        counts = {options.n or 1 for options in _each(self.sampling_params, num_prompts)}
        if len(counts) > 1:
            raise InvalidRequestError(
                f"sampling_params have n={sorted(counts)}; all prompts of a request have the same n", "sampling_params"
            )
        check_choices(num_prompts, counts.pop())
        return self

    @property
    def prompt(self) -> PromptSet:
        prompt = self.text or self.input_ids
        assert prompt is not None
        return prompt

    def with_defaults(self, defaults: Mapping[str, float | int]) -> Self:
        """A copy with the model's default for each sampling option that is absent."""
        own = self.sampling_params
        each = [options.with_defaults(defaults) for options in (own if isinstance(own, list) else [own])]
        return self.model_copy(update={"sampling_params": each if isinstance(own, list) else each[0]})

    @property
    def has_own_params(self) -> bool:
        """Whether each prompt has its own sampling options, and its own random seed if they have none."""
        return isinstance(self.sampling_params, list)

    @property
    def names(self) -> list[str] | None:
        """`rid` of each prompt; None if the request has none."""
        return None if self.rid is None else list(_each(self.rid, len(self.prompt.items)))

    def sampling(self) -> list[SamplingParams]:
        """The options of each prompt."""
        num_prompts = len(self.prompt.items)
        columns = (self.sampling_params, self.return_logprob, self.top_logprobs_num, self.logprob_start_len)
        chosen = self._chosen_token_ids()
        return [
            options.sampling(
                (num_top or 0) if wants else None,
                None if not wants or start in (None, FROM_THE_END) else start,
                token_ids if wants else [],
            )
            for options, wants, num_top, start, token_ids in zip(
                *(_each(column, num_prompts) for column in columns), chosen, strict=True
            )
        ]

    def _chosen_token_ids(self) -> list[list[int]]:
        """`token_ids_logprob` of each prompt."""
        chosen: Any = self.token_ids_logprob or []
        is_per_prompt = bool(chosen) and isinstance(chosen[0], list)
        return chosen if is_per_prompt else [chosen] * len(self.prompt.items)


def _each(value: Any, count: int) -> Sequence[Any]:
    """An option of each prompt."""
    return value if isinstance(value, list) else [value] * count
