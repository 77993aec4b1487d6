"""Garbage collection is off while a rank or a drafter loads."""

import contextlib
import gc
from collections.abc import Iterator

import pytest

from cluster.process_settings import frozen_garbage_collection


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


def test_loaded_objects_are_frozen() -> None:
    frozen = gc.get_freeze_count()
    with frozen_garbage_collection():
        assert not gc.isenabled()
        loaded = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(loaded)


def test_garbage_collection_is_enabled_again_after_a_failure() -> None:
    with contextlib.suppress(ValueError), frozen_garbage_collection():
        raise ValueError
    assert gc.isenabled()
