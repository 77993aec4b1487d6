"""A target's forward pass in one call of the CPU kernels: embedding, decoder layers, norm, output matrix."""

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
        num_layers = len(self._layers.structs)
        taps = tapped(aux_hidden_state_layers, num_layers)
        step = (token_ids, positions, attend, places)
        hidden, final, found, copies = self._layers.start_forward(self._around, *step, taps, self._dtype, only_largest)
        logits = LargestLogits(found) if only_largest else found
        if list(aux_hidden_state_layers) == taps:
            return final, logits, [copies] if taps else []
        self.wait()
        others = {BEFORE_FINAL_NORM: hidden, num_layers: final}
        return final, logits, in_order(aux_hidden_state_layers, taps, copies, others)

    def wait(self) -> None:
        """Wait for the pass, and help with it."""
        self._layers.kernels.join()


def in_order(wanted: Sequence[int], taps: Sequence[int], copies: Tensor, others: dict[int, Tensor]) -> list[Tensor]:
    """The streams of the layers `wanted`: `copies` [T, len(taps) * H] are those of `taps`, whose type all get."""
    states = others | {index: copies.chunk(len(taps), 1)[place] for place, index in enumerate(taps)}
    return [states[index].to(copies.dtype) for index in wanted]


def tapped(aux_hidden_state_layers: Sequence[int], num_layers: int) -> list[int]:
    """The layers whose input is wanted, ascending."""
    return sorted({index for index in aux_hidden_state_layers if 0 <= index < num_layers})
