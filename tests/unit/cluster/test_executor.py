"""What the executor decides before any rank starts."""

import pytest

from cluster.config import AppConfig
from cluster.executor import rank_threads


@pytest.mark.parametrize(
    ("options", "num_cores", "expected"),
    [({}, 2, 1), ({}, 1, 1), ({}, 16, 15), ({"tp_size": 2}, 16, 7), ({"tp_size": 2}, 2, 1), ({"num_threads": 2}, 2, 2)],
)
def test_ranks_leave_a_core_to_the_processes_around_them(
    options: dict[str, int], num_cores: int, expected: int
) -> None:
    assert rank_threads(AppConfig.model_validate(options), num_cores) == expected
