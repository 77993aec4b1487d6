"""The processor: what the system says about it, and how many threads the CPU kernels use."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

# Of x86 and ARM; together they tell kinds of processors apart. Some virtual machines give all of a maker's one name.
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU implementer", "CPU part", "Features")
_count: int | None = None
_SMALL = 6 << 20  # bytes of weights that one thread has nearly read by the time another has woken up


def cpu_name() -> str:
    """The maker's name of it, for people."""
    return _facts().get("model name") or platform.processor() or "unknown CPU"


def cpu_features() -> str:
    """Its instruction sets."""
    facts = _facts()
    return facts.get("flags") or facts.get("Features") or platform.processor()


def cpu_identity() -> str:
    """Equal for processors of one kind, which run the same program equally fast."""
    facts = _facts()
    return "; ".join(facts[name] for name in _IDENTITY if name in facts) or platform.processor()


def use_kernel_threads(count: int) -> None:
    """Compute on `count` threads with the kernels, and on one with torch.

    Between two operations torch's own threads would spin, on the cores that the kernels need.
    """
    global _count  # like torch's, a setting of the process
    _count = count
    torch.set_num_threads(1)


def num_threads(num_bytes: int | None = None) -> int:
    """Threads of a call of the kernels that reads `num_bytes` of weights, or of keys and values for each query.

    torch's number if `use_kernel_threads` was never called; one for little work.
    """
    if num_bytes is not None and num_bytes < _SMALL:
        return 1
    return torch.get_num_threads() if _count is None else _count


@contextmanager
def torch_threads() -> Iterator[None]:
    """Give torch the threads of the kernels, for code that runs on torch alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads())
    yield
    torch.set_num_threads(before)


@cache
def _facts() -> dict[str, str]:
    """The lines of /proc/cpuinfo about the first core; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
