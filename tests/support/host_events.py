"""What the host does between the passes of a worker whose steps run on the stand-in for graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from specray.worker.graph_backend import GraphBackend
from specray.worker.padded_step import CopiedOutcome
from tests.support.graph_stand_in import RecordedGraphs
from tests.support.host_reads import HostReads

EARLY, LAUNCH, OUTCOME = "early", "launch", "outcome"


@contextmanager
def host_events() -> Iterator[list[str]]:
    """The launches of forward passes in graphs, the outcomes that the host reads, and what else it reads, in order.

    A launch of a step that begins early has another event before it.
    """
    reads = HostReads()
    replay, output, begin_after = RecordedGraphs.replay, CopiedOutcome.output, GraphBackend.begin_after

    def replayed(recorded: RecordedGraphs, key: Any) -> None:
        if key[0] == "forward":
            reads.places.append(LAUNCH)
        replay(recorded, key)

    def was_read(outcome: CopiedOutcome) -> Any:
        found = output(outcome)
        reads.places.append(OUTCOME)
        return found

    def begins(backend: GraphBackend, *args: Any) -> Any:
        reads.places.append(EARLY)
        return begin_after(backend, *args)

    with pytest.MonkeyPatch.context() as patch, reads:
        patch.setattr(GraphBackend, "begin_after", begins)
        patch.setattr(RecordedGraphs, "replay", replayed)
        patch.setattr(CopiedOutcome, "output", was_read)
        yield reads.places


class Launches(NamedTuple):
    """Launches of forward passes behind an outcome that the host has read since the launch before."""

    early: int  # while the step before is not finished
    early_without_reads: int  # the host read nothing else since that outcome
    without_reads: int  # the same, early or not


def launches_in(events: list[str]) -> Launches:
    """Those of `host_events`."""
    early = early_without_reads = without_reads = 0
    since: list[str] | None = None  # events since the last outcome
    is_early = False
    for event in events:
        if event == OUTCOME:
            since = []
        elif event == EARLY:
            is_early = True
        elif event == LAUNCH:
            is_clean = since == []
            early += is_early and since is not None
            early_without_reads += is_early and is_clean
            without_reads += is_clean
            since, is_early = None, False
        elif since is not None:
            since.append(event)
    return Launches(early, early_without_reads, without_reads)
