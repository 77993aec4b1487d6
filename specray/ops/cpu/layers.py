"""A stack of decoder layers, or a whole model, as one call of the CPU kernels."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specray.ops.cpu.attention import PagedAttend
from specray.ops.cpu.packed_layers import EmbedAndHead, PackedLayers
from specray.ops.cpu.processor import num_threads
from specray.ops.cpu.structs import FLOAT_TYPES, CaptureStruct, PassStruct, RequestBufferStruct, StepStruct, pointer
from specray.ops.cpu.verification import Verification


class StartedPass(NamedTuple):
    """A whole model's pass. Its results are there once `FusedLayers.join` has returned."""

    number: int  # among the runs of this process's kernels
    final: Tensor  # float32 [T, H], the norm of the stream that leaves the last layer
    # float32 [n, V] of the rows `places` or of all; or the tokens of the largest logits, int64 [n], -1 where logits
    # are not finite
    logits: Tensor
    copies: Tensor  # states of the stream, see `FusedLayers.__call__`
    step: StepStruct
    in_use: tuple[object, ...]  # what else the kernels read or write


class FusedLayers(PackedLayers):
    """Runs the layers. The residual stream is float32 whatever the type of the weights."""

    def __init__(self, *parts: Any) -> None:
        self._started: dict[int, StartedPass] = {}  # and not joined, by number
        super().__init__(*parts)

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        captured: Sequence[int] = (),
        first_input: Tensor | None = None,
        first_layer: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Run the layers on the residual stream `hidden` float32 [T, hidden], in place.

        Returns copies of the stream as it enters the layers `captured`, [T, len(captured) * hidden] of type
        `dtype`; len(layers) is what leaves the last one.
        `first_input` float32 [T, in] is the first layer's input if it has no input norm. `first_layer` is that of the
        KV pool.
        """
        copies, capture = self._copies(len(hidden), captured, dtype)
        positions = positions.contiguous()
        step = self.step(positions, attend, first_layer)
        self.kernels.layers(
            self.structs,
            len(self.structs),
            ctypes.byref(self.sizes),
            ctypes.byref(step),
            pointer(first_input),
            pointer(hidden),
            ctypes.byref(capture),
            num_threads(self.num_bytes),
        )
        return copies

    def start_forward(
        self,
        around: EmbedAndHead,
        token_ids: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        places: Tensor | None,
        captured: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        only_largest: bool = False,
        verification: Verification | None = None,
        read_lens: Sequence[int] | None = None,
    ) -> StartedPass:
        """Start a whole model's pass, after those that were started before, whose results it may read.

        `places` int64 [n] are the rows whose logits are wanted, None all. With `only_largest`, only the tokens of the
        largest logits are. `verification`: of trees whose nodes are these rows. `final` and the rows' logits are only
        right for the last `read_lens` rows of each request, None all.
        """
        count = token_ids.shape[0]
        copies, capture = self._copies(count, captured, dtype)
        token_ids, positions = token_ids.contiguous(), positions.contiguous()
        places = None if places is None else places.contiguous()
        lens = None if read_lens is None else (ctypes.c_int32 * len(read_lens))(*read_lens)
        step = self.step(positions, attend, 0, lens)
        in_use = (attend, token_ids, positions, places, capture, lens)
        return self._start(around, step, token_ids, places, (copies, capture), only_largest, in_use, verification)

    def begin_after(self, around: EmbedAndHead, number: int, buffer: RequestBufferStruct, slots: Tensor) -> StartedPass:
        """Start a pass over the tokens that another one chooses, which is not joined yet, for the same requests.

        The other one, `number`, has the largest logits of each request's last token. `slots` int64 [R] are the
        requests' in the request table.
        """
        before = self._started[number]
        step, slots, count = StepStruct(), slots.contiguous(), slots.shape[0]
        numbers = torch.empty(count * (before.step.requests.slots_width + 5), dtype=torch.int64)
        self.kernels.step_after(
            ctypes.byref(before.step), ctypes.byref(buffer), pointer(slots), pointer(numbers), ctypes.byref(step)
        )
        without = self._copies(count, (), torch.float32)
        return self._start(around, step, before.logits, None, without, True, (numbers,))

    def _start(
        self,
        around: EmbedAndHead,
        step: StepStruct,
        token_ids: Tensor | None,
        places: Tensor | None,
        copies: tuple[Tensor, CaptureStruct],
        only_largest: bool,
        in_use: tuple[object, ...],
        verification: Verification | None = None,
    ) -> StartedPass:
        """`in_use` has what `step` and `copies` point to."""
        count = step.count
        hidden, final = torch.empty(2, count, self.sizes.hidden).unbind()
        num_places = count if places is None else places.shape[0]
        if only_largest:
            logits = torch.empty(num_places, dtype=torch.int64)
        else:
            logits = torch.empty(num_places, around.struct.num_columns)
        where = PassStruct(
            pointer(token_ids),
            pointer(places),
            num_places,
            pointer(hidden),
            pointer(final),
            None if only_largest else pointer(logits),
            pointer(logits) if only_largest else None,
            None if verification is None else verification.address(around.struct.num_columns),
        )
        model = (ctypes.byref(around.struct), self.structs, len(self.structs), ctypes.byref(self.sizes))
        run = (ctypes.byref(step), ctypes.byref(where), ctypes.byref(copies[1]))
        threads = num_threads(self.num_bytes + around.num_bytes)
        number = self.kernels.start_forward(*model, *run, threads)
        in_use = (around, token_ids, places, hidden, verification, *in_use)
        started = StartedPass(number, final, logits, copies[0], step, in_use)
        self._started[number] = started
        return started

    def join(self, number: int) -> None:
        """Wait for a pass and those before it, and help with them."""
        self.kernels.join(number)
        self._started.pop(number, None)

    def _copies(self, count: int, captured: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, CaptureStruct]:
        """(copies of the stream to be filled, where they lie)."""
        size = self.sizes.hidden
        copies = torch.empty(count, len(captured) * size, dtype=dtype)
        if not captured:
            return copies, CaptureStruct(None, FLOAT_TYPES[dtype], 0)
        addresses = (ctypes.c_void_p * (len(self.structs) + 2))()
        for number, index in enumerate(captured):
            addresses[index] = copies.data_ptr() + number * size * dtype.itemsize
        return copies, CaptureStruct(addresses, FLOAT_TYPES[dtype], len(captured) * size)

    def step(
        self,
        positions: Tensor,
        attend: PagedAttend,
        first_layer: int = 0,
        read_lens: ctypes.Array[ctypes.c_int32] | None = None,
    ) -> StepStruct:
        """What the kernels read of a step, besides the layers. `positions` must be contiguous; all must live as long.

        `read_lens` [R]: of how many of each request's last rows the output is read, None of all.
        """
        return StepStruct(
            positions.shape[0],
            pointer(positions),
            pointer(attend.written),
            self.cos,
            self.sin,
            attend.requests,
            attend.backend.address_of(first_layer),
            None if read_lens is None else ctypes.addressof(read_lens),
        )
