"""The one-shot all-reduce without GPUs: ranks share the memory of files, and Triton's interpreter runs the kernel.

The kernel's own flags order the ranks; no collective stands in for them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from triton.runtime import interpreter

from specray.layers import parallel
from specray.layers.parallel import RankGroup
from specray.ops.graphs import Graphs
from specray.ops.peer_buffers import NUM_PROGRAMS, flag_bytes
from specray.worker import startup
from tests.support.fast_interpreter import patch_interpreter
from tests.support.graph_stand_in import RepeatedCall

CPU = torch.device("cpu")


class MappedBuffers:
    """As `specray.ops.peer_buffers.PeerBuffers`. Each process maps the ranks' files at other addresses."""

    folder: ClassVar[Path]

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        assert device == CPU
        self._num_bytes = num_bytes
        self.folder.mkdir(exist_ok=True)

    def meet(self, group: Any) -> list[int]:
        paths = [str(self.folder / str(rank)) for rank in range(group.size())]
        self._memory = [torch.from_file(path, shared=True, size=self._num_bytes, dtype=torch.uint8) for path in paths]
        return [memory.data_ptr() for memory in self._memory]


class OneShotGroup(RankGroup):
    """Starts with the one-shot all-reduce; `sums` is what it says about it."""

    sums = ""
    num_bytes = 1 << 20

    def __init__(self, rank: int = 0, size: int = 1, init_method: str | None = None, *options: Any) -> None:
        super().__init__(rank, size, init_method, *options)
        if size > 1:
            patch_interpreter()
            MappedBuffers.folder = Path(f"{init_method}-memory".removeprefix("file://"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parallel, "PeerBuffers", MappedBuffers)
                self.sums = self.start_one_shot(self.num_bytes, CPU)
            interpreter.InterpreterBuilder.create_atomic_rmw = _yielding(
                interpreter.InterpreterBuilder.create_atomic_rmw
            )


@contextmanager
def one_shot_workers(in_graphs: bool) -> Iterator[None]:
    """Within it, the ranks of workers sum small steps so. Graphs repeat calls: the interpreter leaves no record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAY_KERNELS", "torch")
        patch.setattr(OneShotGroup, "num_bytes", flag_bytes(2) + 2 * NUM_PROGRAMS * 256)  # 64 numbers a program
        patch.setattr(startup, "RankGroup", OneShotGroup)
        if in_graphs:
            patch.setattr(startup, "make_graphs", lambda *_: Graphs(RepeatedCall))
        yield


def _yielding(run: Any) -> Any:
    """An atomic operation of the interpreter that lets other processes run: one may wait for them."""

    def run_and_yield(*args: Any) -> Any:
        os.sched_yield()
        return run(*args)

    return run_and_yield
