"""Routing policy: open replicas only, prefixes and sessions within a bounded imbalance of load."""

from collections import Counter
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specray.server.config import RoutingOptions
from specray.server.routing.policy import KV_FULL, PrefixIndex, ReplicaState, choose_replica, in_order_of

OPTIONS = RoutingOptions()
IDS = [f"router#{index}" for index in range(6)]


@st.composite
def states(draw: st.DrawFn, replica_id: str) -> ReplicaState:
    return ReplicaState(
        replica_id,
        num_requests=draw(st.integers(0, 60)),
        kv_usage=draw(st.sampled_from([0.0, 0.5, 0.94, 0.95, 1.0, float("nan")])),
        acceptance_length=draw(st.sampled_from([None, 1.0, 2.5, 4.0, 0.0, float("nan"), float("inf")])),
        is_alive=draw(st.booleans()),
        is_draining=draw(st.booleans()),
        is_last_resort=draw(st.booleans()),
    )


clusters = st.tuples(*(states(replica_id) for replica_id in IDS)).flatmap(
    lambda drawn: st.permutations(drawn).flatmap(lambda mixed: st.integers(0, 6).map(lambda n: list(mixed)[:n]))
)
hits = st.dictionaries(st.sampled_from([*IDS, "gone"]), st.integers(0, 5).map(lambda blocks: 64 * blocks))
sessions = st.sampled_from(["", "alice", "bob", "\ud800 half a character", "\n\0"])


def idle(replica_id: str, num_requests: int = 0) -> ReplicaState:
    return ReplicaState(replica_id, num_requests)


@given(clusters, hits, st.integers(0, 99), sessions)
@settings(max_examples=150)
def test_a_choice_is_open_deterministic_and_a_last_resort_only_without_others(
    cluster: list[ReplicaState], cached: dict[str, int], seed: int, session: str
) -> None:
    def choice() -> str | None:
        return choose_replica(cluster, cached, Random(seed), OPTIONS, session)

    able = [r for r in cluster if r.is_alive and not r.is_draining]
    preferred = {r.replica_id for r in able if not r.is_last_resort} or {r.replica_id for r in able} or {None}
    assert choice() in preferred
    assert choice() == choice()


@given(clusters, hits, st.integers(0, 99), sessions, st.floats(1.0, 4.0), st.floats(0.0, 20.0))
@settings(max_examples=150)
def test_the_imbalance_is_bounded_for_any_cache_contents(
    cluster: list[ReplicaState], cached: dict[str, int], seed: int, session: str, ratio: float, slack: float
) -> None:
    cluster = [replace(r, acceptance_length=None, is_last_resort=False) for r in cluster]
    options = RoutingOptions(max_load_ratio=ratio, load_slack=slack)
    chosen = choose_replica(cluster, cached, Random(seed), options, session)
    load = {r.replica_id: r.num_requests for r in cluster}
    if chosen is not None:
        able = [r for r in cluster if r.is_open]
        roomy = [r for r in able if r.kv_usage < KV_FULL] or able
        assert chosen in {r.replica_id for r in roomy}
        assert load[chosen] <= ratio * min(load[r.replica_id] for r in roomy) + slack


@given(hits, st.integers(0, 99), sessions)
def test_the_longest_prefix_wins_among_equal_loads(cached: dict[str, int], seed: int, session: str) -> None:
    chosen = choose_replica([idle(name) for name in IDS], cached, Random(seed), OPTIONS, session)
    longest = max(cached.get(name, 0) for name in IDS)
    assert chosen is not None
    assert cached.get(chosen, 0) == longest


def test_the_next_longest_prefix_wins_once_the_first_replica_is_overloaded() -> None:
    cached = {"a": 640, "b": 64}
    for num_requests, first in ((4, "a"), (5, "b")):
        cluster = [idle("a", num_requests), idle("b"), idle("c")]
        assert choose_replica(cluster, cached, Random(0), OPTIONS) == first


def test_a_replica_with_a_higher_acceptance_length_takes_more_requests() -> None:
    slow, fast = (replace(idle(name, 8), acceptance_length=length) for name, length in (("slow", 1.0), ("fast", 3.0)))
    fresh = idle("fresh", 8)  # not measured yet: counts as average
    strict, cluster, order = RoutingOptions(load_slack=0, max_load_ratio=1), [slow, fresh, fast], []
    while cluster:
        order.append(choose_replica(cluster, {}, Random(0), strict))
        cluster = [replica for replica in cluster if replica.replica_id != order[-1]]
    assert order == ["fast", "fresh", "slow"]


def test_a_replica_without_free_kv_is_left_out() -> None:
    cluster = [replace(idle("full"), kv_usage=KV_FULL), idle("busy", 40)]
    assert choose_replica(cluster, {"full": 640}, Random(0), OPTIONS) == "busy"
    cluster[1] = replace(cluster[1], kv_usage=1.0)
    assert choose_replica(cluster, {"full": 640}, Random(0), OPTIONS) == "full"


def test_the_less_loaded_replica_wins() -> None:
    cluster = [idle("a", 9), idle("b", 3)]
    assert choose_replica(cluster, {}, Random(0), OPTIONS) == "b"


@given(st.text(min_size=1), st.sets(st.sampled_from(IDS), min_size=1), st.randoms())
def test_a_session_stays_on_its_replica_while_others_leave(session: str, gone: set[str], random: Random) -> None:
    def place(ids: list[str]) -> str:
        random.shuffle(ids)
        return choose_replica([idle(name) for name in ids], {}, Random(random.random()), OPTIONS, session)

    home = place(list(IDS))
    left = [name for name in IDS if name not in gone]
    if home in left:
        assert place(left) == home


def test_sessions_are_spread_evenly_and_identically_in_every_process() -> None:
    def place(session: str) -> str:
        return choose_replica([idle(name) for name in IDS], {}, Random(0), OPTIONS, session)

    places = Counter(place(f"user {index}") for index in range(600))
    assert min(places[name] for name in IDS) > 60
    assert [place(f"user {index}") for index in range(4)] == IDS[2:6]  # pinned: independent of the process


def test_a_session_on_an_overloaded_replica_moves_to_the_same_second_choice() -> None:
    def place(crowded: str) -> str:
        cluster = [idle(name, 50 if name == crowded else 0) for name in IDS]
        return choose_replica(cluster, {}, Random(0), OPTIONS, "alice")

    home = place("")
    assert place(home) == place(home) != home
    others = [idle(name) for name in IDS if name != home]
    assert choose_replica(others, {}, Random(0), OPTIONS, "alice") == place(home)


def test_a_replica_of_last_resort_is_chosen_only_if_all_are() -> None:
    late, busy = replace(idle("late"), is_last_resort=True), idle("busy", 40)
    assert choose_replica([late, busy], {"late": 640}, Random(0), OPTIONS, "alice", [1, 2]) == "busy"
    both = [late, replace(busy, is_last_resort=True)]
    assert choose_replica(both, {}, Random(0), OPTIONS) == "late"


PREFIXES = st.lists(st.integers(), min_size=1, max_size=4)


@given(PREFIXES, st.integers(), st.randoms(), st.sets(st.sampled_from(IDS), max_size=2))
def test_equal_prefixes_meet_at_one_replica_from_every_ingress(
    prefixes: list[int], other: int, random: Random, gone: set[str]
) -> None:
    """Ingresses have different subsets of the replicas in any order, and know nothing of what others sent."""

    def place(names: list[str], text: list[int]) -> str:
        random.shuffle(names)
        seen = [idle(name) for name in names]
        return choose_replica(seen, {}, Random(random.random()), OPTIONS, prefixes=text)

    home = place(list(IDS), prefixes)
    assert place(list(IDS), [*prefixes, other]) == home
    left = [name for name in IDS if name not in gone]
    if home in left:
        assert place(left, prefixes) == home


def test_a_prefix_goes_to_its_second_home_only_while_the_first_has_more_to_do() -> None:
    def place(*loads: int) -> str:
        cluster = [idle(name, load) for name, load in zip(IDS, loads, strict=False)]
        return choose_replica(cluster, {}, Random(0), OPTIONS, prefixes=[7])

    first, second = in_order_of("7", IDS[:4])[:2]
    for load, expected in ((0, first), (1, first), (2, second), (4, second)):
        assert place(*(load if name == first else 0 for name in IDS[:4])) == expected


def test_among_replicas_with_a_common_prefix_what_follows_it_decides() -> None:
    """A system prompt is cached everywhere; each conversation below it still meets its own replica."""
    cached = dict.fromkeys(IDS, 2 * OPTIONS.prefix_block_size)
    places = {
        choose_replica([idle(name) for name in IDS], cached, Random(seed), OPTIONS, prefixes=[1, 2, user])
        for user in range(60)
        for seed in range(2)
    }
    assert places == set(IDS)
    one = [
        choose_replica([idle(name) for name in IDS], cached, Random(seed), OPTIONS, prefixes=[1, 2, 3])
        for seed in range(8)
    ]
    assert len(set(one)) == 1


def test_hashes_are_equal_in_every_process() -> None:
    assert PrefixIndex(2, 8).hashes("tenant", [1, 2, 3, 4]) == [6759951374768008054, 5026174277851270386]


def test_without_prefix_or_session_the_less_loaded_of_two_random_replicas_wins() -> None:
    cluster = [idle(name, index) for index, name in enumerate(IDS[:4])]
    random = Random(3)
    firsts = Counter(choose_replica(cluster, {}, random, OPTIONS) for _ in range(3000))
    assert firsts[IDS[3]] == 0  # the heaviest never wins a pair
    shares = [firsts[name] / 3000 for name in IDS[:3]]
    assert shares == pytest.approx([3 / 6, 2 / 6, 1 / 6], abs=0.05)


@given(st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=12), min_size=1, max_size=30), st.integers(1, 3))
def test_the_prefix_index_matches_what_was_sent(sent: list[list[int]], size: int) -> None:
    index = PrefixIndex(size, max_blocks=1000)
    for number, tokens in enumerate(sent):
        index.record(IDS[number % 2], index.hashes("", tokens))
    for tokens in sent:
        for place in range(min(2, len(sent))):
            expected = max(size * (_common(tokens, other) // size) for n, other in enumerate(sent) if n % 2 == place)
            assert index.cached(index.hashes("", tokens))[IDS[place]] == expected


def _common(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_namespaces_share_no_blocks() -> None:
    index = PrefixIndex(4, 100)
    index.record("a", index.hashes("tenant", [1, 2, 3, 4]))
    assert index.cached(index.hashes("tenant", [1, 2, 3, 4, 5])) == {"a": 4}
    assert index.cached(index.hashes("other", [1, 2, 3, 4, 5])) == {"a": 0}


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=16), min_size=1, max_size=40), st.integers(1, 12))
def test_the_prefix_index_is_bounded_and_evicts_the_ends_of_old_texts_first(
    sent: list[list[int]], max_blocks: int
) -> None:
    index = PrefixIndex(1, max_blocks)
    for tokens in sent:
        index.record("a", index.hashes("", tokens))
        assert len(index._blocks["a"]) <= max_blocks
        assert index.cached(index.hashes("", tokens))["a"] == min(
            len(tokens), max_blocks
        )  # the newest text is complete, if it fits
        for other in sent:  # known blocks of a text are a prefix
            blocks = [block in index._blocks["a"] for block in index.hashes("", other)]
            assert blocks == sorted(blocks, reverse=True)


def test_lost_replicas_are_removed_from_the_index() -> None:
    index = PrefixIndex(1, 10)
    for name in IDS:
        index.record(name, index.hashes("", [1, 2]))
    index.keep_only(IDS[:2])
    assert index.cached(index.hashes("", [1, 2])) == {IDS[0]: 2, IDS[1]: 2}


class Conversations:
    """Clients in multi-turn conversations with a common system prompt. A replica takes 2 to 8 steps per turn."""

    def __init__(self, num_replicas: int, num_clients: int, by_prefix: bool) -> None:
        self.ids = IDS[:num_replicas]
        self.index = PrefixIndex(8, 4000)
        self.texts = {client: [0] * 64 for client in range(num_clients)}
        self.in_flight: dict[int, tuple[int, str]] = {}  # client -> (steps left, where)
        self.num_tokens = self.num_hits = 0
        self.spread: list[int] = []
        self._by_prefix = by_prefix
        self._random = Random(1)
        self._words = count(1)

    def play(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.in_flight = {c: (left - 1, where) for c, (left, where) in self.in_flight.items() if left > 1}
            for client in [c for c in self.texts if c not in self.in_flight and self._random.random() < 0.3]:
                self.send(client)
            loads = Counter(where for _, where in self.in_flight.values())
            self.spread.append(max(loads[name] for name in self.ids) - min(loads[name] for name in self.ids))

    def send(self, client: int) -> None:
        text = self.texts[client]
        text += [next(self._words) for _ in range(32)]
        loads = Counter(where for _, where in self.in_flight.values())
        hashes = self.index.hashes("", text)
        cached = self.index.cached(hashes)
        cluster = [idle(name, loads[name]) for name in self.ids]
        place = choose_replica(cluster, cached if self._by_prefix else {}, self._random, OPTIONS)
        self.num_tokens += len(text)
        self.num_hits += cached.get(place, 0)
        self.index.record(place, hashes)
        self.in_flight[client] = (self._random.randint(2, 8), place)


def test_conversations_hit_their_prefix_and_the_load_stays_balanced() -> None:
    followed, ignored = (Conversations(4, 60, by_prefix) for by_prefix in (True, False))
    for conversations in (followed, ignored):
        conversations.play(150)
    assert followed.num_hits / followed.num_tokens > 0.9
    assert ignored.num_hits / ignored.num_tokens < followed.num_hits / followed.num_tokens - 0.05
    assert (
        max(followed.spread) <= 0.5 * 60 / 4 + 4 + 4
    )  # the bound at an even load, plus requests that end before the count


def test_a_prefix_shared_by_all_does_not_overload_one_replica() -> None:
    conversations = Conversations(4, 60, by_prefix=True)
    for client in conversations.texts:
        conversations.send(client)
    loads = Counter(where for _, where in conversations.in_flight.values())
    assert set(loads) == set(conversations.ids)
    assert max(loads.values()) <= 1.5 * min(loads.values()) + 4 + 1


@pytest.mark.parametrize("options", [{"max_load_ratio": 0.9}, {"load_slack": -1}, {"prefix_blocks": 0}, {"slack": 1}])
def test_invalid_options_are_rejected(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        RoutingOptions.model_validate(options)
