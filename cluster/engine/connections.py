"""The router's open streams, one per ingress replica: who asked for what, and who is still there.

Everything runs in the router's event loop. Not here: the engine (`router`), the other end (`client`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from cluster.messages import Item, RouterHeartbeat, RouterInfo
from specray.outputs import RequestOutput


class Connection:
    """One ingress replica's stream and the requests that are in flight for it.

    `items` needs no bound: it grows by an item a step, and an ingress that takes none of them does not renew either, so
    that its lease ends it. What a slow client leaves unread waits in the ingress and Serve's proxy, which do not push
    back: at most its whole reply, which max_tokens and the deadline bound.
    """

    def __init__(self, now: float) -> None:
        self.last_seen = now
        self.request_ids: set[str] = set()
        self.items: asyncio.Queue[Item | Exception] = asyncio.Queue()


class Connections:
    """All streams by connection id. `abort` ends the requests of those that went away."""

    def __init__(self, abort: Callable[[list[str]], None], clock: Callable[[], float]) -> None:
        self._abort = abort
        self._clock = clock
        self._by_id: dict[str, Connection] = {}
        self._owner: dict[str, Connection] = {}  # request id -> whose it is

    def __contains__(self, connection_id: str) -> bool:
        return connection_id in self._by_id

    @property
    def num_requests(self) -> int:
        return len(self._owner)

    async def stream(self, connection_id: str, info: RouterInfo) -> AsyncIterator[Item]:
        """`info`, then one item per step with news for this connection. Ends with an exception."""
        connection = self._by_id[connection_id] = Connection(self._clock())
        try:
            yield info
            while True:
                item = await connection.items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._drop(connection_id)

    def add(self, connection_id: str, request_ids: Iterable[str]) -> None:
        """Expect news of requests; call before they are submitted."""
        connection = self._by_id[connection_id]
        for request_id in request_ids:
            connection.request_ids.add(request_id)
            self._owner[request_id] = connection

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if connection := self._owner.pop(request_id, None):
                connection.request_ids.discard(request_id)

    def deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand a step's outputs out, all of a connection's as one item."""
        batches: dict[Connection, list[RequestOutput]] = {}
        for output in outputs:
            if connection := self._owner.get(output.request_id):
                batches.setdefault(connection, []).append(output)
        for connection, batch in batches.items():
            connection.items.put_nowait(batch)
        self.remove(output.request_id for output in outputs if output.finish_reason is not None)

    def send(self, news: RouterHeartbeat | RouterInfo) -> None:
        """Tell every ingress."""
        for connection in self._by_id.values():
            if isinstance(news, RouterHeartbeat):
                news = news._replace(num_others=self.num_requests - len(connection.request_ids))
            connection.items.put_nowait(news)

    def renew(self, connection_id: str) -> bool:
        """Note that an ingress lives; False if its connection is unknown."""
        connection = self._by_id.get(connection_id)
        if connection is not None:
            connection.last_seen = self._clock()
        return connection is not None

    def expire(self, lease_s: float) -> None:
        """Drop the connections not heard of for `lease_s`. Ray does not end a stream whose reader died."""
        now = self._clock()
        for connection_id, connection in list(self._by_id.items()):
            if now - connection.last_seen > lease_s:
                connection.items.put_nowait(TimeoutError("the connection's lease ran out"))
                self._drop(connection_id)

    def fail(self, error: Exception) -> None:
        """End every stream with `error`."""
        for connection in self._by_id.values():
            connection.items.put_nowait(error)

    def _drop(self, connection_id: str) -> None:
        connection = self._by_id.pop(connection_id, None)
        if connection is not None and connection.request_ids:
            orphans = list(connection.request_ids)
            self.remove(orphans)
            self._abort(orphans)
