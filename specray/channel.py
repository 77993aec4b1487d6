"""Framed messages between two processes of an engine over a socket: length, epoch, payload.

An epoch identifies one start of the target's ranks. Frames of another epoch are dropped, so that a late reply is never
read as a reply to the current step. Payloads are opaque here.
"""

import select
import socket
import struct
import time

from specray.cores import num_cores

_HEADER = struct.Struct(">IQ")  # payload length, epoch
_CHUNK = 1 << 18
_LEAST_TIMEOUT_S = 1e-6  # with 0.0 a socket does not block, and has other errors
_POLLED_UNIT_S = 1e-3  # the system call rounds its timeout up to a multiple of it

_SPIN_S = 2e-3  # about a step
_MANY_CORES = 8  # two of them may be busy with waiting


def spin_seconds(device_type: str) -> float:
    """How long both ends of a drafter's channel poll before they sleep. On a CPU the other end needs the cores."""
    return _SPIN_S if device_type == "cuda" and num_cores() >= _MANY_CORES else 0.0


class ChannelClosedError(ConnectionError):
    """The other end has closed the connection."""


class Channel:
    """One end of a connection; used from one thread."""

    def __init__(self, connection: socket.socket, epoch: int) -> None:
        self._socket = connection
        self._epoch = epoch
        self._buffer = bytearray()
        self._arrivals = select.poll()  # unlike `select.select`, for every descriptor
        self._arrivals.register(connection, select.POLLIN)

    def send(self, payload: bytes, timeout: float | None = None) -> None:
        """ChannelClosedError if the connection is closed or the frame is not sent within `timeout` seconds."""
        self._socket.settimeout(timeout)
        try:
            self._socket.sendall(_HEADER.pack(len(payload), self._epoch) + payload)
        except OSError as error:
            raise ChannelClosedError(f"cannot send: {error}") from error

    def recv(self, timeout: float | None = None, spin_s: float = 0.0) -> bytes:
        """The payload of the next frame of this epoch.

        Raises ChannelClosedError if the connection is closed, and TimeoutError if nothing arrives for `timeout`
        seconds (0 or less: does not wait); a partial frame is kept for the next call. Before it sleeps it polls for
        `spin_s` seconds, because a process that sleeps is late by tens of microseconds.
        """
        if spin_s:
            start = time.monotonic()
            until = start + (spin_s if timeout is None else min(spin_s, timeout))
            while not self.poll(0.0) and time.monotonic() < until:
                pass
            timeout = None if timeout is None else timeout - (time.monotonic() - start)
        self._socket.settimeout(None if timeout is None else max(_LEAST_TIMEOUT_S, timeout))
        while True:
            epoch, payload = self._frame()
            if epoch == self._epoch:
                return payload

    def poll(self, timeout: float | None) -> bool:
        """Whether a frame has begun to arrive, or the connection was closed, within `timeout` seconds."""
        if self._buffer:
            return True
        if self._socket.fileno() < 0:
            raise ChannelClosedError("cannot poll: this end is closed")
        if timeout is not None and 0 < timeout < _POLLED_UNIT_S and not self._arrivals.poll(0):
            time.sleep(timeout)
            timeout = 0.0
        return bool(self._arrivals.poll(None if timeout is None else 1e3 * timeout))

    def close(self) -> None:
        self._socket.close()

    def _frame(self) -> tuple[int, bytes]:
        self._fill(_HEADER.size)
        length, epoch = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + length
        self._fill(end)
        payload = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return epoch, payload

    def _fill(self, num_bytes: int) -> None:
        while len(self._buffer) < num_bytes:
            try:
                data = self._socket.recv(_CHUNK)
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosedError(f"cannot receive: {error}") from error
            if not data:
                raise ChannelClosedError("the other end closed the connection")
            self._buffer += data
