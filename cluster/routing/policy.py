"""Which Router replica serves a request: the longest cached prefix within a bounded imbalance of load.

What lives here: the decision as a pure function of the replicas' states, and what an ingress remembers of the texts it
sent where. Not here: where the states come from and how a request travels (Ray), what a replica has really cached
(`specray.engine.radix_cache`).
"""

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from random import Random
from typing import Literal, NamedTuple, TypeGuard

from pydantic import Field

from specray.config import Options

KV_FULL = 0.95  # share of KV blocks in use from which a request more is likely to push another one out


class RoutingOptions(Options):
    """How far requests may crowd together for the sake of a cached prefix or a session."""

    max_load_ratio: float = Field(
        1.5, ge=1.0, le=100.0, description="A replica is passed over beyond this many times the least load, and ..."
    )
    load_slack: float = Field(4.0, ge=0.0, le=10_000.0, description="... this many requests more than that.")
    prefix_block_size: int = Field(
        64, ge=1, le=65_536, description="Tokens in a block of the ingress's memory of prefixes; shorter ones are none."
    )
    prefix_blocks: int = Field(
        65_536, ge=1, le=10_000_000, description="Blocks an ingress remembers of each replica, some 100 bytes each."
    )


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What an ingress knows of one life of a replica: a restarted one has another id."""

    replica_id: str
    num_requests: int  # under way there, those that wait among them
    kv_usage: float = 0.0  # share of KV blocks held by running requests, 0 to 1
    acceptance_length: float | None = None  # tokens a verify step emits, bonus included; None before it was measured
    is_alive: bool = True
    is_draining: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it may be sent requests."""
        return self.is_alive and not self.is_draining


class Route(NamedTuple):
    """Replicas in the order to try them, none if there is none, and what chose the first."""

    replica_ids: list[str]
    reason: Literal["prefix", "session", "load", "none"]


def choose_route(
    replicas: Sequence[ReplicaState],
    cached: Mapping[str, int],
    random: Random,
    options: RoutingOptions,
    session: str = "",
) -> Route:
    """The replicas that may serve a request: the best one, then the rest by load; no dead or draining one.

    `cached` has the prompt's tokens that a replica is believed to have cached; `session` is any text that requests with
    a common past share (the caller puts its tenant in).

    Only replicas whose load is at most `max_load_ratio` times the least, plus `load_slack`, compete. The longest cached
    prefix wins. A session decides between equal ones (a prefix that all requests share is soon cached everywhere):
    by rendezvous hashing, so that it moves only if its replica leaves or is crowded, and to the same place from every
    ingress. Without a session, the lesser load of two drawn at random wins: states are never new, and to take the
    least loaded would send all ingresses to the same replica. O(R log R) for R replicas.
    """
    live = [r for r in replicas if r.is_open]
    if not live:
        return Route([], "none")
    loads = _loads(live)
    open_ids = _within_bound(live, loads, options)
    longest = max(cached.get(replica_id, 0) for replica_id in open_ids)
    equal = [replica_id for replica_id in open_ids if cached.get(replica_id, 0) == longest]
    first = _rendezvous(session, equal) if session else _lighter_of_two(equal, loads, random)
    rest = sorted(loads.keys() - {first}, key=lambda replica_id: (loads[replica_id], replica_id))
    return Route([first, *rest], "prefix" if longest else "session" if session else "load")


def _loads(live: Sequence[ReplicaState]) -> dict[str, float]:
    """Requests at each replica, as one of mean acceptance length would feel them.

    A replica that accepts twice as much is through with its requests in about half the time.
    """
    lengths = [r.acceptance_length for r in live if _is_measured(r.acceptance_length)]
    mean = sum(lengths) / len(lengths) if lengths else 1.0
    return {
        r.replica_id: r.num_requests * (mean / r.acceptance_length if _is_measured(r.acceptance_length) else 1.0)
        for r in live
    }


def _is_measured(acceptance_length: float | None) -> TypeGuard[float]:
    return acceptance_length is not None and 1.0 <= acceptance_length < inf


def _within_bound(live: Sequence[ReplicaState], loads: Mapping[str, float], options: RoutingOptions) -> list[str]:
    """Those with KV left, or all if none has, that are not too far above the least loaded of them."""
    roomy = [r.replica_id for r in live if r.kv_usage < KV_FULL] or list(loads)
    bound = min(loads[name] for name in roomy) * options.max_load_ratio + options.load_slack
    return [name for name in roomy if loads[name] <= bound]


def _rendezvous(session: str, replica_ids: Sequence[str]) -> str:
    """The replica with the highest hash of itself and the session: the others' coming and going changes nothing.

    Not Python's `hash`, which differs between processes: every ingress has to find the same replica.
    """

    def score(replica_id: str) -> bytes:
        text = f"{replica_id}\n{session}".encode(errors="surrogatepass")  # a client's text may be half a character
        return hashlib.blake2b(text, digest_size=8).digest()

    return max(replica_ids, key=lambda replica_id: (score(replica_id), replica_id))


def _lighter_of_two(replica_ids: Sequence[str], loads: Mapping[str, float], random: Random) -> str:
    return min(random.sample(replica_ids, min(2, len(replica_ids))), key=loads.__getitem__)


class PrefixIndex:
    """What one ingress believes each replica has cached: the texts it sent there lately, in blocks.

    A block is known by a hash of its tokens, the blocks before it and the namespace. Two texts with the same hash, or
    one the replica has dropped since, cost a prefill and nothing else: the replica's own cache compares token ids. A
    hash starts from the namespace's, which is salted per process, so nobody can make collisions ahead of time.

    Each replica's blocks are a least recently used set of their own, as in the replica. A path is entered end first,
    so a block is always newer than what lies below it: blocks drop out from the ends of paths, and what is known of
    a text is one run from its start.
    """

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks  # of each replica
        self._blocks: dict[str, OrderedDict[int, None]] = {}  # replica id -> blocks, least recently used first

    def record(self, replica_id: str, namespace: str, token_ids: Sequence[int]) -> None:
        """Note that a replica has computed `token_ids`. O(tokens)."""
        blocks = self._blocks.setdefault(replica_id, OrderedDict())
        for block in reversed(self._hashes(namespace, token_ids)[: self._max_blocks]):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def cached(self, namespace: str, token_ids: Sequence[int]) -> dict[str, int]:
        """Tokens at the start of `token_ids` that each replica is believed to have. O(tokens + replicas log tokens)."""
        hashes = self._hashes(namespace, token_ids)
        return {
            replica_id: self._block_size * bisect_left(hashes, True, key=lambda block: block not in blocks)
            for replica_id, blocks in self._blocks.items()
        }

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget replicas that are gone."""
        self._blocks = {name: blocks for name, blocks in self._blocks.items() if name in replica_ids}

    def _hashes(self, namespace: str, token_ids: Sequence[int]) -> list[int]:
        """One hash for each full block: of all tokens up to its end."""
        size = self._block_size
        starts = range(0, len(token_ids) - size + 1, size)
        blocks = (tuple(token_ids[start : start + size]) for start in starts)
        return list(accumulate(blocks, lambda before, block: hash((before, block)), initial=hash(namespace)))[1:]
