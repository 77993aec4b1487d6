"""Hidden states of the target, as a head will read them when it is served: our engine computes them.

They are recorded through the interface of drafters: in the run that generates the answers, or, for folders that store
tokens only, in a prefill of each sequence during training.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from specray.engine.engine_request import EngineRequest
from specray.errors import EngineDeadError
from specray.llm import LLM
from specray.outputs import FinishReason
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_state import RequestState
from specray.train.shards import Answer

_POSITIONS = 16_384  # of the KV pool; longer batches are computed in turns
_ROWS = 1024  # of one forward pass
_AT_ONCE = 64  # queued requests, far fewer than an engine takes


class Recording(NamedTuple):
    """One request from its first to its last token."""

    seed: int  # the request's; identifies it for the caller
    token_ids: list[int]  # prompt and answer, n tokens
    aux_hidden_states: Tensor  # [n, width]; zeros for the last token, which was sampled and not computed


class HiddenStateRecorder:
    """Drafter that proposes nothing and passes every finished request to `take`.

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


class HiddenStateComputer:
    """An engine that only prefills sequences of up to `max_length` tokens. `layers` are those of `shards`."""

    def __init__(self, model: str, dtype: str, layers: Sequence[int], max_length: int) -> None:
        self._computed: dict[int, Tensor] = {}  # by position in the batch
        self._llm = LLM(
            model=model,
            dtype=dtype,
            disable_radix_cache=True,
            max_total_tokens=max(_POSITIONS, 2 * max_length),
            chunked_prefill_size=_ROWS,
            max_prefill_tokens=_ROWS,
            drafter=HiddenStateRecorder(layers, self._take),
        )

    def __call__(self, answers: Sequence[Answer]) -> list[Tensor]:
        """bfloat16 [n, columns] of each answer; the last row is zeros, as in a shard."""
        engine, waiting, num_queued = self._llm.engine, enumerate(answers), 0
        while True:
            for number, answer in islice(waiting, _AT_ONCE - num_queued):
                # The last token's states are never used; the one generated token stands in for it.
                params = SamplingParams(max_tokens=1, temperature=0.0, seed=number, ignore_eos=True)
                engine.add_request(EngineRequest(str(number), answer.token_ids[:-1].tolist(), params))
                num_queued += 1
            if not engine.has_work:
                break
            for output in engine.step():
                if output.finish_reason is FinishReason.ERROR:
                    raise EngineDeadError(f"the target failed to compute hidden states: {output.error}")
                num_queued -= output.finish_reason is not None
        return [self._computed.pop(number) for number in range(len(answers))]

    def _take(self, recording: Recording) -> None:
        self._computed[recording.seed] = recording.aux_hidden_states
