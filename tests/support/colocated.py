"""Engines with a remote drafter that runs in a thread: same socket and shared memory as in another process."""

import contextlib
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.llm import LLM
from specray.spec_decode.drafter import Drafter, DraftReport, DraftSource
from specray.worker.loading import ring_limits
from specray.worker.remote_drafter.handshake import DraftEndpoint, dismiss
from specray.worker.remote_drafter.server import DraftServer, make_draft_server, remote_target_view
from specray.worker.remote_drafter.source import RemoteDrafts
from specray.worker.startup import start_worker
from specray.worker.warm_up import warm_up
from specray.worker.worker import Worker

EPOCH = 7


def worker_of(llm: LLM) -> Worker:
    return llm._executor.worker


@contextlib.contextmanager
def colocated_worker(config: EngineConfig, folder: Path, uses_cuda_ipc: bool = False) -> Iterator[Worker]:
    """A worker that is ready, whose drafter is connected and drafts in a thread."""
    endpoint = DraftEndpoint(str(folder / "drafts"), EPOCH, uses_cuda_ipc=uses_cuda_ipc)
    worker = start_worker(config, colocate=endpoint)
    assert isinstance(worker.drafts, RemoteDrafts)
    server = make_draft_server(config, remote_target_view(config), worker.capacity.num_blocks * config.page_size)
    with contextlib.closing(worker.drafts):
        thread = serving(server, folder)
        worker.drafts.await_drafter(30.0)
        warm_up(worker, config)
        yield worker
    thread.join(30.0)


def awaiting(receive: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """`_Peer.receive` that finds each reply, as if the target's own steps took longer than the drafter."""

    def awaited(peer: Any, pending: Any) -> bool:
        while peer._unanswered:
            assert peer._channel.poll(60.0)
            assert not receive(peer, pending)
        return receive(peer, pending)

    return awaited


def serving(server: DraftServer, folder: Path) -> threading.Thread:
    """A thread in which a drafter serves the worker of `colocated_worker`; returns once it waits at the socket."""
    connected = threading.Event()

    def draft() -> None:
        with torch.inference_mode():
            server.serve(str(folder / "drafts"), EPOCH, on_connect=connected.set)

    thread = threading.Thread(target=draft, daemon=True)
    thread.start()
    assert connected.wait(60.0)
    return thread


class Colocated:
    """Runs an engine's drafter behind the socket, in a thread."""

    def __init__(self, llm: LLM, folder: Path, uses_cuda_ipc: bool = False) -> None:
        worker = worker_of(llm)
        self._endpoint = DraftEndpoint(str(folder / "drafts"), EPOCH, uses_cuda_ipc=uses_cuda_ipc)
        self._config = llm.config
        self._num_slots = worker.capacity.num_blocks * llm.config.page_size
        self._threads: list[threading.Thread] = []
        self.drafts = RemoteDrafts(self._endpoint, ring_limits(llm.config, worker.model), worker._table)
        worker.drafts = self.drafts

    def start(self, drafter: Drafter | None = None, speculative: SpeculativeConfig | None = None) -> None:
        """Connect this drafter, one with these options, or the configured one; returns once it is connected."""
        config = self._config.model_copy(update={"speculative": speculative or self._config.speculative})
        if drafter is None:
            worker = make_draft_server(config, remote_target_view(config), self._num_slots)
        else:
            worker = DraftServer(drafter, torch.device("cpu"))
        connected = threading.Event()

        def serve() -> None:
            with torch.inference_mode():
                worker.serve(self._endpoint.address, EPOCH, on_connect=connected.set)

        self._run(serve)
        assert connected.wait(30)

    def dismiss(self) -> None:
        """Ask the target to continue without a drafter; returns once the request waits at the socket."""
        self._run(lambda: dismiss(self._endpoint, 30.0))
        assert select.select([self.drafts._server], [], [], 30)[0]

    @contextlib.contextmanager
    def each_fault(self, *actions: Callable[[], object]) -> Iterator[None]:
        """Call this whenever the target has noticed a fault; a late answer then arrives before the next step."""
        take = self.drafts.take_report

        def take_report() -> DraftReport:
            report = take()
            for _ in report.faults:
                for action in actions:
                    action()
            peer = self.drafts._peer
            if report.faults and peer is not None:
                assert select.select([peer._channel._socket], [], [], 30)[0]
            return report

        self.drafts.take_report = take_report  # type: ignore[method-assign]
        yield
        self.drafts.take_report = take  # type: ignore[method-assign]

    def close(self) -> None:
        self.drafts.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _run(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()


class Recorded:
    """A DraftSource that records the trees it returns."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self.trees: list[object] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def collect(self, rows, draft_limits):  # type: ignore[no-untyped-def]
        tree, num_nodes = self._source.collect(rows, draft_limits)
        self.trees.append(tree.to_lists())
        return tree, num_nodes
