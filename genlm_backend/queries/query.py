"""Query: a request to a model, checked before it is queued; RowQuery: a request for a row."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeAlias, final

from genlm_backend.errors import OptionError
from genlm_backend.queries.context import Context, of_no_model
from genlm_backend.queries.row import Row

TokenIds = Iterable[int]
"""What callers pass as a context: a ``Context``, Python or NumPy integers, or a 1-D array."""

UNKNOWN_ADAPTER: Final = "no LoRA adapter named {!r} is loaded"
"""The beginning of an ``UnknownAdapterError``'s message, to format with the adapter's name."""


class Adapter(NamedTuple):
    """One load of an adapter; its number distinguishes it from other loads under the same name.

    Attributes:
        name: The name that callers use.
        number: The number of this load, unique within the model.
    """

    name: str
    number: int


Result: TypeAlias = Any
"""The result of a query: a ``Row``, a text's scores, a readout's answer, or a ``StepResult``."""


class Query(abc.ABC):
    """A request for a row, for a text's scores, for a readout of a row, or for a particle step.

    Equal queries have equal results.

    Attributes:
        context: The tokens that the model has to read; for a step, those of its first row.
        adapter: The adapter to apply; ``None`` for the base model.
        wanted: Description of the result, for error messages.
        targets: The tokens of a text to score.
        num_targets: Number of targets.
        beside: Which further numbers to return for each target; ``None`` unless a text is scored.
        needs_row: Whether the result is computed from rows, on their device; false if it is a row.
        is_cacheable: Whether the result is a row that may be cached.
        weight: How much it counts toward the batch size; 1.0 for a row.
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
        """The query whose forward pass gives the result; queries with equal keys share the pass."""

    @abc.abstractmethod
    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        """Return whether ``answer`` has the type and shape of a result for this vocabulary size."""


@final
class RowQuery(tuple[Adapter | None, tuple[bytes, ...], bytes], Query):
    """A context and the adapter to apply, immutable. Equal queries have equal answers.

    It is a tuple of the adapter and the context's bytes. Python caches the hash of a bytes object,
    so that a lookup does not hash token ids again. The constructor takes a ``Context`` or token
    ids, and an adapter.

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
        raise AttributeError("a Query is immutable")

    def __reduce__(self) -> tuple[type[RowQuery], tuple[Context, Adapter | None]]:
        return RowQuery, (self.context, self.adapter)

    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        """Return whether ``answer`` is a ``Row`` of width ``vocab_size``."""
        return isinstance(answer, Row) and answer.is_of(vocab_size)

    @property
    def forward_key(self) -> RowQuery:
        """The query itself, whose forward pass gives the row."""
        return self

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """The whole context as a tuple, made on first use in time linear in its length."""
        return tuple(self.context)

    @property
    def lora_name(self) -> str | None:
        """Name of the adapter, or ``None`` for the base model."""
        return None if self.adapter is None else self.adapter.name

    def prefix(self, num_tokens: int) -> RowQuery:
        """Return the query of the first ``num_tokens`` tokens, with the same adapter."""
        return RowQuery(self.context[:num_tokens], self.adapter)

    def __repr__(self) -> str:
        return f"RowQuery({self.context!r}, lora_name={self.lora_name!r})"


NO_QUERY: Final = RowQuery([0])
"""A placeholder query for a row that is known already."""


def check_known_ids(
    name: str, ids: Iterable[int], vocab_size: int, error: type[Exception] = OptionError
) -> None:
    """Raise an error if one of an option's token ids is outside the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise error(
                f"{name} has {token_id}, which is outside the vocabulary of {vocab_size} ids"
            )
