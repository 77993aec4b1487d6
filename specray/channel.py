"""Frames between two processes of an engine over a connected socket: length, epoch, bytes.

An epoch names one life of the target group; frames of another one are dropped, so a late reply can never
be taken for the current step's. What the bytes mean is `specray.step`'s business; nothing here unpickles.
"""

import socket
import struct

_HEADER = struct.Struct(">IQ")  # payload length, epoch
_CHUNK = 1 << 18


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of a connection; used from one thread."""

    def __init__(self, connection: socket.socket, epoch: int) -> None:
        self._socket = connection
        self._epoch = epoch
        self._buffer = bytearray()

    def send(self, payload: bytes, timeout: float | None = None) -> None:
        """Raises ChannelClosedError if the other end is gone, or has not taken the frame in `timeout` seconds."""
        self._socket.settimeout(timeout)
        try:
            self._socket.sendall(_HEADER.pack(len(payload), self._epoch) + payload)
        except OSError as error:
            raise ChannelClosedError(f"cannot send: {error}") from error

    def recv(self, timeout: float | None = None) -> bytes:
        """The next frame of our epoch.

        Raises TimeoutError after `timeout` seconds of silence (what has arrived of a frame is kept), and
        ChannelClosedError if the other end is gone.
        """
        self._socket.settimeout(timeout)
        while True:
            epoch, payload = self._frame()
            if epoch == self._epoch:
                return payload

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
