"""A target's forward pass in one call of the CPU kernels: embedding, decoder layers, norm, output matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.models.target_model import BEFORE_FINAL_NORM
from specray.ops.attention import Attend
from specray.ops.cpu.attention import PagedAttend
from specray.ops.cpu.layers import FusedLayers
from specray.ops.cpu.packed_layers import EmbedAndHead
from specray.ops.cpu.structs import Arena
from specray.ops.likeliest import LargestLogits


class FusedForward:
    """`TargetModel.step_forward` of a model that the kernels have whole, for steps that their attention plans.

    Aux hidden states have type `dtype`, that of the weights.
    """

    def __init__(self, layers: FusedLayers, around: EmbedAndHead, dtype: torch.dtype) -> None:
        self._layers = layers
        self._around = around
        self._dtype = dtype
        # Of passes that were started, by number: pairs of aux hidden states and what they are rounded from.
        self._to_round: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        places: Tensor | None,
        aux_hidden_state_layers: Sequence[int] = (),
        only_largest: bool = False,
    ) -> tuple[Tensor, Tensor | LargestLogits, list[Tensor]]:
        number, computed = self.start(token_ids, positions, attend, places, aux_hidden_state_layers, only_largest)
        self.wait(number)
        return computed

    def start(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        places: Tensor | None,
        aux_hidden_state_layers: Sequence[int] = (),
        only_largest: bool = False,
    ) -> tuple[int, tuple[Tensor, Tensor | LargestLogits, list[Tensor]]]:
        """Start a pass; returns its number and its results, which are there after `wait`."""
        assert isinstance(attend, PagedAttend)
        num_layers = len(self._layers.structs)
        taps = tapped(aux_hidden_state_layers, num_layers)
        step = (token_ids, positions, attend, places)
        started = self._layers.start_forward(self._around, *step, taps, self._dtype, only_largest)
        number, hidden, final, found, copies, *_ = started
        logits = LargestLogits(found) if only_largest else found
        if list(aux_hidden_state_layers) == taps:
            return number, (final, logits, [copies] if taps else [])
        others = {BEFORE_FINAL_NORM: hidden, num_layers: final}
        wanted = {index: states for index, states in others.items() if index in aux_hidden_state_layers}
        rounded = {index: torch.empty_like(states, dtype=self._dtype) for index, states in wanted.items()}
        self._to_round[number] = [(rounded[index], states) for index, states in wanted.items()]
        return number, (final, logits, in_order(aux_hidden_state_layers, taps, copies, rounded))

    def follow(self, number: int, arena: Arena, slots: Tensor) -> tuple[int, LargestLogits]:
        """See FusedLayers: the new pass's number, and the tokens that it chooses."""
        started = self._layers.follow(self._around, number, arena, slots)
        return started.number, LargestLogits(started.logits)

    def wait(self, number: int) -> None:
        """Wait for a pass and those before it, and help with them."""
        self._layers.join(number)
        for rounded, states in self._to_round.pop(number, ()):
            rounded.copy_(states)

    def cancel(self, number: int) -> None:
        """See FusedLayers."""
        self._layers.cancel(number)


def in_order(wanted: Sequence[int], taps: Sequence[int], copies: Tensor, others: dict[int, Tensor]) -> list[Tensor]:
    """The streams of the layers `wanted`: `copies` [T, len(taps) * H] are those of `taps`, whose type all get."""
    states = others | {index: copies.chunk(len(taps), 1)[place] for place, index in enumerate(taps)}
    return [states[index].to(copies.dtype) for index in wanted]


def tapped(aux_hidden_state_layers: Sequence[int], num_layers: int) -> list[int]:
    """The layers whose input is wanted, ascending."""
    return sorted({index for index in aux_hidden_state_layers if 0 <= index < num_layers})
