"""Context: token ids that grow by one at a cost that does not depend on how many there are."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, final, overload

from genlm_backend.errors import PictureError
from genlm_backend.model.beginnings import TOKENS_PER_BLOCK
from genlm_backend.prefix import NOWHERE, Place

if TYPE_CHECKING:
    from genlm_backend.model.contexts import Contexts
    from genlm_backend.vision.pictures import Pictures

_ID = struct.Struct("i")
_BLOCK: Final = TOKENS_PER_BLOCK * _ID.size


@final
class Context(Sequence[int]):
    """An immutable sequence of a model's token ids, made by ``lm.context(token_ids)``.

    It goes wherever token ids go, and costs less than a list: its ids are checked once, when it is
    made, and ``context + [token]`` or ``context.extend(token)`` makes a longer one at a cost that
    does not depend on its length, however many are made of one context and on whatever threads.
    Asking it costs as little: where the keys and values of the context that it extends are cached
    is remembered.

    It iterates, indexes and slices as a tuple does (a slice is a ``Context``), equals any other
    ``Context`` with the same ids, and nothing else, and can be the key of a dictionary. Unpickled,
    it belongs to no model: whichever it is asked of checks its ids.

    One that begins with pictures (``lm.context(prompt, images=[…])``) shows the id that stands for
    a part of a picture wherever there is one. Two are equal if their pictures are too.

    Attributes:
        blocks: Its ids as 32-bit integers, block by block; parts of pictures have negative ones
            (see ``Pictures``).
        tail: Those after the last full block.
        contexts: What has checked its ids; contexts of one model have the same.
        place: Where the evaluator of the model has found it, or what it extends, for evaluators to
            write and read; ``NOWHERE`` where it has not. No part of its value.
        pictures: The pictures that it begins with, or ``None``.
    """

    # Full blocks of packed ids, and the ids after them. What extends a context shares its blocks;
    # the hash of each is Python's to keep, and two contexts that share one compare it at once.
    __slots__ = ("blocks", "contexts", "pictures", "place", "tail")

    __array_ufunc__ = None  # an array + a context is a longer context, and no sum

    blocks: tuple[bytes, ...]
    tail: bytes
    contexts: Contexts
    place: Place
    pictures: Pictures | None

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Refuse; see the class."""
        raise TypeError("a Context is made by lm.context(token_ids)")

    @classmethod
    def of(
        cls,
        contexts: Contexts,
        packed: bytes,
        blocks: tuple[bytes, ...] = (),
        place: Place = NOWHERE,
        pictures: Pictures | None = None,
    ) -> Self:
        """Return the context of full blocks and of packed ids after them, which are not checked."""
        if len(packed) >= _BLOCK:
            stop = len(packed) - len(packed) % _BLOCK
            starts = range(0, stop, _BLOCK)
            blocks += tuple([packed[start : start + _BLOCK] for start in starts])
            packed = packed[stop:]
        context = object.__new__(cls)
        context.blocks, context.tail = blocks, packed
        context.contexts, context.place, context.pictures = contexts, place, pictures
        return context

    def extend(self, token_id: int) -> Context:
        """Return the context with one more token.

        Raises:
            ContextTypeError: (``TypeError``) If it is no integer.
            ContextError: (``ValueError``) If it is outside the vocabulary.
        """
        contexts = self.contexts
        if type(token_id) is not int or not 0 <= token_id < contexts.vocab_size:
            token_id = contexts.check_id(token_id)
        tail = self.tail + _ID.pack(token_id)
        return Context.of(contexts, tail, self.blocks, self.place, self.pictures)

    def __add__(self, token_ids: Any) -> Context:
        """Return the context with more tokens, which are checked; it may be none."""
        if type(token_ids) is list and len(token_ids) == 1:
            return self.extend(token_ids[0])
        return self.followed_by(self.contexts.packed(token_ids))

    def __radd__(self, token_ids: Any) -> Context:
        """Return the context behind more tokens, which are checked.

        Raises:
            PictureError: (``ValueError``) If it begins with pictures.
        """
        if self.pictures is not None:
            raise PictureError("nothing can be put before the pictures that a context begins with")
        return self.contexts.of(token_ids).followed_by(self.packed().tobytes())

    def followed_by(self, packed: bytes) -> Context:
        """Return the context with more ids, as 32-bit integers that have been checked."""
        tail = self.tail + packed
        return Context.of(self.contexts, tail, self.blocks, self.place, self.pictures)

    # ---------------------------------------------------------------- a sequence

    def __len__(self) -> int:
        return len(self.blocks) * TOKENS_PER_BLOCK + len(self.tail) // _ID.size

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Context: ...

    def __getitem__(self, index: int | slice) -> int | Context:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1 and start == 0:
                return self._first(stop)
            packed = self.packed()[index]
            if self.pictures is not None and len(packed) and min(packed) < 0:
                raise PictureError("a slice that holds pictures begins with the first token")
            return Context.of(self.contexts, packed.tobytes())
        try:
            position = range(len(self))[index]
        except IndexError:
            raise IndexError(f"index {index} of a context of {len(self)} tokens") from None
        except TypeError:
            message = f"a context's indices must be integers or slices, got {index!r}"
            raise TypeError(message) from None
        block, rest = divmod(position, TOKENS_PER_BLOCK)
        packed = self.blocks[block] if block < len(self.blocks) else self.tail
        token_id: int = _ID.unpack_from(packed, rest * _ID.size)[0]
        return token_id if self.pictures is None or token_id >= 0 else self.pictures.image_token_id

    def _first(self, count: int) -> Context:
        blocks, tail = self.beginning(count)
        # Its place would be a part of this one's, which nobody needs to know: it is found soon.
        first = Context.of(self.contexts, tail, blocks, pictures=self.pictures)
        if self.pictures is not None and count < self.pictures.num_tokens:
            if len(first) and min(first.packed()) < 0:
                raise PictureError(
                    f"the first {count} tokens hold a part of the pictures that the context begins "
                    f"with, which are its first {self.pictures.num_tokens}"
                )
            first.pictures = None
        return first

    def __iter__(self) -> Iterator[int]:
        packed = self.packed()
        return iter(packed if self.pictures is None else self.pictures.shown(packed))

    @property
    def last_packed(self) -> bytes:
        """The last id as a 32-bit integer."""
        return self.tail[-_ID.size :] or self.blocks[-1][-_ID.size :]

    def packed(self, start: int = 0, stop: int | None = None) -> array[int]:
        """Return the ids from ``start`` to ``stop``, neither negative, as 32-bit integers.

        Parts of pictures have ids of their own, which are negative.
        """
        num_blocks = len(self.blocks)
        first = min(start // TOKENS_PER_BLOCK, num_blocks)
        kept = self.tail if first == num_blocks else b"".join((*self.blocks[first:], self.tail))
        skipped, found = first * TOKENS_PER_BLOCK, array("i")
        end = None if stop is None else (max(start, stop) - skipped) * _ID.size
        found.frombytes(kept[(start - skipped) * _ID.size : end])
        return found

    # ---------------------------------------------------------------- a value

    @property
    def key(self) -> tuple[tuple[bytes, ...], bytes]:
        """Its blocks and tail: a value that is hashed and compared without a look at each id."""
        return self.blocks, self.tail

    def beginning(self, count: int) -> tuple[tuple[bytes, ...], bytes]:
        """Return the ``key`` of the first ``count`` tokens, not more than there are."""
        block, rest = divmod(count, TOKENS_PER_BLOCK)
        packed = self.blocks[block] if block < len(self.blocks) else self.tail
        return self.blocks[:block], packed[: rest * _ID.size]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Context):
            return NotImplemented
        return self.tail == other.tail and self.blocks == other.blocks

    def __hash__(self) -> int:
        return hash(self.key)

    def __copy__(self) -> Context:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        return self

    def __reduce__(self) -> tuple[Any, tuple[bytes, Pictures | None]]:
        from genlm_backend.model.contexts import unpickled

        return unpickled, (b"".join((*self.blocks, self.tail)), self.pictures)

    def __repr__(self) -> str:
        size = len(self)
        if size <= 8:
            return f"Context({list(self)})"
        begins = "" if self.pictures is None else ", beginning with pictures"
        return f"Context([{self[0]}, … {self[-1]}], {size} ids{begins})"
