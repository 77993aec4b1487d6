"""The worker's message for a request that starts."""

from specray.engine.request import Request
from specray.sampling_params import SamplingParams
from specray.step import NewRequest, PromptLogprobs, SamplingOptions


def new_request(request: Request, eos_token_ids: list[int]) -> NewRequest:
    """The message for a request that has its slot and its blocks."""
    spec = request.spec
    return NewRequest(
        slot=request.slot,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=list(request.block_ids),
        sampling=sampling_options(spec.params, eos_token_ids),
        cache_salt=spec.cache_salt,
        prompt_logprobs=_wanted_prompt_logprobs(request),
        predicted_token_ids=list(spec.predicted_token_ids),
        traces_drafts=spec.traces_drafts,
        drafter="" if request.drafter is None else request.drafter.name,
        shadow="" if request.drafter is None else request.drafter.shadow,
        stored_state=request.stored_state,
    )


def sampling_options(params: SamplingParams, eos_token_ids: list[int]) -> SamplingOptions:
    """The worker's options of a request with `params`, whose seed is set."""
    assert params.seed is not None
    stops = [] if params.ignore_eos else eos_token_ids
    return SamplingOptions(
        seed=params.seed,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=list(params.logit_bias.items()),
        min_tokens=params.min_tokens,
        eos_token_ids=stops + params.stop_token_ids,
        logprobs=params.logprobs,
        allowed_token_ids=params.allowed_token_ids,
        grammar=params.grammar,
        banned_sequences=params.banned_sequences or None,
        logprob_token_ids=params.logprob_token_ids or None,
    )


def _wanted_prompt_logprobs(request: Request) -> PromptLogprobs | None:
    """Those that were not reported yet."""
    params = request.spec.params
    if request.prompt_logprobs is None or params.prompt_logprobs is None:
        return None
    return PromptLogprobs(params.prompt_logprobs_start, params.prompt_logprobs)
