"""Offline inference in this process, without Ray: `LLM(...).generate(prompts)`."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import count, repeat
from reprlib import repr as short_repr
from typing import Any, Self, SupportsIndex, cast

from pydantic import ValidationError
from tqdm import tqdm

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError, did_you_mean
from specray.grammar import REQUEST_ERRORS
from specray.models.chat_disguise import Message
from specray.models.files import target_folder
from specray.models.target_model import TargetModel
from specray.models.tokenizer import NO_VARIABLES, load_tokenizer, render_chat, sampling_defaults
from specray.outputs import Completion, FinishReason, Generation, RequestOutput
from specray.sampling_params import SamplingParams, choice_seed, fresh_seed, make_sampling_params
from specray.spec_decode.drafter import Drafter
from specray.step import UNLIMITED, DraftLimit
from specray.worker.loading import with_device
from specray.worker.local import LocalExecutor

Prompt = str | Sequence[int]  # a text or token ids
Params = SamplingParams | Mapping[str, Any]


class LLM:
    """An engine with one model, by name or as an EngineConfig. Options are those of EngineConfig.

    >>> LLM("smollm2-135m-instruct").generate("Once upon a time")[0].choices[0].text

    `drafter` replaces the configured drafting method.
    """

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        progress: bool = False,
        drafter: Drafter | None = None,
        _model: TargetModel | None = None,
        **options: Any,
    ) -> None:
        self.config = with_device(_config_of(model, options))
        folder = target_folder(self.config, progress=progress)
        self.tokenizer = load_tokenizer(folder)
        self._sampling_defaults = sampling_defaults(folder)
        self._executor = LocalExecutor(self.config, progress=progress, drafter=drafter, model=_model)
        self.engine = Engine(self.config, self._executor, self.tokenizer.backend_tokenizer)
        self._ids = count()

    def with_speculative(self, speculative: SpeculativeConfig, drafter: Drafter | None = None) -> "LLM":
        """Another engine with the same loaded weights, its own KV pool and this drafting method."""
        config = _config_of(None, {**dict(self.config), "speculative": speculative})
        return LLM(config, drafter=drafter, _model=self._executor.worker.model)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        cache_salt: str = "",
        draft_limits: Sequence[DraftLimit] | None = None,
        predictions: Prompt | Sequence[Prompt] | None = None,
        progress: bool = False,
    ) -> list[Generation]:
        """Complete one prompt (a text or token ids) or several, in order; `draft_limits` has one entry per prompt.

        So has `predictions`: expected outputs, which are drafted while the output agrees with them. Without
        `sampling_params` they are `default_params`; a dict names fields of SamplingParams.

        InvalidRequestError if one of the prompts is invalid; then none is run.
        """
        token_ids = [self._tokens(prompt) for prompt in _listed(prompts, "prompts")]
        expected = [self._tokens(text, add_special_tokens=False) for text in _listed(predictions or [], "predictions")]
        return self._generate(token_ids, sampling_params, cache_salt, draft_limits, expected, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Message] = (),
        chat_template_kwargs: Mapping[str, Any] = NO_VARIABLES,
        progress: bool = False,
    ) -> list[Generation]:
        """Answer one conversation, a list of messages with `role` and `content`, or a list of conversations.

        `chat_template_kwargs` are variables of the chat template, such as enable_thinking. Errors as for `generate`.
        """
        token_ids = [
            render_chat(self.tokenizer, conversation, add_generation_prompt, tools, chat_template_kwargs)
            for conversation in _conversations(messages)
        ]
        return self._generate(token_ids, sampling_params, "", None, [], progress)

    @property
    def default_params(self) -> SamplingParams:
        """SamplingParams with the defaults of the model's generation_config.json."""
        return make_sampling_params(**self._sampling_defaults)

    def close(self) -> None:
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(
        self,
        token_ids: list[list[int]],
        params: Params | Sequence[Params] | None,
        cache_salt: str,
        draft_limits: Sequence[DraftLimit] | None,
        predictions: list[list[int]],
        progress: bool,
    ) -> list[Generation]:
        all_params = self._params_for(len(token_ids), params)
        for name, length in (("draft_limits", len(draft_limits or ())), ("predictions", len(predictions))):
            if length not in (0, len(token_ids)):
                raise InvalidRequestError(f"{len(token_ids)} prompts have {length} {name}; pass one for each", name)
        generations = [Generation(list(ids), []) for ids in token_ids]
        choices: dict[str, Completion] = {}
        requests = []
        hints = zip(draft_limits or repeat(UNLIMITED), predictions or repeat([]), strict=False)
        for generation, ids, options, (limit, expected) in zip(generations, token_ids, all_params, hints, strict=False):
            for request, completion in self._choices(ids, options, cache_salt, limit, expected):
                generation.choices.append(completion)
                choices[request.request_id] = completion
                requests.append(request)
        self._check(requests)
        self._run(requests, choices, progress)
        return generations

    def _params_for(self, num_prompts: int, params: Params | Sequence[Params] | None) -> list[SamplingParams]:
        if params is None:
            return [self.default_params] * num_prompts
        if isinstance(params, SamplingParams | Mapping):
            return [_params(params)] * num_prompts
        if isinstance(params, str) or not isinstance(params, Sequence):
            raise _wrong_type(
                "sampling_params", params, "SamplingParams, a dict of its options, or a list with one per prompt"
            )
        if len(params) != num_prompts:
            raise InvalidRequestError(
                f"{num_prompts} prompts have {len(params)} sampling_params; pass one for each", "sampling_params"
            )
        return [_params(each) for each in params]

    def _tokens(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise _wrong_type("a prompt", prompt, "a text or a list of token ids") from None

    def _choices(
        self,
        token_ids: list[int],
        params: SamplingParams,
        cache_salt: str,
        draft_limit: DraftLimit,
        predicted_token_ids: list[int],
    ) -> list[tuple[EngineRequest, Completion]]:
        seed = fresh_seed() if params.seed is None else params.seed
        pairs = []
        for index in range(params.n):
            seeded = replace(params, seed=choice_seed(seed, index))
            completion = Completion(index, seed=choice_seed(seed, index))
            completion.logprobs = None if params.logprobs is None else []
            request_id = f"llm-{next(self._ids)}"
            request = EngineRequest(
                request_id,
                token_ids,
                seeded,
                cache_salt,
                draft_limit=draft_limit,
                predicted_token_ids=predicted_token_ids,
            )
            pairs.append((request, completion))
        return pairs

    def _check(self, requests: list[EngineRequest]) -> None:
        for index, request in enumerate(requests):
            try:
                self.engine.admission.check(request)
                if request.params.grammar is not None:
                    self._executor.compile_grammar(request.params.grammar)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"request {index}: {error}", error.param) from None

    def _run(self, requests: list[EngineRequest], choices: dict[str, Completion], progress: bool) -> None:
        """Run requests to their end. The first that fails ends all, and its error is raised."""
        waiting, failed = requests[::-1], None
        bar = tqdm(total=len(requests), desc="generating", unit="request", disable=not progress)
        with bar:
            while waiting or self.engine.has_work:
                self._add(waiting)
                for output in self.engine.step():
                    _collect(choices[output.request_id], output)
                    bar.update(output.finish_reason is not None)
                    if output.finish_reason is FinishReason.ERROR and failed is None:
                        failed = output
                        waiting.clear()
                        self.engine.requests.abort(choices)
        if failed is not None and failed.error in REQUEST_ERRORS:
            raise InvalidRequestError(f"{failed.request_id}: {failed.error}", REQUEST_ERRORS[failed.error])
        if failed is not None:
            raise EngineDeadError(f"{failed.request_id}: {failed.error}")

    def _add(self, waiting: list[EngineRequest]) -> None:
        """Add as many requests as the queue accepts."""
        while waiting:
            try:
                self.engine.add_request(waiting[-1])
            except QueueFullError:
                return
            waiting.pop()


def _collect(completion: Completion, output: RequestOutput) -> None:
    completion.token_ids += output.token_ids
    completion.text += output.text
    if completion.logprobs is not None:
        completion.logprobs += output.logprobs or []
    completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
    completion.usage = output.usage
    if output.prompt_logprobs is not None:
        completion.prompt_logprobs = output.prompt_logprobs


def _config_of(model: str | EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    if isinstance(model, EngineConfig):
        if options:
            raise ConfigError(f"{next(iter(options))} is given beside an EngineConfig; set it in the configuration")
        return model
    try:
        return EngineConfig(**options if model is None else {"model": model, **options})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        hint = did_you_mean(name, EngineConfig.model_fields, 0.5) if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{name or 'options'}={short_repr(first['input'])}: {first['msg']}{hint}") from None


def _listed(prompts: Prompt | Sequence[Prompt], name: str) -> Sequence[Prompt]:
    """One prompt as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Sequence):
        raise _wrong_type(name, prompts, "a text, a list of token ids, or a list of these")
    is_one = bool(prompts) and all(isinstance(token, SupportsIndex) for token in prompts)
    return [cast(Prompt, prompts)] if is_one else cast(Sequence[Prompt], prompts)


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    """One conversation as a list of one."""
    conversations = [messages] if messages and all(isinstance(each, Mapping) for each in messages) else messages
    for conversation in conversations:
        if isinstance(conversation, str) or not all(isinstance(message, Mapping) for message in conversation):
            raise _wrong_type(
                "messages", conversation, "a list of messages {'role': ..., 'content': ...}, or a list of such lists"
            )
    return cast(Sequence[Sequence[Message]], conversations)


def _params(params: Params) -> SamplingParams:
    if isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Mapping):
        raise _wrong_type("sampling_params", params, "SamplingParams or a dict of its options")
    known = [field.name for field in fields(SamplingParams)]
    if unknown := [str(name) for name in params if name not in known]:
        hint = did_you_mean(unknown[0], known, 0.5) or "; leave it out"
        raise InvalidRequestError(f"sampling_params has no option {unknown[0]!r}{hint}", "sampling_params")
    return make_sampling_params(**params)


def _wrong_type(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {type(value).__name__} {short_repr(value)}; pass {wanted}", name)
