"""Evaluator: the interface of a backend that answers queries, in this process or another."""

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
        vocab_size: Width of its rows; ``None`` for the size of the tokenizer's vocabulary.
        max_length: Longest context that it takes, in tokens; ``None`` for no limit.
        max_batch_size: Largest number of queries in one call; ``None`` for no limit.
        num_slots: Capacity of its cache of keys and values, in tokens; ``None`` if it has no cache.
        num_states: Number of recurrent states that it can cache; ``None`` if its model has none.
        num_host_slots: Capacity of its host tier, in tokens, for keys and values that are evicted
            from the device; ``None`` if it has no such tier.
        kv_cache_dtype: Number format of cached keys and values; ``None`` for the dtype that it
            computes in.
        slots_per_block: Block size: a context takes slots in whole blocks, so that a part of its
            last block may stay unused.
        device: Device on which it takes token ids: "cpu", "cuda:0", …; ``None`` if unknown.
        takes_adapters: Whether adapters can be added.
        uses_openmp: Whether it computes on OpenMP threads of this process; idle OpenMP threads of
            callers slow these down.
        scores: Whether it answers a ``ScoreQuery``. If not, texts are scored from rows.
        reads_out: Whether it answers a ``Readout``, and a ``ScoreQuery`` that wants more than
            log-probabilities. If not, callers query it for rows.
        takes_steps: Whether it answers a ``ParticleStep``. If not, callers query it for each
            context of a particle group.
        image_token_id: The placeholder id of picture parts; ``None`` for a model without pictures.
        eos_token_ids: The EOS ids of the model's generation config; ``None`` if it has none, so
            that the tokenizer's id is used.
        omits_undefined: Whether its rows already give no probability to ``undefined_ids``. If not,
            ``BatchedLM`` checks and corrects each row.
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
    takes_steps: bool = False
    image_token_id: int | None = None
    eos_token_ids: Collection[int] | None = None
    omits_undefined: bool = False

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _CHECKS}
        for name, value in checked(_CHECKS, given).items():
            object.__setattr__(self, name, value)

    @property
    def before_wait(self) -> Callable[[], None]:
        """The function that a caller has to call, on its thread, before it waits for an answer."""
        return release_idle_threads if self.uses_openmp else _nothing

    def kv_capacity(self, batch_size: int) -> int | None:
        """Return how many tokens of ``batch_size`` contexts fit into the KV cache, or ``None``.

        It subtracts the slots that each context's last block may leave unused, but returns at least
        the length of the longest context that fits alone. ``None`` means that there is no cache.
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
        tokens_computed: Number of tokens in these passes, padding not counted.
        tokens_reused: Number of tokens that were found in the cache instead of being computed.
        kv_bytes_used: Bytes of the keys and values cached on the device.
        kv_bytes_budget: Bytes that these and recurrent states may take on the device together.
        host_bytes_used: Bytes of keys, values and recurrent states on the host.
        host_bytes_budget: Bytes that they may take.
        num_evicted_tokens: Number of tokens whose keys and values were dropped, not moved.
        num_recomputed_tokens: Number of dropped tokens that were computed again.
        num_tokens_to_host: Number of tokens whose keys and values moved to the host.
        num_tokens_from_host: Number of tokens whose keys and values moved back to the device.
        state_bytes_used: Bytes of the recurrent states cached on the device.
        state_bytes_budget: Bytes that these may take, a part of ``kv_bytes_budget``.
        num_evicted_states: Number of recurrent states that were dropped, not moved.
        num_states_to_host: Number of recurrent states that moved to the host.
        num_states_from_host: Number of recurrent states that moved back to the device.
        packed_weight_bytes: Bytes of second copies of weights, in a faster layout.
        num_captured_steps: Number of forward passes that replayed a captured CUDA graph.
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
    """A backend that answers queries. One thread makes all calls except ``counts`` and ``close``.

    Its interface has no futures, event loop or tokenizer, and all arguments and results can be
    pickled, so that it can run in another process. ``BatchedLM`` makes a model from it.

    Attributes:
        info: Its capabilities, if they are known before ``open()``; else ``None``.
        undefined_ids: Ids that no token has; the owner of the evaluator, such as ``BatchedLM``,
            sets them. An evaluator with logits may pass them to ``rows_of_logits`` and set
            ``info.omits_undefined``. Otherwise ``BatchedLM`` excludes them from each row, and
            renormalises the row in float32.
        has_died: Whether it has stopped by itself; if so, it answers nothing until it is restarted.
        check_cancelled: Function to call between two steps of long work; the owner sets it. It
            raises ``QueryDroppedError`` if no caller waits for the current work any more; the
            evaluator must let the error propagate.
    """

    info: EvaluatorInfo | None = None
    undefined_ids: tuple[int, ...] = ()
    has_died: bool = False

    check_cancelled: Callable[[], None] = staticmethod(_nothing)

    @abc.abstractmethod
    def open(self) -> EvaluatorInfo:
        """Load the model, on the thread that also evaluates; return the capabilities.

        The owner calls it once, before all other methods, unless ``info`` is set already.
        """

    @abc.abstractmethod
    def evaluate(self, queries: Sequence[Query], /) -> Sequence[Result | Exception]:
        """Answer one or more distinct queries, in order: each ``RowQuery`` by a ``Row``.

        An exception returned in place of an answer goes only to the callers of that query; a raised
        one goes to all callers of the batch. Rows may share memory, which the evaluator must not
        write to afterwards. Rows may give probability to ``undefined_ids``, which ``BatchedLM``
        then excludes, unless ``info.omits_undefined`` is set.

        If ``info.scores``, the queries may include a ``ScoreQuery``. Its answer is a float32 tensor
        ``[num_targets]`` on any device: log-probabilities renormalised without ``undefined_ids``,
        ``-inf`` for a target among these. If ``info.reads_out``, the queries may also include a
        ``Readout``, whose answer excludes ``undefined_ids`` too, and a ``ScoreQuery`` with extra
        numbers (``beside``), whose answer is float64 ``[num_targets, beside.width]``. If
        ``info.takes_steps``, a query may be a ``ParticleStep``; its answer is a ``StepResult``.
        """

    @abc.abstractmethod
    def num_cached(self, query: RowQuery, tier: TierName | None = None) -> int:
        """Return how many of a query's tokens would be reused from the cache now.

        With ``tier``, only tokens of that tier count; an evaluator without a host tier keeps all
        tokens on the device.
        """

    @abc.abstractmethod
    def pin(self, query: RowQuery) -> bool:
        """Compute a context and keep its keys and values until ``clear()``.

        Returns:
            Whether there was room for them.
        """

    @abc.abstractmethod
    def clear(self) -> None:
        """Free all keys, values and recurrent states, pinned ones too."""

    def save_prefix(self, query: RowQuery, path: str) -> None:
        """Compute a context and write its keys and values into a file.

        Raises:
            CacheError: If there is no room for them, or no cache.
            OSError: If the file cannot be written; no partial file is left.
        """
        raise CacheError(f"{type(self).__name__} cannot save prefixes to files")

    def load_prefix(self, path: str, adapter: Adapter | None) -> Sequence[int]:
        """Cache the keys and values of a file; return its token ids.

        Raises:
            PrefixFileError: If the file holds no prefix of this evaluator's model.
            CacheError: If there is no room for them, or no cache.
            OSError: If the file cannot be read.
        """
        raise CacheError(f"{type(self).__name__} cannot load prefixes from files")

    def picture_rules(
        self, token_ids: Sequence[int], inputs: Mapping[str, torch.Tensor]
    ) -> PictureRules:
        """Find out, by a few passes, how the model computes text after pictures.

        Args:
            token_ids: A prompt that begins with a picture and ends with text.
            inputs: The other outputs of the model's processor, by name.

        Raises:
            PictureError: If the model takes no pictures.
        """
        raise PictureError(f"{type(self).__name__} accepts no pictures")

    @abc.abstractmethod
    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter in PEFT's format from a directory or a repository on the hub.

        Raises:
            AdapterError: If it cannot be loaded; nothing has changed then.
        """

    @abc.abstractmethod
    def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter and free all keys and values; no later query uses the adapter."""

    @abc.abstractmethod
    def counts(self) -> EvaluatorCounts:
        """Return the counts so far without blocking; any thread may call this."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free all resources; this is the last call.

        The thread that closes the model calls it after the worker thread has ended, and also if
        ``open()`` has raised.
        """


class RestartableEvaluator(Evaluator):
    """An evaluator that may die, such as one in a child process, and can be restarted.

    While it is dead, methods that need its model raise ``EngineDiedError``.

    Attributes:
        adapters: Paths of its adapters, which a restart loads again. The mapping is not modified in
            place: any thread may replace it while the evaluator is dead.
    """

    adapters: Mapping[Adapter, str]

    @abc.abstractmethod
    def restart(self) -> EvaluatorInfo:
        """Stop the evaluator if it still runs, start it again, and load ``adapters``."""

    @abc.abstractmethod
    def load_adapters(self) -> None:
        """Load the missing ``adapters``, and remove loaded ones that are not among them.

        If one cannot be loaded, only queries that name it fail, with an ``AdapterError``.
        """


class StatelessEvaluator(Evaluator):
    """An evaluator without a cache and without adapters: the base class of custom backends.

    A subclass has to define ``evaluate``. It sets ``info``, on the class or in its constructor, for
    capabilities other than the width of its rows, and overrides ``close`` if it holds resources.

    Args:
        vocab_size: Width of its rows; ``None`` for the size of the tokenizer's vocabulary.

    Attributes:
        info: Its capabilities.
    """

    info: EvaluatorInfo = EvaluatorInfo()

    def __init__(self, vocab_size: int | None = None) -> None:
        if vocab_size is not None:
            self.info = replace(self.info, vocab_size=vocab_size)

    @final
    def open(self) -> EvaluatorInfo:
        """Return ``info``: nothing is loaded."""
        return self.info

    @final
    def num_cached(self, query: RowQuery, tier: TierName | None = None) -> int:
        """Return 0: nothing is cached."""
        return 0

    @final
    def pin(self, query: RowQuery) -> bool:
        """Return ``False``: there is no cache."""
        return False

    @final
    def clear(self) -> None:
        """Do nothing: there is nothing to free."""

    @final
    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Refuse every adapter."""
        raise AdapterError(f"{type(self).__name__} accepts no adapters, got {adapter.name!r}")

    @final
    def remove_adapter(self, adapter: Adapter) -> None:
        """Do nothing: no adapter can have been added."""

    @final
    def counts(self) -> EvaluatorCounts:
        """Return zeros: nothing is counted."""
        return EvaluatorCounts()

    def close(self) -> None:
        """Do nothing: there are no resources to free."""
