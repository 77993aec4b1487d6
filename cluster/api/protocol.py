"""Request bodies. Every field has bounds; those of sampling options come from `specray.sampling_params`.

An unsupported field that would change the output is rejected. Any other unknown field is accepted and listed in
`ignored_fields`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from cluster.api.errors import short_repr
from specray.errors import InvalidRequestError
from specray.sampling_params import (
    AdditivePenalty,
    LogitBias,
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

MAX_PROMPTS = 64  # also the most choices of a request, over all prompts
MAX_TOKEN_ID = 2**31 - 1
MAX_MESSAGES = 4096
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of /v1/completions
GENERATE_MAX_TOKENS = 128  # SGLang's default of /generate
MAX_NAMED_FIELDS = 20
MAX_FIELD_NAME = 64

# Unsupported field -> accepted values, which all mean "off". Null is always accepted.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_calls": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "bad_words": ([],),
    "lora_path": (),
    "image_data": ([],),
    "audio_data": ([],),
    "video_data": ([],),
    "input_embeds": ([],),
    "logprob_start_len": (-1,),
    "return_hidden_states": (False,),
}


def _refuse_unsupported(value: object) -> object:
    if isinstance(value, Mapping):
        for name, neutral in UNSUPPORTED.items():
            if value.get(name) is not None and value[name] not in neutral:
                raise InvalidRequestError(
                    f"{name}={short_repr(value[name])}: this server does not support {name}; leave it out", name
                )
    return value


class Body(BaseModel):
    """Base of all bodies: strict JSON types, unsupported fields rejected, unknown fields kept in `model_extra`."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())

    _refuse = model_validator(mode="before")(_refuse_unsupported)

    @property
    def ignored_fields(self) -> list[str]:
        """Names of fields without effect, truncated to fit a header."""
        names = [name for name in self.model_extra or {} if name not in UNSUPPORTED]
        return [name[:MAX_FIELD_NAME] for name in names[:MAX_NAMED_FIELDS]]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _integer_keys(value: object) -> object:
    """Convert JSON's string keys to integers. Keys that are not integers are left for the bounds check to report."""
    if not isinstance(value, dict):
        return value
    return {_integer(key): bias for key, bias in value.items()}


def _integer(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key


Stop = Annotated[StopStrings, BeforeValidator(_listed, json_schema_input_type=StopString | StopStrings)]
BiasByToken = Annotated[LogitBias, BeforeValidator(_integer_keys)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
CacheSalt = Annotated[str, Field(max_length=256)]
Timeout = Annotated[float, Field(gt=0.0, le=86_400.0, allow_inf_nan=False)]


class Sampling(Body):
    """Options with the same name in every dialect. Null means absent, as in OpenAI's schema."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: AdditivePenalty | None = None
    frequency_penalty: AdditivePenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: BiasByToken | None = None
    n: NumChoices | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    def _params(self, **own: object) -> SamplingParams:
        """Sampling options from these fields and a dialect's own. None selects the default."""
        fields = {name: getattr(self, name) for name in Sampling.model_fields} | own
        return make_sampling_params(**{name: value for name, value in fields.items() if value is not None})


class StreamOptions(Body):
    include_usage: bool | None = None


class Speculation(Body):
    """Limits on one request's drafts; null selects the server's limit. `speculation` validates them."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool | None = None
    algorithm: Annotated[str, Field(max_length=256)] | None = None  # only ever compared with the server's own
    num_steps: Annotated[int, Field(ge=1)] | None = None
    num_draft_tokens: Annotated[int, Field(ge=2)] | None = None  # root included


class RequestOptions(Body):
    """Fields of all generating endpoints, apart from sampling options."""

    stream: bool | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: CacheSalt | None = None  # requests with the same key go to the same engine while its load allows
    timeout: Timeout | None = None
    speculative: Speculation | None = None


class OpenAIRequest(Sampling, RequestOptions):
    """Fields that chat and text completions share."""

    model: ModelName | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    include_stop_str_in_output: bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options requires stream=true; set stream=true or leave stream_options out", "stream_options"
            )
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        return self._params(
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=logprobs,
        )


class TextPart(Body):
    """One part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


def _joined(value: object) -> object:
    """Join text parts to one string. Any other part is rejected by its index."""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(
                f"content part {index} is {short_repr(kind)}; only parts of type 'text' with a string are supported",
                "messages",
            )
        texts.append(part["text"])
    return "".join(texts)


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart])]

    @property
    def for_template(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(OpenAIRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                f"top_logprobs={self.top_logprobs} requires logprobs=true; set logprobs=true or leave top_logprobs out",
                "top_logprobs",
            )
        return self

    def sampling(self, default_max_tokens: int | None) -> SamplingParams:
        limit = self.max_completion_tokens or self.max_tokens or default_max_tokens
        return self._sampling(limit, (self.top_logprobs or 0) if self.logprobs else None)


class PromptSet(NamedTuple):
    """The prompts of a request: all strings or all token ids."""

    items: list[str] | list[list[int]]
    is_batch: bool  # sent as a list of prompts, possibly with one element


def _prompt_set(value: object) -> PromptSet:
    is_batch = not (isinstance(value, str) or _is_token_ids(value))
    items: Any = value if is_batch else [value]
    is_list = isinstance(items, list) and 1 <= len(items) <= MAX_PROMPTS
    if is_list and (all(isinstance(item, str) for item in items) or all(_is_token_ids(item) for item in items)):
        return PromptSet(items, is_batch)
    raise InvalidRequestError(
        f"prompt={short_repr(value)}: expected a string, token ids (0 to {MAX_TOKEN_ID}), or a list of 1 to "
        f"{MAX_PROMPTS} of one of these",
        "prompt",
    )


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in value)


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS_SCHEMA,
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
PromptField = Annotated[PromptSet, PlainValidator(_prompt_set), WithJsonSchema(_PROMPT_SCHEMA)]


class CompletionRequest(OpenAIRequest):
    """Body of /v1/completions."""

    prompt: PromptField
    logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _choices_are_bounded(self) -> Self:
        _check_choices(len(self.prompt.items), self.n or 1)
        return self

    def sampling(self) -> SamplingParams:
        return self._sampling(self.max_tokens or COMPLETION_MAX_TOKENS, self.logprobs)


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
        _check_choices(len(self.prompt.items), self.sampling_params.n or 1)
        return self

    @property
    def prompt(self) -> PromptSet:
        prompt = self.text or self.input_ids
        assert prompt is not None
        return prompt

    def sampling(self) -> SamplingParams:
        return self.sampling_params.sampling((self.top_logprobs_num or 0) if self.return_logprob else None)


def _check_choices(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_PROMPTS:
        raise InvalidRequestError(
            f"n={n} for {num_prompts} prompts makes {num_prompts * n} choices, more than {MAX_PROMPTS}; reduce n or "
            "the number of prompts",
            "n",
        )
