"""Fixtures of all tests: the toy models, stories260K and process settings. Helpers live in tests/support.

Importing this does not import torch and transformers: the process that controls pytest-xdist's workers needs neither.
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.fast_interpreter import patch_interpreter
from tests.support.skips import pytest_sessionfinish  # noqa: F401 — a hook


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which would take a tenth of the tests' time."""
    gc.freeze()
    gc.enable()
    if "triton" in sys.modules:
        patch_interpreter()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: at the end, one of them would keep a single pytest-xdist worker busy.

    Workers go on with the files that have the most tests. Only with --no-loadscope-reorder do they follow this order.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    in_worker = "PYTEST_XDIST_WORKER" in os.environ
    counts = Counter(item.path for item in items) if in_worker else Counter[Path]()
    items.sort(key=lambda item: (item.path not in slow, -counts[item.path]))


def _keep_to_one_core() -> None:
    """Give each pytest-xdist worker one core: threads that share one wait for each other."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


_keep_to_one_core()
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels run on the CPU; tests/gpu runs them on a GPU
gc.disable()  # until everything is collected
settings.register_profile(
    "specray",
    max_examples=int(os.environ.get("SPECRAY_TEST_EXAMPLES", "100")),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("specray")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Toy models are too small for several threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the toy Llama."""
    from tests.support.toy import write_toy

    return write_toy(tmp_path_factory.mktemp("toy"), "llama")


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of stories260K in Hugging Face layout."""
    from tests.support.stories import write_stories

    return write_stories(tmp_path_factory.mktemp("stories"))
