"""Context: an immutable sequence of token ids; appending an id copies at most 511 others."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self, final, overload

import numpy as np

from genlm_backend.checks import MAX_VOCAB, integer, listed, shown
from genlm_backend.errors import ContextError, ContextTypeError, OptionTypeError, PictureError
from genlm_backend.multimodal.pictures import Pictures
from genlm_backend.prefix.nodes import NO_HINT, CacheHint


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences of the same type."""
    # A bisection over slices takes linear time without a Python loop over elements. ``==`` of two
    # slices has to return one bool, so NumPy arrays do not work.
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


TOKENS_PER_BLOCK: Final = 512
"""Number of token ids that are packed into one bytes object."""

_ID = struct.Struct("i")
_BLOCK: Final = TOKENS_PER_BLOCK * _ID.size


@final
class Context(Sequence[int]):
    """An immutable sequence of a model's token ids, made by ``lm.context(token_ids)``.

    Methods that take token ids accept it, at a lower cost than a list: its ids are checked once,
    when it is made. ``context + [token]`` or ``context.extend(token)`` makes a longer context and
    copies at most 511 ids; any number of threads may extend one context. The longer context
    remembers where the shorter one is cached, so that a query looks up only the new tokens.

    It iterates, indexes and slices like a tuple; a slice is a ``Context``. It is hashable, and
    equals only another ``Context`` with the same ids. An unpickled context belongs to no model; the
    model that receives it checks its ids.

    A context that begins with pictures (``lm.context(prompt, images=[…])``) shows the same
    placeholder id for each part of a picture. Two such contexts differ if their pictures differ.

    Attributes:
        blocks: The full blocks of 512 ids, packed as 32-bit integers; the ids of picture parts are
            negative (see ``Pictures``).
        tail: The packed ids after the last full block.
        contexts: The factory of its model; contexts of no model share one factory.
        cache_hint: The prefix-tree node of a cached prefix; ``NO_HINT`` if none is known. An
            evaluator sets it with its answer; a context that extends another one begins with the
            other's hint. Equality ignores it.
        pictures: The pictures that it begins with, or ``None``.
    """

    # A context shares the full blocks of the one that it extends. Python caches the hash of each
    # block, and compares two shared blocks by identity.
    __slots__ = ("blocks", "cache_hint", "contexts", "pictures", "tail")

    __array_ufunc__ = None  # so that NumPy leaves ``array + context`` to ``__radd__``

    blocks: tuple[bytes, ...]
    tail: bytes
    contexts: ContextFactory
    cache_hint: CacheHint
    pictures: Pictures | None

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError("a Context cannot be constructed directly: use lm.context(token_ids)")

    @classmethod
    def of(
        cls,
        contexts: ContextFactory,
        packed: bytes,
        blocks: tuple[bytes, ...] = (),
        cache_hint: CacheHint = NO_HINT,
        pictures: Pictures | None = None,
    ) -> Self:
        """Make a context from full blocks and the packed ids after them, without checks."""
        if len(packed) >= _BLOCK:
            stop = len(packed) - len(packed) % _BLOCK
            starts = range(0, stop, _BLOCK)
            blocks += tuple([packed[start : start + _BLOCK] for start in starts])
            packed = packed[stop:]
        context = object.__new__(cls)
        context.blocks, context.tail = blocks, packed
        context.contexts, context.cache_hint, context.pictures = contexts, cache_hint, pictures
        return context

    def extend(self, token_id: int) -> Context:
        """Return a new context with one token appended.

        Raises:
            ContextTypeError: (``TypeError``) If ``token_id`` is not an integer.
            ContextError: (``ValueError``) If it is outside the vocabulary.
        """
        contexts = self.contexts
        if type(token_id) is not int or not 0 <= token_id < contexts.vocab_size:
            token_id = contexts.check_id(token_id)
        tail = self.tail + _ID.pack(token_id)
        return Context.of(contexts, tail, self.blocks, self.cache_hint, self.pictures)

    def __add__(self, token_ids: Any) -> Context:
        """Return a new context with token ids appended, after checking them."""
        if type(token_ids) is list and len(token_ids) == 1:
            return self.extend(token_ids[0])
        return self.followed_by(self.contexts.packed(token_ids))

    def __radd__(self, token_ids: Any) -> Context:
        """Return a new context with token ids prepended, after checking them."""
        if self.pictures is not None:
            raise PictureError("nothing can be prepended to a context that begins with pictures")
        return self.contexts.of(token_ids).followed_by(self.packed().tobytes())

    def followed_by(self, packed: bytes) -> Context:
        """Return a new context with packed ids appended, which the caller has checked."""
        tail = self.tail + packed
        return Context.of(self.contexts, tail, self.blocks, self.cache_hint, self.pictures)

    # ---------------------------------------------------------------- the sequence protocol

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
                raise PictureError("a slice with pictures must be [:stop], from the first token on")
            return Context.of(self.contexts, packed.tobytes())
        try:
            position = range(len(self))[index]
        except IndexError:
            raise IndexError(f"index {index} is outside a context of {len(self)} tokens") from None
        except TypeError:
            message = f"context indices must be integers or slices, got {index!r}"
            raise TypeError(message) from None
        block, rest = divmod(position, TOKENS_PER_BLOCK)
        packed = self.blocks[block] if block < len(self.blocks) else self.tail
        token_id: int = _ID.unpack_from(packed, rest * _ID.size)[0]
        return token_id if self.pictures is None or token_id >= 0 else self.pictures.image_token_id

    def _first(self, count: int) -> Context:
        blocks, tail = self.beginning(count)
        # No hint: the whole context's hint names a deeper node, and a walk from the root is fast.
        first = Context.of(self.contexts, tail, blocks, pictures=self.pictures)
        if self.pictures is not None and count < self.pictures.num_tokens:
            if len(first) and min(first.packed()) < 0:
                raise PictureError(
                    f"the first {count} tokens contain only a part of the pictures, which lie "
                    f"within the first {self.pictures.num_tokens} tokens of the context"
                )
            first.pictures = None
        return first

    def __iter__(self) -> Iterator[int]:
        packed = self.packed()
        return iter(packed if self.pictures is None else self.pictures.shown(packed))

    @property
    def last_packed(self) -> bytes:
        """The last id, packed as a 32-bit integer."""
        return self.tail[-_ID.size :] or self.blocks[-1][-_ID.size :]

    def packed(self, start: int = 0, stop: int | None = None) -> array[int]:
        """Return ids ``[start, stop)`` as 32-bit integers; neither bound may be negative."""
        # Picture parts keep their negative ids; the placeholder id does not appear.
        num_blocks = len(self.blocks)
        first = min(start // TOKENS_PER_BLOCK, num_blocks)
        kept = self.tail if first == num_blocks else b"".join((*self.blocks[first:], self.tail))
        skipped, found = first * TOKENS_PER_BLOCK, array("i")
        end = None if stop is None else (max(start, stop) - skipped) * _ID.size
        found.frombytes(kept[(start - skipped) * _ID.size : end])
        return found

    # ---------------------------------------------------------------- equality, hash and pickling

    @property
    def key(self) -> tuple[tuple[bytes, ...], bytes]:
        """Blocks and tail: a key that hashes and compares block by block."""
        return self.blocks, self.tail

    def beginning(self, count: int) -> tuple[tuple[bytes, ...], bytes]:
        """Return the ``key`` of the first ``count`` tokens; ``count`` is at most the length."""
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

    def __reduce__(self) -> tuple[Any, tuple[bytes, Pictures | None, tuple[bytes, ...]]]:
        return unpickled, (self.tail, self.pictures, self.blocks)

    def __repr__(self) -> str:
        size = len(self)
        if size <= 8:
            return f"Context({list(self)})"
        begins = "" if self.pictures is None else ", beginning with pictures"
        return f"Context([{self[0]}, … {self[-1]}], {size} ids{begins})"


@final
class ContextFactory:
    """Makes and checks the contexts of one model."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.image_token_id: int | None = None
        self.image_reader = "transformers"
        self._blocks: dict[bytes, bytes] = {}

    def of(self, token_ids: Any, name: str = "token_ids") -> Context:
        """Return token ids as this model's ``Context``; return the model's contexts unchanged."""
        if isinstance(token_ids, Context):
            if token_ids.contexts is self:
                return token_ids
            self._check_owner(token_ids)
            if (pictures := token_ids.pictures) is not None:
                return self._with_pictures(token_ids, pictures)
        ids = [*_listed(token_ids, name)]  # a copy, which no other thread can change
        if self.image_token_id is not None and self.image_token_id in ids:
            raise PictureError(
                f"{name} contains the image token {self.image_token_id}: make a context with "
                "lm.context(prompt, images=[…]), and extend it with context + [token]"
            )
        context = Context.of(self, self._packed(ids))
        if context.blocks:  # equal blocks share one object: less memory, faster comparisons
            if len(self._blocks) > _MAX_BLOCKS:
                self._blocks.clear()
            context.blocks = tuple([self._blocks.setdefault(own, own) for own in context.blocks])
        return context

    def _with_pictures(self, context: Context, pictures: Pictures) -> Context:
        is_known = pictures.image_token_id == self.image_token_id
        if not is_known or pictures.reader != self.image_reader:
            raise PictureError("the context begins with pictures that this model cannot read")
        rest = context.packed(pictures.num_tokens)
        self._packed(list(rest))
        return Context.of(self, context.packed().tobytes(), pictures=pictures)

    def check_context(
        self, token_ids: Any, max_length: int | None = None, name: str = "token_ids"
    ) -> Context:
        """Check and return token ids as a non-empty ``Context`` of up to ``max_length`` tokens."""
        is_own = isinstance(token_ids, Context) and token_ids.contexts is self
        context: Context = token_ids if is_own else self.of(token_ids, name)
        num_tokens = len(context)
        if not num_tokens:
            raise ContextError(f"{name} is empty: a context needs at least one token")
        if max_length is not None and num_tokens > max_length:
            raise ContextError(
                f"the context has {num_tokens} tokens, more than the model's maximum of "
                f"{max_length}"
            )
        return context

    def check_contexts(self, name: str, value: Any, max_length: int | None = None) -> list[Context]:
        """Return contexts checked by ``check_context``; an error names the index of the context."""
        checked = list[Context]()
        try:
            for token_ids in listed_contexts(name, value):
                checked.append(self.check_context(token_ids, max_length))
        except (ContextError, ContextTypeError) as error:
            raise type(error)(f"{name}[{len(checked)}]: {error}") from None
        return checked

    def check_id(self, token_id: Any) -> int:
        if type(token_id) is not int:
            token_id = _to_int(token_id)
        if not 0 <= token_id < self.vocab_size:
            raise ContextError(
                f"token id {token_id} is outside the vocabulary: "
                f"the model has {self.vocab_size} ids, 0 to {self.vocab_size - 1}"
            )
        return token_id

    def packed(self, token_ids: Any, name: str = "token_ids") -> bytes:
        """Check token ids, which may include image tokens, and pack them as 32-bit integers."""
        self._check_owner(token_ids)
        if isinstance(token_ids, Context) and token_ids.pictures is not None:
            raise PictureError(f"{name} begins with pictures, which nothing may precede")
        return self._packed([*_listed(token_ids, name)])

    def _packed(self, ids: list[Any]) -> bytes:
        are_few_ints = len(ids) <= _FEW and set(map(type, ids)) == {int}
        if are_few_ints and min(ids) >= 0 and max(ids) < self.vocab_size:
            return struct.pack(f"{len(ids)}i", *ids)  # faster than NumPy for few ids
        try:
            packed = struct.pack(f"{len(ids)}i", *ids)
        except Exception:  # an __index__ may raise anything; check_id names the id
            packed = struct.pack(f"{len(ids)}i", *map(self.check_id, ids))
        if not ids:
            return packed
        values = np.frombuffer(packed, np.uint32)  # negative ids become large
        if np.maximum.reduce(values) >= self.vocab_size:
            self.check_id(ids[int(np.argmax(values >= self.vocab_size))])
        if np.minimum.reduce(values) < 2:  # ``check_id`` refuses a bool, packed as 0 or 1
            for index in np.flatnonzero(values < 2).tolist():
                self.check_id(ids[index])
        return packed

    def _check_owner(self, token_ids: Any) -> None:
        if isinstance(token_ids, Context) and token_ids.contexts not in (self, _NOBODYS):
            raise ContextError(
                "the Context was made by another model, whose ids may mean other tokens: "
                "pass list(context) to use its ids with this model"
            )


_FEW: Final = 64
_MAX_BLOCKS: Final = 4096  # of 2 KB each
_NOBODYS: Final = ContextFactory(MAX_VOCAB)


def unpickled(
    packed: bytes, pictures: Pictures | None = None, blocks: tuple[bytes, ...] = ()
) -> Context:
    """Return packed ids as a ``Context`` of no model; the model that receives it checks them."""
    return Context.of(_NOBODYS, packed, blocks, pictures=pictures)


def of_no_model(token_ids: Any) -> Context:
    return token_ids if isinstance(token_ids, Context) else _NOBODYS.of(token_ids)


def listed_contexts(name: str, value: Any) -> list[Any]:
    """Return an iterable of contexts as a list of unchecked contexts; refuse a single context."""
    contexts = listed(name, value)
    if is_one_context(value, contexts):
        raise OptionTypeError(
            f"{name} must be a list of contexts, got one context: put it into a list"
        )
    return contexts


def is_one_context(value: Any, parts: Sequence[Any]) -> bool:
    """Return whether ``value``, with the elements ``parts``, is one context and not several."""
    first = parts[0] if parts else None
    is_id = isinstance(first, (int, np.integer)) or getattr(first, "ndim", 1) == 0
    return is_id or isinstance(value, Context)


def _listed(token_ids: Any, name: str) -> list[Any]:
    """Return token ids as a list; a list itself is not copied."""
    if hasattr(token_ids, "tolist") and hasattr(token_ids, "ndim"):
        if token_ids.ndim != 1:
            raise ContextTypeError(
                f"{name} must have one dimension, got an array of shape {tuple(token_ids.shape)}"
                f"{_way_out(token_ids, name)}"
            )
        try:
            token_ids = token_ids.tolist()
        except (RuntimeError, TypeError) as error:  # a tensor on "meta", or a sparse one
            raise ContextTypeError(
                f"{name} must be a dense array of integers, got {shown(token_ids)}"
            ) from error
    elif isinstance(token_ids, Mapping):  # the output of a tokenizer or chat template
        ids = token_ids.get("input_ids")
        hint = _way_out(ids, "its input_ids") or (
            ": pass its 'input_ids'" if ids is not None else ""
        )
        raise ContextTypeError(f"{name} must be integers, got a {type(token_ids).__name__}{hint}")
    elif isinstance(token_ids, (list, tuple)) and _num_rows(token_ids):
        hint = _way_out(token_ids, name)
        raise ContextTypeError(f"{name} must be integers, got {shown(token_ids)}{hint}")
    elif isinstance(token_ids, (set, frozenset)):
        raise ContextTypeError(f"{name} must be ordered, got a {type(token_ids).__name__}")
    elif isinstance(token_ids, (str, bytes, bytearray)):
        raise ContextTypeError(
            f"{name} must be integers, got {type(token_ids).__name__}: encode the text with "
            "the model's tokenizer first"
        )
    try:
        return token_ids if type(token_ids) is list else list(token_ids)
    except TypeError:
        message = f"{name} must be a list of integers, got {shown(token_ids)}"
        if isinstance(token_ids, (int, np.integer)):
            message += "; put it into a list"
        raise ContextTypeError(message) from None


def _num_rows(ids: Any) -> int:
    """Return the number of rows of two-dimensional token ids; 0 for other shapes."""
    if hasattr(ids, "ndim"):
        return ids.shape[0] if ids.ndim == 2 else 0
    is_list = isinstance(ids, (list, tuple)) and len(ids)
    return len(ids) if is_list and isinstance(ids[0], (list, tuple)) else 0


def _way_out(ids: Any, name: str) -> str:
    """Return the end of an error message about two-dimensional ids; '' for other shapes."""
    num_rows = _num_rows(ids)
    if num_rows == 1:
        return f": pass {name}[0], the only row"
    return f": pass a single row, such as {name}[0], without padding" if num_rows else ""


_token_id = integer()


def _to_int(token_id: Any) -> int:
    try:
        return _token_id("token_ids", token_id)
    except OptionTypeError:
        hint = "; pass its token_id" if hasattr(token_id, "token_id") else ""
        if not hint and isinstance(token_id, (list, tuple, Context)):
            hint = "; append several with context + token_ids"
        raise ContextTypeError(f"token ids must be integers, got {shown(token_id)}{hint}") from None
