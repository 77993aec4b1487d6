"""Padding and other requests of a graph do not change a request's bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specray.config import EngineConfig
from specray.spec_decode.draft_tree import TreeLists
from specray.step import UNLIMITED, NewRequest, ScheduledRequest, StepPlan
from specray.worker.buckets import Bucket
from specray.worker.graph_backend import GraphBackend
from specray.worker.no_token import NOT_A_NUMBER
from specray.worker.startup import start_worker
from tests.support.distributions import OPTIONS
from tests.support.drafters import ScriptedDrafter
from tests.support.graph_stand_in import RecordedGraphs, recorded_graphs

PAGE, BLOCKS = 4, 6  # slot s owns blocks 6 s + 1 … 6 s + 6
PROMPTS = [[0, 9, 8, 7, 6, 5], [3, 4, 5], [20, 21, 22, 23, 24, 25, 26]]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedGraphs]]:
    monkeypatch.setattr("specray.worker.buckets.row_buckets", lambda most: [most])
    monkeypatch.setattr("specray.worker.buckets._powers", lambda _, most: [most])
    with recorded_graphs() as graphs:
        yield graphs


class Driver:
    """A worker with graphs of three rows, and drafts that do not depend on the other requests."""

    def __init__(self, toy: Path) -> None:
        sizes = {"page_size": PAGE, "max_total_tokens": 3 * BLOCKS * PAGE, "max_running_requests": 3}
        config = EngineConfig(model=str(toy), dtype="float32", device="cpu", num_threads=1, **sizes)
        tree = TreeLists([0, 7, 8, 9, 5], [-1, 0, 0, 1, 2])
        self.worker = start_worker(
            config, drafter=ScriptedDrafter(lambda last, *_: tree._replace(tokens=[last, *tree.tokens[1:]]))
        )
        self.pool = self.worker.backend.runner.kv.pool
        self._num_steps = 0

    def prefill(self, slots: list[int]) -> None:
        new = [
            NewRequest(slot, PROMPTS[slot], len(PROMPTS[slot]), 0, self.blocks(slot), OPTIONS._replace(seed=slot), "")
            for slot in slots
        ]
        self._run(slots, new)

    def decode(self, slots: list[int]) -> tuple[Tensor, list[str | None]]:
        """(logits [N, V] of the first slot's tree, the errors of all)."""
        errors = self._run(slots, [])
        backend = self.worker.backend
        assert isinstance(backend, GraphBackend)
        return backend._graphs._step._logits[:5].clone(), errors

    def blocks(self, slot: int) -> list[int]:
        return list(range(BLOCKS * slot + 1, BLOCKS * (slot + 1) + 1))

    def _run(self, slots: list[int], new: list[NewRequest]) -> list[str | None]:
        self._num_steps += 1
        rows = [ScheduledRequest(slot, 64, UNLIMITED, []) for slot in slots]
        result = self.worker.execute(StepPlan(self._num_steps, [], new, rows))
        self.worker.propose()
        return [row.error for row in result.rows]


@pytest.fixture
def alone(toy: Path) -> list[Tensor]:
    """The first request's logits in two steps without others."""
    driver = Driver(toy)
    driver.prefill([0])
    return [driver.decode([0])[0] for _ in range(2)]


def test_other_requests_do_not_change_the_bits_of_a_request(toy: Path, alone: list[Tensor]) -> None:
    driver = Driver(toy)
    for slot in (1, 0, 2):
        driver.prefill([slot])
    for expected in alone:
        assert torch.equal(driver.decode([0, 2, 1])[0], expected)


def test_a_broken_request_and_what_padding_wrote_change_no_other_request(toy: Path, alone: list[Tensor]) -> None:
    driver = Driver(toy)
    for slot in (1, 0):
        driver.prefill([slot])
    driver.pool[:, driver.worker.backend.runner.kv.padding_slot :] = torch.nan
    driver.pool[:, PAGE * (BLOCKS + 1) :] = torch.nan  # all of slot 1
    logits, errors = driver.decode([0, 1])
    assert errors == [None, NOT_A_NUMBER]
    assert torch.equal(logits, alone[0])
    assert torch.equal(driver.decode([0])[0], alone[1])
    assert not driver.pool[:, :PAGE].any()  # what is read as padding


def test_the_steps_had_graphs(toy: Path, graphs: list[RecordedGraphs]) -> None:
    driver = Driver(toy)
    driver.prefill([0])
    driver.decode([0])
    taken = Bucket(3, 39, 13)
    assert {(kind, bucket) for kind, bucket, *_ in graphs[0].replayed} == {("forward", taken), ("verify", taken)}
