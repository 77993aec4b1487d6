"""Launches of the one-shot all-reduce, alone or with the addition and the norm that follow it."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from specray.ops.gpu.all_reduce_kernels import sum_over_ranks
from specray.ops.gpu.launches import starts_early
from specray.ops.peer_buffers import NUM_PROGRAMS, flag_bytes, most_bytes

_MOST_COLUMNS = 16384  # that a program holds
# Looks of `try_sum` at a rank's flag. If each takes a microsecond, these are half a minute, in which another rank may
# still compile the kernel. Derived, not measured.
TRIAL_POLLS = 1 << 25


class OneShotAllReduce:
    """Sums over ranks through memory that all of them can read. All sums of a process run on one stream.

    What a graph repeats does not depend on the host: the device counts the sums, and addresses stay.
    """

    def __init__(self, rank: int, addresses: Sequence[int], num_bytes: int, device: torch.device) -> None:
        """`addresses` of the memory of each rank, as seen from this one: zeroed, `num_bytes` of `buffer_bytes`."""
        self._rank, self._num_ranks = rank, len(addresses)
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._turns = torch.zeros(NUM_PROGRAMS, dtype=torch.int64, device=device)
        self._region_bytes = (num_bytes - flag_bytes(self._num_ranks)) // (2 * NUM_PROGRAMS)

    def takes(self, part: Tensor) -> bool:
        """Whether it sums such a tensor, which is the same on all ranks."""
        if not part.numel() or not part.is_contiguous() or part.shape[-1] > _MOST_COLUMNS:
            return False
        rows = -(-part.numel() // part.shape[-1] // NUM_PROGRAMS)
        fits = rows * part.shape[-1] * part.itemsize <= self._region_bytes
        return fits and part.nbytes <= most_bytes(self._num_ranks)

    def sum(self, part: Tensor) -> None:
        """Add every rank's `part`, in place."""
        self._launch(part, part, part, part, 0.0, norms=False)

    def try_sum(self, part: Tensor) -> str | None:
        """`sum`, or why the kernel cannot be compiled or launched; then `part` is as it was.

        Unlike `sum`, it gives up waiting for a rank that does not come, and `part` is then any numbers.
        """
        try:
            self._launch(part, part, part, part, 0.0, norms=False, most_polls=TRIAL_POLLS)
        except (TritonError, RuntimeError) as error:
            return str(error).partition("\n")[0] or type(error).__name__
        return None

    @property
    def has_summed(self) -> bool:
        """Whether all ranks have met in a sum. Waits for the device."""
        return bool(self._turns[0])

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`TorchOps.add_rms_norm` of the sum of every rank's `part` [T, size], which becomes the sum with residual."""
        out = torch.empty_like(part)
        self._launch(part, residual, out, weight, eps, norms=True)
        return out

    def _launch(
        self, x: Tensor, residual: Tensor, out: Tensor, weight: Tensor, eps: float, norms: bool, most_polls: int = 0
    ) -> None:
        size = x.shape[-1]
        num_rows, padded = x.numel() // size, triton.next_power_of_2(size)
        sum_over_ranks[(min(num_rows, NUM_PROGRAMS),)](
            x,
            residual,
            out,
            weight,
            eps,
            self._addresses,
            self._turns,
            self._rank,
            num_rows,
            self._region_bytes // x.itemsize,
            FLAG_BYTES=flag_bytes(self._num_ranks),
            RANKS=self._num_ranks,
            SIZE=size,
            PADDED=padded,
            NORMS=norms,
            MOST_POLLS=most_polls,
            num_warps=min(16, max(1, padded // 256)),  # as `layers.add_rms_norm`, for the same bits
            **starts_early(x.device),
        )
