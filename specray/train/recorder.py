"""A drafter that proposes nothing and records every request's tokens and hidden states.

Training data is recorded in the run that generates the answers, through the interface of drafters.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_state import RequestState


class Recording(NamedTuple):
    """One request from its first to its last token."""

    seed: int  # the request's; identifies it for the caller
    token_ids: list[int]  # prompt and answer, n tokens
    aux_hidden_states: Tensor  # [n, width]; zeros for the last token, which was sampled and not computed


class HiddenStateRecorder:
    """Drafter that passes every finished request to `take`.

    Needs the prefix cache off: the hidden states of a hit are not computed.
    """

    max_draft_tokens = 0
    reads_next_token = False

    def __init__(self, aux_hidden_state_layers: Sequence[int], take: Callable[[Recording], None]) -> None:
        self.aux_hidden_state_layers = tuple(aux_hidden_state_layers)
        self._take = take
        self._states: dict[int, RequestState] = {}
        self._aux_hidden_states: dict[int, list[Tensor]] = {}

    def propose(self, context: ProposeContext) -> DraftTree:
        requests = context.requests + context.unfinished
        if requests:
            assert context.aux_hidden_states is not None
            aux_hidden_states = context.aux_hidden_states.to("cpu", torch.bfloat16)
            parts = torch.split(aux_hidden_states, [request.end - request.start for request in requests])
            for request, part in zip(requests, parts, strict=True):
                self._states[request.slot] = context.table.states[request.slot]
                self._aux_hidden_states.setdefault(request.slot, []).append(part)
        return DraftTree.roots(context.roots())

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if state := self._states.pop(slot, None):
                computed, token_ids = torch.cat(self._aux_hidden_states.pop(slot)), state.token_ids
                assert len(computed) == len(token_ids) - 1, (len(computed), len(token_ids))
                padded = torch.cat((computed, computed.new_zeros(1, computed.shape[1])))
                self._take(Recording(state.sampling.options.seed, list(token_ids), padded))
