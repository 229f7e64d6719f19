"""Evaluator: the interface of all that answers queries, wherever it lives."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, final

import torch

from genlm_backend.checks import (
    MAX_VOCAB,
    checked,
    integer,
    known_device,
    optional,
    sequence,
    switch,
)
from genlm_backend.errors import AdapterError, CacheError, PictureError
from genlm_backend.multimodal.pictures import PictureRules
from genlm_backend.prefix.budgets import TierName
from genlm_backend.queries.query import Adapter, Query, Result, RowQuery
from genlm_backend.runtime.threads import release_idle_threads


@dataclass(frozen=True, slots=True)
class EvaluatorInfo:
    """Capabilities of an evaluator; they do not change while it is open.

    Attributes:
        vocab_size: Width of its rows; ``None`` for whatever the tokenizer has.
        max_length: Longest context that it takes, in tokens; ``None`` where nothing bounds it.
        max_batch_size: Number of queries that it can be asked at once; ``None`` for any number.
        num_slots: Number of tokens whose keys and values it can keep; ``None`` where it keeps none.
        num_states: Number of recurrent states that it can keep, from which contexts go on; ``None``
            where its model has none.
        num_host_slots: Number of tokens whose keys and values it keeps on the host besides, when
            they have to leave its device; ``None`` where it has no such tier.
        kv_cache_dtype: Number format in which it keeps them; ``None`` for the type that it computes
            in.
        slots_per_block: Number of slots that a context takes at once, so that the rest of its last
            ones stays unused.
        device: Device on which it takes token ids: "cpu", "cuda:0", …; ``None`` where it does not
            say.
        takes_adapters: Whether adapters can be added.
        uses_openmp: Whether it computes on OpenMP threads of this process, which idle threads of
            callers slow down.
        scores: Whether it answers a ``ScoreQuery`` too. Where not, texts are scored by rows.
        reads_out: Whether it answers each ``Readout`` too, and tells what a ``ScoreQuery`` has
            beside the log-probabilities. Where not, it is asked for the rows.
        image_token_id: The id that stands for a part of a picture, where it sees pictures; ``None``
            where it does not.
        eos_token_ids: The ids that end a text by the model's own generation config; ``None`` where
            it names none, and the tokenizer tells.
        omits_undefined: Whether its rows say of themselves that none of its ``undefined_ids``
            comes. Where not, each is looked at once it is there.
    """

    vocab_size: int | None = None
    max_length: int | None = None
    max_batch_size: int | None = None
    num_slots: int | None = None
    num_states: int | None = None
    num_host_slots: int | None = None
    kv_cache_dtype: str | None = None
    slots_per_block: int = 1
    device: str | None = None
    takes_adapters: bool = False
    uses_openmp: bool = False
    scores: bool = False
    reads_out: bool = False
    image_token_id: int | None = None
    eos_token_ids: Collection[int] | None = None
    omits_undefined: bool = False

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _CHECKS}
        for name, value in checked(_CHECKS, given).items():
            object.__setattr__(self, name, value)

    @property
    def before_wait(self) -> Callable[[], None]:
        """The duty of a caller's thread before it waits for an answer."""
        return release_idle_threads if self.uses_openmp else _nothing

    def kv_capacity(self, batch_size: int) -> int | None:
        """Return how many tokens' keys and values fit at once; ``None`` where none are kept.

        The unused ends of the last blocks of a full batch are not counted, as far as that leaves
        room for the longest context.
        """
        if self.num_slots is None:
            return None
        unused = self.slots_per_block - 1
        alone = max(0, self.num_slots - unused)
        longest = alone if self.max_length is None else min(self.max_length, alone)
        return max(self.num_slots - batch_size * unused, longest)


_CHECKS: Final = {
    "vocab_size": optional(integer(1, MAX_VOCAB)),
    "max_length": optional(integer(1)),
    "max_batch_size": optional(integer(1)),
    "num_slots": optional(integer(0)),
    "num_states": optional(integer(0)),
    "num_host_slots": optional(integer(0)),
    "slots_per_block": integer(1),
    "device": optional(known_device),
    **{field.name: switch for field in fields(EvaluatorInfo) if field.type == "bool"},
    "image_token_id": optional(integer(0)),
    "eos_token_ids": optional(sequence(integer(), "a collection of token ids")),
}


@dataclass(frozen=True, slots=True)
class EvaluatorCounts:
    """Counts of an evaluator since it was opened, and the memory that it uses.

    Attributes:
        num_forwards: Number of forward passes of the model.
        tokens_computed: Number of tokens in them, padding not counted.
        tokens_reused: Number of tokens whose keys and values were there.
        kv_bytes_used: Bytes of the keys and values that are kept.
        kv_bytes_budget: Bytes that they may take.
        host_bytes_used: Bytes of keys, values and recurrent states that are kept on the host.
        host_bytes_budget: Bytes that they may take.
        num_evicted_tokens: Number of tokens whose keys and values had to go for others.
        num_recomputed_tokens: Number of tokens that were computed again after they had to go.
        num_tokens_to_host: Number of tokens whose keys and values went to the host.
        num_tokens_from_host: Number of tokens whose keys and values came back.
        state_bytes_used: Bytes of the recurrent states that are kept.
        state_bytes_budget: Bytes that they may take, of ``kv_bytes_budget``.
        num_evicted_states: Number of recurrent states that had to go for others.
        num_states_to_host: Number of recurrent states that went to the host.
        num_states_from_host: Number of recurrent states that came back.
        packed_weight_bytes: Bytes of weights that are there a second time, in a faster layout.
        num_captured_steps: Number of these forward passes that replayed a captured CUDA graph.
    """

    num_forwards: int = 0
    tokens_computed: int = 0
    tokens_reused: int = 0
    kv_bytes_used: int = 0
    kv_bytes_budget: int = 0
    host_bytes_used: int = 0
    host_bytes_budget: int = 0
    num_evicted_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_tokens_to_host: int = 0
    num_tokens_from_host: int = 0
    state_bytes_used: int = 0
    state_bytes_budget: int = 0
    num_evicted_states: int = 0
    num_states_to_host: int = 0
    num_states_from_host: int = 0
    packed_weight_bytes: int = 0
    num_captured_steps: int = 0


def _nothing() -> None:
    return None


class Evaluator(abc.ABC):
    """Answers queries with rows; one thread calls it, one verb at a time, but for ``counts``.

    It knows no futures, no event loop and no tokenizer, and all arguments and results are values
    that pickle, so that it can live in another process. ``BatchedLM`` makes a model of it.

    Attributes:
        info: What it is able to do, where that is known before ``open()``.
        undefined_ids: Ids that no token has. Whoever drives the evaluator puts them here. One that
            knows its logits may hand them to ``rows_of_logits``, and say so by
            ``info.omits_undefined``; ``BatchedLM`` excludes them otherwise, to the precision of the
            row.
        has_died: Whether it has ended by itself, and answers nothing until it is made again.
        check_cancelled: To be called between two steps of long work. It raises a
            ``QueryDroppedError`` where nobody waits any more for what is being done, which the
            evaluator lets through. Whoever drives the evaluator puts it here.
    """

    info: EvaluatorInfo | None = None
    undefined_ids: tuple[int, ...] = ()
    has_died: bool = False

    check_cancelled: Callable[[], None] = staticmethod(_nothing)

    @abc.abstractmethod
    def open(self) -> EvaluatorInfo:
        """Get ready, on the thread that calls everything else; return what it is able to do.

        Called once, before anything else, and not where ``info`` tells it already.
        """

    @abc.abstractmethod
    def evaluate(self, queries: Sequence[Query], /) -> Sequence[Result | Exception]:
        """Return one answer to each of one or more distinct queries, in order: a ``Row``.

        An exception in place of a row is for those who asked that query, and disturbs no other;
        one that is raised is for all of them. Rows may share memory, which nobody writes to
        afterwards. They may give a probability to ids that no token has, unless
        ``info.omits_undefined`` says otherwise: ``BatchedLM`` excludes them.

        Where ``info.scores`` says so, there may be a ``ScoreQuery`` among them. Its answer is a
        float32 tensor ``[num_targets]``, on any device, of what rows without ``undefined_ids``
        say: those are left out, and a target among them is ``-inf``. Where ``info.reads_out`` says
        so, there may be a ``Readout``, of whose answer ``undefined_ids`` are left out as well, and
        a ``ScoreQuery`` may tell more of each token: float64 ``[num_targets, beside.width]``.
        """

    @abc.abstractmethod
    def num_cached(self, query: RowQuery, tier: TierName | None = None) -> int:
        """Return how many of a context's tokens need not be computed if it is asked now.

        Only the tokens of one tier are counted where one is named; what is in no other is on the
        device.
        """

    @abc.abstractmethod
    def pin(self, query: RowQuery) -> bool:
        """Compute a context and keep its keys and values until ``clear()``.

        Returns:
            Whether there was room for them.
        """

    @abc.abstractmethod
    def clear(self) -> None:
        """Free all keys and values, pinned ones too."""

    def save_prefix(self, query: RowQuery, path: str) -> None:
        """Compute a context and write its keys and values into a file.

        Raises:
            CacheError: If there is no room for them, or they are not kept.
            OSError: If the file cannot be written; nothing of it stays then.
        """
        raise CacheError(
            f"{type(self).__name__} writes no prefixes into files; cache_kv keeps them"
        )

    def load_prefix(self, path: str, adapter: Adapter | None) -> Sequence[int]:
        """Keep the keys and values of a file; return the tokens that they are of.

        Raises:
            PrefixFileError: If they are not those of this evaluator's model.
            CacheError: If there is no room for them, or they are not kept.
            OSError: If the file cannot be read.
        """
        raise CacheError(f"{type(self).__name__} reads no prefixes from files")

    def picture_rules(
        self, token_ids: Sequence[int], inputs: Mapping[str, torch.Tensor]
    ) -> PictureRules:
        """Find out where text goes on behind the pictures of a context.

        Args:
            token_ids: A prompt that begins with a picture and ends with text.
            inputs: What the model's processor has made beside them.

        Raises:
            PictureError: If it sees no pictures.
        """
        raise PictureError(f"{type(self).__name__} sees no pictures")

    @abc.abstractmethod
    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter in PEFT's format from a directory or a repository on the hub.

        Raises:
            AdapterError: If it cannot be loaded; everything is as it was then.
        """

    @abc.abstractmethod
    def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter, and free all keys and values; no query with it follows."""

    @abc.abstractmethod
    def counts(self) -> EvaluatorCounts:
        """Return its counts so far; takes no time, and is called on any thread."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free whatever it holds; nothing else follows.

        Called by whoever closes the model, after the thread has ended; also where ``open()`` has
        raised.
        """


class RestartableEvaluator(Evaluator):
    """An evaluator that may end by itself, and can be made again then.

    Whatever it is asked is an ``EngineDiedError`` meanwhile.

    Attributes:
        adapters: Paths of the adapters that it has, and is to have once it has been made again. A
            mapping that is replaced whole, never changed, so that any thread may do so while the
            evaluator is dead.
    """

    adapters: Mapping[Adapter, str]

    @abc.abstractmethod
    def restart(self) -> EvaluatorInfo:
        """End it, whatever it is doing, make it again, and load ``adapters``."""

    @abc.abstractmethod
    def load_adapters(self) -> None:
        """Load those of ``adapters`` that are not there, and remove what is there beside them.

        One that cannot be loaded is an ``AdapterError`` for those who ask for it, and no other.
        """


class StatelessEvaluator(Evaluator):
    """An evaluator that keeps nothing between two batches and has no adapters.

    A backend of one's own has to define ``evaluate``. Where there is more to say of it than the
    width of its rows, it sets ``info``, as a class or in its constructor, and where it holds
    something, it defines ``close``.

    Args:
        vocab_size: Width of its rows; ``None`` for whatever the tokenizer has.

    Attributes:
        info: What it is able to do.
    """

    info: EvaluatorInfo = EvaluatorInfo()

    def __init__(self, vocab_size: int | None = None) -> None:
        if vocab_size is not None:
            self.info = replace(self.info, vocab_size=vocab_size)

    @final
    def open(self) -> EvaluatorInfo:
        """Return ``info``."""
        return self.info

    @final
    def num_cached(self, query: RowQuery, tier: TierName | None = None) -> int:
        """Return 0."""
        return 0

    @final
    def pin(self, query: RowQuery) -> bool:
        """Return ``False``: there is no room."""
        return False

    @final
    def clear(self) -> None:
        """Do nothing: there is nothing to free."""

    @final
    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Refuse every adapter."""
        raise AdapterError(f"{type(self).__name__} takes no adapters: {adapter.name!r} is refused")

    @final
    def remove_adapter(self, adapter: Adapter) -> None:
        """Do nothing: there is none."""

    @final
    def counts(self) -> EvaluatorCounts:
        """Return zeros."""
        return EvaluatorCounts()

    def close(self) -> None:
        """Do nothing: nothing is held."""
