"""A target's forward pass in one call of the CPU kernels: embedding, decoder layers, norm, output matrix."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from specray.models.target_model import BEFORE_FINAL_NORM
from specray.ops.attention import Attend
from specray.ops.cpu.attention import PagedAttend
from specray.ops.cpu.layers import FusedLayers
from specray.ops.cpu.packed_layers import EmbedAndHead
from specray.ops.likeliest import LargestLogits


class FusedForward:
    """`TargetModel.step_forward` of a model that the kernels have whole, for steps that their attention plans.

    A call starts the pass, whose results are there after `wait`. Aux hidden states have type `dtype`, that of the
    weights.
    """

    def __init__(self, layers: FusedLayers, around: EmbedAndHead, dtype: torch.dtype) -> None:
        self._layers = layers
        self._around = around
        self._dtype = dtype
        self._lock = threading.Lock()  # engines in several threads may share a model
        self._to_round: list[tuple[Tensor, Tensor]] = []  # (aux hidden states, what they are rounded from) of passes

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        places: Tensor | None,
        aux_hidden_state_layers: Sequence[int] = (),
        only_largest: bool = False,
    ) -> tuple[Tensor, Tensor | LargestLogits, list[Tensor]]:
        assert isinstance(attend, PagedAttend)
        with self._lock:
            return self._start(token_ids, positions, attend, places, aux_hidden_state_layers, only_largest)

    def wait(self) -> None:
        """Wait for the pass that was started last, and help with it."""
        with self._lock:
            self._layers.join()
            for rounded, states in self._to_round:
                rounded.copy_(states)
            self._to_round.clear()

    def _start(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        places: Tensor | None,
        aux_hidden_state_layers: Sequence[int],
        only_largest: bool,
    ) -> tuple[Tensor, Tensor | LargestLogits, list[Tensor]]:
        num_layers = len(self._layers.structs)
        taps = tapped(aux_hidden_state_layers, num_layers)
        step = (token_ids, positions, attend, places)
        hidden, final, found, copies = self._layers.start_forward(self._around, *step, taps, self._dtype, only_largest)
        logits = LargestLogits(found) if only_largest else found
        if list(aux_hidden_state_layers) == taps:
            return final, logits, [copies] if taps else []
        others = {BEFORE_FINAL_NORM: hidden, num_layers: final}
        wanted = {index: states for index, states in others.items() if index in aux_hidden_state_layers}
        rounded = {index: torch.empty_like(states, dtype=self._dtype) for index, states in wanted.items()}
        self._to_round += [(rounded[index], states) for index, states in wanted.items()]
        return final, logits, in_order(aux_hidden_state_layers, taps, copies, rounded)


def in_order(wanted: Sequence[int], taps: Sequence[int], copies: Tensor, others: dict[int, Tensor]) -> list[Tensor]:
    """The streams of the layers `wanted`: `copies` [T, len(taps) * H] are those of `taps`, whose type all get."""
    states = others | {index: copies.chunk(len(taps), 1)[place] for place, index in enumerate(taps)}
    return [states[index].to(copies.dtype) for index in wanted]


def tapped(aux_hidden_state_layers: Sequence[int], num_layers: int) -> list[int]:
    """The layers whose input is wanted, ascending."""
    return sorted({index for index in aux_hidden_state_layers if 0 <= index < num_layers})
