"""A request's life on the host: the one owner of its token ids, status and finish reason.

Not here: its text (`detokenizer`), its KV rows and its drafts (the worker's).
"""

from dataclasses import dataclass, field
from enum import Enum

from specray.engine.radix_cache import CacheNode
from specray.outputs import FinishReason, RequestUsage, TokenLogprob
from specray.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a caller submits: one choice of one prompt. `params.seed` is set; `params.n` plays no part."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""                  # tenants with different salts share no cached prefix


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
