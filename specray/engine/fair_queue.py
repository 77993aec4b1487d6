"""The order in which waiting requests start: first come, first served within a tenant; fair shares among tenants.

The tenant that was served the fewest tokens is next. A request's prompt is charged when it starts and its output as it
is generated, so unused `max_tokens` cost nothing. A tenant gains no credit while it has nothing waiting: when it queues
again, its count starts at that of the tenant whose turn it is. Use of an otherwise empty queue is not charged.

In addition, up to one token in AGE_SHARE is served out of turn, to the request that has waited longest. With any number
of tenants that always have requests waiting,
- each is served at least 1 - 1 / AGE_SHARE of an equal share (90 %), apart from the requests in flight, and
- a request starts before AGE_SHARE times as many tokens are served as it and all older requests may generate, whatever
  its tenant was served before.

The order affects when a text is generated, never the text.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain

from specray.engine.request import Request

AGE_SHARE = 10


class FairQueue:
    """Waiting requests, with a deque's methods. `popleft` is O(tenants), `remove` O(requests), the rest O(1)."""

    def __init__(self) -> None:
        self._returned: deque[Request] = deque()  # preempted: they go first and are not charged again
        self._queues: dict[str, deque[Request]] = {}  # by tenant, none empty
        self._served: dict[str, int] = {}  # tokens by tenant, for those waiting or above `_level`
        self._level = 0  # tokens served to the last tenant in turn; never decreases while requests wait
        self._total = 0  # tokens served; `_for_age` bounds those served out of turn
        self._for_age = 0
        self.num_waiting = 0  # a counter, so that other threads can read it during a step

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Preempted requests first, then tenant by tenant."""
        return chain(self._returned, *self._queues.values())

    def num_waiting_of(self, tenant: str) -> int:
        """New requests of one tenant. Like `len`, safe to call from another thread."""
        return len(self._queues.get(tenant, ()))

    def append(self, request: Request) -> None:
        """Queue a new request."""
        tenant = request.spec.tenant
        if not self:
            self._served.clear()
            self._level = self._total = self._for_age = 0
        if tenant not in self._queues:
            self._served[tenant] = max(self._level, self._served.get(tenant, 0))
            self._queues[tenant] = deque()
        self._queues[tenant].append(request)
        self.num_waiting += 1

    def appendleft(self, request: Request) -> None:
        """Return a request to the front of the queue."""
        self._returned.appendleft(request)
        self.num_waiting += 1

    def popleft(self) -> Request:
        """Remove and return the request that starts next."""
        self.num_waiting -= 1
        if self._returned:
            return self._returned.popleft()
        request = self._next()
        self._take(request)
        self.charge(request, request.num_prompt_tokens)
        return request

    def remove(self, request: Request) -> None:
        """Remove a request that will not start."""
        if request in self._returned:
            self._returned.remove(request)
        else:
            self._take(request)
        self.num_waiting -= 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge `num_tokens` to a request's tenant."""
        tenant = request.spec.tenant
        self._served[tenant] = self._served.get(tenant, self._level) + num_tokens
        self._total += num_tokens

    def _next(self) -> Request:
        heads = [queue[0] for queue in self._queues.values()]
        oldest = min(heads, key=lambda request: request.arrival)
        in_turn = min(heads, key=lambda request: (self._served[request.spec.tenant], request.arrival))
        if oldest is not in_turn and (self._for_age + oldest.max_length) * AGE_SHARE <= self._total:
            self._for_age += oldest.max_length
            return oldest
        self._level = max(self._level, self._served[in_turn.spec.tenant])
        self._served = {
            name: served for name, served in self._served.items() if served > self._level or name in self._queues
        }
        return in_turn

    def _take(self, request: Request) -> None:
        queue = self._queues[request.spec.tenant]
        queue.remove(request)  # the head, unless it is aborted
        if not queue:
            del self._queues[request.spec.tenant]
