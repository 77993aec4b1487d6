"""Offline inference in this process, without Ray: `LLM(...).generate(prompts)`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Self

from tqdm import tqdm

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.engine import Engine
from specray.engine.request import EngineRequest
from specray.errors import EngineDeadError, InvalidRequestError, QueueFullError
from specray.models.files import resolve_model
from specray.models.target_model import TargetModel
from specray.models.tokenizer import load_tokenizer
from specray.outputs import Completion, FinishReason, Generation, RequestOutput
from specray.sampling_params import SamplingParams, choice_seed, fresh_seed
from specray.spec_decode.drafter import Drafter
from specray.step import UNLIMITED, DraftLimit
from specray.worker.local import LocalExecutor


class LLM:
    """An engine with one model. Options are those of EngineConfig.

    >>> LLM(model="smollm2-135m-instruct").generate(["Once upon a time"])[0].choices[0].text

    `drafter` replaces the configured drafting method.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: bool = False,
        drafter: Drafter | None = None,
        _model: TargetModel | None = None,
        **options: Any,
    ) -> None:
        self.config = config or EngineConfig(**options)
        folder = resolve_model(self.config.model, self.config.revision, self.config.load_format, progress=progress)
        self.tokenizer = load_tokenizer(folder)
        self._executor = LocalExecutor(self.config, progress=progress, drafter=drafter, model=_model)
        self.engine = Engine(self.config, self._executor, self.tokenizer.backend_tokenizer)
        self._ids = count()

    def with_speculative(self, speculative: SpeculativeConfig, drafter: Drafter | None = None) -> "LLM":
        """Another engine with the same loaded weights, its own KV pool and this drafting method."""
        config = self.config.model_copy(update={"speculative": speculative})
        return LLM(config, drafter=drafter, _model=self._executor.worker.model)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        draft_limits: Sequence[DraftLimit] | None = None,
        predictions: Sequence[str | Sequence[int]] | None = None,
        progress: bool = False,
    ) -> list[Generation]:
        """Complete all prompts (text or token ids), in order; `draft_limits` has one entry per prompt.

        So has `predictions`: expected outputs, which are drafted while the output agrees with them.

        InvalidRequestError if one of the prompts is invalid; then none is run.
        """
        all_params = self._params_for(prompts, params)
        token_ids = [self._tokens(prompt) for prompt in prompts]
        generations = [Generation(list(ids), []) for ids in token_ids]
        choices: dict[str, Completion] = {}
        requests = []
        hints = zip(draft_limits or [UNLIMITED] * len(prompts), predictions or [()] * len(prompts), strict=True)
        for generation, ids, options, (limit, predicted) in zip(generations, token_ids, all_params, hints, strict=True):
            expected = self._tokens(predicted, add_special_tokens=False)
            for request, completion in self._choices(ids, options, cache_salt, limit, expected):
                generation.choices.append(completion)
                choices[request.request_id] = completion
                requests.append(request)
        self._check(requests)
        self._run(requests, choices, progress)
        return generations

    def close(self) -> None:
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params_for(
        self, prompts: Sequence[object], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts have {len(params)} params; pass one for each", "params")
        return params

    def _tokens(self, text: str | Sequence[int], add_special_tokens: bool = True) -> list[int]:
        if isinstance(text, str):
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return list(text)

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
        waiting = requests[::-1]
        with tqdm(total=len(requests), desc="generating", unit="request", disable=not progress) as bar:
            while waiting or self.engine.has_work:
                self._add(waiting)
                for output in self.engine.step():
                    _collect(choices[output.request_id], output)
                    bar.update(output.finish_reason is not None)

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
    if output.finish_reason is FinishReason.ERROR:
        raise EngineDeadError(f"{output.request_id}: {output.error}")
