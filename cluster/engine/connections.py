"""The router's output streams, one per ingress replica.

All methods run in the router's event loop. The ingress's side lives in `specray.server.routing.client`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

from specray.errors import EngineDeadError
from specray.heartbeat import LocalHeartbeat, SilenceWatch
from specray.outputs import RequestOutput
from specray.server.routing.messages import ConnectionEnd, Item, RouterHeartbeat, RouterInfo


class Connection:
    """One ingress replica's stream and its unfinished requests.

    `items` needs no bound. It grows by one item per step, and an ingress that does not read also does not renew its
    lease, so its connection expires. Output that a slow client has not read yet is buffered by the ingress and Serve's
    proxy, without backpressure. It is at most the client's whole reply, which max_tokens and the request's timeout
    bound.
    """

    def __init__(self, poll_interval_s: float, clock: Callable[[], float]) -> None:
        self.lease = LocalHeartbeat(clock)
        self.lease.beat()
        self.silence = SilenceWatch(self.lease, poll_interval_s, clock)
        self.request_ids: set[str] = set()
        self.items: asyncio.Queue[Item] = asyncio.Queue()
        self._clock = clock
        self._heartbeat: RouterHeartbeat | None = None  # as the ingress assumes it since `_heartbeat_at`
        self._heartbeat_at = 0.0
        self._has_skipped = False

    def send_heartbeat(self, heartbeat: RouterHeartbeat) -> None:
        """Send what has changed since the last one; a message without changes is a sign of life, too.

        Without changes and requests, every second one is left out: reading them is most of what an idle ingress does.
        """
        now = self._clock()
        if self._heartbeat is None:
            self.items.put_nowait(heartbeat)
            self._heartbeat = heartbeat
        else:
            assumed = self._heartbeat.later(now - self._heartbeat_at)
            changes = heartbeat.changes_since(assumed)
            self._has_skipped = not (changes or self.request_ids or self._has_skipped)
            if self._has_skipped:
                return
            self.items.put_nowait(changes)
            self._heartbeat = assumed._replace(**changes)
        self._heartbeat_at = now


class Connections:
    """All connections by ID. `abort` ends the requests of closed connections.

    `expire` is called every `poll_interval_s` seconds. Renewals wait while this process stalls, which must not end
    leases.
    """

    def __init__(
        self, abort: Callable[[list[str]], None], poll_interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._abort = abort
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self._by_id: dict[str, Connection] = {}
        self._owner: dict[str, Connection] = {}  # by request ID

    def __contains__(self, connection_id: str) -> bool:
        return connection_id in self._by_id

    @property
    def num_requests(self) -> int:
        return len(self._owner)

    async def stream(self, connection_id: str, info: RouterInfo) -> AsyncIterator[Item]:
        """Open a connection. Yields `info`, then heartbeats and one item per step with outputs for the connection.

        Ends only by raising EngineDeadError, after the ConnectionEnd that `fail` or an expired lease has caused.
        """
        connection = self._by_id[connection_id] = Connection(self._poll_interval_s, self._clock)
        try:
            yield info
            while True:
                item = await connection.items.get()
                yield item
                if isinstance(item, ConnectionEnd):
                    raise EngineDeadError(item.reason)
        finally:
            self._close(connection_id)

    def add(self, connection_id: str, request_ids: Iterable[str]) -> None:
        """Deliver the outputs of these requests to a connection. Call it before they are submitted."""
        connection = self._by_id[connection_id]
        for request_id in request_ids:
            connection.request_ids.add(request_id)
            self._owner[request_id] = connection

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if connection := self._owner.pop(request_id, None):
                connection.request_ids.discard(request_id)

    def deliver(self, outputs: list[RequestOutput]) -> None:
        """Send a step's outputs, as one item per connection."""
        batches: dict[Connection, list[RequestOutput]] = {}
        for output in outputs:
            if connection := self._owner.get(output.request_id):
                batches.setdefault(connection, []).append(output)
        for connection, batch in batches.items():
            connection.items.put_nowait(batch)
        self.remove(output.request_id for output in outputs if output.finish_reason is not None)

    def send_info(self, info: RouterInfo) -> None:
        """Send changed information to every ingress."""
        for connection in self._by_id.values():
            connection.items.put_nowait(info)

    def send_heartbeat(self, heartbeat: RouterHeartbeat) -> None:
        """Send a heartbeat to every ingress, to each with its own `num_others`."""
        for connection in self._by_id.values():
            num_others = self.num_requests - len(connection.request_ids)
            connection.send_heartbeat(heartbeat._replace(num_others=num_others))

    def renew(self, connection_id: str) -> bool:
        """Renew a connection's lease. False if there is no such connection."""
        connection = self._by_id.get(connection_id)
        if connection is not None:
            connection.lease.beat()
        return connection is not None

    def expire(self, lease_s: float) -> None:
        """Close connections not renewed for `lease_s` seconds. Ray does not end a stream whose reader died."""
        for connection_id, connection in list(self._by_id.items()):
            if connection.silence.poll() > lease_s:
                connection.items.put_nowait(ConnectionEnd("the connection's lease expired", []))
                self._close(connection_id)

    def fail(self, end: ConnectionEnd) -> None:
        """End every connection."""
        for connection in self._by_id.values():
            ids = end.request_ids and [each for each in end.request_ids if each in connection.request_ids]
            connection.items.put_nowait(end._replace(request_ids=ids))

    def _close(self, connection_id: str) -> None:
        connection = self._by_id.pop(connection_id, None)
        if connection is not None and connection.request_ids:
            request_ids = list(connection.request_ids)
            self.remove(request_ids)
            self._abort(request_ids)
