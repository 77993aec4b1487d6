"""Which engines an ingress has streams to, where there are many. `policy` decides which of them gets a request."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from specray.server.routing.policy import in_order_of

INGRESSES_PER_ENGINE = 2  # at least, so that no engine idles while one of them restarts
WIDEN_AFTER_S = 0.5  # seconds without an engine that takes requests, after which `Breadth` doubles
NARROW_AFTER_S = 30.0  # seconds since its last change, after which it halves


class IngressPlace(NamedTuple):
    """The rank of an ingress replica, and the number of replicas."""

    rank: int = 0
    num_ingresses: int = 1


def engines_of(place: IngressPlace, engine_ids: Sequence[str], usual: int, breadth: int = 1) -> set[str]:
    """The engines that an ingress has streams to; all of them if they are at most `usual`.

    Each engine is given to the ingresses that come first in its order of them. So every engine has some, and nothing
    changes for others when one starts or ends. All ingresses together have max(`usual` x ingresses,
    INGRESSES_PER_ENGINE x engines) streams, or somewhat fewer, times `breadth`, up to all engines for each.
    """
    rank, num_ingresses = place.rank, max(place.num_ingresses, place.rank + 1)
    num_each = max(INGRESSES_PER_ENGINE, usual * num_ingresses // max(1, len(engine_ids))) * breadth
    if num_each >= num_ingresses:
        return set(engine_ids)
    return {engine_id for engine_id in engine_ids if rank in _ingresses_in_order(engine_id, num_ingresses)[:num_each]}


@lru_cache(maxsize=4096)  # an ingress looks every second, and whenever an engine starts or ends
def _ingresses_in_order(engine_id: str, num_ingresses: int) -> list[int]:
    return [int(rank) for rank in in_order_of(engine_id, map(str, range(num_ingresses)))]


class Breadth:
    """How many times its own engines an ingress uses: more while none of them takes requests. `now` is in seconds."""

    def __init__(self, now: float) -> None:
        self.value = 1
        self._since = self._free_at = now

    def update(self, now: float, *, is_free: bool, has_all: bool) -> None:
        """`is_free`: a connected engine takes requests; `has_all`: the ingress uses every engine."""
        if is_free or has_all:
            self._free_at = now
        if now - self._free_at > WIDEN_AFTER_S:
            self.value *= 2
            self._since = self._free_at = now
        elif self.value > 1 and now - self._since > NARROW_AFTER_S:
            self.value //= 2
            self._since = now
