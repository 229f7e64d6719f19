"""Scheduler: answers a batch of queries by forward passes that reuse cached prefixes.

**Three ways.** If each context has one uncached token, the batch is a *decode step*: arrays have
three integers per row (the token, its slot, and the node before it). Other cacheable contexts
(prompts, texts to score, rows whose cached lengths are far apart) are *planned* into chunks, waves
and groups (``prefill_plan.py``). A decode step pads to the longest row, so the longest cached
length must not exceed twice the shortest plus 64 tokens. Contexts that cannot be cached run
*uncached*, from their first token. Tests compare the rows with ``naive_row`` in tests/naive.py.

**Nodes come first.** ``append`` makes nodes before a pass fills their slots, and ``insert`` makes
them findable after it. So later passes of a batch read the tokens of earlier passes like cached
tokens, and after an error only the batch's new nodes have to be freed. If the cache has too little
room or memory runs out, the batch is halved; a single query without room runs uncached.

**NaN stays with its context.** Attention weighs masked tokens by zero, and 0 × NaN is NaN, so a
context that overflows spoils the keys and values of its own earlier tokens. A row with NaN is
computed again, uncached and without padding; only tokens from which a result without NaN was
computed are inserted. Scores of a text that overflows stay NaN.

**Recurrent states** belong to nodes. A context continues only from a node with a state; its
matched tokens after that node are computed again. A pass copies its rows' states, since the model
writes in place, and stores the results at the rows' last nodes. States do not tolerate padding, so
rows of a pass have equal numbers of new tokens. Some models continue from a state only one token at
a time, with a pass for each token.

**Limits of models.** Beyond some length, "longrope" and "dynamic" RoPE scaling use other rotary
frequencies, so cached keys are wrong: each longer context runs uncached, in its own pass. Llama 4
scales attention by a pass's number of cached columns, so its rows have equally many cached tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, cast, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.cascade_plan import CachedPrefixes, CascadePlan
from genlm_backend.attention.forward_batch import (
    AttentionBackend,
    BatchStates,
    Runner,
    TokenChunk,
    pack,
    pack_decode,
)
from genlm_backend.errors import CacheError, ContextError, QueryDroppedError
from genlm_backend.prefix.prefix_tree import PrefixTree
from genlm_backend.queries.query import Query, Result, RowQuery
from genlm_backend.queries.row import Row, stacked
from genlm_backend.readouts.particle_step import ParticleStep, StepResult
from genlm_backend.runtime.memory import is_out_of_memory, release_cached_memory
from genlm_backend.scheduling.multimodal_prefixes import MultimodalPrefixes
from genlm_backend.scheduling.output_processor import OutputProcessor
from genlm_backend.scheduling.prefill_plan import (
    PICTURES,
    CostModel,
    PrefillChunk,
    ScheduledQuery,
    StatePlan,
    cut_to_sound,
    first_output,
    plan_chunks,
    plan_groups,
    plan_uncached,
    plan_waves,
)
from genlm_backend.scheduling.prefix_cache import OutOfStates, PrefixCache

_NUM_TARGETS: Final = attrgetter("num_targets")

NUM_REMEMBERED: Final = 8
"""Number of decode steps whose plans are kept: particles may alternate between 8 batches."""


@final
@dataclass(frozen=True, slots=True)
class Capabilities:
    """Kinds of passes that the model supports, found by trial passes and its config."""

    pads: bool = True  # an uncached pass may mix contexts of several lengths
    needs_equal_lengths: bool = False  # rows of a cached pass need equal cached lengths
    takes_several_tokens: bool = True  # several tokens may continue from a recurrent state at once
    max_cacheable_len: float = math.inf  # longer contexts run uncached


ALL: Final = Capabilities()


@final
class Scheduler:
    """Runs forward passes for the contexts of one adapter at a time, over a prefix cache."""

    # The steps of a batch are match, plan, allocate, run and link, so that its contexts share
    # prefixes with each other and with earlier contexts. A decode step, with one new token per
    # context, needs no plan of chunks. Without a cache, every context is run uncached.
    def __init__(
        self,
        runner: Runner,
        outputs: OutputProcessor,
        cost: CostModel,
        cache: PrefixCache,
        uncached_attention: AttentionBackend,
        check_cancelled: Callable[[], None],
        can: Capabilities = ALL,
    ) -> None:
        self.runner, self._outputs, self.cache, self.can = runner, outputs, cache, can
        self._check_cancelled = check_cancelled
        self.cost = cost if cache.most_rows is None else replace(cost, max_rows=cache.most_rows)
        self.uncached_attention = uncached_attention
        self.tokens_reused = self.tokens_without_room = 0
        # If all contexts of a decode step extend contexts of one earlier step, reuse that step's
        # plan, with rows permuted and one more column. Entries: the plan, the sorted ``node_uses``
        # (``Nodes``) of its rows' last nodes, and the permutation that sorts the ``node_uses``.
        self._remembered: deque[tuple[CascadePlan, NDArray[np.int64], NDArray[np.intp]]] = deque(
            maxlen=NUM_REMEMBERED
        )
        self._valid_for: tuple[object, ...] = ()  # the tree and attention that these plans are for
        self.openings = MultimodalPrefixes(runner, cache, self._run_alone)

    @property
    def tree(self) -> PrefixTree:
        return self.cache.tree

    def evaluate(self, queries: list[Query]) -> list[Result]:
        """Return one answer per query; if memory runs out, halve the batch and try again."""
        if ParticleStep in set(map(type, queries)):
            return self._evaluate_steps(queries)
        answers: list[Result] | None = None
        try:
            apart = self._run_unshared(queries)
            if not apart:
                return self._run_cached(queries)
            answers = _beside(apart, queries, self._run_cached)
        except Exception as error:
            if not is_out_of_memory(error) or len(queries) == 1:
                raise
        if answers is None:  # after the handler: inside, a traceback would keep the tensors alive
            release_cached_memory()
            return _in_halves(queries, self._evaluate_half)
        return answers

    def _evaluate_half(self, queries: list[Query]) -> list[Result | Exception]:
        """Evaluate half a batch; a single query that does not fit into memory fails alone."""
        try:
            return self.evaluate(queries)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None  # it would keep the tensors of the pass alive
            return [error] * len(queries)

    def _run_unshared(self, queries: Sequence[Query]) -> dict[Query, Result]:
        """Answer long queries and some with pictures, each alone; cache the others' openings."""
        apart: dict[Query, Result] = {}
        if self.can.max_cacheable_len < math.inf:
            long = [q for q in queries if len(q.context) > self.can.max_cacheable_len]
            apart = {query: self._answer_of_long(query) for query in long}
        if self.cache.keeps and any(map(PICTURES, queries)):
            apart.update(self.openings.begin([q for q in queries if q not in apart]))
        return apart

    def row_alone(self, query: RowQuery) -> Row:
        """Return the row of a context, computed alone and without the cache."""
        # A model with dynamic rotary frequencies keeps the frequencies of its longest context until
        # a short context resets them.
        if len(query.context) > self.can.max_cacheable_len:
            self.run_uncached([RowQuery([0], query.adapter)])
        (row,) = self.run_uncached([query])
        return cast(Row, row)

    def _answer_of_long(self, query: Query) -> Result | ContextError:
        """Return the row of a context beyond ``max_cacheable_len``, or an error for scores."""
        if not query.num_targets:
            return self.row_alone(RowQuery(query.context, query.adapter))
        limit = int(self.can.max_cacheable_len)
        return ContextError(
            f"a text of {len(query.context) + 1} tokens is longer than the {limit + 1} tokens that "
            f"can be scored at once: beyond {limit} tokens, this model encodes all positions "
            f"differently, so each score needs a separate pass. Loaded with max_length={limit}, "
            "the model scores longer texts in windows by surprisal(). Without that limit, "
            "next_token_logprobs accepts longer contexts"
        )

    def run_uncached(self, queries: list[Query], *, pads: bool = True) -> list[Result]:
        """Return one result per query, without reading or writing the cache."""
        with_pictures = [query for query in queries if query.context.pictures]
        if with_pictures:
            apart = {query: self.openings.run_uncached(query) for query in with_pictures}
            return _beside(apart, queries, partial(self.run_uncached, pads=pads))
        jobs = [ScheduledQuery.of(query) for query in queries]
        # A text with more than ``max_outputs`` outputs runs several times from its first token:
        # once for each part of the outputs.
        wanted = [(job, part) for job in jobs for part in job.parts(self.cost.max_outputs)]
        padded = self._run_from_start(wanted, pads and self.can.pads)
        # Padding may have caused NaN: compute NaN outputs again without padding. Scores before a
        # token that overflows stay NaN: attention weighs masked tokens by zero, and 0 × NaN is NaN.
        again = [(job, part) for job, part in wanted if (job, part[0]) in padded]
        again = [(job, part) for job, part in again if job.has_nan(part)]
        self._run_from_start(again, pads=False)
        return [job.answer for job in jobs]

    def _run_from_start(
        self, wanted: Sequence[tuple[ScheduledQuery, Sequence[int]]], pads: bool
    ) -> set[tuple[ScheduledQuery, int]]:
        """Run contexts from their first tokens; return which outputs came from padded passes."""
        chunks, padded = plan_uncached(wanted), set[tuple[ScheduledQuery, int]]()
        if not chunks:
            return padded
        for group in plan_groups([chunk.size for chunk in chunks], self.cost, pads=pads):
            run = [chunks[i] for i in group]
            self._forward(run, is_cached=False)
            if len({chunk.num_tokens for chunk in run}) > 1:
                padded.update(
                    (job, position)
                    for chunk in run
                    for position, own in chunk.outputs.items()
                    for job in own
                )
        return padded

    def _forward(self, chunks: Sequence[PrefillChunk], *, is_cached: bool) -> None:
        """Run chunks in one pass, or token by token, and keep their recurrent states."""
        attention = self.cache.attention if is_cached else self.uncached_attention
        before = np.array([chunk.before for chunk in chunks], np.int32)
        states = self.cache.states_behind(before) if is_cached else None
        if states is None:
            self._run_pass(chunks, None, attention)
            return
        self.tree.states.release(before)
        # If states advance token by token, pass i runs token i of chunks that continue a state.
        is_one_by_one = not self.can.takes_several_tokens
        pieces = [each.by_token() if is_one_by_one and each.start else [each] for each in chunks]
        num_passes = np.array([*map(len, pieces)])
        last = np.array([*map(self._end, chunks)], np.int32)
        num_behind = np.array([chunk.num_behind for chunk in chunks])
        left = np.arange(len(chunks))
        for i in range(int(num_passes.max())):
            if i:
                rows = np.flatnonzero(num_passes[left] > i)
                layout, left = self.cache.state_pool.layout, left[rows]
                states = self.runner.running_states(layout, states.behind(rows))
            run = [pieces[k][i] for k in left.tolist()]
            self._run_pass(run, states, attention)
            ends = np.where(num_passes[left] == i + 1, last[left], 0)
            if ends.any():
                self.cache.keep_states(ends, num_behind[left], states)

    def _run_pass(
        self,
        chunks: Sequence[PrefillChunk],
        states: BatchStates | None,
        attention: AttentionBackend,
    ) -> None:
        """Run chunks in one pass, and store the results in the chunks' jobs."""
        self._check_cancelled()
        nodes = self.tree.nodes
        token_chunks = [chunk.token_chunk(nodes.slot[chunk.nodes]) for chunk in chunks]
        before = np.array([chunk.before for chunk in chunks], np.int32)
        batch = pack(token_chunks, CachedPrefixes.of(nodes, before), states)
        outputs = [output for chunk in chunks for output in chunk.outputs.items()]
        wanted = [(i, job, position) for i, (position, jobs) in enumerate(outputs) for job in jobs]
        self._outputs.hand_out(self.runner.forward(batch, attention), wanted)

    def _run_alone(
        self,
        job: ScheduledQuery,
        token_chunk: TokenChunk,
        attention: AttentionBackend,
        start: int = 0,
    ) -> None:
        """Run tokens of one context in a separate pass, and store the results in its job."""
        self._check_cancelled()
        logits = self.runner.forward(pack([token_chunk]), attention)
        wanted = [(row, job, start + position) for row, position in enumerate(token_chunk.outputs)]
        self._outputs.hand_out(logits, wanted)

    # ---------------------------------------------------------------- through the cache

    def check_cacheable(self, num_tokens: int) -> None:
        """Raise a ``CacheError`` if a context of ``num_tokens`` exceeds ``max_cacheable_len``."""
        if num_tokens > self.can.max_cacheable_len:
            raise CacheError(
                f"this model caches no context of more than {self.can.max_cacheable_len} tokens"
            )

    def computed(self, query: RowQuery) -> int | None:
        """Cache a context, and a state to repeat it from. Return its node, ``None`` if no room."""
        tree, size = self.tree, len(query.context)
        if self.cache.keeps:
            self.check_cacheable(size)
        if tree.states.num_states and size > 1 and query.context.pictures is None:
            node = self.cache.match(query.context, query.adapter, size - 1)
            if tree.nodes.depth[node] < size - 1 or not tree.nodes.state[node]:
                self.evaluate([query.prefix(size - 1)])
        (row,) = self.evaluate([query])
        if self.cache.keeps and row.is_nan:
            raise CacheError(
                "the model's row after this context is NaN, so the context is not cached"
            )
        node = self.cache.match(query.context, query.adapter, size)
        is_kept = tree.nodes.depth[node] == size and tree.nodes.slot[node] > 0
        if is_kept and tree.states.num_states:  # bring its state to the device
            ends = np.array([self.cache.resumed(node)], np.int32)
            is_kept = tree.states.fetch(ends) and bool(tree.nodes.state[ends[0]])
        return node if is_kept else None

    def _run_cached(self, queries: list[Query]) -> list[Result]:
        """Answer queries over the cache, after ``_run_unshared`` has cached their openings."""
        if not self.cache.keeps:
            return self.run_uncached(queries)
        self.tree.new_step(len(queries))
        lengths = np.array([len(query.context) for query in queries], np.int32)
        # Tokens with an output always go through the model: logits are not cached.
        are_scored = any(map(_NUM_TARGETS, queries))
        sizes = lengths - 1
        if are_scored:
            sizes = np.array([*map(first_output, queries)], np.int32)
        nodes = self._match(queries, sizes)
        matched, has_states = nodes, self.cache.state_pool.num_states > 0
        if has_states:
            nodes = self._at_states(nodes, lengths)
        self.tree.touch(nodes)
        answers: list[Result] | None = None
        if not self.cache.host_state_pool.num_states or self.tree.states.fetch(nodes):
            if not are_scored and self.is_decode(nodes, sizes, queries):
                answers = self.decode(queries, nodes)
            else:
                answers = self._planned(queries, nodes, matched)
        if answers is not None:
            return answers
        if len(queries) == 1:
            self.tokens_without_room += len(queries[0].context)
            return self.run_uncached(queries)
        fetched = nodes if self.cache.host_state_pool.num_states else None
        return _in_halves(queries, self._evaluate_half, fetched)

    def _match(self, queries: Sequence[Query], sizes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the node of each context's longest cached prefix of at most ``sizes`` tokens."""
        contexts = [query.context for query in queries]
        return self.tree.match_all(
            [context.cache_hint for context in contexts],
            queries[0].adapter,
            sizes,
            lambda i, start: contexts[i].packed(start, int(sizes[i])),
        )

    def _at_states(self, nodes: NDArray[np.int32], lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the node that each context starts from: its last one with a state, or the root."""
        nodes = self.tree.states.last(nodes)
        if not self.can.takes_several_tokens:  # a pass per token may cost more than one whole pass
            num_passes = lengths - self.tree.nodes.depth[nodes]
            is_far = (num_passes - 1) * self.cost.per_forward > lengths.sum()
            nodes[is_far] = self.tree.nodes.root[nodes[is_far]]
        return nodes

    def _planned(
        self, queries: list[Query], nodes: NDArray[np.int32], matched: NDArray[np.int32]
    ) -> list[Result] | None:
        """Answer queries by chunks and waves; ``None`` if the cache lacks room for all."""
        starts = self.tree.nodes.depth[nodes].tolist()
        jobs = list(map(ScheduledQuery.of, queries, nodes.tolist(), starts))
        for job, num_known in zip(jobs, self.tree.nodes.depth[matched].tolist(), strict=True):
            job.num_known = num_known
            job.position_offset = self.openings.position_offset(job.context)
        pictures = [(job.start, job.context.pictures) for job in jobs]
        if any(own is not None and start < own.num_tokens for start, own in pictures):
            return None  # an opening was evicted to make room for another
        chunks = self._plan(jobs)
        slots = self.tree.allocate(sum(chunk.num_tokens for chunk in chunks), nodes)
        if slots is None:
            return None
        try:
            self._run(jobs, chunks, slots)
        except OutOfStates:
            return None
        self.tokens_reused += sum(starts)
        hints = self.tree.nodes.cache_hints(np.array([job.node for job in jobs], np.int32))
        for query, hint in zip(queries, hints, strict=True):
            query.context.cache_hint = hint
        answers = [job.answer for job in jobs]
        nan_indices = [i for i, job in enumerate(jobs) if job.has_nan(job.outputs)]
        return self._without_nan(queries, answers, nan_indices)

    def _without_nan(
        self, queries: Sequence[Query], answers: Sequence[Result], nan_indices: Sequence[int]
    ) -> list[Result]:
        """Return the results, with those at ``nan_indices`` computed again, whole and uncached."""
        sound = list(answers)
        # A masked key has weight zero, and 0 × NaN is NaN. So if numbers overflow at one token, its
        # context's earlier tokens get NaN too, and so do other contexts that end at one of these.
        if nan_indices:
            again = self.run_uncached([queries[i] for i in nan_indices], pads=False)
            for i, answer in zip(nan_indices, again, strict=True):
                sound[i] = answer
        return sound

    def _run(
        self, jobs: list[ScheduledQuery], chunks: list[PrefillChunk], slots: NDArray[Any]
    ) -> None:
        """Compute results; if any is NaN, cache only tokens that results without NaN depend on."""
        start, has_states = 0, self.cache.state_pool.num_states > 0
        for chunk in chunks:
            own = slots[start : start + chunk.num_tokens]
            tokens = np.asarray(chunk.token_ids, np.int32)
            chunk.nodes = self.tree.append(chunk.before, tokens, own)
            start += chunk.num_tokens
        if has_states:
            before = np.array([chunk.before for chunk in chunks], np.int32)
            self.tree.states.hold(before)
            self.tree.states.go_on_from(before)
        held = {chunk: chunk.nodes for chunk in chunks}  # nodes to free unless they are linked
        computed: list[PrefillChunk] = []
        try:
            for chunks_of_pass in self._passes(chunks):
                self._forward(chunks_of_pass, is_cached=True)
                computed += chunks_of_pass
            if any(job.has_nan(job.outputs) for job in jobs):
                cut_to_sound(chunks)
                computed = [chunk for chunk in chunks if chunk.num_tokens]
            self._link(computed, held)
        except QueryDroppedError:
            # Results that would show NaN may be missing, so check the keys, values and states.
            own = [chunk.nodes for chunk in computed]
            if own and self.cache.are_finite(np.concatenate(own)):
                self._link(computed, held)
            raise
        finally:
            for nodes in held.values():
                self.tree.free(nodes)

    # ---------------------------------------------------------------- decode steps

    def is_decode(
        self, nodes: NDArray[np.int32], sizes: NDArray[np.int32], queries: Sequence[Query] = ()
    ) -> bool:
        """Return whether each row has one uncached token, and all fit into one pass.

        Args:
            nodes: The node of each row's cached prefix.
            sizes: The length of each row's context without its last token.
            queries: The row queries of the batch; one with pictures makes the answer ``False``.
        """
        depths = self.tree.nodes.depth[nodes]
        least, deepest = int(depths.min()), int(depths.max())
        return (
            len(nodes) <= min(self.cost.max_tokens, self.cost.max_rows)
            and bool((depths == sizes).all())
            and (not self.cache.state_pool.num_states or least > 0 or deepest == 0)
            and (deepest == least if self.can.needs_equal_lengths else deepest <= 2 * least + 64)
            and not any(map(PICTURES, queries))
        )

    def decode(self, queries: Sequence[Query], nodes: NDArray[np.int32]) -> list[Result] | None:
        """Return the rows of a decode step; ``None`` if the cache lacks room for its tokens."""
        rows = list[Row]()

        def read(logits: torch.Tensor) -> NDArray[np.bool_]:
            rows.extend(self._outputs.rows(logits))
            return _are_sound(rows)

        kept = self._decode(nodes, _last_tokens(queries), read)
        return None if kept is None else self._rows_of_step(queries, rows, kept)

    def _rows_of_step(
        self, queries: Sequence[Query], rows: list[Row], kept: NDArray[np.int32]
    ) -> list[Result]:
        """Return a decode step's rows, after computing those with NaN again; set cache hints."""
        hints = self.tree.nodes.cache_hints(kept)
        for query, hint in zip(queries, hints, strict=True):
            query.context.cache_hint = hint
        return self._without_nan(queries, rows, np.flatnonzero(kept == 0).tolist())

    def _decode(
        self,
        nodes: NDArray[np.int32],
        tokens: NDArray[np.int32],
        read: Callable[[torch.Tensor], NDArray[np.bool_]],
    ) -> NDArray[np.int32] | None:
        """Run one token after each of ``R`` nodes, and cache the tokens whose rows are sound.

        Args:
            nodes: The node before each row's token: int32 ``[R]``.
            tokens: The tokens: int32 ``[R]``.
            read: Makes the results from the logits, ``[R, model_vocab]``, which it may overwrite;
                returns whether each row is free of NaN.

        Returns:
            The node of each row's token, 0 for a row with NaN: int32 ``[R]``. ``None`` if the cache
            lacks room.
        """
        cache, tree = self.cache, self.tree
        # 1. Allocate: a slot and an unlinked node per row.
        slots = tree.allocate(len(nodes), nodes)
        if slots is None:
            return None
        new = tree.append(nodes, tokens, slots)
        try:
            # 2. Plan, or extend the plan of an earlier step, and run.
            self._check_cancelled()
            past = CachedPrefixes.of(tree.nodes, nodes)
            plan = self._decode_plan(nodes, past)
            states = cache.states_behind(nodes)
            batch = pack_decode(tokens.astype(np.int64), slots, past, plan, states)
            logits = self.runner.forward(batch, cache.attention)
            # 3. Read the results, which waits for the device.
            is_sound = read(logits)
        except BaseException:
            tree.free(new)
            raise
        # 4. Insert the nodes, except those of rows with NaN, and keep their states.
        if states is not None:
            tree.states.go_on_from(nodes)
        if is_sound.all():
            kept = tree.insert(new)
        else:
            kept = np.zeros(len(nodes), np.int32)
            kept[is_sound] = tree.insert(new[is_sound])
            tree.free(new[~is_sound])
            plan = None
        if states is not None:
            cache.keep_states(kept, np.zeros(len(kept), np.int64), states)
        # 5. Remember the plan for a later step whose contexts extend these.
        if plan is not None:
            node_uses = tree.nodes.node_uses(kept)
            order = np.argsort(node_uses)
            self._remembered.append((plan, node_uses[order], order))
        self.tokens_reused += int(batch.prefix_lens.sum())
        return kept

    def _decode_plan(self, nodes: NDArray[np.int32], past: CachedPrefixes) -> CascadePlan | None:
        """Return the cascade plan by which a decode step reads the cached tokens of its rows."""
        attention, tree = self.cache.attention, self.tree
        # If these change, slots have moved or the tree was cleared: remembered plans are invalid.
        valid_for = tree.nodes.key, tree.num_slot_changes, attention
        if valid_for != self._valid_for:
            self._valid_for = valid_for
            self._remembered.clear()
        node_uses = tree.nodes.node_uses(nodes)
        for plan, known, order in reversed(self._remembered):
            if node_uses[0] not in known or plan.is_stale:  # one lookup rules most plans out
                continue
            found = np.searchsorted(known, node_uses).clip(max=len(known) - 1)
            if (known[found] == node_uses).all():
                return plan.advanced(order[found], tree.nodes.slot[nodes].astype(np.int64))
        return attention.plan(past, np.ones(len(nodes), np.int64))

    # ---------------------------------------------------------------- particle steps

    def _evaluate_steps(self, queries: list[Query]) -> list[Result]:
        """Answer a batch that has particle steps, on arrays if each row has one uncached token."""
        steps = [query for query in queries if type(query) is ParticleStep]
        others = [query for query in queries if type(query) is not ParticleStep]
        answers = dict[Query, Result]()
        try:
            if all(self._nodes_of_step(step) is not None for step in steps):
                answers = self._decode_steps(steps, others)
                if not answers and others:
                    answers.update(zip(others, self.evaluate(others), strict=True))
                    answers.update(self._decode_steps(steps, []))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        missing = [query for query in queries if query not in answers]
        if missing:  # after the handler: inside, a traceback would keep the tensors alive
            answers.update(self._steps_by_rows(missing))
        return [answers[query] for query in queries]

    def _nodes_of_step(self, step: ParticleStep) -> NDArray[np.int32] | None:
        """Return the node before each row's last token; ``None`` if one is missing or unusable."""
        nodes, sizes = self.tree.nodes, step.lengths - 1
        if not self.cache.keeps or step.has_pictures or sizes.max() >= self.can.max_cacheable_len:
            return None
        found = nodes.numbered(step.hints, step.hint_key, self.tree.root(step.adapter))
        if (nodes.depth[found] > sizes).any():  # a row computed before is at its last token's node
            found = nodes.ancestors(found, sizes)
        if self.cache.state_pool.num_states:
            found = self._at_states(found, step.lengths)
        return found if (nodes.depth[found] == sizes).all() else None

    def _decode_steps(
        self, steps: Sequence[ParticleStep], others: Sequence[Query]
    ) -> dict[Query, Result]:
        """Answer steps and row queries by one decode step; return ``{}`` if that is impossible."""
        tree, cache = self.tree, self.cache
        tree.new_step(sum(map(len, steps)) + len(others))
        # 1. Match: arrays of the node before each row's last token, and of that token.
        parts = [self._nodes_of_step(step) for step in steps]
        sizes = [step.lengths - 1 for step in steps]
        tokens = [step.tokens for step in steps]
        if others:
            lengths = np.array([len(query.context) for query in others], np.int32)
            if any(map(_NUM_TARGETS, others)) or lengths.max() > self.can.max_cacheable_len:
                return {}
            own = self._match(others, lengths - 1)
            parts.append(self._at_states(own, lengths) if cache.state_pool.num_states else own)
            sizes.append(lengths - 1)
            tokens.append(_last_tokens(others))
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return {}
        nodes = np.concatenate(found)
        tree.touch(nodes)
        if cache.host_state_pool.num_states and not tree.states.fetch(nodes):
            return {}
        if not self.is_decode(nodes, np.concatenate(sizes), others):
            return {}
        # 2. Run, and read each step's values from its part of the logits.
        starts = np.cumsum([0, *map(len, steps)]).tolist()
        tables, rows = dict[ParticleStep, tuple[torch.Tensor, Any]](), list[Row]()

        def read(logits: torch.Tensor) -> NDArray[np.bool_]:
            are_sound = list[NDArray[np.bool_]]()
            for step, start in zip(steps, starts, strict=False):
                own = logits[start : start + len(step)]
                as_logits = step.takes_logits
                table = self._outputs.defined(own) if as_logits else self._outputs.table(own)
                values = step.values(table, are_logits=as_logits)
                tables[step] = table, values
                are_sound.append(step.are_sound(values))
            if others:
                rows.extend(self._outputs.rows(logits[starts[-1] :]))
                are_sound.append(_are_sound(rows))
            return np.concatenate(are_sound)

        kept = self._decode(nodes, np.concatenate(tokens), read)
        if kept is None:
            return {}
        # 3. Compute rows with NaN again, uncached and without padding.
        answers, key = dict[Query, Result](), tree.nodes.key
        for step, start in zip(steps, starts, strict=False):
            own = kept[start : start + len(step)]
            table, values = tables[step]
            bad = np.flatnonzero(own == 0).tolist()
            if bad:
                again = [RowQuery(step.contexts.context(i), step.adapter) for i in bad]
                rows_again = self.run_uncached([*again], pads=False)
                with torch.inference_mode():  # the table is an inference tensor
                    table = self._outputs.table(table) if step.takes_logits else table.clone()
                    for i, row in zip(bad, rows_again, strict=True):
                        table[i] = row.logprobs.to(table.device)
                values = step.values(table)
            answers[step] = StepResult(values, tree.nodes.node_uses(own), key)
        if others:
            found_rows = self._rows_of_step(others, rows, kept[starts[-1] :])
            answers.update(zip(others, found_rows, strict=True))
        return answers

    def _steps_by_rows(self, queries: Sequence[Query]) -> dict[Query, Result]:
        """Answer queries; a particle step is answered from a row query for each of its contexts."""
        queries_of = dict[Query, list[RowQuery]]()
        queries_of.update((q, q.row_queries()) for q in queries if isinstance(q, ParticleStep))
        wanted = {own: own for query in queries for own in queries_of.get(query, (query,))}
        found = dict(zip(wanted, self.evaluate([*wanted]), strict=True))
        answers = {query: found[query] for query in queries if query not in queries_of}
        key = self.tree.nodes.key
        for step, own in queries_of.items():
            assert isinstance(step, ParticleStep)
            rows = [found[query] for query in own]
            errors = [row for row in rows if isinstance(row, Exception)]
            hints = [wanted[query].context.cache_hint for query in own]
            numbers = np.array([hint[1] if hint[0] is key else 0 for hint in hints], np.int64)
            root = self.tree.root(step.adapter)
            depths = self.tree.nodes.depth[self.tree.nodes.numbered(numbers, key, root)]
            numbers[depths != step.lengths] = 0  # contexts that were not cached whole
            values = None if errors else step.values(stacked(rows))
            answers[step] = errors[0] if errors else StepResult(values, numbers, key)
        return answers

    # ---------------------------------------------------------------- recurrent states

    def _end(self, chunk: PrefillChunk) -> int:
        """Return a chunk's last node; 0 if no chunk continues it and the cache has its state."""
        if not chunk.num_behind:
            tokens = np.asarray(chunk.token_ids, np.int32)
            known = self.tree.nodes.walk(chunk.before, tokens)
            if self.tree.nodes.depth[known] == chunk.stop and self.tree.nodes.state[known]:
                return 0
        return int(chunk.nodes[-1])

    def _plan(self, jobs: list[ScheduledQuery]) -> list[PrefillChunk]:
        """Plan chunks; with at least two states per job, cut them where later batches may start."""
        num_states = self.cache.state_pool.num_states
        if not num_states:
            return plan_chunks(jobs, self.cost)
        states = StatePlan(self.can.takes_several_tokens, is_short=num_states < 2 * len(jobs))
        return plan_chunks(jobs, self.cost, states)

    def _passes(self, chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
        has_states, passes = self.cache.state_pool.num_states > 0, list[list[PrefillChunk]]()
        for wave in plan_waves(chunks):
            sizes = [chunk.size for chunk in wave]
            if not self.can.takes_several_tokens:  # chunks that continue a state run token by token
                sizes = [size._replace(num_new=1) if size.prefix_len else size for size in sizes]
            groups = plan_groups(
                sizes,
                self.cost,
                needs_equal_lengths=self.can.needs_equal_lengths,
                has_states=has_states,
            )
            passes += [[wave[i] for i in group] for group in groups]
        return passes

    def _link(
        self, chunks: Sequence[PrefillChunk], held: dict[PrefillChunk, NDArray[np.int32]]
    ) -> None:
        """Insert the nodes of chunks into the tree, and set the last node of each job."""
        if not chunks:
            return
        sizes = [chunk.num_tokens for chunk in chunks]
        new = [chunk.nodes[:size] for chunk, size in zip(chunks, sizes, strict=True)]
        for chunk, size in zip(chunks, sizes, strict=True):
            held[chunk] = chunk.nodes[size:]
        linked = np.split(self.tree.insert(np.concatenate(new)), np.cumsum(sizes)[:-1])
        for chunk, nodes in zip(chunks, linked, strict=True):
            for position, jobs in chunk.outputs.items():
                if position < chunk.stop:
                    for job in jobs:
                        job.node = int(nodes[position - chunk.start])


def _are_sound(rows: Sequence[Row]) -> NDArray[np.bool_]:
    """Return whether each row of a pass is free of NaN."""
    return ~np.isnan(np.array([row.logsumexp for row in rows], np.float64))


def _last_tokens(queries: Sequence[Query]) -> NDArray[np.int32]:
    return np.frombuffer(b"".join([query.context.last_packed for query in queries]), np.int32)


def _beside(
    apart: dict[Query, Result],
    queries: Sequence[Query],
    evaluate: Callable[[list[Query]], list[Result]],
) -> list[Result]:
    """Return the answers to all queries: those in ``apart``, and the others by ``evaluate``."""
    others = [query for query in queries if query not in apart]
    answers = {**apart, **dict(zip(others, evaluate(others) if others else (), strict=True))}
    return [answers[query] for query in queries]


def _in_halves(
    queries: list[Query],
    evaluate: Callable[[list[Query]], list[Result]],
    starts: NDArray[np.int32] | None = None,
) -> list[Result]:
    """Evaluate a batch in two halves; contexts with equal start nodes stay together if possible."""
    order, middle = np.arange(len(queries)), len(queries) // 2
    if starts is not None:
        order = np.argsort(starts, kind="stable")
        cuts = np.flatnonzero(np.diff(starts[order])) + 1
        middle = int(cuts[np.argmin(abs(cuts - middle))]) if len(cuts) else middle
    return in_parts(queries, [order[:middle].tolist(), order[middle:].tolist()], evaluate)


def in_parts(
    queries: Sequence[Query],
    parts: Iterable[list[int]],
    evaluate: Callable[[list[Query]], list[Result]],
) -> list[Result]:
    """Return the answers to queries; ``parts`` has the indices of queries to evaluate together."""
    answers: dict[int, Result] = {}
    try:
        for part in filter(None, parts):
            answers.update(zip(part, evaluate([queries[i] for i in part]), strict=True))
        return [answers[i] for i in range(len(queries))]
    finally:
        answers.clear()  # an error's traceback keeps this frame, which must not keep the error
