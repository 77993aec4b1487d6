"""The one-shot all-reduce, by real processes over shared memory, against the sum of gathered parts, bit by bit."""

from collections.abc import Callable
from functools import partial
from itertools import product
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("triton")

from triton.errors import TritonError

from specray.layers import parallel
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.ops.gpu import all_reduce, layers
from specray.ops.peer_buffers import NUM_PROGRAMS, buffer_bytes, flag_bytes, most_bytes
from tests.support.forked import PROCESSES
from tests.support.one_shot import CPU, MappedBuffers, OneShotGroup

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((1, 1), (3, 17), (2, 1000))
MANY_ROWS = (NUM_PROGRAMS + 3, 5)  # some programs have two
EPS = 1e-5
TIMEOUT_S = 120.0


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_and_norms_have_the_bits_of_gathered_parts(size: int, tmp_path: Path) -> None:
    assert _wrong_of_all(_sums, size, tmp_path) == [[]] * size


@pytest.mark.parametrize("size", [2, 4])
def test_repeated_launches_take_the_buffers_in_turn(size: int, tmp_path: Path) -> None:
    """A graph repeats three sums of different sizes on the same tensors, and ranks come at different times."""
    assert _wrong_of_all(_replays, size, tmp_path) == [[]] * size


def test_a_kernel_with_another_sum_is_refused(tmp_path: Path) -> None:
    assert _wrong_of_all(_refused, 2, tmp_path) == [[]] * 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("memory", "rank 1: no memory for it"),
        ("rendezvous", "rank 1: no peer access"),
        ("launch", "rank 1: ptxas failed"),
        ("silence", "rank 0: it waited in vain for another rank"),
    ],
)
def test_what_one_rank_cannot_do_all_leave(fault: str, reason: str, tmp_path: Path) -> None:
    """At once, if it has no memory. A rank that waits for the other's memory or kernel does not wait for ever."""
    assert _wrong_of_all(partial(_one_fails, fault, reason), 2, tmp_path) == [[]] * 2


def test_without_symmetric_memory_sums_are_those_of_the_library(tmp_path: Path) -> None:
    """A CPU has none, so this is what ranks whose driver or machine refuses it do."""
    assert _wrong_of_all(_without, 2, tmp_path) == [[]] * 2


@pytest.mark.parametrize(("num_ranks", "num_rows"), list(product((2, 4, 8), (1, 64, 65, 1024))))
def test_buffers_hold_the_rows_that_they_are_made_for(num_ranks: int, num_rows: int) -> None:
    row = torch.empty(1, 8192, dtype=torch.bfloat16)
    num_bytes = buffer_bytes(num_ranks, num_rows, row.nbytes)
    made = all_reduce.OneShotAllReduce(0, [0] * num_ranks, num_bytes, CPU)
    rows = min(num_rows, most_bytes(num_ranks) // row.nbytes)
    assert made.takes(row.expand(rows, -1).contiguous())
    assert not made.takes(row.expand(2 * 1024, -1).contiguous())
    assert num_bytes <= flag_bytes(num_ranks) + 2 * (rows + NUM_PROGRAMS) * row.nbytes


def _wrong_of_all(target: Callable[..., object], size: int, folder: Path) -> list[list[str]]:
    """What each rank's `target` found wrong."""
    found: Queue[list[str]] = PROCESSES.Queue()
    arguments = [(f"file://{folder}/ranks", rank, size, found) for rank in range(size)]
    ranks = [PROCESSES.Process(target=target, args=each, daemon=True) for each in arguments]
    for rank in ranks:
        rank.start()
    wrong = [found.get(timeout=TIMEOUT_S) for _ in ranks]
    for rank in ranks:
        rank.join(TIMEOUT_S)
    assert [rank.exitcode for rank in ranks] == [0] * size
    return wrong


def _sums(meeting: str, rank: int, size: int, found: "Queue[list[str]]") -> None:
    torch.set_num_threads(1)
    group = OneShotGroup(rank, size, meeting)
    wrong = [] if group.sums.startswith("one-shot") else [group.sums]
    shapes = (*SIZES, MANY_ROWS) if size == 2 else SIZES
    for number, (dtype, shape) in enumerate(product(DTYPES, shapes)):
        parts = [_part(number * size + each, shape, dtype) for each in range(size)]
        summed = _summed(parts)
        if not torch.equal(group.sum(parts[rank].clone()), summed):
            wrong.append(f"sum {dtype} {shape}")
        residual, norm = _part(1000, shape, dtype), RMSNorm(_part(1001, shape[1:], dtype), EPS, group)
        with_residual = summed.clone()
        normed = layers.add_rms_norm(with_residual, residual, norm.weight.data, EPS)
        out = norm.after_add(parts[rank].clone(), residual)
        if not torch.equal(out[0], normed) or not torch.equal(out[1], with_residual):
            wrong.append(f"norm {dtype} {shape}")
    found.put(wrong)
    group.close()


def _replays(meeting: str, rank: int, size: int, found: "Queue[list[str]]") -> None:
    torch.set_num_threads(1)
    group, shapes, wrong = OneShotGroup(rank, size, meeting), ((5, 7), (1, 9), (3, 7)), list[str]()
    buffers = [torch.empty(shape) for shape in shapes]
    waits = torch.Generator().manual_seed(rank)
    for number in range(20):
        for place, shape in enumerate(shapes):
            parts = [_part((number * 3 + place) * size + each, shape, torch.float32) for each in range(size)]
            buffers[place].copy_(parts[rank])
            for _ in range(int(torch.randint(0, 2000, (), generator=waits))):
                pass
            group.sum(buffers[place])
            if not torch.equal(buffers[place], _summed(parts)):
                wrong.append(f"{number} {shape}")
    found.put(wrong)
    group.close()


def _refused(meeting: str, rank: int, size: int, found: "Queue[list[str]]") -> None:
    torch.set_num_threads(1)
    right = all_reduce.OneShotAllReduce.try_sum

    def sum_wrongly(self: all_reduce.OneShotAllReduce, part: Tensor) -> str | None:
        error = right(self, part)
        part[0] += rank  # on one of them
        return error

    all_reduce.OneShotAllReduce.try_sum = sum_wrongly  # type: ignore[method-assign]
    group = OneShotGroup(rank, size, meeting)
    found.put([] if group.sums == "NCCL: rank 1: the kernel's sum differs" and group.one_shot is None else [group.sums])
    group.close()


def _one_fails(fault: str, reason: str, meeting: str, rank: int, size: int, found: "Queue[list[str]]") -> None:
    torch.set_num_threads(1)
    all_reduce.TRIAL_POLLS = 1000
    if fault == "memory":
        MappedBuffers.meet = _fails(RuntimeError("not all ranks have memory"))  # type: ignore[method-assign]
    if fault == "rendezvous":
        parallel.MEET_S = 2.0
        failing = _fails(RuntimeError("no peer access"))
        MappedBuffers.meet = failing if rank == 1 else _waits_for_a_key  # type: ignore[method-assign]
    if rank == 1 and fault == "memory":
        MappedBuffers.__init__ = _fails(RuntimeError("no memory for it"))  # type: ignore[method-assign]
    elif rank == 1 and fault == "launch":
        error = TritonError("ptxas failed\nmore of it")  # no RuntimeError
        all_reduce.OneShotAllReduce._launch = _fails(error)  # type: ignore[method-assign]
    elif rank == 1 and fault == "silence":
        all_reduce.OneShotAllReduce._launch = lambda *_, **__: None  # type: ignore[method-assign]
    group = OneShotGroup(rank, size, meeting)
    wrong = [] if group.sums == f"NCCL: {reason}" and group.one_shot is None else [group.sums]
    if not torch.equal(group.sum(torch.ones(3)), torch.full((3,), 2.0)):
        wrong.append("sum")
    found.put(wrong)
    group.close()


def _waits_for_a_key(*_: object) -> list[int]:
    """As a rendezvous of which one rank does not take part."""
    dist.distributed_c10d._get_default_store().get("of the other rank")
    return []


def _fails(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def _without(meeting: str, rank: int, size: int, found: "Queue[list[str]]") -> None:
    torch.set_num_threads(1)
    group = RankGroup(rank, size, meeting)
    sums = group.start_one_shot(1 << 20, CPU)
    wrong = [] if sums.startswith("NCCL: ") and len(sums) > len("NCCL: ") else [sums]
    if not torch.equal(group.sum(torch.ones(3)), torch.full((3,), 2.0)):
        wrong.append("sum")
    found.put(wrong)
    group.close()


def _part(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _summed(parts: list[Tensor]) -> Tensor:
    """As `RankGroup` sums gathered parts."""
    first = parts[0].clone()
    for other in parts[1:]:
        first += other
    return first
