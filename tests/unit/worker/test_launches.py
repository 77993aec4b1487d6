"""How many kernels a decode step launches on a GPU. Counted on fake tensors: every layer launches the same.

A graph of hundreds of launches takes one call of the host, but each of them still takes microseconds of the device.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

from specray.config import EngineConfig, SpeculativeConfig
from specray.step import UNLIMITED, NewRequest, SamplingOptions
from specray.worker.startup import start_worker
from specray.worker.worker import Worker
from tests.support.launches import Counter, fake_launches
from tests.support.methods import eagle
from tests.support.toy import write_toy
from tests.unit.worker.test_fake_gpu import GREEDY, SAMPLED, decode

LAYERS_OF_8B = 32


class StepLaunches(NamedTuple):
    """Launches of one decode step."""

    in_graphs: int
    around: int

    @property
    def total(self) -> int:
        return self.in_graphs + self.around


class Kind(NamedTuple):
    """What a step does beside the target's forward."""

    tree: tuple[int, int, int] | None = None  # of an EAGLE-3 head: steps, branches of a node, nodes
    options: SamplingOptions = GREEDY
    cuts: bool = False  # unlikely nodes (DraftLimit.min_score)


PLAIN = Kind()
CHAIN, TREE = (7, 1, 8), (5, 4, 8)  # the latter is the automatic tree of Llama


def launches_of(num_layers: int, folder: Path, kind: Kind = PLAIN) -> StepLaunches:
    """A step of two requests with a target of `num_layers` layers."""
    target = folder / f"target-{num_layers}"
    target.mkdir(exist_ok=True)
    write_toy(target, num_layers=num_layers)
    speculative = eagle(3, shape=kind.tree)(target, folder) if kind.tree else SpeculativeConfig()
    config = EngineConfig(
        model=str(target),
        device="cuda",
        dtype="bfloat16",
        max_total_tokens=512,
        max_running_requests=3,
        cuda_graph_max_bs=2,
        speculative=speculative,
    )
    with fake_launches(num_nodes=kind.tree[2] if kind.tree else 1) as counter:
        worker = start_worker(config)
        worker.prepare()
        new = [NewRequest(slot, [5, 6, 7], 3, 0, [slot + 1], kind.options, "") for slot in (0, 2)]
        worker.execute(decode(0)._replace(new_requests=new))
        worker.propose()
        return _step(worker, counter, 0.2 if kind.cuts else 0.0)


def _step(worker: Worker, counter: Counter, min_score: float) -> StepLaunches:
    counter.replayed.clear()
    rows = [row._replace(draft_limit=UNLIMITED._replace(min_score=min_score)) for row in decode(1).rows]
    with counter.counting() as around:
        worker.execute(decode(1)._replace(rows=rows))
        worker.propose()
    return StepLaunches(sum(len(graph.launches) for graph in counter.replayed), len(around))


def of_8b(folder: Path, kind: Kind = PLAIN) -> StepLaunches:
    two, four = (launches_of(num_layers, folder, kind) for num_layers in (2, 4))
    assert two.around == four.around
    per_layer, rest = divmod(four.in_graphs - two.in_graphs, 2)
    assert rest == 0
    return two._replace(in_graphs=two.in_graphs + (LAYERS_OF_8B - 2) * per_layer)


def test_a_layer_launches_ten_kernels(tmp_path: Path) -> None:
    two, four = (launches_of(num_layers, tmp_path) for num_layers in (2, 4))
    assert four.in_graphs - two.in_graphs == 2 * 10


def test_launches_of_a_plain_step(tmp_path: Path) -> None:
    launches = of_8b(tmp_path)
    assert launches.total <= 333
    assert launches.around <= 4  # beside the graphs: each of these is a call of the host


def test_launches_of_a_step_with_a_chain_of_seven(tmp_path: Path) -> None:
    launches = of_8b(tmp_path, Kind(CHAIN))
    assert launches.total <= 467
    assert launches.around <= 6


@pytest.mark.parametrize(
    ("kind", "total", "around"),
    [
        (Kind(options=SAMPLED), 340, 4),
        (Kind(CHAIN, SAMPLED), 480, 6),
        (Kind(TREE), 551, 6),
        (Kind(TREE, SAMPLED), 564, 6),
        (Kind(TREE, cuts=True), 552, 7),
    ],
)
def test_launches_of_other_steps(kind: Kind, total: int, around: int, tmp_path: Path) -> None:
    """No more than when they were counted last. Cutting unlikely nodes takes none."""
    launches = of_8b(tmp_path, kind)
    assert launches.total <= total
    assert launches.around <= around
