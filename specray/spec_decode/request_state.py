"""The host's part of a request on a rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specray.ops.sampling_state import SamplingState
from specray.step import NewRequest, PromptLogprobs, SamplingOptions


@dataclass(slots=True, eq=False)
class RequestState:
    """The host's part of one slot of the request table."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int  # committed tokens whose KV is written
    num_kv_slots: int  # tokens that the request's blocks can hold
    block_ids: list[int]
    cache_salt: str
    sampling: SamplingState
    prompt_logprobs: PromptLogprobs | None = None
    predicted_token_ids: Sequence[int] = ()
    traces_drafts: bool = False
    drafter: str = ""  # see NewRequest
    shadow: str = ""
    has_ended: bool = False  # it emitted a token that ends it, or failed; the scheduler may not know yet

    @classmethod
    def start(cls, new: NewRequest, vocab_size: int, device: torch.device) -> "RequestState":
        """The state before its tokens and blocks are entered."""
        return cls(
            new.slot,
            [],
            new.num_prompt_tokens,
            new.num_computed_tokens,
            0,
            [],
            new.cache_salt,
            SamplingState.start(new.sampling, new.token_ids, new.num_prompt_tokens, vocab_size, device),
            new.prompt_logprobs,
            new.predicted_token_ids,
            new.traces_drafts,
            new.drafter,
            new.shadow,
        )


def sampling_columns(options: SamplingOptions) -> list[int]:
    """The int32 columns of a request's sampling options in the request table."""
    seed = np.array([options.seed], dtype=np.int64).view(np.int32)
    integers = np.array([options.top_k], dtype=np.int32)
    floats = np.array([options.temperature, options.top_p, options.min_p], dtype=np.float32).view(np.int32)
    return [int(column) for column in np.concatenate((seed, integers, floats))]
