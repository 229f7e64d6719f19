"""Pickles the arguments of an evaluator's methods, without pictures that were sent before."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, final

from genlm_backend.multimodal.pictures import Pictures
from genlm_backend.remote.messages import Reply, UnknownPictures

MAX_PICTURE_BYTES: Final = 1 << 30
"""Most bytes of ``Pictures`` that the receiver keeps; it always keeps the object used last."""


@final
class ArgumentEncoder:
    """Pickles arguments for one receiver: a process or an actor."""

    def __init__(self) -> None:
        self._sent = set[bytes]()  # keys of the pictures that the receiver may have

    def ask(self, method: str, arguments: tuple[Any, ...], do: Callable[[bytes], Reply]) -> Reply:
        """Return ``do``'s reply; call ``do`` again with all pictures if the receiver lacks some."""
        if method == "clear":
            self._sent.clear()
        reply = do(self.packed(arguments))
        if isinstance(reply.value, UnknownPictures):
            self._sent.clear()
            reply = do(self.packed(arguments))
        return reply

    def packed(self, arguments: tuple[Any, ...]) -> bytes:
        buffer = io.BytesIO()
        # Contexts share blocks of ids; pickle writes a shared object once.
        _Pickler(buffer, self._sent).dump(arguments)
        return buffer.getvalue()


@final
class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, sent: set[bytes]) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._sent = sent

    def persistent_id(self, obj: Any) -> tuple[bytes, bytes | None] | None:
        """Return key and pickle of ``Pictures``, no pickle if it was sent; ``None`` for others."""
        if type(obj) is not Pictures:
            return None
        if obj.key in self._sent:
            return obj.key, None
        self._sent.add(obj.key)
        return obj.key, pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)


@final
class ArgumentDecoder:
    """Unpickles arguments, and keeps their pictures for later messages."""

    def __init__(self) -> None:
        self._pictures: OrderedDict[bytes, Pictures] = OrderedDict()  # least recently used first

    def arguments(self, packed: bytes) -> tuple[Any, ...] | None:
        """Return the arguments; ``None`` if they refer to pictures that are not kept."""
        try:
            return _Unpickler(io.BytesIO(packed), self._pictures).load()
        except _UnknownPicturesError:
            return None
        finally:
            excess = sum(own.num_bytes for own in self._pictures.values()) - MAX_PICTURE_BYTES
            while excess > 0 and len(self._pictures) > 1:
                excess -= self._pictures.popitem(last=False)[1].num_bytes


class _UnknownPicturesError(Exception):
    """A message refers to pictures that are not kept."""


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, pictures: OrderedDict[bytes, Pictures]) -> None:
        super().__init__(buffer)
        self._pictures = pictures

    def persistent_load(self, pid: Any) -> Pictures:
        key, packed = pid
        if packed is not None:
            self._pictures[key] = pickle.loads(packed)
        elif key not in self._pictures:
            raise _UnknownPicturesError
        self._pictures.move_to_end(key)
        return self._pictures[key]
