"""What every test may use: the toy models, stories260K, quiet settings. Helpers live in tests/support."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.stories import write_stories
from tests.support.toy import write_toy


def pytest_collection_finish() -> None:
    """All that the tests import is there, and stays: a tenth of their time would go by in looking for garbage in it."""
    gc.freeze()
    gc.enable()


def _keep_to_one_core() -> None:
    """Of several workers side by side (pytest-xdist), each has a core: threads that share one wait for one another."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


_keep_to_one_core()
gc.disable()  # until everything is collected
settings.register_profile(
    "specray", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("specray")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Toy models are too small to share, and a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the toy Llama."""
    return write_toy(tmp_path_factory.mktemp("toy"), "llama")


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of stories260K in Hugging Face layout."""
    return write_stories(tmp_path_factory.mktemp("stories"))
