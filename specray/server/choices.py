"""The engine's requests of one HTTP request: one for each choice of each prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from specray.engine.engine_request import EngineRequest
from specray.sampling_params import SamplingParams, choice_seed, fresh_seed
from specray.step import DraftLimit
from specray.tenants import tenant_scoped


class Truncation(NamedTuple):
    """Which tokens of a prompt are used: the last `limit` ones, or the first ones."""

    limit: int | None
    keeps_start: bool = False

    def of(self, token_ids: list[int]) -> list[int]:
        if self.limit is None:
            return token_ids
        return token_ids[: self.limit] if self.keeps_start else token_ids[-self.limit :]


WHOLE = Truncation(None)


class PreparedPrompt(NamedTuple):
    """One prompt, tokenized, with the options of its `params.n` choices. `params.seed` is set."""

    token_ids: list[int]
    params: SamplingParams
    names: Sequence[str]  # each choice's, for /abort_request
    predicted_token_ids: Sequence[int] = ()  # see EngineRequest


def engine_requests(
    request_id: str,
    prompts: Sequence[PreparedPrompt],
    tenant: str,
    cache_salt: str,
    draft_limit: DraftLimit,
    drafter: str,
) -> list[EngineRequest]:
    """Prompt by prompt, in the order of `replies.empty_choices`. `drafter` is a name, or empty: the engine chooses."""
    namespace = tenant_scoped(tenant, cache_salt)
    requests: list[EngineRequest] = []
    for prompt in prompts:
        for index, name in enumerate(prompt.names):
            requests.append(
                EngineRequest(
                    f"{request_id}-{len(requests)}",
                    prompt.token_ids,
                    replace(prompt.params, seed=seed_of(prompt.params, index), n=1),
                    namespace,
                    tenant,
                    draft_limit=draft_limit,
                    predicted_token_ids=prompt.predicted_token_ids,
                    drafter=drafter,
                    name=name,
                )
            )
    return requests


def seed_of(params: SamplingParams, index: int) -> int:
    """The seed of choice `index` of a prompt."""
    assert params.seed is not None
    return choice_seed(params.seed, index)


def seeded(params: SamplingParams) -> SamplingParams:
    """`params` with a seed: the client's, or a random one."""
    return params if params.seed is not None else replace(params, seed=fresh_seed())
