"""Python looks for no garbage while a rank or a drafter loads, and looks for it afterwards."""

import contextlib
import gc
from collections.abc import Iterator

import pytest

from cluster.engine.garbage import all_that_stays


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """As it was."""
    yield
    gc.enable()


def test_what_is_loaded_stays_and_is_never_looked_at() -> None:
    frozen = gc.get_freeze_count()
    with all_that_stays():
        assert not gc.isenabled()
        loaded = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(loaded)


def test_garbage_is_looked_for_again_after_a_failure() -> None:
    with contextlib.suppress(ValueError), all_that_stays():
        raise ValueError
    assert gc.isenabled()
