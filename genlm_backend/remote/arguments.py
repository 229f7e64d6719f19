"""Pickles the arguments of an evaluator's methods such that contexts and pictures cross once.

The sender numbers them, and the receiver keeps them until it is told to drop one; a context crosses
as the number of one that it extends and the tokens after it. An *epoch* has each number once; after
an unknown number, everything is sent again in a new epoch.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final, final

from genlm_backend.multimodal.pictures import Pictures
from genlm_backend.queries.context import Context, unpickled
from genlm_backend.remote.messages import Reply, UnknownIds

MAX_CONTEXT_BYTES: Final = 1 << 28
"""Bytes of contexts that the receiver keeps, counted without sharing."""
# A particle takes two, one of which extends the other: room for 1,000 particles after 32,000
# tokens. Their contexts share blocks, and take 4 MB.
MAX_PICTURE_BYTES: Final = 1 << 30
"""Bytes of pictures that the receiver keeps, about."""

_MOST_NEW: Final = 32
"""Tokens after a known context, at most; with more, computing costs more than sending."""
_OVERHEAD: Final = 512
"""Bytes of a context without its ids, at both ends."""
_NOTHING: Final = -1


@final
class _Kept:
    """Numbers of objects that the receiver keeps, the least recently used first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._total = max_bytes, 0
        self._numbers: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()

    def find(self, key: Hashable) -> int | None:
        found = self._numbers.get(key)
        if found is None:
            return None
        self._numbers.move_to_end(key)
        return found[0]

    def add(self, key: Hashable, number: int, size: int) -> list[int]:
        """Give a number to a new object; return the numbers that are dropped for it."""
        self._numbers[key] = number, size
        self._total += size
        dropped: list[int] = []
        while self._total > self._max_bytes and len(self._numbers) > 1:
            _, (old, its_size) = self._numbers.popitem(last=False)
            self._total -= its_size
            dropped.append(old)
        return dropped


@final
class ArgumentEncoder:
    """Packs arguments for one process or actor; they must be sent, in this order, or forgotten."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin an epoch, in which the receiver knows nothing."""
        self._epoch = os.urandom(8)
        self._next, self._num_pictures = 0, 0
        # By their ids, whichever object, list or model a context is of.
        self._contexts, self._pictures = _Kept(MAX_CONTEXT_BYTES), _Kept(MAX_PICTURE_BYTES)
        self._begin()

    def _begin(self) -> None:
        self._first = self._next
        self._bases, self._counts, self._dropped = array("q"), array("q"), array("q")
        self._tokens: list[bytes] = []
        self._new_pictures: dict[int, bytes] = {}

    def asked(self, method: str, arguments: tuple[Any, ...], do: Callable[[bytes], Reply]) -> Reply:
        """Return the reply to a call, sent again in a new epoch if a number is unknown there."""
        if method == "clear":
            self.forget()
        reply = do(self.packed(arguments))
        if isinstance(reply.value, UnknownIds):
            self.forget()
            reply = do(self.packed(arguments))
        return reply

    def packed(self, arguments: tuple[Any, ...]) -> bytes:
        self._begin()
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self).dump(arguments)
        except BaseException:  # what has got a number is not going to be sent
            self.forget()
            raise
        message = (
            self._epoch,
            self._first,
            self._bases.tobytes(),
            self._counts.tobytes(),
            b"".join(self._tokens),
            self._new_pictures,
            self._dropped.tobytes(),
            buffer.getvalue(),
        )
        self._begin()
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

    def context(self, context: Context) -> int:
        """Return the number of a context's ids, which are sent if it has none yet."""
        key = context.key
        number = self._contexts.find(key)
        if number is None:
            base, length = self._extended(context)
            number, size = self._next, len(context)
            self._next += 1
            self._bases.append(base)
            self._counts.append(size - length)
            self._tokens.append(context.packed(length).tobytes())
            self._dropped.extend(self._contexts.add(key, number, 4 * size + _OVERHEAD))
        return number

    def _extended(self, context: Context) -> tuple[int, int]:
        """Return number and length of the longest known context that one extends by few tokens."""
        size = len(context)
        for length in range(size - 1, max(0, size - 1 - _MOST_NEW), -1):
            number = self._contexts.find(context.beginning(length))
            if number is not None:
                return number, length
        return _NOTHING, 0

    def pictures(self, pictures: Pictures) -> int:
        number = self._pictures.find(pictures.key)
        if number is None:
            self._num_pictures += 1
            number = _NOTHING - self._num_pictures  # as no context has
            self._new_pictures[number] = pickle.dumps(pictures, pickle.HIGHEST_PROTOCOL)
            self._dropped.extend(self._pictures.add(pictures.key, number, pictures.num_bytes))
        return number


@final
class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, sender: ArgumentEncoder) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._sender = sender

    def persistent_id(self, obj: Any) -> Any:
        """Return the number of a context or of pictures, or a context's with its pictures."""
        if type(obj) is Context:
            number = self._sender.context(obj)
            return number if obj.pictures is None else (number, obj.pictures)
        return self._sender.pictures(obj) if type(obj) is Pictures else None


@final
class ArgumentDecoder:
    """Unpacks the arguments of one ``ArgumentEncoder`` after another, in the order of packing."""

    def __init__(self) -> None:
        self._epoch = b""
        # Contexts are kept without pictures: these have a budget of their own.
        self._known: dict[int, Context | Pictures] = {}

    def arguments(self, packed: bytes) -> tuple[Any, ...] | None:
        """Return the arguments; ``None`` if they have a number that is unknown here."""
        epoch, first, bases, counts, tokens, pictures, dropped, arguments = pickle.loads(packed)
        if epoch != self._epoch:
            self._epoch, self._known = epoch, {}
        try:
            self._learn(first, array("q", bases), array("q", counts), tokens)
            for number, own in pictures.items():
                self._known[number] = pickle.loads(own)
            return _Unpickler(io.BytesIO(arguments), self._known).load()
        except _UnknownNumberError:
            return None
        finally:
            for number in array("q", dropped):
                self._known.pop(number, None)

    def _learn(self, first: int, bases: array[int], counts: array[int], tokens: bytes) -> None:
        """Keep each new context as an extension of a known one, whose blocks it shares."""
        known, start = self._known, 0
        for number, base, count in zip(itertools.count(first), bases, counts):
            stop = start + 4 * count
            extended = _EMPTY if base == _NOTHING else known.get(base)
            if not isinstance(extended, Context):
                raise _UnknownNumberError
            known[number] = extended.followed_by(tokens[start:stop])
            start = stop


class _UnknownNumberError(Exception):
    """A number of no object that is kept."""


_EMPTY: Final = unpickled(b"")


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, known: dict[int, Context | Pictures]) -> None:
        super().__init__(buffer)
        self._known = known

    def persistent_load(self, pid: Any) -> Any:
        number, pictures = (pid, None) if type(pid) is int else pid
        found = self._known.get(number)
        if found is None:
            raise _UnknownNumberError
        if pictures is None:
            return found
        assert isinstance(found, Context)
        blocks, tail = found.key
        return Context.of(found.contexts, tail, blocks, pictures=pictures)
