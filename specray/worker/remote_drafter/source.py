"""The target's side of a drafter in another process.

A drafter connects when it is ready. A drafter that connects later replaces it between two steps, which is how drafters
are restarted and changed. If a drafter is late, gone, frozen or sends invalid data, the step runs without draft trees.
`cluster.engine.supervisor` starts the processes, and `server` runs in them.
"""

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.channel import Channel, ChannelClosedError, spin_seconds
from specray.errors import ConfigError, EngineDeadError
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import DraftFaultError, TreeRows, UnsizedTrees
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.step import TOLERATED_FAULTS, DrafterUse, DraftFault, DraftLimit
from specray.worker.remote_drafter.device_ring import DeviceRing
from specray.worker.remote_drafter.handshake import (
    ACCEPTED,
    NO_DRAFTER,
    REFUSED,
    DraftEndpoint,
    DrafterHandshake,
    accept,
    listen,
    unpack_handshake,
)
from specray.worker.remote_drafter.received_trees import ReceivedTrees
from specray.worker.remote_drafter.ring import NUM_REGIONS, HiddenStateRing, open_file
from specray.worker.remote_drafter.wire import DeltaEncoder, TargetHandshake, pack, unpack_reply

FROZEN_S = 3.0  # the drafter is dropped if an order has no reply for this long
LATE_FACTOR = 4.0  # a step waits this many times the longest of the recent replies' times,
LEAST_WAIT_S = 0.05  # but at least this long, because a process may have to wait for its core
FIRST_WAIT_S = 2.0  # for the first reply, which includes everything that is set up on first use
SEND_S = 1.0  # a drafter that reads no bytes for this long is gone
HANDSHAKE_S = 0.5
_ADMIT_POLL_S = 0.02

logger = logging.getLogger(__name__)


class RingLimits(NamedTuple):
    """Bounds on the contents of the ring."""

    num_layers: int
    hidden_size: int
    prompt_tokens: int  # most tokens of prompts in a step
    num_requests: int
    dtype: torch.dtype

    def step_tokens(self, max_draft_tokens: int) -> int:
        """Most tokens that a step commits with the trees of a drafter: a root and a path of drafts for each request."""
        return self.prompt_tokens + self.num_requests * (1 + max_draft_tokens)


class RemoteDrafts:
    """DraftSource for the drafter that is connected. Without one, every tree is its root."""

    reads_context = True

    def __init__(self, endpoint: DraftEndpoint, limits: RingLimits, table: RequestTable) -> None:
        self._epoch, self._uses_ipc = endpoint.epoch, endpoint.uses_cuda_ipc
        self._limits = limits
        self._table = table
        self._pending = ReceivedTrees(table.device)
        self._peer: _Peer | None = None
        self._rings: dict[tuple[int, int], DeviceRing] = {}
        self._is_new = False
        self._faults: list[DraftFault] = []
        self._server = listen(endpoint.address)

    @property
    def max_draft_tokens(self) -> int:
        return self._peer.handshake.max_draft_tokens if self._peer else 0

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return tuple(self._peer.handshake.aux_hidden_state_layers) if self._peer else ()

    @property
    def reads_next_token(self) -> bool:
        return self._peer is not None and self._peer.handshake.reads_next_token

    @property
    def scores(self) -> list[list[float]]:
        return self._pending.scores

    @property
    def seconds(self) -> float:
        return self._peer.seconds if self._peer else 0.0

    def submit(self, context: ProposeContext) -> None:
        if self._peer is not None and (context.requests or context.unfinished):
            with self._recorded_faults():
                self._peer.submit(context)

    def take_unsized(self, slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]) -> None:
        """Trees are taken as a whole."""

    def take_next(
        self,
        tree: DraftTree,  # noqa: ARG002
        slots: Tensor,  # noqa: ARG002
        roots: Tensor,  # noqa: ARG002
        draft_limits: Sequence[DraftLimit],  # noqa: ARG002
    ) -> UnsizedTrees:
        raise AssertionError("no graph of the target drafts")

    def collect(self, rows: TreeRows, draft_limits: Sequence[DraftLimit]) -> tuple[DraftTree, list[int]]:
        self._admit()
        if self._peer is not None:
            with self._recorded_faults():
                if self._peer.collect(self._pending):
                    self._faults.append(DraftFault.MEMBER_NOT_A_NUMBER)
        return self._pending.take(rows, draft_limits)

    def release(self, slots: Sequence[int]) -> None:
        self._pending.drop(slots)
        if self._peer is not None:
            self._peer.release(slots)

    def take_faults(self) -> list[DraftFault]:
        faults, self._faults = self._faults, []
        return faults

    def take_uses(self) -> Sequence[DrafterUse]:
        return self._peer.take_uses() if self._peer else ()

    def take_is_new(self) -> bool:
        is_new, self._is_new = self._is_new, False
        return is_new

    def close(self) -> None:
        self._server.close()
        self._drop()

    def await_drafter(self, timeout_s: float) -> None:
        """Wait for the first drafter. ConfigError if it is refused, EngineDeadError if none connects in time."""
        until = time.monotonic() + timeout_s
        while self._peer is None:
            if (reason := self._admit()) is not None:
                raise ConfigError(f"the target refused its drafter: {reason}")
            if time.monotonic() > until:
                raise EngineDeadError(f"no drafter has connected to the target within {timeout_s:g} s")
            time.sleep(_ADMIT_POLL_S)

    def _admit(self) -> str | None:
        """Accept a drafter that has connected, and dismiss the one before it. Returns why it is refused."""
        connection = accept(self._server)
        if connection is None:
            return None
        channel = Channel(connection, self._epoch)
        try:
            handshake = unpack_handshake(channel.recv(HANDSHAKE_S), self._limits.num_layers)
            parts = (connection, channel, handshake, self._limits, self._table, self._device_ring)
            peer = None if handshake == NO_DRAFTER else _Peer(*parts)
        except (OSError, ValueError, RuntimeError) as error:  # a closed channel and a timeout are OSErrors
            logger.warning("refused a drafter: %s", error)
            _refuse(connection, channel, str(error))
            self._faults.append(DraftFault.NO_HANDSHAKE)
            return str(error)
        self._drop()
        self._peer, self._is_new = peer, peer is not None and bool(peer.handshake.aux_hidden_state_layers)
        if peer is None:
            channel.close()
        return None

    def _device_ring(self, tokens: int, width: int) -> DeviceRing | None:
        """The ring in this GPU's memory for regions of [tokens, width]; None if hidden states cross the host's memory.

        It lasts as long as this rank: memory that a process has opened and not let go of, because it was killed, is
        never freed.
        """
        if not (self._uses_ipc and width and self._table.device.type == "cuda"):
            return None
        if (tokens, width) not in self._rings:
            self._rings[tokens, width] = DeviceRing.make(tokens, width, self._limits.dtype, self._table.device)
        return self._rings[tokens, width]

    @contextlib.contextmanager
    def _recorded_faults(self) -> Iterator[None]:
        try:
            yield
        except ChannelClosedError:
            self._record_fault(DraftFault.GONE)
        except DraftFaultError as fault:
            self._record_fault(fault.kind)

    def _record_fault(self, kind: DraftFault) -> None:
        self._faults.append(kind)
        if kind not in TOLERATED_FAULTS:
            logger.warning("dropped the drafter (%s); decoding continues without drafts until one connects", kind)
            self._drop()

    def _drop(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None
            self._pending = ReceivedTrees(self._table.device)


def _refuse(connection: socket.socket, channel: Channel, reason: str) -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(HANDSHAKE_S)
        connection.sendall(REFUSED)
        channel.send(reason.encode(), HANDSHAKE_S)
    channel.close()


class _Sent(NamedTuple):
    """An order without a reply."""

    number: int
    region: int
    slots: list[int]
    freed: set[int]  # slots whose requests have ended since then
    time: float


class _Peer:
    """One connected drafter. Methods raise DraftFaultError or ChannelClosedError if it fails."""

    def __init__(
        self,
        connection: socket.socket,
        channel: Channel,
        handshake: DrafterHandshake,
        limits: RingLimits,
        table: RequestTable,
        device_ring_of: Callable[[int, int], DeviceRing | None],
    ) -> None:
        self._table = table
        self._channel = channel
        self.handshake = handshake
        self.seconds = 0.0
        self._uses: list[DrafterUse] = []
        tokens, width = limits.step_tokens(handshake.max_draft_tokens), len(handshake.aux_hidden_state_layers)
        width *= limits.hidden_size
        fd = open_file(tokens, width, limits.dtype)
        try:
            socket.send_fds(connection, [ACCEPTED], [fd])
            shared = device_ring_of(tokens, width)
            device_ring = b"" if shared is None else shared.export()
            self._ring: HiddenStateRing | DeviceRing = shared or HiddenStateRing(
                fd, tokens, width, limits.dtype, table.device
            )
        finally:
            os.close(fd)
        sizes = table.num_slots, table.max_tokens, table.page_size, table.vocab_size
        reply = TargetHandshake(tokens, width, str(limits.dtype).removeprefix("torch."), *sizes, device_ring)
        self._channel.send(pack(reply), SEND_S)
        self._spin_s = spin_seconds(table.device.type)
        self._encoder = DeltaEncoder()
        self._free = deque(range(NUM_REGIONS))
        self._unanswered: deque[_Sent] = deque()
        self._recent: deque[float] = deque(maxlen=32)  # seconds of the last replies
        self._number = 0
        self._is_late = False

    def submit(self, context: ProposeContext) -> None:
        self._check_frozen()
        states, room = context.aux_hidden_states, self._ring.num_tokens
        # Too far behind, or paths that are longer than this drafter's; DraftRequest.start shows it what it has missed.
        if not self._free or (states is not None and len(states) > room):
            self._encoder.skip(context)
            return
        region = self._free.popleft()
        if states is not None:
            self._ring.write(region, states)
        self._number += 1
        order = self._encoder.order(self._number, region, context)
        slots = [request.slot for request in context.requests]
        data = pack(order)
        if states is not None:
            self._ring.wait()
        self._unanswered.append(_Sent(self._number, region, slots, set(), time.monotonic()))
        self._channel.send(data, SEND_S)

    def collect(self, pending: ReceivedTrees) -> bool:
        """Put the last order's trees into `pending` once they arrive, waiting at most `_reply_timeout_s`.

        Returns whether one of several drafters is broken.
        """
        is_broken = False
        while self._unanswered:
            # While replies to earlier orders are missing, the step does not wait; otherwise every step would time out.
            # The last order is too recent to count as late.
            is_behind = self._is_late and len(self._unanswered) > 1
            until = 0.0 if is_behind else self._unanswered[-1].time + self._reply_timeout_s()
            try:
                data = self._channel.recv(until - time.monotonic(), self._spin_s)
            except TimeoutError:
                self._check_frozen()
                self._is_late = True
                raise DraftFaultError(DraftFault.LATE) from None
            is_broken |= self._receive(data, pending)
        self._is_late = False
        return is_broken

    def release(self, slots: Sequence[int]) -> None:
        self._encoder.release(slots)
        for sent in self._unanswered:
            sent.freed.update(slots)

    def take_uses(self) -> list[DrafterUse]:
        uses, self._uses = self._uses, []
        return uses

    def close(self) -> None:
        self._channel.close()
        if isinstance(self._ring, HiddenStateRing):  # a DeviceRing is the rank's
            self._ring.close()

    def _receive(self, data: bytes, pending: ReceivedTrees) -> bool:
        """See `collect`."""
        sent = self._unanswered.popleft()
        try:
            reply = unpack_reply(data)
            if reply.fault is not None:
                raise DraftFaultError(DraftFault(reply.fault))
            if reply.number != sent.number:
                raise ValueError(f"a reply to order {reply.number} instead of {sent.number}")
            trees = reply.checked_trees(len(sent.slots), self._table.vocab_size, self.handshake.max_draft_tokens)
        except ValueError:
            raise DraftFaultError(DraftFault.NONSENSE) from None
        self._free.append(sent.region)
        self._recent.append(reply.seconds)
        self.seconds = reply.seconds
        self._uses += reply.uses
        if sent.slots and not self._unanswered:
            pending.put(sent.slots, trees)
            pending.drop(list(sent.freed))
        return reply.num_broken > 0

    def _reply_timeout_s(self) -> float:
        if not self._recent:
            return FIRST_WAIT_S
        return min(max(LEAST_WAIT_S, LATE_FACTOR * max(self._recent)), FROZEN_S)

    def _check_frozen(self) -> None:
        if self._unanswered and time.monotonic() - self._unanswered[0].time >= FROZEN_S:
            raise DraftFaultError(DraftFault.FROZEN)
