"""A request's sampling options and their bounds. Servers use the annotated types in their schemas.

Sampling itself lives in `specray.ops.sampling`, stop strings in `specray.engine.detokenizer`.
"""

import secrets
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec

_WRAP = 1 << 64
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_ALLOWED_TOKENS = 1024
MAX_BIASED_TOKENS = 300
MAX_BANNED_SEQUENCES = 512
MAX_BANNED_LENGTH = 64  # tokens of a banned sequence
MAX_TOP_K = 1_000_000  # no vocabulary is larger
ANY_SEED = -1  # asks for a random one, as in vLLM and SGLang

Temperature = Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)]
TopP = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1)]
MinP = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
AdditivePenalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0.0, le=1000.0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
LogitBias = Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASED_TOKENS)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
MaxTokens = Annotated[int, Field(ge=0, le=10_000_000)]
MinTokens = Annotated[int, Field(ge=0, le=10_000_000)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
StopTokenIds = Annotated[list[TokenId], Field(max_length=64)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
AllowedTokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)]
LogprobTokenIds = Annotated[list[TokenId], Field(max_length=MAX_ALLOWED_TOKENS)]
TokenSequence = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_BANNED_LENGTH)]
BannedSequences = Annotated[list[TokenSequence], Field(max_length=MAX_BANNED_SEQUENCES)]
PromptPosition = Annotated[int, Field(ge=0, le=10_000_000)]


class ReasoningMarks(NamedTuple):
    """The texts around the reasoning that an output may begin with. Stop strings act on the answer after it."""

    start: str = "<think>"
    ends: tuple[str, ...] = ("</think>",)  # the first of them ends it
    is_open: bool = False  # the output begins inside, after a start in the prompt for example


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class SamplingParams:
    """Sampling options of a request. pydantic's ValidationError names an invalid field, its value and bound.

    Presence and frequency penalties count generated tokens, the repetition penalty prompt and generated tokens.
    `top_p=0` is greedy decoding. `logprobs` is the number of alternatives reported per token; 0 reports only the
    token's own. `prompt_logprobs` is the same for the prompt's tokens after position `prompt_logprobs_start`.
    `max_tokens=0` only computes the prompt.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1  # -1 and 0 disable it
    min_p: MinP = 0.0
    presence_penalty: AdditivePenalty = 0.0
    frequency_penalty: AdditivePenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Seed | None = None  # None: a random one, which the output reports
    n: NumChoices = 1
    max_tokens: MaxTokens | None = None  # None: up to the end of the context
    min_tokens: MinTokens = 0
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    logprobs: NumLogprobs | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    allowed_token_ids: AllowedTokenIds | None = None
    banned_sequences: BannedSequences = Field(default_factory=list)  # token sequences that the output never has
    logprob_token_ids: LogprobTokenIds = Field(default_factory=list)  # reported with each token's log probability
    prompt_logprobs: NumLogprobs | None = None
    prompt_logprobs_start: PromptPosition = 0
    grammar: GrammarSpec | None = None  # the output matches it, unless max_tokens ends it before
    reasoning: ReasoningMarks | None = None  # None: the whole output is the answer

    def __post_init__(self) -> None:
        if self.top_p == 0.0:  # only the most likely token; of equally likely ones the first, as at temperature 0
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "top_p", 1.0)
        if self.top_k > MAX_TOP_K:
            object.__setattr__(self, "top_k", -1)


_ADAPTER = TypeAdapter(SamplingParams)


def make_sampling_params(**fields: object) -> SamplingParams:
    """SamplingParams from untrusted fields. InvalidRequestError for the first invalid field."""
    if fields.get("seed") == ANY_SEED:
        fields["seed"] = None
    try:
        return _ADAPTER.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"{name}={first['input']!r}: {first['msg']}", param=name) from None


def fresh_seed() -> int:
    """A random seed that a JSON number represents exactly."""
    return secrets.randbits(53)


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request; choice 0 has the request's seed."""
    half = _WRAP >> 1
    return (seed + index * 0x9E3779B97F4A7C15 + half) % _WRAP - half
