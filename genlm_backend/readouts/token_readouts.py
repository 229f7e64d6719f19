"""Readouts of top tokens, chosen tokens, entropies and log-masses of groups."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.checks import function, integer, listed, sequence, shown
from genlm_backend.errors import OptionTypeError
from genlm_backend.queries.query import RowQuery, check_known_ids
from genlm_backend.queries.row import spare_memory
from genlm_backend.readouts.draw import as_ids_or_bools, packed_mask
from genlm_backend.readouts.readout import Readout, is_own


class _TopFields(NamedTuple):
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    log_rest: float


class TopTokens(_TopFields):
    """The most probable tokens after a context, and the log-mass of all others.

    Attributes:
        token_ids: Token ids, the most probable first; ties are in order of id: int64 ``[k]``.
        logprobs: The log-probabilities of these tokens: float32 ``[k]``.
        log_rest: Log-mass of all other tokens, summed from their probabilities; ``-inf`` if there
            are none.
        texts: The tokens' entries in the model's ``str_vocab``; empty until ``next_token_top``
            adds them. An attribute, not an item of the tuple.
    """

    texts: tuple[str, ...] = ()

    def __repr__(self) -> str:
        pairs = zip(self.texts or self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        shown = [f"{token!r}: {logprob:.3f}" for token, logprob in islice(pairs, 10)]
        more = ["…"] if len(self.logprobs) > 10 else []
        return f"TopTokens({', '.join([*shown, *more])}; log_rest: {self.log_rest:.3f})"


ReadoutOf: TypeAlias = Callable[[RowQuery], Readout]
"""A function that makes a ``Readout`` of a ``RowQuery``, such as the class ``Entropy``."""


def readout_of(make: Callable[[RowQuery], Any], query: RowQuery) -> Readout:
    return _checked(function("readout", make)(query), query)


def readouts_of(make: Callable[[RowQuery], Any], queries: Sequence[RowQuery]) -> list[Readout]:
    """Call ``make`` with each query, in order; check and return the readouts."""
    made = [function("readout", make)(query) for query in queries]
    # Readouts of this library's classes are checked together, which is faster.
    if all(issubclass(kind, Readout) and not is_own(kind) for kind in set(map(type, made))) and all(
        map(operator.is_, map(_QUERY, made), queries)
    ):
        return made
    return [_checked(readout, query) for readout, query in zip(made, queries, strict=True)]


_QUERY: Final = operator.attrgetter("query")


def _checked(readout: Any, query: RowQuery) -> Readout:
    if not isinstance(readout, Readout):
        raise OptionTypeError(f"readout must return a Readout of its query, got {shown(readout)}")
    if getattr(readout, "query", None) is not query:
        name = type(readout).__name__
        raise OptionTypeError(
            f"readout must return a Readout of its query, got a {name} of another query or none"
        )
    try:
        hash(readout)
    except TypeError as error:
        raise OptionTypeError(f"readout must return a hashable Readout: {error}") from error
    return readout


@final
@dataclass(frozen=True, slots=True)
class Top(Readout):
    """The ``k`` most probable tokens after a context; the answer is a ``TopTokens``."""

    query: RowQuery
    k: int
    wanted: ClassVar[str] = "TopTokens of k tokens for a Top"
    modifies_rows: ClassVar[bool] = False

    @classmethod
    def of_rows(cls, readouts: Sequence[Any], rows: torch.Tensor) -> Sequence[Any]:
        if rows.is_cpu:
            pairs = zip(readouts, rows.numpy(), strict=True)
            return [_top_here(readout.k, row) for readout, row in pairs]
        answers: list[Any] = [None] * len(readouts)
        for k in {readout.k for readout in readouts}:
            indices = [i for i, readout in enumerate(readouts) if readout.k == k]
            own = rows if len(indices) == len(rows) else rows[indices]
            values, ids = _largest(own, k)
            rest = log_sums(own.scatter(1, ids, -torch.inf)).tolist()
            parts = zip(ids.cpu().unbind(), values.cpu().unbind(), rest, strict=True)
            for index, (of_row, logprobs, log_rest) in zip(indices, parts, strict=True):
                answers[index] = TopTokens(of_row.clone(), logprobs.clone(), log_rest)
        return answers

    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        return (
            isinstance(answer, TopTokens)
            and _is_vector(answer.token_ids, torch.int64, self.k)
            and _is_vector(answer.logprobs, torch.float32, self.k)
            and bool(((answer.token_ids >= 0) & (answer.token_ids < vocab_size)).all())
            and isinstance(answer.log_rest, float)
        )


@final
@dataclass(frozen=True, slots=True)
class Chosen(Readout):
    """Log-probabilities of chosen tokens after a context: float32 ``[len(token_ids)]``."""

    query: RowQuery
    token_ids: tuple[int, ...]
    wanted: ClassVar[str] = "a tensor of float32 [len(token_ids)] for a Chosen"
    modifies_rows: ClassVar[bool] = False

    @classmethod
    def of_rows(cls, readouts: Sequence[Any], rows: torch.Tensor) -> Sequence[Any]:
        sizes = [len(readout.token_ids) for readout in readouts]
        ids = [token_id for readout in readouts for token_id in readout.token_ids]
        columns = torch.tensor(ids, dtype=torch.int64, device=rows.device)
        own = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(rows.device)
        return [part.clone() for part in rows[own, columns].cpu().split(sizes)]

    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        return _is_vector(answer, torch.float32, len(self.token_ids))


@final
@dataclass(frozen=True, slots=True)
class Entropy(Readout):
    """Entropy of the next-token distribution, in nats: a ``float``, summed in float64."""

    query: RowQuery
    wanted: ClassVar[str] = "a float for an Entropy"
    modifies_rows: ClassVar[bool] = False

    @classmethod
    def of_rows(cls, readouts: Sequence[Any], rows: torch.Tensor) -> Sequence[Any]:
        if rows.is_cpu:
            return [_entropy_here(row) for row in rows.numpy()]
        values = _double(rows)
        # Probability 0 must add 0 to the entropy, but 0 × -inf is NaN: clamp to a finite number.
        return (-(values.exp() * values.clamp(min=-1e6)).sum(-1)).tolist()

    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        return isinstance(answer, float)


@final
@dataclass(frozen=True, slots=True)
class Masses(Readout):
    """Log-masses of groups of tokens after a context: float64 ``[len(groups)]``."""

    query: RowQuery
    groups: tuple[bytes, ...]
    wanted: ClassVar[str] = "a tensor of float64 [len(groups)] for Masses"
    modifies_rows: ClassVar[bool] = False

    @classmethod
    def of_rows(cls, readouts: Sequence[Any], rows: torch.Tensor) -> Sequence[Any]:
        asked = [(row, group) for row, own in enumerate(readouts) for group in own.groups]
        places: defaultdict[bytes, list[int]] = defaultdict(list)
        for place, (_, group) in enumerate(asked):
            places[group].append(place)
        sums = list[torch.Tensor]()
        for group, own in places.items():
            bits = np.unpackbits(np.frombuffer(group, np.uint8), count=rows.shape[1])
            ids = torch.from_numpy(np.flatnonzero(bits)).to(rows.device)
            of_group = [asked[place][0] for place in own]
            if rows.is_cpu:  # one row at a time fits in the CPU cache
                sums += [log_sums(rows[row][ids][None]) for row in of_group]
            else:
                theirs = rows if of_group == [*range(len(rows))] else rows[of_group]
                sums.append(log_sums(theirs.index_select(1, ids)))
        found = torch.empty(len(asked), dtype=torch.float64)
        if sums:
            found[[place for own in places.values() for place in own]] = torch.cat(sums).cpu()
        sizes = [len(readout.groups) for readout in readouts]
        return [part.clone() for part in found.clamp_(max=0).split(sizes)]

    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        return _is_vector(answer, torch.float64, len(self.groups))


def masses_of(groups: Any, vocab_size: int) -> ReadoutOf:
    return partial(Masses, groups=packed_groups(groups, vocab_size))


def packed_groups(groups: Any, vocab_size: int) -> tuple[bytes, ...]:
    """Check groups of tokens; return the packed mask of each."""
    packed = list[bytes]()
    for i, group in enumerate(listed("groups", groups)):
        mask = packed_mask(group, vocab_size, True, f"groups[{i}]")
        if mask is None:
            raise OptionTypeError(f"groups[{i}] must be token ids or a mask, got None")
        packed.append(mask)
    return tuple(packed)


def top_of(k: Any, vocab_size: int) -> ReadoutOf:
    return partial(Top, k=integer(1, vocab_size)("k", k))


def own_top(found: TopTokens, str_vocab: Sequence[str]) -> TopTokens:
    """Return a copy of ``found`` with texts; other callers may have received the original."""
    top = TopTokens(found.token_ids.clone(), found.logprobs.clone(), found.log_rest)
    ids: list[int] = found.token_ids.tolist()
    top.texts = tuple([str_vocab[i] for i in ids])
    return top


def chosen_of(chosen: Any, vocab_size: int) -> ReadoutOf:
    if isinstance(chosen, Set):
        raise OptionTypeError(f"chosen must be ordered, got a {type(chosen).__name__}")
    values = as_ids_or_bools("chosen", chosen)
    values = values.tolist() if isinstance(values, np.ndarray) else values
    ids = tuple(_IDS("chosen", values))
    check_known_ids("chosen", ids, vocab_size)
    return partial(Chosen, token_ids=ids)


_IDS: Final = sequence(integer(), "a collection of token ids")


def _is_vector(answer: Any, dtype: torch.dtype, size: int) -> bool:
    is_tensor = isinstance(answer, torch.Tensor) and answer.dtype is dtype
    return is_tensor and answer.shape == (size,) and not answer.requires_grad


# Functions for the CPU take one row at a time, which fits in the CPU cache, and reuse memory.

_NUM_BLOCKS: Final = 64


def _top_here(k: int, row: NDArray[np.float32]) -> TopTokens:
    width = len(row) // _NUM_BLOCKS
    if k <= width // 2:
        # ``least``, the k-th largest of the columns' maxima, is a lower bound of the row's k-th
        # largest number. So only the tail and the columns that reach the bound are searched.
        blocks = row[: width * _NUM_BLOCKS].reshape(_NUM_BLOCKS, width)
        largest = np.maximum.reduce(blocks, axis=0)
        least = np.partition(largest, -k)[-k]
        offsets, columns = np.nonzero(blocks[:, own := np.flatnonzero(largest >= least)] >= least)
        (behind,) = np.nonzero(row[width * _NUM_BLOCKS :] >= least)
        ids = np.concatenate([offsets * width + own[columns], behind + width * _NUM_BLOCKS])
    else:
        ids = np.arange(len(row))
    ids = ids[np.argsort(-row[ids], kind="stable")[:k]]
    logprobs = row[ids]
    memory = spare_memory.take_array(row.shape, np.float32)
    with np.errstate(under="ignore"):
        np.exp(row, out=memory)
        memory[ids] = 0
        rest = float(memory.sum(dtype=np.float64))
        log_rest = math.log(rest) if rest > _TINY else _log_rest(row, ids)
    return TopTokens(torch.from_numpy(ids), torch.from_numpy(logprobs), log_rest)


_TINY: Final = 1e-25
"""Up to this sum, float32 probabilities may have underflowed: the sum is recomputed in float64."""


def _log_rest(row: NDArray[np.float32], ids: NDArray[np.int64]) -> float:
    others = np.delete(row, ids).astype(np.float64)
    largest = others.max(initial=-np.inf)
    if largest == -np.inf:
        return -math.inf
    return float(largest) + math.log(np.exp(others - largest).sum())


def _entropy_here(row: NDArray[np.float32]) -> float:
    logprobs, weighted = (spare_memory.take_array(row.shape, np.float64) for _ in range(2))
    # Probability 0 must add 0 to the entropy, but 0 × -inf is NaN: clamp to a finite number.
    np.maximum(row, -1e6, out=logprobs)
    with np.errstate(under="ignore"):
        np.exp(logprobs, out=weighted)
    np.multiply(weighted, logprobs, out=weighted)  # np.dot would wake the threads of BLAS
    return 0.0 - float(weighted.sum())


# Functions for any device take several rows at once.


def _largest(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's ``k`` largest numbers and their indices; ties take the first indices."""
    values, ids = rows.topk(k, -1)
    least = values[:, -1:]
    for i in ((rows >= least).sum(-1) > k).nonzero()[:, 0].tolist():  # ties at the k-th number
        larger = ids[i][values[i] > least[i]]
        equal = (rows[i] == least[i]).nonzero()[: k - len(larger), 0]
        ids[i] = torch.cat([larger, equal])
    ids = ids.sort(-1).values
    values = rows.gather(1, ids)
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def log_sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the log-mass of each row of log-probabilities, summed in float64."""
    if rows.shape[-1] == 0:
        return _double(rows).sum(-1).log()
    largest = rows.amax(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).min)
    shares = (rows - largest).exp_()
    if rows.device.type == "mps":
        shares = shares.cpu()
    sums = shares.sum(-1, dtype=torch.float64)
    return largest[:, 0].to(sums) + sums.log()


def _double(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as float64; those on "mps", which has no float64, are copied to the CPU."""
    return (rows.cpu() if rows.device.type == "mps" else rows).double()
