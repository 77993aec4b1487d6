"""How many kernels a decode step launches on a GPU. Counted on fake tensors: every layer launches the same.

A graph of hundreds of launches takes one call of the host, but each of them still takes microseconds of the device.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

from specray.config import EngineConfig, SpeculativeConfig
from specray.step import NewRequest
from specray.worker.startup import start_worker
from specray.worker.worker import Worker
from tests.support.launches import Counter, fake_launches
from tests.support.methods import eagle
from tests.support.toy import write_toy
from tests.unit.worker.test_fake_gpu import GREEDY, decode

LAYERS_OF_8B = 32


class StepLaunches(NamedTuple):
    """Launches of one decode step."""

    in_graphs: int
    around: int

    @property
    def total(self) -> int:
        return self.in_graphs + self.around


def launches_of(num_layers: int, folder: Path, chain: int = 0) -> StepLaunches:
    """A step of two greedy requests with a target of `num_layers` layers and chains of `chain` drafts."""
    target = folder / f"target-{num_layers}"
    target.mkdir(exist_ok=True)
    write_toy(target, num_layers=num_layers)
    speculative = eagle(3, shape=(chain, 1, chain + 1))(target, folder) if chain else SpeculativeConfig()
    config = EngineConfig(
        model=str(target),
        device="cuda",
        dtype="bfloat16",
        max_total_tokens=512,
        max_running_requests=3,
        cuda_graph_max_bs=2,
        speculative=speculative,
    )
    with fake_launches(num_nodes=chain + 1) as counter:
        worker = start_worker(config)
        new = [NewRequest(slot, [5, 6, 7], 3, 0, [slot + 1], GREEDY, "") for slot in (0, 2)]
        worker.execute(decode(0)._replace(new_requests=new))
        worker.propose()
        return _step(worker, counter)


def _step(worker: Worker, counter: Counter) -> StepLaunches:
    counter.replayed.clear()
    with counter.counting() as around:
        worker.execute(decode(1))
        worker.propose()
    return StepLaunches(sum(len(graph.launches) for graph in counter.replayed), len(around))


def of_8b(folder: Path, chain: int = 0) -> StepLaunches:
    two, four = (launches_of(num_layers, folder, chain) for num_layers in (2, 4))
    assert two.around == four.around
    per_layer, rest = divmod(four.in_graphs - two.in_graphs, 2)
    assert rest == 0
    return two._replace(in_graphs=two.in_graphs + (LAYERS_OF_8B - 2) * per_layer)


def test_a_layer_launches_eleven_kernels(tmp_path: Path) -> None:
    two, four = (launches_of(num_layers, tmp_path) for num_layers in (2, 4))
    assert four.in_graphs - two.in_graphs == 2 * 11


def test_launches_of_a_plain_step(tmp_path: Path) -> None:
    launches = of_8b(tmp_path)
    assert launches.total <= 370
    assert launches.around <= 4  # beside the graphs: each of these is a call of the host


def test_launches_of_a_step_with_a_chain_of_seven(tmp_path: Path) -> None:
    launches = of_8b(tmp_path, chain=7)
    assert launches.total <= 520
    assert launches.around <= 8
