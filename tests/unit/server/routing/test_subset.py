"""Which engines an ingress has streams to."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.server.config import RoutingOptions
from specray.server.routing.subset import (
    INGRESSES_PER_ENGINE,
    NARROW_AFTER_S,
    WIDEN_AFTER_S,
    Breadth,
    IngressPlace,
    engines_of,
)

USUAL = RoutingOptions().engines_per_ingress
counts = st.integers(1, 24)


def engines(count: int) -> list[str]:
    return [f"router#{number}" for number in range(count)]


def subsets(num_ingresses: int, ids: list[str], breadth: int = 1) -> list[set[str]]:
    return [engines_of(IngressPlace(rank, num_ingresses), ids, USUAL, breadth) for rank in range(num_ingresses)]


@given(counts, st.integers(0, 80))
def test_every_engine_has_ingresses_and_the_streams_are_bounded(num_ingresses: int, num_engines: int) -> None:
    found = subsets(num_ingresses, engines(num_engines))
    per_engine = Counter(engine for subset in found for engine in subset)
    assert set(per_engine) == set(engines(num_engines))
    assert all(count >= min(INGRESSES_PER_ENGINE, num_ingresses) for count in per_engine.values())
    assert per_engine.total() <= max(USUAL * num_ingresses, INGRESSES_PER_ENGINE * num_engines)


def test_eight_ingresses_and_64_engines_have_128_streams() -> None:
    sizes = [len(subset) for subset in subsets(8, engines(64))]
    assert sum(sizes) == 128
    assert min(sizes) >= 8


@given(counts, st.integers(0, USUAL))
def test_few_engines_are_used_by_every_ingress(num_ingresses: int, num_engines: int) -> None:
    assert subsets(num_ingresses, engines(num_engines)) == [set(engines(num_engines))] * num_ingresses


@pytest.mark.parametrize("num_engines", [63, 200])
def test_an_engine_that_leaves_changes_nothing_for_others(num_engines: int) -> None:
    """63 and 200: the number of ingresses of each engine stays the same."""
    ids = engines(num_engines + 1)
    for gone in ids[::17]:
        left = [engine for engine in ids if engine != gone]
        assert subsets(8, left) == [subset - {gone} for subset in subsets(8, ids)]


def test_an_ingress_more_moves_few_engines() -> None:
    before, after = subsets(8, engines(200)), subsets(9, engines(200))
    kept = sum(len(old & new) for old, new in zip(before, after, strict=False))
    assert kept > 0.8 * sum(map(len, before))


def test_a_larger_breadth_adds_engines_until_they_are_all() -> None:
    one, two, four = (subsets(8, engines(64), breadth) for breadth in (1, 2, 4))
    assert all(small <= large for small, large in zip(one, two, strict=True))
    assert sum(map(len, two)) == 2 * sum(map(len, one))
    assert four == [set(engines(64))] * 8


def test_an_ingress_whose_number_exceeds_the_count_has_engines() -> None:
    """Serve tells replicas of their numbers one after the other."""
    assert engines_of(IngressPlace(8, 8), engines(64), USUAL) == engines_of(IngressPlace(8, 9), engines(64), USUAL)


def test_the_breadth_follows_whether_an_engine_takes_requests() -> None:
    breadth, values = Breadth(0.0), []
    for now, is_free, has_all in (
        (WIDEN_AFTER_S / 2, False, False),
        (WIDEN_AFTER_S + 0.1, False, False),
        (WIDEN_AFTER_S + 0.2, False, False),
        (2 * WIDEN_AFTER_S + 0.2, False, False),
        (3 * WIDEN_AFTER_S + 1.0, False, True),
        (WIDEN_AFTER_S + NARROW_AFTER_S, True, False),
        (3 * WIDEN_AFTER_S + NARROW_AFTER_S, True, False),
        (3 * WIDEN_AFTER_S + 2 * NARROW_AFTER_S, True, False),
        (3 * WIDEN_AFTER_S + 3 * NARROW_AFTER_S + 1.0, True, False),
    ):
        breadth.update(now, is_free=is_free, has_all=has_all)
        values.append(breadth.value)
    assert values == [1, 2, 2, 4, 4, 4, 2, 2, 1]
