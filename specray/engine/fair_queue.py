"""Whose turn it is to start: requests that wait, first come first served within a tenant, tenants by tokens served.

The tenant that was served the fewest tokens starts next. A request's prompt is charged when it starts and its output
as it is generated: nobody pays for what was asked for and not used, and a long prompt never delays itself. A tenant
whose requests do not wait saves nothing up: when they wait again, they start level with the tenant whose turn it is.
What was used while nobody waited was taken from nobody and is forgotten.

Age counts besides: up to one token in AGE_SHARE is served out of turn, to the request that has waited longest. So, with
any number of tenants that always have requests waiting,
- each is served at least 1 - 1 / AGE_SHARE of an equal share (90 %), give or take the requests in flight, and
- a request starts before AGE_SHARE times the tokens have been served that it and all older requests may fill, whatever
  its tenant was served before.
How long that takes is up to the server's speed: these are shares and orders, not seconds.

Not here: slots, KV blocks and budgets (`scheduler`). The order changes when a text is written, never the text.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain

from specray.engine.request import Request

AGE_SHARE = 10


class FairQueue:
    """Waiting requests; the names are a deque's. `popleft` is O(tenants that wait), the rest O(1) but `remove`."""

    def __init__(self) -> None:
        self._returned: deque[Request] = deque()  # were started before: they go first and are not charged again
        self._lines: dict[str, deque[Request]] = {}  # by tenant, none empty
        self._served: dict[str, int] = {}  # tokens by tenant, of all that wait and those ahead of `_level`
        self._level = 0  # what the tenant whose turn came last had been served; never falls while requests wait
        self._total = 0  # tokens served, of these `_for_age` to requests out of turn: at most what those may fill
        self._for_age = 0
        self._num_waiting = 0  # counted, so that another thread may ask for it in the middle of a step

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Those put back first, then tenant by tenant."""
        return chain(self._returned, *self._lines.values())

    def num_waiting_of(self, tenant: str) -> int:
        """New requests of one tenant. As `len`, another thread may ask for it."""
        return len(self._lines.get(tenant, ()))

    def append(self, request: Request) -> None:
        """Queue a new request."""
        tenant = request.spec.tenant
        if not self:
            self._served.clear()
            self._level = self._total = self._for_age = 0
        if tenant not in self._lines:
            self._served[tenant] = max(self._level, self._served.get(tenant, 0))
            self._lines[tenant] = deque()
        self._lines[tenant].append(request)
        self._num_waiting += 1

    def appendleft(self, request: Request) -> None:
        """Put a request back that was taken out: it is the next one."""
        self._returned.appendleft(request)
        self._num_waiting += 1

    def popleft(self) -> Request:
        """Take out the request that starts next."""
        self._num_waiting -= 1
        if self._returned:
            return self._returned.popleft()
        request = self._next()
        self._take(request)
        self.charge(request, request.num_prompt_tokens)
        return request

    def remove(self, request: Request) -> None:
        """Take out a request that will not start."""
        if request in self._returned:
            self._returned.remove(request)
        else:
            self._take(request)
        self._num_waiting -= 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Note that a request's tenant was served `num_tokens`."""
        tenant = request.spec.tenant
        self._served[tenant] = self._served.get(tenant, self._level) + num_tokens
        self._total += num_tokens

    def _next(self) -> Request:
        heads = [line[0] for line in self._lines.values()]
        oldest = min(heads, key=lambda request: request.arrival)
        in_turn = min(heads, key=lambda request: (self._served[request.spec.tenant], request.arrival))
        if oldest is not in_turn and (self._for_age + oldest.max_length) * AGE_SHARE <= self._total:
            self._for_age += oldest.max_length
            return oldest
        self._level = max(self._level, self._served[in_turn.spec.tenant])
        self._served = {
            name: served for name, served in self._served.items() if served > self._level or name in self._lines
        }
        return in_turn

    def _take(self, request: Request) -> None:
        line = self._lines[request.spec.tenant]
        line.remove(request)  # its head, but for an abort
        if not line:
            del self._lines[request.spec.tenant]
