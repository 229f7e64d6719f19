"""Channel: messages between two processes, whose other end may stop at any moment."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, final

_LENGTH: Final = struct.Struct("!Q")
_CHUNK: Final = 1 << 20


@final
class Channel:
    """Whole messages over a socket. One thread sends and one receives.

    Args:
        sock: The socket, which whoever has made it closes.
        seconds: Seconds between two looks at whether there is a reason to wait on.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._socket = sock
        self._socket.settimeout(seconds)
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()

    def send(self, message: bytes, look: Callable[[], None]) -> None:
        """Send a message.

        What ``look`` raises ends the waiting; the rest of the message goes before the next one.

        Args:
            message: The message.
            look: Called every now and then while the other end takes nothing.

        Raises:
            OSError: If the other end has been closed.
        """
        self._unsent.append(memoryview(_LENGTH.pack(len(message)) + message))
        while self._unsent:
            view = self._unsent[0]
            try:
                self._unsent[0] = view[self._socket.send(view[:_CHUNK]) :]
            except TimeoutError:
                look()
            if not len(self._unsent[0]):
                self._unsent.popleft()

    def receive(self, look: Callable[[], None]) -> bytes:
        """Return the next message.

        What ``look`` raises ends the waiting; what has come of a message is kept.

        Args:
            look: Called every now and then while nothing comes.

        Raises:
            EOFError: If the other end has been closed.
            OSError: If this one has.
        """
        self._fill(_LENGTH.size, look)
        (length,) = _LENGTH.unpack_from(self._received)
        self._fill(_LENGTH.size + length, look)
        message = bytes(memoryview(self._received)[_LENGTH.size : _LENGTH.size + length])
        del self._received[: _LENGTH.size + length]
        return message

    def _fill(self, size: int, look: Callable[[], None]) -> None:
        while len(self._received) < size:
            try:
                part = self._socket.recv(_CHUNK)
            except TimeoutError:
                look()
                continue
            if not part:
                raise EOFError
            self._received += part

    @property
    def is_clear(self) -> bool:
        """Whether all messages have been sent whole."""
        return not self._unsent
