"""Computes hidden states of answers during training, for folders that store tokens only.

The target prefills each sequence in our engine, so that a head learns from the hidden states that it will read when it
is served.
"""

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from specray.engine.request import EngineRequest
from specray.errors import EngineDeadError
from specray.llm import LLM
from specray.outputs import FinishReason
from specray.sampling_params import SamplingParams
from specray.train.recorder import HiddenStateRecorder, Recording
from specray.train.shards import Answer

_POSITIONS = 16_384  # of the KV pool; longer batches are computed in turns
_ROWS = 1024  # of one forward pass
_AT_ONCE = 64  # queued requests, far fewer than an engine takes


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
