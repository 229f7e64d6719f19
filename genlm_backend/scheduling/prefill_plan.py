"""Plans which tokens go through the model, in which order and in which passes.

The uncached tokens of a batch become *chunks*, which contexts share. Contexts that branch off
wait for the next *wave*, or recompute the shared tokens if that costs less than another pass. The
chunks of a wave become *groups*, one forward pass each, so that short chunks are not padded to the
length of long ones. A chunk's *outputs* are the positions after which logits are needed, each with
the *jobs* (scheduled queries) that need these logits.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.forward_batch import TokenChunk
from genlm_backend.queries.context import Context, common_length
from genlm_backend.queries.query import Query
from genlm_backend.queries.row import Row
from genlm_backend.readouts.score_query import NO_EXTRAS, ScoreExtras

_MANY: Final = 32
"""Recomputing at least this many tokens costs more than an extra pass that keeps a state."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Limits and costs of forward passes; the unit of cost is one token in a large pass."""

    per_forward: float = 8.0
    per_past_token: float = 1 / 256
    max_chunk: int = 1024
    max_tokens: int = 4096
    max_outputs: int = 512
    max_rows: int = 1 << 30

    @classmethod
    def on(cls, device: str) -> Self:
        """Return the costs of passes on a kind of device, such as "cpu" or "cuda"."""
        if device == "cpu":
            return cls()
        # A GPU needs as long to read the weights once as to compute about a hundred tokens.
        return cls(per_forward=128.0, per_past_token=1 / 64, max_chunk=2048, max_tokens=16384)

    def of(self, num_rows: int, num_new: int, prefix_len: int) -> float:
        """Return the cost of a pass of ``num_rows`` rows, padded to the given numbers of tokens."""
        return self.per_forward + num_rows * (
            num_new + self.per_past_token * (prefix_len + num_new)
        )


PICTURES: Final = attrgetter("context.pictures")


def first_output(query: Query) -> int:
    """Return the first position of a query's context after which it needs logits."""
    return len(query.context) - (query.num_targets or 1)


@final
@dataclass(slots=True, eq=False)
class ScheduledQuery:
    """A query of the current batch, and its results."""

    context: Context
    node: int = 0
    start: int = 0
    targets: tuple[int, ...] = ()
    stop: int = field(init=False)
    first: int = field(init=False)
    missing: array[int] = field(init=False)
    position_offset: int = 0
    num_known: int = 0
    row: Row | None = None
    beside: ScoreExtras = NO_EXTRAS
    scores: NDArray[np.float64] = field(init=False)  # [num_targets, beside.width] float64

    def __post_init__(self) -> None:
        self.stop = len(self.context)
        self.first = self.stop - (len(self.targets) or 1)
        self.missing = self.context.packed(self.start)
        self.scores = np.zeros((len(self.targets), self.beside.width))

    @classmethod
    def of(cls, query: Query, node: int = 0, start: int = 0) -> Self:
        return cls(query.context, node, start, query.targets, beside=query.beside or NO_EXTRAS)

    @property
    def outputs(self) -> range:
        """All positions after which logits are needed."""
        return range(self.first, self.stop)

    def outputs_in(self, start: int, stop: int) -> range:
        """Return the positions in ``[start, stop)`` after which logits are needed."""
        return range(max(start, self.first), min(stop, self.stop))

    def parts(self, size: int) -> list[range]:
        """Return all outputs, divided into parts of at most ``size``."""
        outputs = self.outputs
        return [outputs[i : i + size] for i in range(0, len(outputs), size)]

    def has_nan(self, outputs: Iterable[int]) -> bool:
        """Return whether the row, or a score at one of these outputs, is NaN."""
        if self.row is not None:
            return self.row.is_nan
        if not self.targets:
            return False
        own = self.scores[:, 0]
        if isinstance(outputs, range) and outputs.step == 1:  # a view, without a copy
            own = own[outputs.start - self.first : outputs.stop - self.first]
        else:
            own = own[[i - self.first for i in outputs]]
        return bool(np.isnan(own).any())

    @property
    def answer(self) -> Row | torch.Tensor:
        if self.targets:
            scores = torch.from_numpy(self.scores)
            return scores[:, 0].float() if self.beside == NO_EXTRAS else scores.clone()
        assert self.row is not None
        return self.row


@dataclass(slots=True, eq=False)
class PrefillChunk:
    """Consecutive tokens to compute, for all contexts that share them."""

    job: ScheduledQuery
    start: int
    stop: int
    parent: PrefillChunk | None
    wave: int
    outputs: dict[int, list[ScheduledQuery]] = field(default_factory=dict)
    nodes: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    num_behind: int = 0

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def token_ids(self) -> array[int]:
        first = self.job.start
        return self.job.missing[self.start - first : self.stop - first]

    @property
    def size(self) -> Size:
        return Size(self.num_tokens, self.start, len(self.outputs))

    @property
    def before(self) -> int:
        """Node of the token before the chunk, cached or appended in this batch."""
        if self.parent is None:
            return self.job.node
        return int(self.parent.nodes[self.start - self.parent.start - 1])

    def by_token(self) -> list[PrefillChunk]:
        found = list[PrefillChunk]()
        for i, start in enumerate(range(self.start, self.stop)):
            own = {start: self.outputs[start]} if start in self.outputs else {}
            one = PrefillChunk(self.job, start, start + 1, self if i else self.parent, 0, own)
            one.nodes = self.nodes[i : i + 1]
            found.append(one)
        return found

    def token_chunk(self, slots: NDArray[np.int32]) -> TokenChunk:
        """Return the chunk's tokens as the input of a pass, with slots and output indices."""
        return TokenChunk(
            token_ids=self.token_ids,
            slots=slots,
            outputs=[position - self.start for position in self.outputs],
            position_offset=self.job.position_offset,
        )


class StatePlan(NamedTuple):
    """Whether a pass may continue a state by several tokens, and whether there are few states."""

    takes_several_tokens: bool
    is_short: bool = False


class Size(NamedTuple):
    """Size of one row of a forward pass."""

    num_new: int
    prefix_len: int
    num_outputs: int = 1


def plan_chunks(
    jobs: Sequence[ScheduledQuery], cost: CostModel, states: StatePlan | None = None
) -> list[PrefillChunk]:
    """Return chunks that together answer every job, parents before their children."""
    chunks: list[PrefillChunk] = []
    # Contexts whose cached prefixes end at different nodes share no uncached tokens, or the cache
    # would have matched a longer prefix of one of them. Exception: the targets of a scored text,
    # which are computed even if they are cached.
    by_node: defaultdict[int, list[ScheduledQuery]] = defaultdict(list)
    for job in jobs:
        by_node[job.node].append(job)
    for group in by_node.values():
        start = group[0].start
        if len(group) == 1:
            (job,) = group
            outputs = dict.fromkeys(job.outputs, group)
            chunks.append(PrefillChunk(job, start, job.stop, None, 0, outputs))
            continue
        for part in _split(sorted(group, key=lambda job: job.missing), start):
            if states is None or states.takes_several_tokens or start or _may_part(part, cost):
                _add_chunks(part, start, start, None, 0, cost, chunks)
            else:
                for job in part:
                    _add_chunks([job], start, start, None, 0, cost, chunks)
    return _cut_to_size(chunks, cost, states)


def _may_part(jobs: Sequence[ScheduledQuery], cost: CostModel) -> bool:
    """Return whether sharing a prefix saves more than continuing it token by token costs."""
    num_shared = common_length(jobs[0].missing, jobs[-1].missing)
    num_passes = max(job.stop for job in jobs) - num_shared
    return num_shared * (len(jobs) - 1) > num_passes * cost.per_forward


def plan_uncached(wanted: Iterable[tuple[ScheduledQuery, Sequence[int]]]) -> list[PrefillChunk]:
    """Return a chunk per pair, from the first token to the last position; merge equal chunks."""
    chunks: dict[Context, PrefillChunk] = {}
    for job, positions in sorted(wanted, key=lambda pair: pair[1][0]):
        stop = positions[-1] + 1
        ids = job.context[:stop]
        chunk = chunks.setdefault(ids, PrefillChunk(job, 0, stop, None, 0))
        for position in positions:
            chunk.outputs.setdefault(position, []).append(job)
    return list(chunks.values())


def _split(jobs: Iterable[ScheduledQuery], position: int) -> list[list[ScheduledQuery]]:
    """Group sorted jobs by the token at ``position``; all of them share a cached prefix."""
    return [list(part) for _, part in groupby(jobs, lambda job: job.missing[position - job.start])]


def _add_chunks(
    part: list[ScheduledQuery],
    start: int,
    answered: int,
    parent: PrefillChunk | None,
    wave: int,
    cost: CostModel,
    chunks: list[PrefillChunk],
) -> None:
    """Add chunks for sorted jobs that share a cached prefix and agree up to ``start``."""
    chunk = PrefillChunk(part[0], start, start, parent, wave)
    chunks.append(chunk)
    while True:
        shared = part[0].stop
        if len(part) > 1:  # sorted: all share the prefix that the first and the last share
            shared = part[0].start + common_length(part[0].missing, part[-1].missing)
        chunk.job, chunk.stop = part[-1], shared
        for job in part:
            # Another chunk already has the outputs before ``answered``.
            for position in job.outputs_in(answered, shared):
                chunk.outputs.setdefault(position, []).append(job)
        answered = shared
        branches = _split((job for job in part if job.stop > shared), shared)
        if not branches:
            return
        # The branch with the most jobs continues this chunk. The others start after the shared
        # tokens in the next wave, or recompute these tokens if that costs less than another pass.
        branches.sort(key=len)
        part = branches.pop()
        num_saved = (shared - start) * len(branches)
        for branch in branches:
            if num_saved > cost.per_forward:
                _add_chunks(branch, shared, shared, chunk, wave + 1, cost, chunks)
            else:
                _add_chunks(branch, start, shared, parent, wave, cost, chunks)


def _cut_to_size(
    chunks: list[PrefillChunk], cost: CostModel, states: StatePlan | None
) -> list[PrefillChunk]:
    """Cut chunks to the size limits, and at positions whose recurrent states are to be kept."""
    cut: list[PrefillChunk] = []
    by_origin: dict[PrefillChunk, list[PrefillChunk]] = {}
    cuts: defaultdict[PrefillChunk, list[int]] = defaultdict(list)
    for chunk in chunks:
        if states is None:
            break
        if chunk.parent is not None:
            cuts[chunk.parent].append(chunk.start)
        if not states.is_short:
            cuts[chunk].extend(_later_starts(chunk, cost, states))
    for chunk in chunks:
        parent = chunk.parent
        is_whole = chunk.num_tokens <= cost.max_chunk and len(chunk.outputs) <= 1
        if parent is None and is_whole and not cuts[chunk]:
            by_origin[chunk] = [chunk]
            cut.append(chunk)
            continue
        if parent is not None:  # the first piece that reaches this chunk's start
            parent = next(c for c in by_origin[parent] if c.stop >= chunk.start)
        pieces = by_origin[chunk] = []
        positions, start, first = sorted(chunk.outputs), chunk.start, 0
        while start < chunk.stop:
            ends = [start + cost.max_chunk, *cuts[chunk], chunk.stop]
            stop = min(end for end in ends if end > start)
            end = bisect_left(positions, stop)
            if end - first > cost.max_outputs:
                end = first + cost.max_outputs
                stop = positions[end]
            wave = 0 if parent is None else parent.wave + 1
            outputs = {position: chunk.outputs[position] for position in positions[first:end]}
            if parent is not None and parent.stop == start:
                parent.num_behind += 1
            parent = PrefillChunk(chunk.job, start, stop, parent, wave, outputs)
            pieces.append(parent)
            start, first = stop, end
        cut.extend(pieces)
    return cut


def _later_starts(chunk: PrefillChunk, cost: CostModel, states: StatePlan) -> Iterator[int]:
    """Yield positions in a chunk at which later contexts may well continue from a state."""
    known = chunk.job.num_known
    is_far = not states.takes_several_tokens and chunk.start == 0
    is_far = is_far and (chunk.stop - known) * cost.per_forward > chunk.stop
    # This context branches off cached contexts at ``known``; later contexts may do so as well.
    if known - chunk.start >= _MANY and known < chunk.stop and not is_far:
        yield known
    # A repeated query, or a score of a continuation, starts at the context's last token.
    if chunk.num_tokens >= _MANY:
        yield chunk.stop - 1


def cut_to_sound(chunks: Sequence[PrefillChunk]) -> None:
    """Drop each chunk's tokens after the last one that a result without NaN depends on."""
    # If a row or score is not NaN, neither are the keys and values that it was computed from.
    stops = {chunk: chunk.start for chunk in chunks}
    for chunk in chunks:
        for position, jobs in chunk.outputs.items():
            if all(job.has_nan(range(position, position + 1)) for job in jobs):
                continue
            read: PrefillChunk | None = chunk
            stop = position + 1
            while read is not None and stops[read] < stop:
                stops[read], stop, read = stop, read.start, read.parent
    for chunk, stop in stops.items():
        chunk.stop = stop


def plan_waves(chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Return the chunks by wave, in order of execution: a wave needs only earlier waves."""
    waves: list[list[PrefillChunk]] = [[] for _ in range(1 + max(s.wave for s in chunks))]
    for chunk in chunks:
        waves[chunk.wave].append(chunk)
    return waves


def plan_groups(
    sizes: Sequence[Size],
    cost: CostModel,
    *,
    pads: bool = True,
    needs_equal_lengths: bool = False,
    has_states: bool = False,
) -> list[list[int]]:
    """Divide rows into forward passes of low total cost; return the row indices of each pass."""
    if needs_equal_lengths or has_states:
        kinds: defaultdict[int, list[int]] = defaultdict(list)
        for i, size in enumerate(sizes):
            kinds[size.prefix_len if needs_equal_lengths else min(size.prefix_len, 1)].append(i)
        return [
            [rows[i] for i in group]
            for rows in kinds.values()
            for group in _groups([sizes[i] for i in rows], cost, pads and not has_states)
        ]
    return _groups(sizes, cost, pads)


def _groups(sizes: Sequence[Size], cost: CostModel, pads: bool) -> list[list[int]]:
    """Divide rows at the cheapest candidate boundaries, by dynamic programming."""
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    cuts = [0]  # candidate boundaries; rows of about the same size stay together
    for rank in range(1, len(order)):
        (new, past, _), (base_new, base_past, _) = sizes[order[rank]], sizes[order[cuts[-1]]]
        most = base_new + base_new // 8 if pads else base_new
        if new > most or past > 2 * base_past + 64 or past * 2 + 64 < base_past:
            cuts.append(rank)
    cuts.append(len(order))
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(cuts)):
        options = []
        for start in range(max(0, end - 32) if pads else end - 1, end):
            rows = [sizes[i] for i in order[cuts[start] : cuts[end]]]
            num_new = max(row.num_new for row in rows)
            prefix_len = max(row.prefix_len for row in rows)
            num_outputs = sum(row.num_outputs for row in rows)
            num_passes = max(
                -(-len(rows) * num_new // max(cost.max_tokens, num_new)),
                -(-num_outputs // max(cost.max_outputs, len(rows))),
                -(-len(rows) // cost.max_rows),
            )
            total = best[start][0] + cost.of(len(rows), num_new, prefix_len)
            options.append((total + (num_passes - 1) * cost.per_forward, start))
        best.append(min(options))
    groups: list[list[int]] = []
    end = len(cuts) - 1
    while end > 0:
        start = best[end][1]
        groups.extend(_cut(order[cuts[start] : cuts[end]], sizes, cost))
        end = start
    return groups[::-1]


def _cut(run: Sequence[int], sizes: Sequence[Size], cost: CostModel) -> list[list[int]]:
    """Cut a group into passes; a pass may exceed limits if it has one row or one output per row."""
    max_rows = max(1, cost.max_tokens // max(sizes[i].num_new for i in run))
    max_rows = min(max_rows, cost.max_rows)
    groups: list[list[int]] = [[]]
    num_outputs = 0
    for i in run:
        num_outputs += sizes[i].num_outputs
        is_full = num_outputs > max(cost.max_outputs, len(groups[-1]) + 1)
        if groups[-1] and (len(groups[-1]) == max_rows or is_full):
            groups.append([])
            num_outputs = sizes[i].num_outputs
        groups[-1].append(i)
    return groups
