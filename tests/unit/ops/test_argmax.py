"""The two-level argmax of torch's operations, and that of the CPU kernels, equal `torch.argmax`."""

import pytest
import torch

from specray.ops.device_ops import ops_on
from specray.ops.torch_ops import TorchOps
from tests.support.sampling import CPU


@pytest.fixture(params=["torch", "of the CPU"])
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return TorchOps() if request.param == "torch" else ops_on(CPU)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 257, 512, 1000, 1024, 49_152, 151_936])
def test_argmax_equals_torch(ops: TorchOps, vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    assert ops.argmax(logits).tolist() == logits.argmax(-1).tolist()


def test_the_first_of_equal_maxima_is_returned(ops: TorchOps) -> None:
    logits = torch.zeros(3, 2048)
    logits[1, [700, 701, 1500]] = 1.0
    logits[2] = -torch.inf
    assert ops.argmax(logits).tolist() == [0, 700, 0]


def test_the_first_nan_is_returned(ops: TorchOps) -> None:
    logits = torch.zeros(1, 2048)
    logits[0, [900, 1100]] = torch.nan
    logits[0, 3] = torch.inf
    assert ops.argmax(logits).tolist() == [900]


def test_non_contiguous_and_empty_input(ops: TorchOps) -> None:
    logits = torch.randn(4, 2048, generator=torch.Generator().manual_seed(1))[:, :1024]
    assert ops.argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert ops.argmax(logits[:0]).shape == (0,)
