"""Which tokens go through the model, in which order and in which company; pure, no tensors.

A batch of contexts, each with a cached prefix, becomes *segments*: stretches of tokens that no
cache has. Contexts of one batch that share tokens beyond what is cached share a segment too; those
that branch off it wait for the next *wave*. The segments of a wave become *groups*, one forward
pass each, such that short segments do not pay for the padding of long ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Self

from genlm_backend.cache import Match, Run
from genlm_backend.common_prefix import common_length
from genlm_backend.llm.hf.packing import Span
from genlm_backend.llm.row import Row


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a forward pass costs, in units of one token's share of a large pass.

    Attributes:
        per_forward: Cost of any pass, however small: reading the weights, launching the kernels.
        per_past_token: Cost of one cached token of one row: gathering and attending to it.
        max_segment: Number of tokens of one context in one pass, at most; longer ones go in chunks.
        max_tokens: Number of tokens of one pass, padding included, at most.
    """

    per_forward: float = 8.0
    per_past_token: float = 1 / 256
    max_segment: int = 1024
    max_tokens: int = 4096

    @classmethod
    def on(cls, device: str) -> Self:
        """Return what passes cost on a kind of device, such as "cpu" or "cuda"."""
        if device == "cpu":
            return cls()
        # A GPU reads its weights for one token in the time that it computes some hundred in.
        return cls(per_forward=128.0, per_past_token=1 / 64, max_segment=2048, max_tokens=16384)

    def of(self, num_rows: int, num_new: int, num_past: int) -> float:
        """Cost of a pass of ``num_rows`` rows padded to these lengths."""
        return self.per_forward + num_rows * (num_new + self.per_past_token * (num_past + num_new))


@dataclass(slots=True, eq=False)
class Job:
    """One context on its way to its row.

    Attributes:
        token_ids: The whole context.
        match: Its cached prefix, shorter than the context; replaced by longer ones as its tokens
            are inserted into the tree.
        row: What comes of it.
    """

    token_ids: tuple[int, ...]
    match: Match
    row: Row | None = None


@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive tokens to compute, of one context on behalf of all that share them.

    Attributes:
        job: A context that has these tokens.
        start: Position of the first one.
        stop: Position after the last one.
        parent: The segment that computes what lies between the cached prefix and ``start``, or
            ``None`` where nothing does.
        wave: Number of waves that must have been computed before.
        outputs: Position and context of each row that is wanted: the one after that position.
        slots: Where the keys and values of its tokens go, once there are slots for them.
    """

    job: Job
    start: int
    stop: int
    parent: Segment | None
    wave: int
    outputs: list[tuple[int, Job]] = field(default_factory=list)
    slots: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute."""
        return self.stop - self.start

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens to compute."""
        return self.job.token_ids[self.start : self.stop]

    def span(self) -> Span:
        """Return what the forward pass takes: the tokens, and the slots of those before them."""
        computed: list[Run] = []  # by earlier waves of this batch
        ancestor, position = self.parent, self.start
        while ancestor is not None:
            computed.append(Run(ancestor, ancestor.slots, position - ancestor.start))
            position, ancestor = ancestor.start, ancestor.parent
        return Span(
            token_ids=self.token_ids,
            past=(*self.job.match.runs(), *reversed(computed)),
            slots=self.slots,
            outputs=[position - self.start for position, _ in self.outputs],
        )


def plan_segments(jobs: Sequence[Job], cost: CostModel) -> list[Segment]:
    """Return segments that together answer every job, parents before their children.

    The jobs are distinct contexts of one adapter.
    """
    segments: list[Segment] = []

    def order(job: Job) -> tuple[int, tuple[int, ...]]:
        return job.match.num_tokens, job.token_ids

    # Contexts with different cached lengths share nothing uncached: had they more in common
    # than the shorter length, the cache would have found it for both.
    for start, group in groupby(sorted(jobs, key=order), lambda job: job.match.num_tokens):
        for part in _split(group, start, from_beginning=True):
            _place(part, start, None, 0, cost, segments)
    return _chunk(segments, cost.max_segment)


def _split(jobs: Iterable[Job], position: int, from_beginning: bool = False) -> list[list[Job]]:
    """Group sorted jobs by the token at ``position`` (by all tokens up to it, where asked)."""

    def key(job: Job) -> tuple[int, ...]:
        return job.token_ids[0 if from_beginning else position : position + 1]

    return [list(part) for _, part in groupby(jobs, key)]


def _place(
    part: list[Job],
    start: int,
    parent: Segment | None,
    wave: int,
    cost: CostModel,
    segments: list[Segment],
) -> None:
    """Add segments for sorted jobs that agree up to and including position ``start``."""
    segment = Segment(part[0], start, start, parent, wave)
    segments.append(segment)
    while True:
        shared = len(part[0].token_ids)
        if len(part) > 1:  # of sorted contexts, what the first and the last share all share
            shared = common_length(part[0].token_ids, part[-1].token_ids)
        segment.job, segment.stop = part[-1], shared
        ending = [job for job in part if len(job.token_ids) == shared]
        segment.outputs.extend((shared - 1, job) for job in ending)
        branches = _split((job for job in part if len(job.token_ids) > shared), shared)
        if not branches:
            return
        # The most wanted branch goes on in this very row. The others wait for the shared tokens,
        # or, where a pass more costs more than these, compute them again.
        branches.sort(key=len)
        part = branches.pop()
        num_saved = (shared - start) * len(branches)
        for branch in branches:
            if num_saved > cost.per_forward:
                _place(branch, shared, segment, wave + 1, cost, segments)
            else:
                _place(branch, start, parent, wave, cost, segments)


def _chunk(segments: list[Segment], size: int) -> list[Segment]:
    """Cut segments into chains of at most ``size`` tokens each."""
    chunks: list[Segment] = []
    by_origin: dict[Segment, list[Segment]] = {}
    for segment in segments:
        parent = segment.parent
        if parent is not None:  # the first chunk that reaches this segment's start
            parent = next(c for c in by_origin[parent] if c.stop >= segment.start)
        pieces = by_origin[segment] = []
        for start in range(segment.start, segment.stop, size):
            stop = min(start + size, segment.stop)
            wave = 0 if parent is None else parent.wave + 1
            outputs = [(p, job) for p, job in segment.outputs if start <= p < stop]
            parent = Segment(segment.job, start, stop, parent, wave, outputs)
            pieces.append(parent)
        chunks.extend(pieces)
    return chunks


def plan_waves(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return the segments in order of execution: each wave needs only the ones before it."""
    waves: list[list[Segment]] = [[] for _ in range(1 + max(s.wave for s in segments))]
    for segment in segments:
        waves[segment.wave].append(segment)
    return waves


def plan_groups(sizes: Sequence[tuple[int, int]], cost: CostModel) -> list[list[int]]:
    """Divide rows into forward passes of the least total cost.

    Args:
        sizes: Number of new tokens and number of past tokens of each row.
        cost: What a pass costs.

    Returns:
        Groups of indices into ``sizes``. Rows are sorted by size and cut into runs by dynamic
        programming over the places where the size changes.
    """
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    cuts = [0]  # candidate boundaries; rows of about one size are never parted
    for rank in range(1, len(order)):
        (new, past), (base_new, base_past) = sizes[order[rank]], sizes[order[cuts[-1]]]
        if new > base_new + base_new // 8 or past > 2 * base_past + 64 or past * 2 + 64 < base_past:
            cuts.append(rank)
    cuts.append(len(order))
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(cuts)):
        options = []
        for start in range(max(0, end - 32), end):
            rows = [sizes[i] for i in order[cuts[start] : cuts[end]]]
            num_new, num_past = max(n for n, _ in rows), max(p for _, p in rows)
            num_passes = -(-len(rows) * num_new // max(cost.max_tokens, num_new))
            options.append(
                (
                    best[start][0]
                    + cost.of(len(rows), num_new, num_past)
                    + (num_passes - 1) * cost.per_forward,
                    start,
                )
            )
        best.append(min(options))
    groups: list[list[int]] = []
    end = len(cuts) - 1
    while end > 0:
        start = best[end][1]
        run = order[cuts[start] : cuts[end]]
        rows_per_pass = max(1, cost.max_tokens // max(sizes[i][0] for i in run))
        groups.extend(run[i : i + rows_per_pass] for i in range(0, len(run), rows_per_pass))
        end = start
    return groups[::-1]
