"""Text: the characters of generated tokens, as they become certain, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import final


@final
class Text:
    """Bytes in, characters out: never half of one, and none that a stop string may still take back.

    Args:
        stops: Strings that end the text; none of them is empty.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._longest = max(map(len, self._stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = bytearray()
        self._num_shown = 0
        self.is_stopped = False

    def add(self, new: bytes) -> str:
        """Add the bytes of a token; return the characters that are certain now."""
        begin = max(0, len(self._bytes) - self._longest + 1)
        self._bytes += new
        found = [self._bytes.find(stop, begin) for stop in self._stops]
        ends = [position for position in found if position >= 0]
        if ends:
            self.is_stopped = True
            del self._bytes[min(ends) :]
            return self.end()
        return self._show(len(self._bytes) - self._num_held_back())

    def end(self) -> str:
        """Return what is left; half a character becomes U+FFFD."""
        return self._show(len(self._bytes)) + self._decoder.decode(b"", final=True)

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        sizes = range(min(self._longest - 1, len(self._bytes)), 0, -1)
        ends = (
            size
            for size in sizes
            if any(stop.startswith(self._bytes[-size:]) for stop in self._stops)
        )
        return next(ends, 0)

    def _show(self, end: int) -> str:
        # A stop string may begin within what is shown only if it has been ruled out already.
        end = max(end, self._num_shown)
        shown = self._decoder.decode(bytes(self._bytes[self._num_shown : end]))
        self._num_shown = end
        return shown
