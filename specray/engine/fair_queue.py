"""The order in which waiting requests start: by priority and age within a tenant, by fair shares among tenants.

The tenant that was served the fewest tokens is next; a priority gains it nothing against others. A request's prompt is
charged when it starts and its output as it is generated, so unused `max_tokens` cost nothing. A tenant gains no credit
while it has nothing waiting: when it queues again, its count starts at that of the tenant whose turn it is. Use of an
otherwise empty queue is not charged.

In addition, up to one token in AGE_SHARE is served out of turn, to the request that has waited longest. With any number
of tenants that always have requests waiting,
- each is served at least 1 - 1 / AGE_SHARE of an equal share (90 %), apart from the requests in flight, and
- a request starts before AGE_SHARE times as many tokens are served as it and all older requests may generate, whatever
  its priority is and its tenant was served before.

The order affects when a text is generated, never the text.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain

from specray.engine.request import Request

AGE_SHARE = 10


Line = tuple[str, int]  # tenant and priority: the requests of a line start in the order of their arrival


class FairQueue:
    """Waiting requests, with a deque's methods. `popleft` is O(lines), `remove` O(requests), the rest O(1)."""

    def __init__(self) -> None:
        self._returned: deque[Request] = deque()  # preempted: they go first and are not charged again
        self._lines: dict[Line, deque[Request]] = {}  # none empty
        self._num_of: dict[str, int] = {}  # waiting requests by tenant, those returned not counted; none is 0
        self._served: dict[str, int] = {}  # tokens by tenant, for those waiting or above `_level`
        self._level = 0  # tokens served to the last tenant in turn; never decreases while requests wait
        self._total = 0  # tokens served; `_for_age` bounds those served out of turn
        self._for_age = 0
        # Counters, so that other threads can read them during a step.
        self.num_waiting = 0
        self.num_probes = 0  # of these, the server's own requests

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Preempted requests first, then line by line."""
        return chain(self._returned, *self._lines.values())

    def num_waiting_of(self, tenant: str) -> int:
        """New requests of one tenant. Like `len`, safe to call from another thread."""
        return self._num_of.get(tenant, 0)

    def append(self, request: Request) -> None:
        """Queue a new request."""
        tenant = request.spec.tenant
        if not self:
            self._served.clear()
            self._level = self._total = self._for_age = 0
        if tenant not in self._num_of:
            self._served[tenant] = max(self._level, self._served.get(tenant, 0))
        self._num_of[tenant] = self._num_of.get(tenant, 0) + 1
        self._lines.setdefault(_line_of(request), deque()).append(request)
        self._count(request, 1)

    def appendleft(self, request: Request) -> None:
        """Return a request to the front of the queue."""
        self._returned.appendleft(request)
        self._count(request, 1)

    def popleft(self) -> Request:
        """Remove and return the request that starts next."""
        is_returned = bool(self._returned)
        request = self._returned[0] if is_returned else self._next()
        self.remove(request)
        if not is_returned:
            self.charge(request, request.num_prompt_tokens)
        return request

    def remove(self, request: Request) -> None:
        """Remove a request."""
        if request in self._returned:
            self._returned.remove(request)
        else:
            self._take(request)
        self._count(request, -1)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge `num_tokens` to a request's tenant."""
        tenant = request.spec.tenant
        self._served[tenant] = self._served.get(tenant, self._level) + num_tokens
        self._total += num_tokens

    def _count(self, request: Request, change: int) -> None:
        self.num_waiting += change
        self.num_probes += change * request.spec.is_probe

    def _next(self) -> Request:
        heads = [line[0] for line in self._lines.values()]
        oldest = min(heads, key=lambda request: request.arrival)
        tenant = min(heads, key=lambda request: (self._served[request.spec.tenant], request.arrival)).spec.tenant
        own = [request for request in heads if request.spec.tenant == tenant]
        in_turn = min(own, key=lambda request: request.spec.priority)
        if oldest is not in_turn and (self._for_age + oldest.max_length) * AGE_SHARE <= self._total:
            self._for_age += oldest.max_length
            return oldest
        self._level = max(self._level, self._served[in_turn.spec.tenant])
        self._served = {
            name: served for name, served in self._served.items() if served > self._level or name in self._num_of
        }
        return in_turn

    def _take(self, request: Request) -> None:
        line, tenant = self._lines[_line_of(request)], request.spec.tenant
        line.remove(request)  # the head, unless it is aborted
        if not line:
            del self._lines[_line_of(request)]
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]


def _line_of(request: Request) -> Line:
    return request.spec.tenant, request.spec.priority
