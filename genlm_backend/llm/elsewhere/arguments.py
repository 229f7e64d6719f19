"""Arguments: what a verb is given, pickled such that pictures cross once.

Both ends know which pictures have crossed last, by the same rule: of those whose bytes are more
than ``MAX_BYTES`` together, the ones named longest ago are forgotten, but for the last one.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Final, Generic, TypeVar, final

from genlm_backend.errors import EngineDiedError
from genlm_backend.llm.pictures import Pictures

T = TypeVar("T")

MAX_BYTES: Final = 1 << 30
"""Bytes of pictures that are remembered, about."""


@final
class _Recent(Generic[T]):
    """Values by key, the one that was named last at the end."""

    def __init__(self, known: dict[bytes, tuple[int, T]] | None = None) -> None:
        self.known = {} if known is None else dict(known)
        self.total = sum(size for size, _ in self.known.values())

    def name(self, key: bytes, size: int, value: T) -> T:
        """Note that a value has been named."""
        self.total += size - self.known.pop(key, (0, None))[0]
        self.known[key] = size, value
        while self.total > MAX_BYTES and len(self.known) > 1:
            self.total -= self.known.pop(next(iter(self.known)))[0]
        return value


@final
class Sender:
    """Packs the arguments of one process's or actor's verbs, in their order."""

    def __init__(self) -> None:
        self._recent: _Recent[None] = _Recent()

    def packed(self, arguments: tuple[Any, ...]) -> bytes:
        """Return arguments as bytes.

        Raises:
            Exception: What an object's own way of pickling raises; nothing has been sent then.
        """
        recent = _Recent(self._recent.known)
        buffer = io.BytesIO()
        _Pickler(buffer, recent).dump(arguments)
        self._recent = recent
        return buffer.getvalue()


@final
class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, recent: _Recent[None]) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._recent = recent

    def persistent_id(self, obj: Any) -> Any:
        """Return what stands for pictures: their key, and where they are new, all of them."""
        if type(obj) is not Pictures:
            return None
        is_known, size = obj.key in self._recent.known, obj.num_bytes
        self._recent.name(obj.key, size, None)
        whole = None if is_known else pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        return obj.key, size, whole


@final
class Receiver:
    """Unpacks what a ``Sender`` has packed, in the same order."""

    def __init__(self) -> None:
        self._recent: _Recent[Pictures] = _Recent()

    def arguments(self, packed: bytes) -> tuple[Any, ...]:
        """Return the arguments."""
        return _Unpickler(io.BytesIO(packed), self._recent).load()


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, recent: _Recent[Pictures]) -> None:
        super().__init__(buffer)
        self._recent = recent

    def persistent_load(self, pid: Any) -> Any:
        """Return the pictures that something stands for."""
        key, size, whole = pid
        if whole is None and key not in self._recent.known:
            raise EngineDiedError("the model has lost the pictures that it was sent: restart it")
        pictures = self._recent.known[key][1] if whole is None else pickle.loads(whole)
        return self._recent.name(key, size, pictures)
