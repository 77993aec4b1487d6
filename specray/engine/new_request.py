"""The worker's message for a request that starts."""

from specray.engine.request import Request
from specray.sampling_params import SamplingParams
from specray.step import NewRequest, PromptLogprobs, SamplingOptions


def new_request(request: Request, eos_token_ids: list[int]) -> NewRequest:
    """The message for a request that has its slot and its blocks."""
    spec = request.spec
    return NewRequest(
        request.slot,
        list(request.token_ids),
        request.num_prompt_tokens,
        request.num_computed_tokens,
        list(request.block_ids),
        sampling_options(spec.params, eos_token_ids),
        spec.cache_salt,
        _wanted_prompt_logprobs(request),
        list(spec.predicted_token_ids),
        spec.traces_drafts,
        "" if request.drafter is None else request.drafter.name,
        "" if request.drafter is None else request.drafter.shadow,
    )


def sampling_options(params: SamplingParams, eos_token_ids: list[int]) -> SamplingOptions:
    """The worker's options of a request with `params`, whose seed is set."""
    assert params.seed is not None
    stops = [] if params.ignore_eos else eos_token_ids
    return SamplingOptions(
        params.seed,
        params.temperature,
        params.top_p,
        max(0, params.top_k),
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        list(params.logit_bias.items()),
        params.min_tokens,
        stops + params.stop_token_ids,
        params.logprobs,
        params.allowed_token_ids,
        params.grammar,
        params.banned_sequences or None,
        params.logprob_token_ids or None,
    )


def _wanted_prompt_logprobs(request: Request) -> PromptLogprobs | None:
    """Those that were not reported yet."""
    params = request.spec.params
    if request.prompt_logprobs is None or params.prompt_logprobs is None:
        return None
    return PromptLogprobs(params.prompt_logprobs_start, params.prompt_logprobs)
