"""ScoreQuery: a query for the log-probabilities of a text's tokens, instead of a row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, TypedDict, final

import numpy as np
import torch

from genlm_backend.checks import Option, integer, listed, switch
from genlm_backend.errors import OptionError
from genlm_backend.queries.context import Context, ContextFactory, is_one_context
from genlm_backend.queries.query import Adapter, Query, RowQuery
from genlm_backend.readouts.draw import Allowed
from genlm_backend.readouts.token_readouts import Entropy, Masses, Top, log_sums, packed_groups
from genlm_backend.tokenization import Alphabet


class TokenScores(NamedTuple):
    """Numbers for each of the ``n`` tokens of a continuation, from the row of the tokens before it.

    Numbers that were not requested are ``None``. If a row has a NaN, its numbers are NaN, and its
    ids and ranks are -1.

    Attributes:
        logprobs: The token's log-probability: float32 ``[n]``.
        entropies: The entropy of the row, in nats: float64 ``[n]``.
        ranks: Number of tokens that are more probable, or equally probable with a smaller id; 0
            for the token of greedy decoding: int64 ``[n]``.
        top_token_ids: Ids of the ``k`` most probable tokens, in the order of ``TopTokens``: int64
            ``[n, k]``.
        top_logprobs: Log-probabilities of ``top_token_ids``: float32 ``[n, k]``.
        log_rest: Log-mass of all tokens but ``top_token_ids``: float64 ``[n]``.
        log_masses: Log-masses of groups of tokens: float64 ``[n, groups]``.
        log_beginnings: For a token of ``m`` bytes, column ``j < m - 1`` is the log-mass of all text
            tokens with the same first ``j + 1`` bytes, or the token's log-probability if the token
            is special. Other columns are ``-inf``: float64 ``[n, max(m) - 1]``.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    top_token_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    log_rest: torch.Tensor | None = None
    log_masses: torch.Tensor | None = None
    log_beginnings: torch.Tensor | None = None


@final
class BytePrefixIntervals(NamedTuple):
    """The tokens that share first bytes with given tokens, as intervals of ``Alphabet.order``."""

    order: bytes
    token_ids: bytes  # int32 [n]: the n given tokens, ascending
    bounds: bytes  # int32 [n, width, 2], of ``Alphabet.intervals``
    width: int

    def log_masses(self, rows: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
        """Return log-masses of tokens with each target's first 1, 2, … bytes: ``[n, width]``."""
        found = torch.full((len(rows), self.width), -torch.inf, dtype=torch.float64)
        if not self.width:
            return found
        order = torch.from_numpy(np.frombuffer(self.order, np.int32).astype(np.int64))
        order = order.to(rows.device)
        places = np.searchsorted(np.frombuffer(self.token_ids, np.int32), np.array(targets))
        bounds = np.frombuffer(self.bounds, np.int32).reshape(-1, self.width, 2)[places].tolist()
        sums, cells = list[torch.Tensor](), list[tuple[int, int]]()
        for i, (row, own) in enumerate(zip(rows, bounds, strict=True)):
            first, stop = own[0]
            weights = row[order[first:stop]]  # the first interval contains all others
            for k, (start, stop) in enumerate(own):
                if start == stop:
                    break
                sums.append(log_sums(weights[None, start - first : stop - first]))
                cells.append((i, k))
        if sums:
            i, k = torch.tensor(cells, dtype=torch.int64).T
            found[i, k] = torch.cat(sums).clamp_(max=0).cpu()
        return found


def beginnings_of(alphabet: Alphabet, token_ids: Iterable[int]) -> BytePrefixIntervals:
    own = sorted(set(token_ids))
    bounds = alphabet.intervals(own)
    ids = np.array(own, np.int32).tobytes()
    return BytePrefixIntervals(alphabet.order, ids, bounds.tobytes(), bounds.shape[1])


class ScoreExtras(NamedTuple):
    """Further numbers to return for each token of a text, with the layout of their columns.

    The columns are the log-probability and, if requested: entropy; rank; ids of the most probable
    tokens, their log-probabilities, and the log-mass of all others; log-masses of groups;
    log-masses of tokens with the same first bytes. A float64 holds any id or float32 exactly.

    Attributes:
        entropy: Whether to return the entropy of the row.
        rank: Whether to return the rank of the token in its row.
        top: Number of most probable tokens to return; 0 for none.
        groups: The groups whose log-masses to return, each with one bit per token, in the format of
            ``packed_mask``.
        beginnings: The tokens that share first bytes with each token; ``None`` if not requested.
    """

    entropy: bool = False
    rank: bool = False
    top: int = 0
    groups: tuple[bytes, ...] = ()
    beginnings: BytePrefixIntervals | None = None

    @property
    def width(self) -> int:
        """Number of columns."""
        top = 2 * self.top + 1 if self.top else 0
        return 1 + self.entropy + self.rank + top + len(self.groups) + self._num_beginnings

    @property
    def _num_beginnings(self) -> int:
        return 0 if self.beginnings is None else self.beginnings.width

    def scores_of(self, columns: torch.Tensor) -> TokenScores:
        """Split columns, as ``numbers_of_rows`` returns them, into ``TokenScores``."""
        if self == NO_EXTRAS:
            return TokenScores(columns)
        sizes = [1, int(self.entropy), int(self.rank), self.top, self.top, int(self.top > 0)]
        parts = columns.split([*sizes, len(self.groups), self._num_beginnings], -1)
        logprobs, entropies, ranks, ids, top, rest, masses, beginnings = parts
        return TokenScores(
            logprobs[:, 0].float(),
            entropies[:, 0].clone() if self.entropy else None,
            ranks[:, 0].nan_to_num(-1).long() if self.rank else None,
            ids.nan_to_num(-1).long() if self.top else None,
            top.float() if self.top else None,
            rest[:, 0].clone() if self.top else None,
            masses.clone() if self.groups else None,
            None if self.beginnings is None else beginnings.clone(),
        )


NO_EXTRAS: Final = ScoreExtras()
"""Only log-probabilities."""


class ScoreOptions(TypedDict, total=False):
    """Options for the numbers of each token of a text; ``score_with`` explains them."""

    entropy: Annotated[bool, Option(False, switch)]
    rank: Annotated[bool, Option(False, switch)]
    top: Annotated[int, Option(0, integer(0))]
    groups: Annotated[Sequence[Allowed], Option(())]
    beginnings: Annotated[bool, Option(False, switch)]


def beside_of(options: Mapping[str, Any], vocab_size: int) -> ScoreExtras:
    top = integer(0, vocab_size)("top", options["top"])
    masks = packed_groups(options["groups"], vocab_size)
    return ScoreExtras(options["entropy"], options["rank"], top, masks)


TOKENS_PER_ROW: Final = 200
"""Number of tokens of a scored text that count as much as one row in a batch."""


@final
@dataclass(frozen=True, slots=True)
class ScoreQuery(Query):
    """A text and the index of its first scored token. Equal queries have equal answers.

    The answer is float32 ``[num_targets]``: for each token from ``start`` on, its log-probability
    in the row of the tokens before it. With extras, it is float64 ``[num_targets, beside.width]``,
    whose columns ``ScoreExtras`` lists.

    Attributes:
        text: All tokens, prompt and continuation, and the adapter to read them with.
        start: Number of tokens of the prompt; at least 1.
        beside: The numbers to return for each token, in addition to its log-probability.
    """

    text: RowQuery
    start: int
    beside: ScoreExtras = NO_EXTRAS

    @property
    def adapter(self) -> Adapter | None:
        """The adapter to read the text with, or ``None`` for the base model."""
        return self.text.adapter

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens to score."""
        return tuple(self.text.context.packed(self.start))

    @property
    def num_targets(self) -> int:
        """Number of tokens to score."""
        return len(self.text.context) - self.start

    @property
    def needs_row(self) -> bool:
        """Whether the answer has columns besides log-probabilities, to be computed from rows."""
        return self.beside != NO_EXTRAS

    @property
    def forward_key(self) -> ScoreQuery:
        """The query itself: only equal queries share its computation."""
        return self

    @property
    def context(self) -> Context:
        """The tokens that the model has to read: all but the last."""
        return self.text.context[:-1]

    @property
    def weight(self) -> float:
        """Weight in a batch: the text's length divided by 200; a row counts as 1.

        If each counted as 1, batches of short texts would be too small, and of long ones too large.
        """
        return len(self.text.context) / TOKENS_PER_ROW

    @property
    def wanted(self) -> str:
        """Description of the answer, for error messages."""
        kind = (
            "float32 [{}]" if self.beside == NO_EXTRAS else f"float64 [{{}}, {self.beside.width}]"
        )
        return f"a tensor of {kind.format(self.num_targets)} for a ScoreQuery"

    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        """Return whether ``answer`` is a tensor of the expected dtype and shape."""
        if not isinstance(answer, torch.Tensor) or answer.requires_grad:
            return False
        if self.beside == NO_EXTRAS:
            return answer.dtype is torch.float32 and answer.shape == (self.num_targets,)
        shape = self.num_targets, self.beside.width
        return answer.dtype is torch.float64 and answer.shape == shape


def check_scorings(
    contexts: ContextFactory,
    prompts: Any,
    continuations: Any,
    max_length: int | None = None,
    adapter: Adapter | None = None,
    beside: ScoreExtras = NO_EXTRAS,
) -> list[ScoreQuery]:
    """Return a query per continuation, each after its own prompt or all after one prompt."""
    before, behind = listed("prompts", prompts), listed("continuations", continuations)
    if is_one_context(prompts, before):
        prompt = prompts if isinstance(prompts, Context) else before  # ``listed`` empties iterators
        before = [contexts.check_context(prompt, max_length, name="prompt")] * len(behind)
    if len(before) != len(behind):
        raise OptionError(
            "prompts and continuations must be equal in number, "
            f"got {len(before)} prompts and {len(behind)} continuations: to score one "
            "continuation after each prompt, pass [continuation] * len(prompts)"
        )
    scorings = []
    for prompt, continuation in zip(before, behind, strict=True):
        context = contexts.check_context(prompt, max_length, name="prompt")
        text = context.followed_by(contexts.packed(continuation, name="continuation"))
        if len(text) > len(context):
            contexts.check_context(text[:-1], max_length)
        scorings.append(ScoreQuery(RowQuery(text, adapter), len(context), beside))
    return scorings


def distinct(scorings: Sequence[ScoreQuery]) -> list[ScoreQuery]:
    return [scoring for scoring in dict.fromkeys(scorings) if scoring.num_targets]


def own_scores(
    scorings: Sequence[ScoreQuery],
    found: Mapping[ScoreQuery, torch.Tensor],
    device: torch.device | None,
) -> list[torch.Tensor]:
    """Return a copy of each text's scores on ``device``; ``None`` means where they are."""
    return [
        (found[own] if own.num_targets else _no_scores(own.beside)).to(device, copy=True)
        for own in scorings
    ]


async def scores_of_rows(
    scorings: Sequence[ScoreQuery],
    ask: Callable[[list[RowQuery]], Awaitable[torch.Tensor]],
    chunk_size: int,
) -> list[torch.Tensor]:
    """Return texts' scores from rows; each call of ``ask`` gets up to ``chunk_size`` queries."""
    beside = scorings[0].beside if scorings else NO_EXTRAS
    ends = [range(own.start, len(own.text.context)) for own in scorings]
    places = [(own.text, end) for own, its in zip(scorings, ends, strict=True) for end in its]
    found = list[torch.Tensor]()
    for begin in range(0, len(places), chunk_size):
        chunk = places[begin : begin + chunk_size]
        rows = await ask([text.prefix(end) for text, end in chunk])
        found.append(numbers_of_rows(rows, [text.token_ids[end] for text, end in chunk], beside))
    scores, sizes = torch.cat(found) if found else _no_scores(beside), [*map(len, ends)]
    return [part.clone() for part in scores.split(sizes)]  # a view would keep all scores alive


@torch.inference_mode()
def numbers_of_rows(
    rows: torch.Tensor, targets: Sequence[int], beside: ScoreExtras
) -> torch.Tensor:
    """Return ``ScoreExtras`` columns for each row's target; without extras, log-probabilities."""
    ids = torch.tensor(targets, dtype=torch.int64, device=rows.device)[:, None]
    logprobs = rows.gather(1, ids).float()
    if beside == NO_EXTRAS:
        return logprobs[:, 0]
    is_nan = rows.amax(1).isnan()
    rows = rows.float().masked_fill(is_nan[:, None], 0) if is_nan.any() else rows.float()
    columns = [logprobs[:, 0].double().cpu()]
    query = RowQuery(())
    if beside.entropy:
        entropies = Entropy.of_rows([Entropy(query)] * len(rows), rows)
        columns.append(torch.tensor(entropies, dtype=torch.float64))
    if beside.rank:
        columns.append(_ranks(rows, ids, logprobs).double().cpu())
    if beside.top:
        found = Top.of_rows([Top(query, beside.top)] * len(rows), rows)
        columns += torch.stack([each.token_ids for each in found]).double().unbind(1)
        columns += torch.stack([each.logprobs for each in found]).double().unbind(1)
        columns.append(torch.tensor([each.log_rest for each in found], dtype=torch.float64))
    if beside.groups:
        masses = Masses.of_rows([Masses(query, beside.groups)] * len(rows), rows)
        columns += torch.stack([*masses]).unbind(1)
    if beside.beginnings is not None:
        columns += beside.beginnings.log_masses(rows, targets).unbind(1)
    return torch.stack(columns, 1).masked_fill_(is_nan.cpu()[:, None], torch.nan)


def _ranks(rows: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the rank of one id in each row: int64 ``[n]``."""
    if rows.is_cpu:  # one row at a time fits in the CPU cache
        pairs = zip(rows.numpy(), ids[:, 0].tolist(), logprobs[:, 0].numpy(), strict=True)
        counts = [
            np.count_nonzero(row > own) + np.count_nonzero(row[:i] == own) for row, i, own in pairs
        ]
        return torch.tensor(counts, dtype=torch.int64)
    columns = torch.arange(rows.shape[1], dtype=torch.int64, device=rows.device)
    return ((rows > logprobs) | ((rows == logprobs) & (columns < ids))).sum(1)


def _no_scores(beside: ScoreExtras) -> torch.Tensor:
    if beside == NO_EXTRAS:
        return torch.empty(0, dtype=torch.float32)
    return torch.empty(0, beside.width, dtype=torch.float64)
