"""What happens to a request before it is queued: checks of its tokens, its length, and the queue's length."""

from collections.abc import Iterable, Mapping, Sequence

from specray.config import EngineConfig
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.engine.request import Request
from specray.engine.scheduler import Scheduler
from specray.errors import ContextLengthError, InvalidRequestError, Overflow, QueueFullError
from specray.sampling_params import SamplingParams


class Admission:
    """Whether an engine accepts a request. `requests` are those that have not ended, by id; changes nothing."""

    def __init__(
        self, config: EngineConfig, capacity: Capacity, scheduler: Scheduler, requests: Mapping[str, Request]
    ) -> None:
        self.max_length = min(capacity.context_length, scheduler.slots.max_request_tokens)
        self._config = config
        self._capacity = capacity
        self._scheduler = scheduler
        self._requests = requests

    def request_of(self, spec: EngineRequest, arrival: float) -> Request:
        """The request to be queued; `arrival` is on the engine's clock."""
        num_prompt, max_tokens = len(spec.prompt_token_ids), spec.params.max_tokens
        max_length = self.max_length if max_tokens is None else num_prompt + max_tokens
        known = [*spec.prompt_token_ids, *spec.emitted_token_ids]
        request = Request(spec, max_length, arrival, known, num_prompt)
        speculative = self._config.speculative
        request.prompt_logprobs = None if spec.params.prompt_logprobs is None else []
        request.is_lossy = speculative.is_simulated or (speculative.is_lossy and spec.params.temperature > 0)
        return request

    def check(self, spec: EngineRequest, arriving: Sequence[EngineRequest] = ()) -> None:
        """Raise if a request cannot be queued after the `arriving` ones: InvalidRequestError or QueueFullError."""
        num_prompt = len(spec.prompt_token_ids)
        max_tokens = 1 if spec.params.max_tokens is None else spec.params.max_tokens
        if spec.request_id in self._requests or any(spec.request_id == other.request_id for other in arriving):
            raise InvalidRequestError(f"request_id={spec.request_id!r} is already in use; choose another", "request_id")
        if num_prompt == 0:
            raise InvalidRequestError("the prompt has no tokens; send at least one", "prompt")
        if num_prompt + max_tokens > self.max_length:
            raise ContextLengthError.of(Overflow(num_prompt, max_tokens, self.max_length))
        if spec.emitted_token_ids and len(spec.emitted_token_ids) >= (spec.params.max_tokens or self.max_length):
            raise InvalidRequestError("emitted_token_ids has max_tokens tokens already; none is left to generate")
        if spec.params.grammar is not None:
            self._check_grammar(spec.params)
        self._check_ids("prompt", spec.prompt_token_ids)
        self._check_ids("emitted_token_ids", spec.emitted_token_ids)
        self._check_ids("prediction", spec.predicted_token_ids)
        if (num_predicted := len(spec.predicted_token_ids)) > self.max_length:
            raise InvalidRequestError(
                f"prediction has {num_predicted} tokens, but this server allows {self.max_length} per request; "
                "shorten it or leave it out",
                "prediction",
            )
        self._check_ids("logit_bias", spec.params.logit_bias)
        self._check_ids("stop_token_ids", spec.params.stop_token_ids)
        self._check_ids("logprob_token_ids", spec.params.logprob_token_ids)
        for sequence in spec.params.banned_sequences:
            self._check_ids("bad_words", sequence)
        self._check_allowed(spec.params)
        self.check_queue(spec.tenant, arriving)

    def check_queue(self, tenant: str = "", arriving: Sequence[EngineRequest] = ()) -> None:
        """QueueFullError if one more request, after the `arriving` ones, exceeds the queue's limit or its tenant's."""
        # Before the queue: a step in another thread may admit a request meanwhile, and it must not count in both.
        num_free = self._scheduler.slots.num_free
        waiting = self._scheduler.waiting
        num_waiting = len(waiting) - waiting.num_probes + sum(not other.is_probe for other in arriving)
        num_own = waiting.num_waiting_of(tenant) + sum(other.tenant == tenant for other in arriving)
        if num_waiting >= self._config.max_queued_requests + num_free:
            raise QueueFullError(
                f"{num_waiting} requests are waiting and max_queued_requests is {self._config.max_queued_requests}; "
                "send the request again later"
            )
        if tenant and num_own >= self._config.max_queued_of_tenant + num_free:
            raise QueueFullError(
                f"{num_own} requests with this key are waiting and max_queued_requests_per_tenant is "
                f"{self._config.max_queued_of_tenant}; send the request again later"
            )

    def _check_allowed(self, params: SamplingParams) -> None:
        allowed = params.allowed_token_ids
        if allowed is None:
            return
        self._check_ids("allowed_token_ids", allowed)
        masked = {sequence[0] for sequence in params.banned_sequences if len(sequence) == 1}
        if params.min_tokens:
            masked |= set(params.stop_token_ids) | set(() if params.ignore_eos else self._capacity.eos_token_ids)
        if masked.issuperset(allowed):
            raise InvalidRequestError(
                "allowed_token_ids has only tokens that bad_words forbids, or that end the output, which "
                f"min_tokens={params.min_tokens} forbids; allow another token",
                "allowed_token_ids",
            )

    def _check_grammar(self, params: SamplingParams) -> None:
        """Refuse what contradicts a grammar. The grammar itself was compiled before."""
        if params.min_tokens:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} contradicts a grammar, which decides where the output may end; leave "
                "min_tokens out and put the least length into the grammar",
                "min_tokens",
            )
        if not self._capacity.eos_token_ids:
            raise InvalidRequestError("this model has no end token, so no output of a grammar could end", "grammar")
        if self._config.speculative.is_simulated:
            raise InvalidRequestError(
                "this server simulates acceptance, so its output matches no grammar; send the request to another one",
                "grammar",
            )

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._capacity.vocab_size:
                raise InvalidRequestError(
                    f"{name} has token id {token_id}, but the vocabulary has {self._capacity.vocab_size} tokens", name
                )
