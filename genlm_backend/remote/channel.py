"""Channel and SharedRows: messages between two processes, and memory that both processes map."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Self, final

import numpy as np

_LENGTH: Final = struct.Struct("!Q")
_CHUNK: Final = 1 << 20
_BYTES_PER_NUMBER: Final = 4
MAX_SHARED_BYTES: Final = 64 << 20
"""Most bytes of rows that are transferred at once, unless a single row is larger."""


@final
class Channel:
    """Sends and receives messages over a socket whose peer may stop at any moment."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._socket = sock
        self._socket.settimeout(seconds)
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()

    def send(self, message: bytes, look: Callable[[], None]) -> None:
        """Send a message; if ``look`` (called on timeouts) raises, the next call sends the rest."""
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
        """Return the next message; if ``look`` (called on timeouts) raises, no byte is lost."""
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
        return not self._unsent


@final
class SharedRows:
    """A float32 table that two processes map, so that rows need no pickling."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = None
        self._finalizer = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def new(cls) -> Self:
        """Return an empty table, whose file descriptor a child process can inherit."""
        if sys.platform == "linux":
            return cls(os.memfd_create("genlm-rows"))
        with tempfile.TemporaryFile() as file:  # an unnamed file lasts while a descriptor is open
            return cls(os.dup(file.fileno()))

    @staticmethod
    def max_rows(width: int) -> int:
        """Return the largest number of rows of this width that are transferred at once."""
        return max(1, MAX_SHARED_BYTES // (_BYTES_PER_NUMBER * max(1, width)))

    def table(self, num_rows: int, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the memory as float32 ``[num_rows, width]``, grown if necessary."""
        count = num_rows * width
        size = max(mmap.PAGESIZE, count * _BYTES_PER_NUMBER)
        if self._memory is None or len(self._memory) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self._memory = mmap.mmap(self.descriptor, size)
        return np.frombuffer(self._memory, np.float32, count).reshape(num_rows, width)

    def close(self) -> None:
        self._memory = None
        self._finalizer()
