"""Query: what a model is asked, checked before anything is queued; RowQuery: a row."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeAlias, final

from genlm_backend.errors import OptionError
from genlm_backend.queries.context import Context, of_no_model
from genlm_backend.queries.row import Row

TokenIds = Iterable[int]
"""A context: a ``Context``, or token ids as Python or NumPy integers or a 1-D integer array."""

UNKNOWN_ADAPTER: Final = "no LoRA adapter named {!r} is loaded"
"""The beginning of an ``UnknownAdapterError``'s message, for the adapter's name."""


class Adapter(NamedTuple):
    """An adapter as a model has loaded it: two of one name are told apart by their numbers.

    Attributes:
        name: The name that callers use.
        number: The number of its load, which no other load has.
    """

    name: str
    number: int


Result: TypeAlias = Any
"""The result of a query: a ``Row``, scores of a text, or the type that a kind of readout has."""


class Query(abc.ABC):
    """What a model is asked: a context's row, a text's scores, or what is read off a row.

    Equal queries have equal results.

    Attributes:
        context: The tokens that the model has to read.
        adapter: The adapter to read them with; ``None`` for the base model.
        wanted: Description of the result, for error messages.
        targets: The tokens of a text whose log-probabilities are wanted.
        num_targets: Their number.
        beside: Further numbers that are wanted of each target; ``None`` without targets.
        needs_row: Whether the result is computed from rows, on the device of the rows.
        is_cacheable: Whether the result is a row that may be cached.
        weight: How much the query counts for in a batch.
    """

    __slots__ = ()

    context: Context
    adapter: Adapter | None
    wanted: ClassVar[str]
    targets: ClassVar[tuple[int, ...]] = ()
    num_targets: ClassVar[int] = 0
    beside: ClassVar[Any] = None
    needs_row: ClassVar[bool] = False
    is_cacheable: ClassVar[bool] = False
    weight: ClassVar[float] = 1.0

    @property
    @abc.abstractmethod
    def forward_key(self) -> Query:
        """The query whose result is computed for this one."""

    @abc.abstractmethod
    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        """Return whether ``answer`` is a result of this query, of a vocabulary of that size."""


@final
class RowQuery(tuple[Adapter | None, tuple[bytes, ...], bytes], Query):
    """A context and the adapter to read it with. Equal queries have equal answers.

    Immutable. It is a tuple of the adapter and of the context's bytes, whose hashes Python keeps,
    so that looking a query up takes no time that grows with its context. It is made of a
    ``Context``, or of token ids, and of an adapter.

    Attributes:
        context: The whole context.
        adapter: The adapter, or ``None`` for the base model; contexts of different adapters share
            no keys and values.
    """

    is_cacheable: ClassVar[bool] = True
    wanted: ClassVar[str] = "a Row of float32 [{vocab_size}] for each query"

    def __new__(cls, token_ids: Iterable[int], adapter: Adapter | None = None) -> Self:
        context = token_ids if isinstance(token_ids, Context) else of_no_model(token_ids)
        query = super().__new__(cls, (adapter, context.blocks, context.tail))
        fields = vars(query)
        fields["context"], fields["adapter"] = context, adapter
        return query

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Query cannot be changed")

    def __reduce__(self) -> tuple[type[RowQuery], tuple[Context, Adapter | None]]:
        return RowQuery, (self.context, self.adapter)

    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        """Return whether ``answer`` is a row of a vocabulary of that size."""
        return isinstance(answer, Row) and answer.is_of(vocab_size)

    @property
    def forward_key(self) -> RowQuery:
        """Itself."""
        return self

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """The whole context as a tuple, which takes a moment for each token."""
        return tuple(self.context)

    @property
    def lora_name(self) -> str | None:
        """Name of the adapter, or ``None`` for the base model."""
        return None if self.adapter is None else self.adapter.name

    def prefix(self, num_tokens: int) -> RowQuery:
        """Return the query of the first tokens, with the same adapter."""
        return RowQuery(self.context[:num_tokens], self.adapter)

    def __repr__(self) -> str:
        return f"RowQuery({self.context!r}, lora_name={self.lora_name!r})"


NO_QUERY: Final = RowQuery([0])
"""Stands for the query of a row that is known."""


def check_known_ids(
    name: str, ids: Iterable[int], vocab_size: int, error: type[Exception] = OptionError
) -> None:
    """Raise an error if one of an option's token ids is outside the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise error(
                f"{name} has {token_id}, which is outside the vocabulary of {vocab_size} ids"
            )
