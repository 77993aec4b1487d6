"""Engines whose drafter is behind the socket and the shared memory of a process of its own, here in a thread."""

import threading
from pathlib import Path

import torch

from specray.llm import LLM
from specray.spec_decode.drafter import Drafter, DraftSource
from specray.worker.colocated import ColocatedDrafts, Doorbell
from specray.worker.draft_worker import DraftWorker
from specray.worker.worker import Worker

EPOCH = 7


def worker_of(llm: LLM) -> Worker:
    return llm._executor.worker


class Colocated:
    """Takes an engine's drafter out of its process."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        worker = worker_of(llm)
        self._doorbell = Doorbell(str(folder / "drafts"), EPOCH)
        self._config = llm.config
        self._num_slots = worker._runner.num_blocks * llm.config.page_size
        self._threads: list[threading.Thread] = []
        self.drafts = ColocatedDrafts(self._doorbell, worker._runner.ring_limits(llm.config))
        worker._drafts = self.drafts

    def start(self, drafter: Drafter | None = None) -> None:
        """This drafter, or the configured one, knocks; returns once it does."""
        worker = DraftWorker(self._config, self._num_slots, drafter)
        knocked = threading.Event()

        def serve() -> None:
            with torch.inference_mode():
                worker.serve(*self._doorbell, knocked=knocked.set)

        self._threads.append(threading.Thread(target=serve, daemon=True))
        self._threads[-1].start()
        assert knocked.wait(30)

    def close(self) -> None:
        self.drafts.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


class Recorded:
    """A DraftSource that notes every tree it hands out."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self.trees: list[object] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def collect(self, roots, limits):  # type: ignore[no-untyped-def]
        tree = self._source.collect(roots, limits)
        self.trees.append(tree.rows())
        return tree
