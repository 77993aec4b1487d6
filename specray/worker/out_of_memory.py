"""Out-of-memory errors of any allocator, turned into one that says which options to lower."""

import contextlib
from collections.abc import Iterator

import torch

from specray.config import EngineConfig
from specray.errors import ConfigError, EngineDeadError
from specray.worker.memory import advice

STARTING = "loading the model and making its KV pool"
STEPPING = "computing a step"


@contextlib.contextmanager
def enough_memory(config: EngineConfig, while_: str, error: type[ConfigError | EngineDeadError]) -> Iterator[None]:
    """Raise `error` with the options to lower instead of an out-of-memory error."""
    try:
        yield
    except (MemoryError, RuntimeError) as failure:
        if not _is_out_of_memory(failure):
            raise
        raise error(f"out of memory while {while_}: {failure}; {advice(config)}") from failure


def _is_out_of_memory(failure: BaseException) -> bool:
    """Whether memory ran out; torch's CPU allocator raises a plain RuntimeError."""
    is_named = isinstance(failure, MemoryError | torch.OutOfMemoryError)
    return is_named or "not enough memory" in str(failure) or "can't allocate memory" in str(failure)
