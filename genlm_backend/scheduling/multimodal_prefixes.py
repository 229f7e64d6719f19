"""MultimodalPrefixes: computes and caches the openings of contexts that begin with pictures."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.forward_batch import Runner, TokenChunk
from genlm_backend.attention.torch.multimodal_prefill import (
    MultimodalPrefillAttention,
    positions_of,
)
from genlm_backend.multimodal.pictures import Pictures
from genlm_backend.queries.context import Context
from genlm_backend.queries.query import Query, Result
from genlm_backend.scheduling.prefill_plan import ScheduledQuery, first_output
from genlm_backend.scheduling.prefix_cache import PrefixCache

FEW_BEHIND: Final = 64
"""If at most this many tokens follow an opening, the opening's pass may compute them too."""


@final
class MultimodalPrefixes:
    """Computes in one pass a context's opening: its first tokens, among which all pictures lie."""

    def __init__(self, runner: Runner, cache: PrefixCache, run_alone: Callable[..., None]) -> None:
        self._runner, self._cache, self._run_alone = runner, cache, run_alone
        self._offsets: weakref.WeakKeyDictionary[Pictures, int] = weakref.WeakKeyDictionary()

    def begin(self, queries: Sequence[Query]) -> dict[Query, Result]:
        """Cache the queries' openings if possible; return the answers computed in the process."""
        answers: dict[Query, Result] = {}
        for query in queries:
            pictures = query.context.pictures
            if pictures is None:
                continue
            if not pictures.keeps or self._cache.layout.states:
                answers[query] = self.run_uncached(query)
                continue
            answer = self._begun(query, pictures)
            if answer is not None:
                answers[query] = answer
        return answers

    def run_uncached(self, query: Query) -> Result:
        """Return the answer to a query with pictures, computed alone and without the cache."""
        job, pictures = ScheduledQuery.of(query), query.context.pictures
        assert pictures is not None
        # A pass with pictures must contain exactly one image token per picture part. If the text
        # after the opening contains another one, the tokens after the opening get a second pass.
        is_apart = _holds_parts(job, pictures)
        attention = MultimodalPrefillAttention(pictures, self._cache.layout, goes_on=is_apart)
        end, size = pictures.num_tokens, len(query.context)
        if not is_apart:
            self._run_alone(job, _span(job, pictures, size), attention)
            return job.answer
        self._run_alone(job, _span(job, pictures, end), attention)
        outputs = [position - end for position in job.outputs_in(end, size)]
        offset = end + self.position_offset(query.context)
        behind = TokenChunk(job.context.packed(end), outputs=outputs, position_offset=offset)
        self._run_alone(job, behind, attention, end)
        return job.answer

    def position_offset(self, context: Context) -> int:
        """Return position id minus token index for the tokens after the pictures."""
        pictures = context.pictures
        if pictures is None:
            return 0
        if pictures not in self._offsets:
            ids = torch.frombuffer(bytearray(pictures.token_ids), dtype=torch.int32).long()
            _, offset = positions_of(self._runner.model, ids[None], pictures)
            self._offsets[pictures] = offset
        return self._offsets[pictures]

    def _begun(self, query: Query, pictures: Pictures) -> Result | None:
        """Cache an opening if there is room; return the answer, or ``None`` if not yet computed."""
        tree, end, size = self._cache.tree, pictures.num_tokens, len(query.context)
        tree.new_step()
        node = self._cache.match(query.context, query.adapter, end)
        start, is_within = int(tree.nodes.depth[node]), first_output(query) < end
        if start == end and not is_within:
            return None
        is_apart = _holds_parts(ScheduledQuery.of(query), pictures)
        if is_within and is_apart:
            return self.run_uncached(query)
        is_answered = is_within or (size - end <= FEW_BEHIND and not is_apart)
        stop = size if is_answered else end
        slots = tree.allocate(0 if start == end else stop - start, [node])
        if slots is None:
            return self.run_uncached(query)
        job = ScheduledQuery.of(query)
        self._run(job, pictures, node, slots, stop)
        return job.answer if is_answered else None

    def _run(
        self,
        job: ScheduledQuery,
        pictures: Pictures,
        node: int,
        slots: NDArray[np.int64],
        stop: int,
    ) -> None:
        """Run the first ``stop`` tokens; cache the last ``len(slots)`` if all values are finite."""
        cache, tree = self._cache, self._cache.tree
        tokens = np.asarray(job.context.packed(stop - len(slots), stop), np.int32)
        new = tree.append(node, tokens, slots)
        try:
            pool = cache.pool if len(slots) else None
            attention = MultimodalPrefillAttention(
                pictures, cache.layout, pool, slots.tolist(), stop
            )
            token_chunk = _span(job, pictures, stop)
            self._run_alone(job, token_chunk, attention)
            has_nan = any(job.has_nan(range(i, i + 1)) for i in token_chunk.outputs)
            if len(slots) and not has_nan and cache.pool.is_finite(slots):
                new = tree.insert(new)[:0]
        finally:
            tree.free(new)


def _holds_parts(job: ScheduledQuery, pictures: Pictures) -> bool:
    """Return whether the text after the opening contains an image token."""
    return pictures.image_token_id in job.context.packed(pictures.num_tokens)


def _span(job: ScheduledQuery, pictures: Pictures, stop: int) -> TokenChunk:
    """Return the first ``stop`` tokens of a context with the ids that the model takes."""
    ids = pictures.ids(job.context.packed(pictures.num_tokens, stop))
    return TokenChunk(ids, outputs=job.outputs_in(0, stop))
