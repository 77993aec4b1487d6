"""Real CUDA graphs, with Triton's kernels. tests/lossless/test_graphs.py is its CPU twin."""

from pathlib import Path
from typing import Any

import pytest

from specray.outputs import Completion
from tests.support.graph_cases import NAMES, plain_output, require_plain_output
from tests.support.needs_gpu import NEEDS_GPU
from tests.support.toy import write_toy

pytestmark = NEEDS_GPU

VARIANT = "qwen3"
# Fixed sums, because near-ties would differ otherwise.
ENGINE: dict[str, Any] = {"device": "cuda", "deterministic": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("target"), VARIANT)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[Completion]]:
    return plain_output(target, **ENGINE)


@pytest.mark.parametrize("name", NAMES)
def test_output_does_not_depend_on_graphs(
    name: str | None, target: Path, tmp_path: Path, plain: list[list[Completion]]
) -> None:
    require_plain_output(name, target, tmp_path, plain, **ENGINE)
