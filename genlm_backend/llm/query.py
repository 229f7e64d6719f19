"""Query: what is asked of a model, checked before anything is queued."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self, final

from genlm_backend.checks import integer, shown
from genlm_backend.errors import ContextError, ContextTypeError, OptionError, OptionTypeError
from genlm_backend.tokenization import Token

TokenIds = Iterable[int]
"""A context: token ids, as Python or NumPy integers, or a 1-D integer array or tensor."""


class Adapter(NamedTuple):
    """An adapter as a model has loaded it: two of one name are told apart by their numbers.

    Attributes:
        name: The name that callers use.
        number: The number of its load, which no other load has.
    """

    name: str
    number: int


@final
class Query(tuple[Adapter | None, bytes]):
    """A context and the adapter to read it with. Equal queries have equal answers.

    Immutable. It is a tuple of the adapter and of the context's bytes, whose hash Python keeps,
    so that looking a query up takes no time that grows with its context.

    Attributes:
        token_ids: The whole context.
        adapter: The adapter, or ``None`` for the base model; contexts of different adapters share
            no keys and values.
        tokens: The ids as an array of 64-bit integers.
    """

    token_ids: tuple[int, ...]
    adapter: Adapter | None
    tokens: array[int]

    def __new__(cls, token_ids: tuple[int, ...], adapter: Adapter | None = None) -> Self:
        """Make a query; see the class."""
        packed = struct.pack(f"{len(token_ids)}q", *token_ids)  # faster than an array's own way
        tokens = array("q")
        tokens.frombytes(packed)
        query = super().__new__(cls, (adapter, packed))
        vars(query).update(token_ids=token_ids, adapter=adapter, tokens=tokens)
        return query

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Query cannot be changed")

    def __reduce__(self) -> tuple[type[Query], tuple[tuple[int, ...], Adapter | None]]:
        return Query, (self.token_ids, self.adapter)

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that the model has to read: the whole context."""
        return self.token_ids

    @property
    def lora_name(self) -> str | None:
        """Name of the adapter, or ``None`` for the base model."""
        return None if self.adapter is None else self.adapter.name

    def prefix(self, num_tokens: int) -> Query:
        """Return the query of the first tokens, with the same adapter."""
        return Query(self.token_ids[:num_tokens], self.adapter)

    def __repr__(self) -> str:
        ids = self.token_ids
        shown = repr(list(ids)) if len(ids) <= 8 else f"[{ids[0]}, … {ids[-1]}] ({len(ids)} ids)"
        return f"Query({shown}, lora_name={self.lora_name!r})"


def check_context(
    token_ids: Any, vocab_size: int, max_length: int | None = None, name: str = "token_ids"
) -> tuple[int, ...]:
    """Return ``token_ids`` as a tuple of at least one ``int``.

    Raises:
        ContextTypeError: If they are not integers, as ``check_token_ids`` says.
        ContextError: If there are none, more than ``max_length``, or one outside
            ``0 … vocab_size - 1``.
    """
    ids = check_token_ids(token_ids, vocab_size, name)
    if not ids:
        raise ContextError(f"{name} is empty: a context needs at least one token")
    if max_length is not None and len(ids) > max_length:
        raise ContextError(
            f"the context has {len(ids)} tokens, more than the model's maximum of {max_length}"
        )
    return ids


def check_token_ids(token_ids: Any, vocab_size: int, name: str = "token_ids") -> tuple[int, ...]:
    """Return any number of token ids, or none, as a tuple of ``int``.

    Accepts any iterable of Python or NumPy integers and one-dimensional integer arrays and
    tensors. ``name`` is what messages call them.

    Raises:
        ContextTypeError: If they are not integers (a ``bool`` is none), or not iterable.
        ContextError: If there is one outside ``0 … vocab_size - 1``.
    """
    if hasattr(token_ids, "tolist") and hasattr(token_ids, "ndim"):
        if token_ids.ndim != 1:
            raise ContextTypeError(
                f"{name} must have one dimension, got an array of shape {tuple(token_ids.shape)}"
            )
        try:
            token_ids = token_ids.tolist()
        except (RuntimeError, TypeError) as error:  # a tensor on "meta", or one of sparse layout
            raise ContextTypeError(f"{name} hold no integers: {shown(token_ids)}") from error
    elif isinstance(token_ids, Mapping):  # as tokenizers and chat templates return
        raise ContextTypeError(
            f"{name} must be integers, got a {type(token_ids).__name__}: pass its 'input_ids'"
        )
    elif isinstance(token_ids, (str, bytes, bytearray)):
        raise ContextTypeError(
            f"{name} must be integers, got {type(token_ids).__name__}: encode the text with "
            "the model's tokenizer first"
        )
    try:
        ids = tuple(token_ids)
    except TypeError:
        message = f"{name} must be a list of integers, got {shown(token_ids)}"
        raise ContextTypeError(message) from None
    if ids and set(map(type, ids)) != {int}:
        ids = tuple(map(_to_int, ids))
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise ContextError(
            f"token id {wrong} is outside the vocabulary: "
            f"the model has {vocab_size} ids, 0 to {vocab_size - 1}"
        )
    return ids


def check_known_ids(
    name: str, ids: Iterable[int], vocab_size: int, error: type[Exception] = OptionError
) -> None:
    """Raise an error if one of an option's token ids is outside the vocabulary.

    Args:
        name: Name of the option.
        ids: Its token ids.
        vocab_size: Number of ids that the model has.
        error: Type of the error to raise.
    """
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise error(
                f"{name} has {token_id}, which is outside the vocabulary of {vocab_size} ids"
            )


_token_id = integer()


def _to_int(token_id: Any) -> int:
    try:
        return _token_id("token_ids", token_id)
    except OptionTypeError:
        hint = "; pass its token_id" if isinstance(token_id, Token) else ""
        raise ContextTypeError(f"token ids must be integers, got {shown(token_id)}{hint}") from None
