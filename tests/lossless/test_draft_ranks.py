"""A drafter of several processes beside a target of several ranks: a fault of one costs drafts, never a request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specray.sampling_params import make_sampling_params
from specray.step import DraftFault
from tests.support.draft_ranks import kill, run_draft_ranks, stop
from tests.support.engine import generate
from tests.support.methods import METHODS
from tests.support.two_ranks import run_methods

PROMPTS = [[0, 9, 8, 7, 6, 5, 9, 8], [0, *range(10, 40)]]
PARAMS = [
    {"seed": 1, "temperature": 0.0, "max_tokens": 30, "ignore_eos": True},
    {"seed": 2, "temperature": 1.0, "max_tokens": 30, "ignore_eos": True},
]
# Where the drafts cross: sockets and the host's memory, or a GPU's memory, with orders before outcomes.
WAYS: dict[str, dict[str, Any]] = {"host": {}, "device": {"in_graphs": True, "uses_cuda_ipc": True}}


def plain(folder: Path) -> list[list[int]]:
    return [list(each.token_ids) for each in generate(folder, PROMPTS, [make_sampling_params(**p) for p in PARAMS])]


@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE-tree"])
def test_a_split_drafter_in_its_own_processes_changes_no_text(name: str, toy: Path, tmp_path: Path) -> None:
    seen = run_draft_ranks(toy, METHODS[name](toy, tmp_path), PROMPTS, PARAMS)
    assert seen.token_ids == plain(toy)
    assert seen.drafts[0] > 0
    assert seen.faults == []


def test_a_rank_reads_nothing_between_an_outcome_and_the_next_launch(toy: Path, tmp_path: Path) -> None:
    """On the stand-in for graphs. The trees come through a socket, so the host knows them."""
    seen = run_draft_ranks(toy, METHODS["EAGLE3"](toy, tmp_path), PROMPTS, PARAMS, in_graphs=True)
    assert seen.token_ids == plain(toy)
    assert sum(seen.drafts) > 10
    assert seen.launches[0].without_reads > 10


@pytest.mark.parametrize("name", ["EAGLE3", pytest.param("STANDALONE-tree", marks=pytest.mark.slow)])
def test_ranks_read_nothing_before_a_launch_whose_drafts_were_ordered_before_the_outcome(
    name: str, toy: Path, tmp_path: Path
) -> None:
    """On the stand-in for graphs. The trees are those of a drafter in the target's ranks."""
    speculative, prompts = METHODS[name](toy, tmp_path), [*PROMPTS, [7, 8, 9]]
    params = [*PARAMS, {"seed": 3, "temperature": 0.7, "top_p": 0.9, "max_tokens": 30, "ignore_eos": True}]
    [inline] = run_methods(toy, 2, [speculative], prompts, params, in_graphs=True, max_running_requests=2)
    seen = run_draft_ranks(toy, speculative, prompts, params, **WAYS["device"])
    assert seen.token_ids == [choice["token_ids"] for choice in inline.choices]
    assert seen.token_ids[:2] == plain(toy)
    assert seen.accept_length == inline.accept_length > 1.0
    assert seen.faults == []
    for launches in [*inline.launches, *seen.launches]:  # of both ranks
        assert launches.early_without_reads == launches.early > 10


@pytest.mark.parametrize(
    ("fault", "last", "way"),
    [
        (kill, DraftFault.GONE, "host"),
        (stop, DraftFault.FROZEN, "host"),
        (kill, DraftFault.GONE, "device"),
        pytest.param(stop, DraftFault.FROZEN, "device", marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_the_drafter_that_fails_costs_drafts_until_all_are_replaced(
    fault: Callable[[int], None], last: DraftFault, way: str, toy: Path, tmp_path: Path
) -> None:
    seen = run_draft_ranks(toy, METHODS["EAGLE3"](toy, tmp_path), PROMPTS, PARAMS, fault, **WAYS[way])
    assert seen.token_ids == plain(toy)
    before, _, after = seen.drafts
    assert min(before, after) > 0
    assert seen.faults[-1] == last


@pytest.mark.parametrize(("size", "way"), [(2, "host"), (2, "device"), (4, "host")])
def test_a_rank_of_the_drafter_that_computes_nonsense_is_late_and_ends_changes_no_text(
    size: int, way: str, toy: Path, tmp_path: Path
) -> None:
    speculative = METHODS["EAGLE3"](toy, tmp_path)
    seen = run_draft_ranks(toy, speculative, PROMPTS, PARAMS, kill, lies=True, is_late=True, size=size, **WAYS[way])
    assert seen.token_ids == plain(toy)
    in_time, late, caught_up, ended, replaced = seen.drafts
    assert min(in_time, caught_up, replaced) > 0
    assert (late, ended) == (0, 0) or way == "device"  # where steps that had begun have drafts
    assert (seen.faults[0], seen.faults[-1]) == (DraftFault.LATE, DraftFault.GONE)
