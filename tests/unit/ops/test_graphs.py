"""The stand-in for CUDA graphs on a CPU finds what real graphs would not do."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specray.errors import ConfigError
from specray.ops.graphs import Graphs, make_graphs
from tests.support.graph_stand_in import RecordedGraphs


def test_a_cpu_and_torchs_attention_have_no_graphs() -> None:
    assert make_graphs(torch.device("cpu"), "auto") is None
    assert make_graphs(torch.device("cuda", 0), "torch") is None


def test_a_function_runs_once_before_its_capture() -> None:
    """Compilers and libraries allocate memory when they are first called, which a capture forbids."""
    runs: list[str] = []

    class Once:
        def capture(self, run: Callable[[], object]) -> None:
            assert runs == ["run"]
            run()

        def replay(self) -> None:
            runs.append("replay")

    graphs = Graphs(Once)
    graphs.capture("graph", lambda: runs.append("run"))
    graphs.replay("graph")
    assert runs == ["run", "run", "replay"]


def test_a_model_that_no_graph_can_have_is_refused_with_the_way_out() -> None:
    class Forbidding:
        def capture(self, run: Callable[[], object]) -> None:  # noqa: ARG002
            raise RuntimeError("operation not permitted when stream is capturing")

        def replay(self) -> None:
            """It has nothing."""

    with pytest.raises(ConfigError, match=r"CUDA graph capture failed .*not permitted.*; set disable_cuda_graph: true"):
        Graphs(Forbidding).capture("graph", lambda: None)


def test_a_replay_computes_with_what_its_inputs_hold_then() -> None:
    graphs, x, out = RecordedGraphs(), torch.ones(3), torch.zeros(3)
    graphs.capture("double", lambda: out.copy_(x.mul(2).view(3, 1)[:, 0]))
    x.fill_(5.0)
    graphs.replay("double")
    assert out.tolist() == [10.0, 10.0, 10.0]
    assert graphs.num_launches("double") == 2


def test_a_value_of_python_stays_what_it_was_at_capture() -> None:
    graphs, out, factor = RecordedGraphs(), torch.zeros(1), [2.0]
    graphs.capture("scale", lambda: out.copy_(torch.ones(1) * factor[0]))
    factor[0] = 7.0
    graphs.replay("scale")
    assert out.item() == 2.0


def test_what_a_graph_leaves_in_its_own_memory_is_lost() -> None:
    graphs, x, left = RecordedGraphs(), torch.ones(3), []
    graphs.capture("one", lambda: left.append(x + 1))
    graphs.capture("other", lambda: x.add_(0))
    graphs.replay("one")
    assert left[-1].tolist() == [2.0, 2.0, 2.0]
    graphs.replay("other")
    assert left[-1].tolist() != [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: x + torch.from_numpy(np.ones(3, dtype=np.float32)),
    ],
)
def test_an_access_by_the_host_is_an_error(run: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="host"):
        RecordedGraphs().capture("wrong", lambda: run(torch.ones(3)))
