"""Request bodies: what those of several endpoints share. Each endpoint's own body is in its package.

Every field has bounds; those of sampling options come import re
from `specray.sampling_params`.

`request_fields` says which fields that a body does not declare are refused. The others are accepted and listed in
`ignored_fields`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec
from specray.sampling_params import (
    MAX_BANNED_SEQUENCES,
    MAX_BIASED_TOKENS,
    AdditivePenalty,
    AllowedTokenIds,
    LogitBias,
    LogprobTokenIds,
    MaxTokens,
    MinP,
    MinTokens,
    NumChoices,
    NumLogprobs,
    RepetitionPenalty,
    SamplingParams,
    Seed,
    StopString,
    StopStrings,
    StopTokenIds,
    Temperature,
    TopK,
    TopP,
    make_sampling_params,
)
from specray.server.schemas.grammar_fields import grammar_of
from specray.server.schemas.parts import JoinedText
from specray.server.schemas.request_fields import GENERATION, REFUSED, Refusals, check_refused

MAX_NAMED_FIELDS = 20
MAX_FIELD_NAME = 64
MAX_NUMBER_LENGTH = 32  # characters
WHOLE_CONTEXT = -1  # truncate_prompt_tokens: what the context holds beside the output


class Body(BaseModel):
    """Base of all bodies: strict JSON types, refused fields rejected, other fields kept in `model_extra`."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())

    refusals: ClassVar[Refusals] = REFUSED
    synonyms: ClassVar[Mapping[str, str]] = {}  # another dialect's field -> what to send instead of it

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, value: object) -> object:
        if isinstance(value, Mapping):
            check_refused(value, cls.refused_fields(), cls.synonyms)
        return value

    @classmethod
    def refused_fields(cls) -> Refusals:
        """The fields that get a 400. A body honours what it declares."""
        return {name: refusal for name, refusal in cls.refusals.items() if name not in cls.model_fields}

    @property
    def ignored_fields(self) -> list[str]:
        """Names of fields without effect, truncated to fit a header."""
        names = [name for name in self.model_extra or {} if name not in self.refusals] + self._ignored_parts()
        return [name[:MAX_FIELD_NAME] for name in names[:MAX_NAMED_FIELDS]]

    def _ignored_parts(self) -> list[str]:
        """Parts of fields that have no effect, as paths."""
        return []


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def at_most(limit: int) -> BeforeValidator:
    """Refuse a longer object before its keys are looked at: pydantic makes an error of each wrong key first."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            bounds = {"field_type": "Object", "max_length": limit, "actual_length": len(value)}
            raise PydanticKnownError("too_long", bounds)
        return value

    return BeforeValidator(check)


def _integer_keys(value: object) -> object:
    """Convert JSON's string keys to integers. Keys that are not integers are left for the bounds check to report."""
    if not isinstance(value, dict):
        return value
    return {_integer(key): bias for key, bias in value.items()}


def _integer(key: object) -> object:
    return int(key) if isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,18}", key) else key


def _number(value: object) -> object:
    """A number that is sent as text, which vLLM and SGLang convert too. Other text is left for the schema to refuse."""
    if not isinstance(value, str) or len(value) > MAX_NUMBER_LENGTH:
        return value
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            continue
    return value


FROM_TEXT = BeforeValidator(_number)
Stop = Annotated[StopStrings, BeforeValidator(_listed, json_schema_input_type=StopString | StopStrings)]
BiasByToken = Annotated[LogitBias, BeforeValidator(_integer_keys), at_most(MAX_BIASED_TOKENS)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
BadWords = Annotated[list[StopString], Field(max_length=MAX_BANNED_SEQUENCES // 2, fail_fast=True)]
CacheSalt = Annotated[str, Field(max_length=256)]
Timeout = Annotated[float, Field(gt=0.0, le=86_400.0, allow_inf_nan=False)]
RequestName = Annotated[str, Field(min_length=1, max_length=256)]  # by which /abort_request finds a request
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
ServiceTier = Annotated[str, Field(max_length=64)]
PRIORITY_OF_TIER = {"priority": -1, "flex": 1}
PromptLimit = Annotated[int, Field(ge=WHOLE_CONTEXT, le=10_000_000)]


class Sampling(Body):
    """Options with the same name in every dialect. Null means absent, as in OpenAI's schema."""

    temperature: Annotated[Temperature | None, FROM_TEXT] = None
    top_p: Annotated[TopP | None, FROM_TEXT] = None
    top_k: Annotated[TopK | None, FROM_TEXT] = None
    min_p: Annotated[MinP | None, FROM_TEXT] = None
    presence_penalty: Annotated[AdditivePenalty | None, FROM_TEXT] = None
    frequency_penalty: Annotated[AdditivePenalty | None, FROM_TEXT] = None
    repetition_penalty: Annotated[RepetitionPenalty | None, FROM_TEXT] = None
    logit_bias: BiasByToken | None = None
    n: Annotated[NumChoices | None, FROM_TEXT] = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    def with_defaults(self, defaults: Mapping[str, float | int]) -> Self:
        """A copy with the model's default for each option that is absent."""
        # Not validated again: the defaults are when they are read, and a prompt can be converted only once.
        return self.model_copy(update={name: v for name, v in defaults.items() if getattr(self, name) is None})

    def _params(self, **own: object) -> SamplingParams:
        """Sampling options from these fields and a dialect's own. None selects the default."""
        fields = {name: getattr(self, name) for name in Sampling.model_fields} | own
        return make_sampling_params(**{name: value for name, value in fields.items() if value is not None})


class GrammarFields(Body):
    """SGLang's fields for structured output; `grammar_fields` reads them."""

    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None

    @property
    def grammar(self) -> GrammarSpec | None:
        return grammar_of({name: getattr(self, name) for name in type(self).model_fields})


# Lists fail fast, because pydantic would make an error of each of a million wrong elements, and the first is reported.


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, each chunk has the usage so far


class Speculation(Body):
    """Limits on one request's drafts; null selects the server's limit. `speculation` validates them."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool | None = None
    algorithm: Annotated[str, Field(max_length=256)] | None = None  # only compared with the server's own
    drafter: Annotated[str, Field(max_length=64)] | None = None  # the name of one of the server's drafters
    num_steps: Annotated[int, Field(ge=1)] | None = None
    num_draft_tokens: Annotated[int, Field(ge=2)] | None = None  # root included
    trace: bool | None = None  # the stream shows how its tokens came about: `draft_trace`


class RequestOptions(Body):
    """Fields of all generating endpoints, apart from sampling options."""

    stream: bool | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: CacheSalt | None = None  # requests with the same key go to the same engine while its load allows
    timeout: Timeout | None = None
    speculative: Speculation | None = None

    @property
    def queue_priority(self) -> int:
        """See `EngineRequest.priority`."""
        return 0

    @property
    def traces_drafts(self) -> bool:
        return bool(self.speculative and self.speculative.trace)


class ReplyOptions(NamedTuple):
    """Fields of a reply beside the text that a request asks for."""

    usage: bool = False  # whether it ends a stream
    continuous_usage: bool = False  # whether every chunk has it
    token_ids: bool = False  # whether those of prompt and output are wanted
    prompt_logprobs: bool = False
    spec_tokens_details: bool = False  # whether SGLang's figures of drafts are wanted


class PredictionContent(Body):
    """Output that the client expects. It only suggests drafts: the output is the same without it."""

    type: Literal["content"]
    content: JoinedText


class OpenAIRequest(Sampling, GrammarFields, RequestOptions):
    """Fields that chat and text completions share."""

    refusals = REFUSED | GENERATION

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    model: ModelName | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[Seed | None, FROM_TEXT] = None
    max_tokens: Annotated[MaxTokens | None, FROM_TEXT] = None
    min_tokens: Annotated[MinTokens | None, FROM_TEXT] = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name of include_stop_str_in_output
    allowed_token_ids: AllowedTokenIds | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    truncation_side: Literal["left", "right"] | None = None  # which end of the prompt is dropped; left without it
    bad_words: BadWords | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    return_spec_tokens_details: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prediction: PredictionContent | None = None
    rid: RequestName | None = None
    priority: Priority | None = None
    service_tier: ServiceTier | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options requires stream=true; set stream=true or leave stream_options out", "stream_options"
            )
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_are_not_streamed(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                f"prompt_logprobs={self.prompt_logprobs} cannot be streamed; set stream=false", "prompt_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _limit_is_not_zero(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens=0 leaves no prompt; send at least 1, or -1 for all that fits",
                "truncate_prompt_tokens",
            )
        return self

    def _ignored_parts(self) -> list[str]:
        return [f"stream_options.{name}" for name in (self.stream_options or StreamOptions()).model_extra or {}]

    @property
    def reply_options(self) -> ReplyOptions:
        stream = self.stream_options or StreamOptions()
        return ReplyOptions(
            bool(stream.include_usage),
            bool(stream.include_usage and stream.continuous_usage_stats),
            bool(self.return_token_ids),
            self.prompt_logprobs is not None,
            bool(self.return_spec_tokens_details),
        )

    @property
    def queue_priority(self) -> int:
        """vLLM's `priority`, else that of OpenAI's tier. Clients send tiers that they know; others have no effect."""
        return PRIORITY_OF_TIER.get(self.service_tier or "", 0) if self.priority is None else self.priority

    def _sampling(self, max_tokens: int | None, logprobs: int | None, **own: object) -> SamplingParams:
        return self._params(
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            include_stop_str_in_output=bool(self.include_stop_str_in_output or self.no_stop_trim),
            allowed_token_ids=self.allowed_token_ids,
            logprobs=logprobs,
            grammar=self.grammar,
            logprob_token_ids=self.logprob_token_ids,
            **({"prompt_logprobs": self.prompt_logprobs} | own),
        )
