"""Routing policy: the replica with the longest cached prefix, within a bounded imbalance of load.

`choose_replica` is a pure function of the replicas' states. `PrefixIndex` estimates what each replica has cached; the
actual cache lives in `specray.engine.radix_cache`.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import inf
from random import Random
from typing import TypeGuard

from specray.server.config import RoutingOptions

KV_FULL = 0.95  # share of KV blocks in use above which another request is likely to preempt one
PREFERRED_SLACK = 1.0  # requests by which the load of a prefix's first replica may exceed that of its second


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What an ingress knows about a replica. A restarted replica has a new ID."""

    replica_id: str
    num_requests: int  # running or waiting there
    kv_usage: float = 0.0  # share of KV blocks held by running requests, 0 to 1
    acceptance_length: float | None = None  # tokens per verify step, bonus token included; None until measured
    is_alive: bool = True
    is_draining: bool = False
    is_last_resort: bool = False  # its queue is full, or its heartbeat is late

    @property
    def is_open(self) -> bool:
        """Whether new requests may be sent to it."""
        return self.is_alive and not self.is_draining


def choose_replica(
    replicas: Sequence[ReplicaState],
    cached: Mapping[str, int],
    random: Random,
    options: RoutingOptions,
    session: str = "",
    prefixes: Sequence[int] = (),
) -> str | None:
    """The replica for a request; None if none is open.

    `cached` is the number of the prompt's tokens that each replica is believed to have cached. `session` is any text
    that related requests share; the caller includes its tenant. `prefixes` are `PrefixIndex.hashes` of the prompt.

    Candidates have a load of at most `max_load_ratio` times the least, plus `load_slack`. The longest cached prefix
    wins. Ties are common, because a prefix that all requests share is soon cached everywhere. A session breaks ties by
    rendezvous hashing: it moves only if its replica leaves or is overloaded, and every ingress moves it to the same
    replica. Without a session, the hashed key is the shortest prefix that none of the tied replicas has cached, so
    requests that share it meet at one replica, although no ingress knows what others sent. A prompt without such a
    prefix goes to the less loaded of two random candidates. Always taking the least loaded one would make all
    ingresses, whose states lag behind, choose the same replica.
    """
    is_open = [r for r in replicas if r.is_open]
    if not is_open:
        return None
    live = [r for r in is_open if not r.is_last_resort] or is_open
    loads = _loads(live)
    open_ids = _within_bound(live, loads, options)
    longest = max(cached.get(replica_id, 0) for replica_id in open_ids)
    equal = [replica_id for replica_id in open_ids if cached.get(replica_id, 0) == longest]
    num_known = longest // options.prefix_block_size
    if session:
        return in_order_of(session, equal)[0]
    if num_known < len(prefixes):
        return _preferred(str(prefixes[num_known]), equal, loads)
    return _lighter_of_two(equal, loads, random)


def in_order_of(key: str, names: Iterable[str]) -> list[str]:
    """Rendezvous hashing: the names by their hashes with a key, the highest first.

    The order of two names depends on no other name. Everyone has the same order, so not by Python's `hash`, which
    differs between processes. A client's text may contain unpaired surrogates.
    """

    def score(name: str) -> tuple[bytes, str]:
        return blake2b(f"{name}\n{key}".encode(errors="surrogatepass"), digest_size=8).digest(), name

    return sorted(names, key=score, reverse=True)


def _loads(live: Sequence[ReplicaState]) -> dict[str, float]:
    """Requests at each replica, scaled by the mean acceptance length over the replica's own.

    A replica that accepts twice as many tokens finishes its requests in about half the time.
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
    """Replicas with free KV blocks (all if none has any) whose load is within the bound of the least loaded."""
    with_free_kv = [r.replica_id for r in live if r.kv_usage < KV_FULL] or list(loads)
    bound = min(loads[name] for name in with_free_kv) * options.max_load_ratio + options.load_slack
    return [name for name in with_free_kv if loads[name] <= bound]


def _preferred(prefix: str, replica_ids: Sequence[str], loads: Mapping[str, float]) -> str:
    """The first replica in the prefix's order, or the second one while its load is lower by PREFERRED_SLACK."""
    first, second = [*in_order_of(prefix, replica_ids), ""][:2]
    return second if second and loads[first] > loads[second] + PREFERRED_SLACK else first


def _lighter_of_two(replica_ids: Sequence[str], loads: Mapping[str, float], random: Random) -> str:
    return min(random.sample(replica_ids, min(2, len(replica_ids))), key=loads.__getitem__)


class PrefixIndex:
    """An ingress's estimate of what each replica has cached: blocks of the texts it recently sent there.

    A block is identified by a hash of its tokens, the preceding blocks and the namespace, which is equal at every
    ingress. A hash collision, or a block that the replica has evicted, only costs a prefill, because the replica's
    cache compares token ids.

    Each replica has its own LRU set of blocks, as the replica itself does. The blocks of a text are inserted last block
    first, so a block is always newer than its successors. Eviction therefore removes blocks from the ends of texts, and
    the known blocks of a text are always a prefix of it.
    """

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks  # of each replica
        self._blocks: dict[str, OrderedDict[int, None]] = {}  # replica id -> blocks, least recently used first

    def hashes(self, namespace: str, token_ids: Sequence[int]) -> list[int]:
        """For each full block, a hash of all tokens up to its end: what identifies a text to the other methods."""
        size = self._block_size
        starts = range(0, len(token_ids) - size + 1, size)
        blocks = (tuple(token_ids[start : start + size]) for start in starts)
        salt = blake2b(namespace.encode(errors="surrogatepass"), digest_size=8).digest()  # Python's differs by process
        return list(accumulate(blocks, lambda before, block: hash((before, block)), initial=int.from_bytes(salt)))[1:]

    def record(self, replica_id: str, hashes: Sequence[int]) -> None:
        """Record that a replica has computed a text. O(tokens)."""
        blocks = self._blocks.setdefault(replica_id, OrderedDict())
        for block in reversed(hashes[: self._max_blocks]):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def cached(self, hashes: Sequence[int]) -> dict[str, int]:
        """Length of the prefix of a text that each replica has cached. O(replicas log tokens)."""
        return {
            replica_id: self._block_size * bisect_left(hashes, True, key=lambda block: block not in blocks)
            for replica_id, blocks in self._blocks.items()
        }

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Remove replicas that are gone."""
        self._blocks = {name: blocks for name, blocks in self._blocks.items() if name in replica_ids}
