"""The target's side of a drafter in a process of its own: orders out, trees in, and no harm from whatever it does.

A drafter connects when it is ready; one that connects later takes its place between two steps, which is how drafters
are restarted and replaced: features of other layers, larger trees, all that is new begins with its hello. Whatever is
wrong with it, late, gone, frozen or lying, costs the step its trees. Processes are started by
`cluster.engine.draft`. Not here:
what the drafter does (`draft_worker`), who may come in (`endpoint`).
"""

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from specray.channel import Channel, ChannelClosedError
from specray.spec_decode.draft_tree import DraftTree, RowTree
from specray.spec_decode.drafter import DraftFaultError, ProposeContext, cut_tree
from specray.step import DraftFault, DraftLimit
from specray.worker.remote_drafter.handshake import (
    NOBODY,
    DraftEndpoint,
    DrafterHandshake,
    answer,
    listen,
    unpack_handshake,
)
from specray.worker.remote_drafter.ring import NUM_REGIONS, HiddenStateRing, open_file
from specray.worker.remote_drafter.wire import DeltaEncoder, TargetHandshake, pack, unpack_reply

FROZEN_S = 3.0  # an order unanswered for so long: the drafter is given up
LATE_FACTOR = 4.0  # a step waits so many times the longest of the last answers' times …
LEAST_WAIT_S = 0.05  # … but so long at least: a process may have to wait for its core
FIRST_WAIT_S = 2.0  # for the first answer, which pays for everything that is set up on first use
SEND_S = 1.0  # a drafter that takes no bytes for so long is gone
HANDSHAKE_S = 0.5
_POLL_S = 1e-4

logger = logging.getLogger(__name__)


class RingLimits(NamedTuple):
    """What the target knows of what will go through the ring."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    step_tokens: int  # most tokens that a step computes for good
    dtype: torch.dtype


class RemoteDrafts:
    """DraftSource for whoever knocks. Without a drafter, or with a bad one, every tree is a root."""

    def __init__(self, endpoint: DraftEndpoint, limits: RingLimits) -> None:
        self._epoch = endpoint.epoch
        self._limits = limits
        self._peer: _Peer | None = None
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
    def seconds(self) -> float:
        return self._peer.seconds if self._peer else 0.0

    def submit(self, context: ProposeContext) -> None:
        if self._peer is not None and (context.rows or context.unfinished):
            with self._peer_on_probation():
                self._peer.submit(context)

    def collect(self, roots: Sequence[tuple[int, int]], limits: Sequence[DraftLimit]) -> DraftTree:
        self._admit()
        trees: dict[int, RowTree] = {}
        if self._peer is not None and roots:
            with self._peer_on_probation():
                trees = self._peer.collect()
        rows = zip(roots, limits, strict=True)
        return DraftTree.of([cut_tree(trees.get(slot), root, limit) for (slot, root), limit in rows])

    def release(self, slots: Sequence[int]) -> None:
        if self._peer is not None:
            self._peer.release(slots)

    def take_faults(self) -> list[DraftFault]:
        faults, self._faults = self._faults, []
        return faults

    def close(self) -> None:
        self._server.close()
        self._drop()

    def _admit(self) -> None:
        """Take in a drafter that has connected; the one before it is dismissed."""
        connection = answer(self._server)
        if connection is None:
            return
        channel = Channel(connection, self._epoch)
        try:
            handshake = unpack_handshake(channel.recv(HANDSHAKE_S), self._limits.num_layers)
            peer = None if handshake == NOBODY else _Peer(connection, channel, handshake, self._limits)
        except (OSError, ValueError):  # a closed channel and a timeout are OSErrors
            channel.close()
            self._faults.append(DraftFault.NO_HANDSHAKE)
            return
        self._drop()
        self._peer = peer
        if peer is None:
            channel.close()

    @contextlib.contextmanager
    def _peer_on_probation(self) -> Iterator[None]:
        try:
            yield
        except ChannelClosedError:
            self._note(DraftFault.GONE)
        except DraftFaultError as fault:
            self._note(fault.kind)

    def _note(self, kind: DraftFault) -> None:
        self._faults.append(kind)
        if kind != DraftFault.LATE:
            logger.warning("the drafter is given up (%s); decoding goes on plainly until another one connects", kind)
            self._drop()

    def _drop(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None


class _Sent(NamedTuple):
    """An order that is not answered yet."""

    number: int
    region: int
    slots: list[int]
    freed: set[int]  # slots whose requests have ended since
    time: float


class _Peer:
    """One drafter, from its welcome to its end. Raises DraftFaultError or ChannelClosedError for all it does wrong."""

    def __init__(
        self, connection: socket.socket, channel: Channel, handshake: DrafterHandshake, limits: RingLimits
    ) -> None:
        self._limits = limits
        self._channel = channel
        self.handshake = handshake
        self.seconds = 0.0
        tokens, width = limits.step_tokens, len(self.handshake.aux_hidden_state_layers) * limits.hidden_size
        fd = open_file(tokens, width, limits.dtype)
        try:
            socket.send_fds(connection, [b"f"], [fd])
            self._ring = HiddenStateRing(fd, tokens, width, limits.dtype)
        finally:
            os.close(fd)
        self._channel.send(pack(TargetHandshake(tokens, width, str(limits.dtype).removeprefix("torch."))), SEND_S)
        self._encoder = DeltaEncoder()
        self._free = deque(range(NUM_REGIONS))
        self._unanswered: deque[_Sent] = deque()
        self._recent: deque[float] = deque(maxlen=32)  # seconds of the last answers
        self._number = 0
        self._is_late = False

    def submit(self, context: ProposeContext) -> None:
        self._check_frozen()
        if not self._free:  # too far behind: it will find out what it was not told (DraftRow.start)
            return
        region = self._free.popleft()
        if context.aux_hidden_states is not None:
            self._ring.regions[region][: len(context.aux_hidden_states)].copy_(context.aux_hidden_states)
        self._number += 1
        order = self._encoder.order(self._number, region, context)
        slots = [row.slot for row in context.rows]
        self._unanswered.append(_Sent(self._number, region, slots, set(), time.monotonic()))
        self._channel.send(pack(order), SEND_S)

    def collect(self) -> dict[int, RowTree]:
        """Trees of the last order by slot, as soon as they come, but no later than patience allows."""
        trees: dict[int, RowTree] = {}
        while self._unanswered:
            # Once late it is waited for no more, until it has answered what came before: or every step would wait in
            # vain. The last order is not old enough to hold against it.
            is_behind = self._is_late and len(self._unanswered) > 1
            until = 0.0 if is_behind else self._unanswered[-1].time + self._patience()
            try:
                reply = self._channel.recv(max(until - time.monotonic(), _POLL_S))
            except TimeoutError:
                self._check_frozen()
                self._is_late = True
                raise DraftFaultError(DraftFault.LATE) from None
            trees = self._enter(reply)
        self._is_late = False
        return trees

    def release(self, slots: Sequence[int]) -> None:
        self._encoder.release(slots)
        for sent in self._unanswered:
            sent.freed.update(slots)

    def close(self) -> None:
        self._channel.close()

    def _enter(self, data: bytes) -> dict[int, RowTree]:
        try:
            reply = unpack_reply(data, self._limits.vocab_size, self.handshake.max_draft_tokens)
        except ValueError:
            raise DraftFaultError(DraftFault.NONSENSE) from None
        sent = self._unanswered.popleft()
        if reply.fault is not None:
            raise DraftFaultError(reply.fault)
        if reply.number != sent.number or len(reply.trees) != len(sent.slots):
            raise DraftFaultError(DraftFault.NONSENSE)
        self._free.append(sent.region)
        self._recent.append(reply.seconds)
        self.seconds = reply.seconds
        trees = zip(sent.slots, reply.trees, strict=True)
        return {slot: tree for slot, tree in trees if slot not in sent.freed}

    def _patience(self) -> float:
        if not self._recent:
            return FIRST_WAIT_S
        return min(max(LEAST_WAIT_S, LATE_FACTOR * max(self._recent)), FROZEN_S)

    def _check_frozen(self) -> None:
        if self._unanswered and time.monotonic() - self._unanswered[0].time >= FROZEN_S:
            raise DraftFaultError(DraftFault.FROZEN)
