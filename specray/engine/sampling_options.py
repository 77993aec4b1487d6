"""The part of a request's sampling parameters that the worker needs."""

from specray.sampling_params import SamplingParams
from specray.step import SamplingOptions


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
        stops + params.stop_token_ids if params.min_tokens else [],
        params.logprobs,
        params.allowed_token_ids,
        params.grammar,
    )
