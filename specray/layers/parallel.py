"""The tensor-parallel ranks of one target and their collectives, which are no-ops with one rank.

The collectives are torch.distributed's: gloo on CPUs, NCCL for tensors on GPUs.
"""

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_LENGTH_BYTES = 8
_HEAD_BYTES = 4096  # sent with the length; enough for most steps, so that one broadcast suffices


class Part(NamedTuple):
    """A rank's part of a tensor: the `rows`, one after the other, of the `length` along `dim`."""

    dim: int
    rows: tuple[slice, ...]
    length: int

    @property
    def size(self) -> int:
        return sum(rows.stop - rows.start for rows in self.rows)


class RankGroup:
    """Rank `rank` of `size`. Build it in every rank at once; `init_method` is torch.distributed's address.

    Collectives of tensors are NCCL's if `device` is a GPU. Its sums over more than two ranks may run in an order that
    depends on the tensor's size; `deterministic` sums in the order of ranks instead.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        init_method: str | None = None,
        device: torch.device | None = None,
        deterministic: bool = False,
    ) -> None:
        assert 0 <= rank < size, (rank, size)
        self.rank = rank
        self.size = size
        self.leads = rank == 0
        self._cpu: dist.ProcessGroup | None = None
        self._sums_by_rank = False
        if size > 1:
            backend = "nccl" if device is not None and device.type == "cuda" else "gloo"
            # Gloo's order depends on the place in the tensor, so on the batch. Two numbers have one sum in any order.
            self._sums_by_rank = size > 2 and (deterministic or backend == "gloo")
            dist.init_process_group(backend, init_method, rank=rank, world_size=size, timeout=timedelta(minutes=5))
            # A follower waits for its next plan as long as the server is idle; the actor's watchdog detects dead ranks.
            self._cpu = dist.new_group(backend="gloo", timeout=timedelta(days=365))

    def share(self, total: int, unit: int = 1) -> slice:
        """This rank's rows of `total` units of `unit` rows; the first ranks have one more unit if it is uneven."""
        base, rest = divmod(total, self.size)
        start = self.rank * base + min(self.rank, rest)
        return slice(start * unit, (start + base + (self.rank < rest)) * unit)

    def even_share(self, total: int) -> slice:
        """This rank's rows of `total` in parts of ceil(total / ranks); the last ranks may have fewer, or none."""
        size = -(-total // self.size)
        return slice(min(self.rank * size, total), min((self.rank + 1) * size, total))

    def sum(self, partial: Tensor) -> Tensor:
        """Add every rank's tensor, in place; bitwise the same on all ranks."""
        if self._sums_by_rank:
            first, *others = self._gathered(partial)
            partial.copy_(first)
            for other in others:
                partial += other
        elif self.size > 1:
            dist.all_reduce(partial)
        return partial

    def gather(self, part: Tensor) -> Tensor:
        """Concatenate every rank's equally shaped tensor along the last dimension, on all ranks."""
        return part if self.size == 1 else torch.cat(self._gathered(part), dim=-1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place, on every rank."""
        if self.size > 1:
            dist.broadcast(tensor, 0)
        return tensor

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; the others pass None."""
        if self.size == 1:
            assert data is not None
            return data
        if data is None:
            head = bytearray(_HEAD_BYTES)
        else:
            head = bytearray((len(data).to_bytes(_LENGTH_BYTES) + data)[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0"))
        self._broadcast(head)
        length = int.from_bytes(head[:_LENGTH_BYTES])
        missing = _LENGTH_BYTES + length - _HEAD_BYTES
        if missing <= 0:
            return bytes(head[_LENGTH_BYTES : _LENGTH_BYTES + length])
        tail = bytearray(missing) if data is None else bytearray(data[-missing:])
        self._broadcast(tail)
        return bytes(head[_LENGTH_BYTES:] + tail)

    def smallest(self, value: int) -> int:
        """The least of every rank's `value`."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._cpu)
        return int(tensor)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            self._cpu = None  # or its connections stay open, and other ranks wait for this one

    def _gathered(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return parts

    def _broadcast(self, buffer: bytearray) -> None:
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), 0, group=self._cpu)


class SilentRank(RankGroup):
    """The first of `size` ranks that are not there, for what one's part of a model would be. It has no collectives."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
