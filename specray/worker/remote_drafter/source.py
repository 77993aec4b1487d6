"""The target's side of a drafter in another process.

A drafter connects when it is ready. A drafter that connects later replaces it between two steps, which is how drafters
are restarted and changed. If a drafter is late, gone, frozen or sends invalid data, the step runs without draft trees.
`cluster.engine.supervisor` starts the processes, and `server` runs in them.
"""

import contextlib
import logging
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from specray.channel import Channel, ChannelClosedError, spin_seconds
from specray.errors import ConfigError, EngineDeadError
from specray.ops.host_copy import HostCopy
from specray.spec_decode.draft_tree import NONE, DraftTree
from specray.spec_decode.drafter import DraftFaultError, DraftReport, EarlyStep, TreeRows, UnsizedTrees
from specray.spec_decode.pending_trees import PendingTrees
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.step import TOLERATED_FAULTS, DrafterUse, DraftFault, DraftLimit
from specray.worker.remote_drafter.device_ring import DeviceRing
from specray.worker.remote_drafter.device_trees import DeviceMemory
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
from specray.worker.remote_drafter.wire import DeltaEncoder, Order, TargetHandshake, pack, unpack_reply

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
        self._epoch = endpoint.epoch
        self._limits = limits
        self._table = table
        self._forget_trees()
        self._peer: _Peer | None = None
        self._numbers = count(1)  # of the orders of all drafters
        self._memory: DeviceMemory | None = None  # None: everything crosses the host's memory and the socket
        if endpoint.uses_cuda_ipc:
            self._memory = DeviceMemory(table.num_slots, limits.dtype, table.device)
        self._is_new = False
        self._faults: list[DraftFault] = []
        self._server = listen(endpoint.address)
        self._arrivals = select.poll()  # unlike `select.select`, for every descriptor
        self._arrivals.register(self._server, select.POLLIN)

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
    def waits_on_device(self) -> bool:
        return self._memory is not None

    @property
    def scores(self) -> list[list[float]]:
        return self._pending.scores

    @property
    def seconds(self) -> float:
        return self._peer.seconds if self._peer else 0.0

    def submit(self, context: ProposeContext) -> None:
        if (peer := self._peer) is not None and (peer.owes_outcome or context.requests or context.unfinished):
            with self._recorded_faults():
                # What came during a long step is read before the drafter counts as frozen.
                self._note_broken(peer.receive(self._pending))
                peer.submit(context)
            self._waiting.difference_update(each.slot for each in context.requests + context.unfinished)

    def draft_early(self, step: EarlyStep) -> DraftTree | None:
        # A step that does not begin early admits the drafter that waits.
        if (peer := self._peer) is None or self._arrivals.poll(0):
            return None
        with self._recorded_faults():
            self._note_broken(peer.receive(self._pending))
            return peer.draft_early(step)
        return None

    def take_unsized(self, slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]) -> UnsizedTrees | None:
        self._admit()
        if (peer := self._peer) is None or peer.trees is None:
            return None
        return self._take(peer, slots, roots, draft_limits)

    def take_next(
        self,
        tree: DraftTree,  # noqa: ARG002
        slots: Tensor,
        roots: Tensor,
        draft_limits: Sequence[DraftLimit],
    ) -> UnsizedTrees:
        return self._take(self._peer, slots, roots, draft_limits)

    def _take(
        self, peer: "_Peer | None", slots: Tensor, roots: Tensor, draft_limits: Sequence[DraftLimit]
    ) -> UnsizedTrees:
        """See `take_unsized`; without a drafter every tree is its root."""
        in_time = None
        if peer is not None:
            with self._recorded_faults():
                self._note_broken(peer.receive(self._pending))
                in_time = peer.await_trees(self._on_device, self._waiting)
        if self._waiting and any(limit.num_tokens for limit in draft_limits):
            taken = self._on_device.take(slots, roots, draft_limits)
        else:  # a plain step, which the next one may follow early
            self._on_device.drop(slots)
            taken = UnsizedTrees.roots(roots)
        return taken._replace(wait_for_sizes=partial(self._read, taken, peer, in_time))

    def collect(self, rows: TreeRows, draft_limits: Sequence[DraftLimit]) -> tuple[DraftTree, list[int]]:
        if (unsized := self.take_unsized(rows.slots, rows.roots, draft_limits)) is not None:
            return unsized.wait_for_sizes()
        if self._peer is not None:
            with self._recorded_faults():
                self._note_broken(self._peer.collect(self._pending))
        return self._pending.take(rows, draft_limits)

    def release(self, slots: Sequence[int]) -> None:
        self._pending.drop(slots)
        self._on_device.drop(slots)
        self._waiting.difference_update(slots)
        if self._peer is not None:
            self._peer.release(slots)

    def take_report(self) -> DraftReport:
        report = DraftReport(self._faults, self._peer.take_uses() if self._peer else (), self._is_new)
        self._faults, self._is_new = [], False
        return report

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
            parts = (connection, channel, handshake, self._limits, self._table, self._numbers, self._memory)
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

    def _read(self, taken: UnsizedTrees, peer: "_Peer | None", in_time: HostCopy | None) -> tuple[DraftTree, list[int]]:
        """Wait for the sizes of the trees, and record it if they came late."""
        tree, num_nodes = taken.wait_for_sizes()  # logits that are not finite are a fault of the reply
        if in_time is not None and peer is not None and peer is self._peer:
            with self._recorded_faults():
                is_late = not in_time.wait().tolist()[0]
                self._note_broken(peer.receive(self._pending))
                peer.is_late = is_late
                if is_late:
                    peer.report_late()
        return tree, num_nodes

    def _note_broken(self, is_broken: bool) -> None:
        """One of several drafters is broken."""
        if is_broken:
            self._faults.append(DraftFault.MEMBER_NOT_A_NUMBER)

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
            self._forget_trees()

    def _forget_trees(self) -> None:
        table = self._table
        self._pending = ReceivedTrees(table.device)
        self._waiting: set[int] = set()  # slots whose trees on the device may be newer than their last step
        self._on_device = PendingTrees(table.num_slots, table.vocab_size, table.device)


def _refuse(connection: socket.socket, channel: Channel, reason: str) -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(HANDSHAKE_S)
        connection.sendall(REFUSED)
        channel.send(reason.encode(), HANDSHAKE_S)
    channel.close()


@dataclass(slots=True)
class _Sent:
    """An order without a reply."""

    number: int
    region: int
    slots: list[int]
    time: float  # when the host had the outcome; infinity: it has not
    freed: set[int] = field(default_factory=set)  # slots whose requests have ended since then


class _Peer:
    """One connected drafter. Methods raise DraftFaultError or ChannelClosedError if it fails."""

    def __init__(
        self,
        connection: socket.socket,
        channel: Channel,
        handshake: DrafterHandshake,
        limits: RingLimits,
        table: RequestTable,
        numbers: Iterator[int],
        memory: DeviceMemory | None,
    ) -> None:
        """`numbers` are those of its orders."""
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
            shared = memory.ring(tokens, width) if memory is not None else None
            device_ring = b"" if shared is None else shared.export()
            self._ring: HiddenStateRing | DeviceRing = shared or HiddenStateRing(
                fd, tokens, width, limits.dtype, table.device
            )
            self.trees = memory.trees(1 + handshake.max_draft_tokens) if memory is not None else None
            device_trees = b"" if self.trees is None else self.trees.export()
        finally:
            os.close(fd)
        sizes = table.num_slots, table.max_tokens, table.page_size, table.vocab_size
        reply = TargetHandshake(
            self._ring.num_tokens, width, str(limits.dtype).removeprefix("torch."), *sizes, device_ring, device_trees
        )
        self._channel.send(pack(reply), SEND_S)
        self._spin_s = spin_seconds(table.device.type)
        self._encoder = DeltaEncoder()
        self._free = deque(range(NUM_REGIONS))
        self._unanswered: deque[_Sent] = deque()
        self._awaited: _Sent | None = None  # the order whose trees the device will wait for
        self._early: deque[_Sent] = deque()  # orders of steps whose outcome the drafter's host was not sent
        # Slots of requests that may have an early order, for steps with trees of so many nodes: see DraftReply.
        self._early_slots: set[int] = set()
        self._early_nodes = 0
        self._recent: deque[float] = deque(maxlen=32)  # seconds of the last replies
        self._numbers = numbers
        self.is_late = False  # the trees of the last order
        self._catches_up = False  # until it has replied to all orders

    @property
    def owes_outcome(self) -> bool:
        """Whether the next `submit` is about the step of an early order.

        After a step without one, none is sent before that step is submitted.
        """
        return bool(self._early)

    def draft_early(self, step: EarlyStep) -> DraftTree | None:
        """See `DraftSource.draft_early`."""
        slots, num_nodes = [request.slot for request in step.requests], step.outcome.shape[1] // 2 - 1
        can_read = self._early_slots.issuperset(slots) and self._encoder.is_current(self._table, slots)
        is_behind = self.is_late or len(self._free) < 2  # with the last region it would begin to catch up
        if not can_read or is_behind or num_nodes > self._early_nodes:
            return None
        assert self.trees is not None, "see `DraftReply.early_nodes`"
        sent = _Sent(next(self._numbers), self._free.popleft(), slots, math.inf)
        if step.gather_states is not None:
            self._ring.write(sent.region, step.gather_states())
        self.trees.put_outcome(sent.region, step.outcome)
        context = ProposeContext(self._table, step.requests)
        self._send(sent, self._encoder.order(sent.number, sent.region, context, num_nodes))
        self._early.append(sent)
        return self.trees.unread(sent.region, len(slots))

    def submit(self, context: ProposeContext) -> None:
        if self._early:
            sent = self._early.popleft()
            sent.time = time.monotonic()
            self._channel.send(pack(self._encoder.order(sent.number, NONE, context)), SEND_S)
            return
        self._awaited = None
        self._check_frozen()
        states, room = context.aux_hidden_states, self._ring.num_tokens
        # Too far behind, or paths that are longer than this drafter's; DraftRequest.start shows it what it has missed.
        if self._catches_up or (states is not None and len(states) > room):
            self._encoder.skip(context)
            self._early_slots.clear()
            return
        region = self._free.popleft()
        # A drafter that is slower than steps without drafts catches up only if it gets no orders meanwhile.
        self._catches_up = not self._free
        if states is not None:
            self._ring.write(region, states)
        order = self._encoder.order(next(self._numbers), region, context)
        if order.missed_kv_slots:
            self._early_slots.clear()
        if states is not None:
            self._ring.wait()
        self._send(_Sent(order.number, region, [request.slot for request in context.requests], time.monotonic()), order)

    def _send(self, sent: _Sent, order: Order) -> None:
        """Send an order for whose trees the device will wait."""
        self._awaited = sent
        self._unanswered.append(sent)
        self._channel.send(pack(order), SEND_S)

    def receive(self, pending: ReceivedTrees) -> bool:
        """Read the replies that have arrived; trees that are not on the device go to `pending`.

        Returns whether one of several drafters is broken.
        """
        is_broken = False
        with contextlib.suppress(TimeoutError):  # the rest of a reply is missing
            while self._unanswered and self._channel.poll(0.0):
                is_broken |= self._receive(self._channel.recv(0.0), pending)
        if not self._unanswered:
            self.is_late = self._catches_up = False
        return is_broken

    def collect(self, pending: ReceivedTrees) -> bool:
        """`receive`, which waits for the last order's trees, at most `_reply_timeout_s`."""
        is_broken = False
        while self._unanswered:
            try:
                data = self._channel.recv(self._timeout_s(self._unanswered[-1]), self._spin_s)
            except TimeoutError:
                self.is_late = True
                self.report_late()
            is_broken |= self._receive(data, pending)
        self.is_late = self._catches_up = False
        return is_broken

    def await_trees(self, pending: PendingTrees, waiting: set[int]) -> HostCopy | None:
        """Let the device wait for the last order's trees and put them into `pending`, and their slots into `waiting`.

        Returns whether they came in time, for `is_late`; None if there are none to wait for.
        """
        sent, self._awaited = self._awaited, None
        if sent is None or not sent.slots:
            return None
        assert self.trees is not None
        kept = [place for place, slot in enumerate(sent.slots) if slot not in sent.freed]
        # Copied before the device waits.
        places, slots = self._table.numbers(kept), self._table.numbers([sent.slots[place] for place in kept])
        tree, in_time = self.trees.get(sent.region, sent.number, len(sent.slots), self._timeout_s(sent))
        if kept:
            pending.put(slots, tree.select(places))
            waiting.update(sent.slots[place] for place in kept)
        return in_time

    def report_late(self) -> NoReturn:
        self._check_frozen()
        raise DraftFaultError(DraftFault.LATE)

    def release(self, slots: Sequence[int]) -> None:
        self._encoder.release(slots)
        self._early_slots.difference_update(slots)
        for sent in self._unanswered:
            sent.freed.update(slots)
        if self._awaited is not None:
            self._awaited.freed.update(slots)

    def take_uses(self) -> list[DrafterUse]:
        uses, self._uses = self._uses, []
        return uses

    def close(self) -> None:
        self._channel.close()
        if isinstance(self._ring, HiddenStateRing):  # a DeviceRing is the rank's
            self._ring.close()

    def _receive(self, data: bytes, pending: ReceivedTrees) -> bool:
        """See `receive`."""
        sent = self._unanswered.popleft()
        try:
            reply = unpack_reply(data)
            if reply.fault is not None:
                raise DraftFaultError(DraftFault(reply.fault))
            if reply.number != sent.number:
                raise ValueError(f"a reply to order {reply.number} instead of {sent.number}")
            num_trees = len(sent.slots) if self.trees is None else 0
            trees = reply.checked_trees(num_trees, self._table.vocab_size, self.handshake.max_draft_tokens)
        except ValueError:
            raise DraftFaultError(DraftFault.NONSENSE) from None
        self._free.append(sent.region)
        # 0 after an early order, because the drafter does not know how long its device has waited for the outcome. It
        # drafts no longer than after the shortest other order, which may have had prompts too.
        self.seconds = reply.seconds
        self._recent.append(reply.seconds or min(self._recent, default=0.0))
        self._uses += reply.uses
        if self.trees is None or not reply.early_nodes:
            self._early_slots.clear()
        elif not self._unanswered:
            self._early_slots = set(sent.slots) - sent.freed
            self._early_nodes = min(reply.early_nodes, 1 + self.handshake.max_draft_tokens)
        if self.trees is None and sent.slots and not self._unanswered:
            pending.put(sent.slots, trees)
            pending.drop(list(sent.freed))
        return reply.num_broken > 0

    def _timeout_s(self, sent: _Sent) -> float:
        """How long to wait for the trees of the last order.

        While replies to earlier orders are missing, the step does not wait; otherwise every step would time out. The
        last order is too recent to count as late.
        """
        is_behind = self.is_late and len(self._unanswered) > 1
        since_outcome = max(0.0, time.monotonic() - sent.time)
        return 0.0 if is_behind else max(0.0, self._reply_timeout_s() - since_outcome)

    def _reply_timeout_s(self) -> float:
        if not self._recent:
            return FIRST_WAIT_S
        return min(max(LEAST_WAIT_S, LATE_FACTOR * max(self._recent)), FROZEN_S)

    def _check_frozen(self) -> None:
        if self._unanswered and time.monotonic() - self._unanswered[0].time >= FROZEN_S:
            raise DraftFaultError(DraftFault.FROZEN)
