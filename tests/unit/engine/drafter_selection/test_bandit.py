"""The bandit finds the faster drafter for each kind of text, follows changes, and forgets tenants."""

from collections.abc import Callable, Hashable
from random import Random

import pytest

from specray.engine.drafter_selection.bandit import REQUEST_TOKENS, DrafterBandit

HEAD, LOOKUP = "head", "lookup"
NAMES = [HEAD, LOOKUP]
RATES = {"chat": {HEAD: 1.0, LOOKUP: 0.65}, "code": {HEAD: 1.0, LOOKUP: 0.8}, "copy": {HEAD: 1.0, LOOKUP: 1.6}}
SWAPPED = {kind: {HEAD: rates[LOOKUP], LOOKUP: rates[HEAD]} for kind, rates in RATES.items()}

Rates = dict[str, dict[str, float]]


def play(
    bandit: DrafterBandit,
    rates: Callable[[int], Rates],
    num_requests: int,
    seed: int = 0,
    num_at_once: int = 1,
    num_tenants: int = 1,
    deviation: float = 0.25,
) -> float:
    """Requests of all kinds in turn; the time of always having the best drafter, relative to what was needed."""
    random, running = Random(seed), []
    best = needed = 0.0
    for number in range(num_requests):
        kind, tenant = list(RATES)[number % 3], f"tenant {random.randrange(num_tenants)}"
        running.append((tenant, kind, bandit.choose(tenant, kind, NAMES)))
        if len(running) == num_at_once:
            tenant, kind, drafter = running.pop(0)
            of_kind = rates(number)[kind]
            rate = of_kind[drafter] * max(0.3, random.gauss(1.0, deviation))
            bandit.observe(tenant, kind, drafter, REQUEST_TOKENS, REQUEST_TOKENS / rate)
            bandit.end(tenant, kind, drafter)
            best += 1 / max(of_kind.values())
            needed += 1 / of_kind[drafter]
    return best / needed


@pytest.mark.parametrize(("num_at_once", "num_tenants"), [(1, 1), (8, 1), (8, 20)])
def test_it_comes_close_to_the_better_drafter_of_each_kind(num_at_once: int, num_tenants: int) -> None:
    shares = [play(DrafterBandit(), lambda _: RATES, 600, seed, num_at_once, num_tenants) for seed in range(10)]
    assert sum(shares) / len(shares) > 0.96
    assert min(shares) > 0.9


def test_it_follows_a_change() -> None:
    """Drafters change places; the second half begins with old measurements that say the opposite."""
    shares = []
    for seed in range(10):
        bandit = DrafterBandit()
        play(bandit, lambda _: RATES, 300, seed)
        play(bandit, lambda _: SWAPPED, 300, seed)
        shares.append(play(bandit, lambda _: SWAPPED, 300, seed))
    assert sum(shares) / len(shares) > 0.95


def test_equal_measurements_give_equal_choices() -> None:
    assert play(DrafterBandit(), lambda _: RATES, 100) == play(DrafterBandit(), lambda _: RATES, 100)


def test_a_burst_is_spread_over_unknown_drafters() -> None:
    bandit = DrafterBandit()
    chosen = [bandit.choose("", "chat", NAMES) for _ in range(8)]
    assert [chosen.count(name) for name in NAMES] == [4, 4]


def test_a_new_tenant_starts_from_what_all_tenants_have_shown() -> None:
    bandit = DrafterBandit()
    play(bandit, lambda _: RATES, 120, deviation=0.0)
    assert bandit.choose("unknown", "copy", NAMES) == LOOKUP
    assert bandit.choose("unknown", "chat", NAMES) == HEAD


def test_a_tenant_may_differ_from_the_others() -> None:
    bandit = DrafterBandit()
    for _ in range(60):
        for tenant, better in (("a", HEAD), ("b", LOOKUP)):
            drafter = bandit.choose(tenant, "chat", NAMES)
            bandit.observe(
                tenant, "chat", drafter, REQUEST_TOKENS, REQUEST_TOKENS / (2.0 if drafter == better else 1.0)
            )
            bandit.end(tenant, "chat", drafter)
    assert [bandit.choose(tenant, "chat", NAMES) for tenant in "ab"] == [HEAD, LOOKUP]


def test_the_number_of_tenants_is_bounded() -> None:
    bandit = DrafterBandit(max_tenants=3)
    for number in range(10):
        drafter = bandit.choose(f"tenant {number}", "chat", NAMES)
        bandit.observe(f"tenant {number}", "chat", drafter, 1, 1.0)
    assert len(bandit._tenants) == 3
    bandit.end("tenant 0", "chat", HEAD)  # forgotten meanwhile
    assert len(bandit._tenants) == 3


def test_a_dropped_drafter_leaves_no_experience_to_one_of_its_name() -> None:
    bandit = DrafterBandit()
    experience: list[tuple[str, Hashable, float]] = [(HEAD, "chat", 1.0), (LOOKUP, "chat", 9.0)]
    for drafter, kind, seconds in experience:
        bandit.start("", kind, drafter)
        bandit.observe("", kind, drafter, 10 * REQUEST_TOKENS, seconds)
        bandit.end("", kind, drafter)
    assert bandit.choose("", "chat", NAMES) == HEAD
    bandit.forget(LOOKUP)
    assert bandit.choose("", "chat", NAMES) == LOOKUP, "the unknown one is tried"


def test_experience_that_has_faded_away_is_none() -> None:
    """Tokens and seconds end as numbers that a float cannot divide."""
    bandit = DrafterBandit()
    bandit.observe("one", "chat", LOOKUP, REQUEST_TOKENS, 100.0)
    for _ in range(25_000):
        bandit.observe("one", "chat", HEAD, REQUEST_TOKENS, 100.0)
    assert bandit.choose("another", "chat", NAMES) == LOOKUP, "as unknown as at the start"


def test_a_burst_does_not_all_go_to_a_new_drafter() -> None:
    bandit = DrafterBandit()
    for _ in range(60):
        bandit.observe("", "chat", HEAD, REQUEST_TOKENS, 1.0)
    chosen = [bandit.choose("", "chat", [HEAD, "new"]) for _ in range(64)]
    assert chosen[0] == "new"
    assert 1 < chosen.count("new") < 40
