"""Collectives between ranks in two processes."""

from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from specray.layers.moe import Expert, ExpertList, MixtureOfExperts, SoftmaxRoute
from specray.layers.parallel import RankGroup
from tests.support.forked import PROCESSES

SIZES = (0, 1, 4087, 4088, 4089, 8192, 100_000)  # around the 4,096 bytes that go at once, 8 of them the length


def test_broadcast_of_bytes_of_any_length(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/ranks"
    received: Queue[list[bytes]] = PROCESSES.Queue()
    follower = PROCESSES.Process(target=_listen, args=(meeting, received), daemon=True)
    follower.start()
    group = RankGroup(0, 2, meeting)
    sent = [_message(size) for size in SIZES]
    assert [group.broadcast_bytes(message) for message in sent] == sent
    assert received.get(timeout=30) == sent
    group.close()
    follower.join(30)
    assert follower.exitcode == 0


def test_the_parts_of_routed_and_shared_experts_sum_to_the_mixture() -> None:
    gate, x = torch.randn(3, 8), torch.randn(5, 8)
    weights = [(torch.randn(6, 8), torch.randn(6, 8), torch.randn(8, 6)) for _ in range(4)]  # the last one is shared

    def mixture(part: slice) -> Tensor:
        *routed, shared = [Expert(first[part], second[part], last[:, part]) for first, second, last in weights]
        return MixtureOfExperts(gate, SoftmaxRoute(2), ExpertList(routed), shared)(x)

    torch.testing.assert_close(mixture(slice(0, 3)) + mixture(slice(3, 6)), mixture(slice(None)))


@pytest.mark.parametrize(
    ("size", "device", "deterministic", "is_fixed"),
    [
        (1, "cuda", False, True),
        (2, "cuda", False, True),
        (3, "cuda", False, False),
        (3, "cuda", True, True),
        (3, "cpu", False, True),
    ],
)
def test_sums_are_promised_to_be_fixed_where_their_order_is(
    size: int, device: str, deterministic: bool, is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL chooses the order of more than two parts by the size of the message."""
    for function in ("init_process_group", "new_group"):
        monkeypatch.setattr(dist, function, lambda *_, **__: None)
    group = RankGroup(0, size, "file:///nowhere", torch.device(device), deterministic)
    assert group.has_fixed_sums == is_fixed


def _listen(meeting: str, received: "Queue[list[bytes]]") -> None:
    group = RankGroup(1, 2, meeting)
    received.put([group.broadcast_bytes(None) for _ in SIZES])
    group.close()


def _message(size: int) -> bytes:
    return bytes(number % 251 for number in range(size))


def test_sums_over_three_ranks_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """A collective may add the ranks' parts in an order that depends on the place in the tensor."""
    meeting = f"file://{tmp_path}/ranks"
    others = [PROCESSES.Process(target=_sum, args=(meeting, rank), daemon=True) for rank in (1, 2)]
    for other in others:
        other.start()
    whole, last = _sum(meeting, 0)
    assert torch.equal(whole[-1:], last)
    assert torch.equal(last, (_part(0) + _part(1) + _part(2))[-1:])
    for other in others:
        other.join(30)
        assert other.exitcode == 0


def _sum(meeting: str, rank: int) -> tuple[Tensor, Tensor]:
    """The sum of all rows, and that of the last row alone."""
    group = RankGroup(rank, 3, meeting)
    sums = group.sum(_part(rank)), group.sum(_part(rank)[-1:])
    group.close()
    return sums


def _part(rank: int) -> Tensor:
    return torch.randn(7, 1000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
