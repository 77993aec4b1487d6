"""The tensor-parallel ranks of one target and their collectives, which are no-ops with one rank.

The collectives are torch.distributed's: gloo on CPUs, NCCL for tensors on GPUs. Small sums on GPUs are our own.
"""

import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from specray.ops.peer_buffers import PeerBuffers

if TYPE_CHECKING:
    from specray.ops.gpu.all_reduce import OneShotAllReduce

_LENGTH_BYTES = 8
_HEAD_BYTES = 4096  # sent with the length; enough for most steps, so that one broadcast suffices
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CHECKED = 97  # numbers of the sum that is compared with NCCL's
_TIMEOUT = timedelta(minutes=5)  # of collectives
MEET_S = 30.0  # that ranks wait for each other's memory; all begin within milliseconds
_WAITED = "it waited in vain for another rank"
_REASON_BYTES = 256  # of why a rank cannot use the one-shot kernel, as others see it
logger = logging.getLogger(__name__)


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
    depends on the tensor's size; `deterministic`, and the one-shot kernel, sum in the order of ranks instead.
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
        self.one_shot: OneShotAllReduce | None = None  # after `start_one_shot`
        self._buffers: PeerBuffers | None = None
        self._cpu: dist.ProcessGroup | None = None
        self._sums_by_rank = False
        self.has_fixed_sums = True  # a number's sum has the same bits wherever it stands in a tensor of any size
        if size > 1:
            backend = "nccl" if device is not None and device.type == "cuda" else "gloo"
            # Gloo's order depends on the place in the tensor, so on the batch. Two numbers have one sum in any order.
            self._sums_by_rank = size > 2 and (deterministic or backend == "gloo")
            self.has_fixed_sums = size == 2 or self._sums_by_rank
            dist.init_process_group(backend, init_method, rank=rank, world_size=size, timeout=_TIMEOUT)
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
        if self.one_shot is not None and self.one_shot.takes(partial):
            self.one_shot.sum(partial)
        elif self._sums_by_rank:
            self._sum_by_rank(partial)
        elif self.size > 1:
            dist.all_reduce(partial)
        return partial

    def start_one_shot(self, num_bytes: int, device: torch.device) -> str:
        """Sum what fits in `num_bytes` of a GPU's memory by one kernel from now on; returns what sums over ranks.

        Call it in every rank at once. If one of them cannot, or gets another sum, all keep NCCL's, and return why.
        """
        used = "one-shot kernel over symmetric memory"
        if (reason := self._try_one_shot(num_bytes, device)) is not None:
            self.one_shot = self._buffers = None
            used = f"NCCL: {reason}"
        logger.info("sums over ranks: %s", used)
        return used

    def gather(self, part: Tensor) -> Tensor:
        """Concatenate every rank's equally shaped tensor along the last dimension, on all ranks."""
        return part if self.size == 1 else torch.cat(self._gathered(part), dim=-1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, on every rank; in place if it is contiguous."""
        if self.size > 1 and tensor.numel():
            tensor = tensor.contiguous()
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
            self.one_shot = self._buffers = None
            self._cpu = None  # or its connections stay open, and other ranks wait for this one

    def _try_one_shot(self, num_bytes: int, device: torch.device) -> str | None:
        """Why this is not possible, or None."""
        own = f"{platform.node()} {_BOOT_ID.read_text() if _BOOT_ID.exists() else ''}"
        first = self.broadcast_bytes(own.encode() if self.leads else None).decode()
        if reason := self._first_reason(None if own == first else "it is on another machine than rank 0"):
            return reason
        # All agree on each part before the next one, in which ranks wait for each other.
        for part in (self._allocate, self._meet):
            start = time.monotonic()
            try:
                with _store_timeout():
                    part(num_bytes, device)
                failure = None
            except (ImportError, OSError, RuntimeError) as error:
                failure = _first_line(error) if time.monotonic() < start + MEET_S else _WAITED
            if reason := self._first_reason(failure):
                return reason
        return self._compare_sums(device)

    def _allocate(self, num_bytes: int, device: torch.device) -> None:
        # Ray shows each rank one GPU, which is its first, and torch takes that for one GPU that all share.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self._buffers = PeerBuffers(num_bytes, device)

    def _meet(self, num_bytes: int, device: torch.device) -> None:
        from specray.ops.gpu.all_reduce import OneShotAllReduce

        assert self._buffers is not None
        assert dist.group.WORLD is not None
        self.one_shot = OneShotAllReduce(self.rank, self._buffers.meet(dist.group.WORLD), num_bytes, device)

    def _compare_sums(self, device: torch.device) -> str | None:
        """Why the first sum of the one-shot kernel is not that of gathered parts, or None."""
        assert self.one_shot is not None
        part = torch.arange(_CHECKED, device=device, dtype=torch.bfloat16) / (self.rank + 3)
        summed, wanted = part.clone(), part
        launch_error = self.one_shot.try_sum(summed)
        self._sum_by_rank(wanted)
        is_right = torch.equal(summed, wanted)  # waits for the kernel, before this or another rank frees its memory
        failure = "the kernel's sum differs" if self.one_shot.has_summed else _WAITED
        return self._first_reason(launch_error) or self._first_reason(None if is_right else failure)

    def _first_reason(self, own: str | None) -> str | None:
        """The first rank's reason and that rank, on all ranks, one that only waited last; None if none has one."""
        cut = (own or "").encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
        parts = [torch.empty(_REASON_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.frombuffer(bytearray(cut), dtype=torch.uint8), group=self._cpu)
        reasons = [bytes(part.tolist()).rstrip(b"\0").decode(errors="ignore") for part in parts]
        found = [(reason == _WAITED, rank) for rank, reason in enumerate(reasons) if reason]
        return f"rank {min(found)[1]}: {reasons[min(found)[1]]}" if found else None

    def _sum_by_rank(self, partial: Tensor) -> None:
        first, *others = self._gathered(partial)
        partial.copy_(first)
        for other in others:
            partial += other

    def _gathered(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return parts

    def _broadcast(self, buffer: bytearray) -> None:
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), 0, group=self._cpu)


@contextmanager
def _store_timeout() -> Iterator[None]:
    """Within it, ranks that meet in torch.distributed's store wait MEET_S for each other."""
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=MEET_S))
    try:
        yield
    finally:
        store.set_timeout(_TIMEOUT)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


class SilentRank(RankGroup):
    """The first of `size` ranks that are not there, for what one's part of a model would be. It has no collectives."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
