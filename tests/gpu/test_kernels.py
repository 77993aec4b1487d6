"""Every kernel on a GPU against float64. tests/unit/benchmarks/test_gpu.py runs the same checks in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.cases import SHAPES, Shape
from benchmarks.gpu.checks import check
from tests.support.needs_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_check_passes(shape: Shape) -> None:
    found = list(check(shape, torch.device("cuda"), 1500))
    assert len(found) == 60
    assert [row for row in found if row["passed"] != "yes"] == []
