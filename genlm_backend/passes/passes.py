"""Passes: answers to a batch of questions, from as few tokens through the model as possible."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.attend import Attend
from genlm_backend.attention.packing import RowStates, Span, pack
from genlm_backend.attention.paths import Paths
from genlm_backend.attention.torch import WholeAttend
from genlm_backend.errors import QueryDroppedError
from genlm_backend.model.context import Context
from genlm_backend.model.query import Adapter, Query
from genlm_backend.model.row import Row, rows_of_logits, scores_of_logits
from genlm_backend.passes.decode_steps import DecodeSteps
from genlm_backend.passes.going_on import GoingOn
from genlm_backend.passes.job import Asked, Found, Job, first_output
from genlm_backend.passes.overflow import search, still_spoilt
from genlm_backend.passes.prefill_plan import (
    CostModel,
    Segment,
    cut_to_sound,
    plan_groups,
    plan_segments,
    plan_waves,
    plan_whole,
)
from genlm_backend.passes.roots import Roots
from genlm_backend.passes.runner import Runner
from genlm_backend.prefix import (
    KVLayout,
    KVStore,
    Mover,
    PrefixTree,
    Slots,
    StateLayout,
    StateStore,
)
from genlm_backend.runtime.memory import is_out_of_memory, release_cached_memory


@final
class Passes:
    """Forward passes for contexts of one adapter at a time, and what is kept of them.

    Contexts of one batch share what they have in common, with each other and with earlier
    contexts: match, plan, allocate, run, link. Where each has one token that is new, it is a
    decode step, and nothing is planned. Without slots, every context is run whole.

    Args:
        runner: What calls the model.
        cost: Cost of passes, by which a batch is divided.
        finish: Makes one row of each vector of logits, ``[n, vocab]``, which it may overwrite, and
            knows what it was normalised by.
        score: Makes scores of logits, as ``scores_of_logits`` does.
        check_wanted: Called before each pass; raises a ``QueryDroppedError`` where nobody waits.

    Attributes:
        runner: As given.
        cost: As given; it can be set.
        tree: The contexts that are kept.
        store: Their keys and values.
        states: Their running states; none of most models.
        attend: The way to attend to them.
        attend_whole: The way of contexts that are run whole; it can be set.
        layout: Shapes of keys and values, and how they are kept or would be; it can be set.
        roots: The beginnings of contexts that are pictures.
        keeps: Whether keys and values are kept.
        pads: Whether contexts that are run whole may be padded beside longer ones; it can be set.
        aligns: Whether rows of a pass have to have as many past tokens each; it can be set.
        going_on: How many tokens go on from a running state in one pass; it can be set.
        tokens_reused: Number of tokens whose keys and values were there.
    """

    def __init__(
        self,
        runner: Runner,
        cost: CostModel,
        finish: Callable[[torch.Tensor], list[Row]] = rows_of_logits,
        score: Callable[[torch.Tensor, list[int], list[int]], torch.Tensor] = scores_of_logits,
        check_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner = runner
        self.cost = cost
        self.pads, self.aligns, self.going_on = True, False, GoingOn()
        self.tokens_reused = 0
        self.finish = finish
        self._score = score
        self.check_wanted = check_wanted
        self.roots = Roots(self)
        self.layout = KVLayout()
        self.keep_nothing()

    def keep_nothing(self) -> None:
        """Let go of all slots, and run every context whole from now on."""
        self.keeps, self._steps = False, DecodeSteps(self)
        self.tree = PrefixTree(Slots(0))
        self.store, self.states = KVStore(KVLayout(), 0), StateStore(StateLayout(), 0)
        self.attend: Attend = WholeAttend()
        self.attend_whole = WholeAttend()

    def keep(
        self,
        store: KVStore,
        num_slots: int,
        attend: Attend,
        host_store: KVStore | None = None,
        num_host_slots: int = 0,
        states: StateStore | None = None,
    ) -> None:
        """Keep keys and values in a store from now on, and attend to them in one way.

        Args:
            store: The store.
            num_slots: Number of its slots.
            attend: The way to attend to them.
            host_store: Another one, for what is evicted from the first; ``None`` for none.
            num_host_slots: Number of its slots.
            states: Where running states are kept, of a model that has such.
        """
        self.keeps = True
        moves = None if host_store is None else Mover(store, host_store)
        self.states = StateStore(StateLayout(), 0) if states is None else states
        num_states = self.states.num_states
        self.tree = PrefixTree(Slots(num_slots), Slots(num_host_slots), moves, num_states)
        self.store, self.attend = store, attend
        self.attend_whole = WholeAttend(store.layout)
        self.layout = store.layout

    def evaluate(self, questions: list[Asked]) -> list[Found]:
        """Return one answer to each question; out of memory, halve the batch and try again."""
        try:
            answers = self._from_slots(questions)
        except Exception as error:
            if not is_out_of_memory(error) or len(questions) == 1:
                raise
            answers = None  # outside of the handler, since the traceback holds the tensors
        if answers is None:
            release_cached_memory()
            return _in_halves(questions, self.evaluate)
        return answers

    def whole(self, questions: list[Asked], *, pads: bool = True) -> list[Found]:
        """Return one answer to each question without reading or writing a slot.

        A text with more outputs than one pass may have is run again for those that are left, from
        its beginning. What is NaN is run again where padding or a later token may have made it so.

        Args:
            questions: The questions.
            pads: Whether they may be padded beside longer ones, where the model allows it.
        """
        with_pictures = [question for question in questions if question.context.pictures]
        if with_pictures:
            answers = {question: self.roots.whole(question) for question in with_pictures}
            others = [question for question in questions if question not in answers]
            answers.update(zip(others, self.whole(others, pads=pads), strict=True))
            return [answers[question] for question in questions]
        jobs = [Job.of(question) for question in questions]
        size = self.cost.max_outputs
        wanted = [(job, part) for job in jobs for part in job.parts(size)]
        padded = self._run_whole(wanted, pads and self.pads)
        again = [(job, part) for job, part in wanted if (job, part[0]) in padded]
        again = [(job, part) for job, part in again if job.is_spoilt(part)]
        self._run_whole(again, pads=False)
        spoilt: defaultdict[Job, list[int]] = defaultdict(list)
        for job, positions in still_spoilt(wanted):
            spoilt[job] += positions
        searches = [search(job, positions, size) for job, positions in spoilt.items()]
        while searches:
            steps = [(each, next(each, None)) for each in searches]
            searches = [each for each, step in steps if step is not None]
            self._run_whole([pair for _, step in steps for pair in step or ()], pads=False)
        return [job.answer for job in jobs]

    def _run_whole(
        self, wanted: Sequence[tuple[Job, Sequence[int]]], pads: bool
    ) -> set[tuple[Job, int]]:
        """Run contexts from their beginnings; return the outputs that were beside longer ones."""
        segments, padded = plan_whole(wanted), set[tuple[Job, int]]()
        if not segments:
            return padded
        for group in plan_groups([segment.size for segment in segments], self.cost, pads=pads):
            run = [segments[i] for i in group]
            self._forward(run, self.attend_whole)
            if len({segment.num_tokens for segment in run}) > 1:
                padded.update(
                    (job, position)
                    for segment in run
                    for position, own in segment.outputs.items()
                    for job in own
                )
        return padded

    def _forward(self, segments: Sequence[Segment], attend: Attend) -> None:
        """Run segments in one pass, and hand its outputs to the jobs that want them."""
        self.check_wanted()
        nodes = self.tree.nodes
        spans = [segment.span(nodes.slot[segment.nodes]) for segment in segments]
        before = np.array([segment.before for segment in segments], np.int32)
        states = self.states_behind(before) if attend is self.attend else None
        logits = self.runner.forward(pack(spans, Paths.of(nodes, before), states), attend)
        if states is not None:
            self._keep_states(segments, before, states)
        wanted = [jobs for segment in segments for jobs in segment.outputs.values()]
        if any(job.targets for jobs in wanted for job in jobs):
            self._hand_out_scores(segments, logits)
        places = [i for i, jobs in enumerate(wanted) if not all(job.targets for job in jobs)]
        if places:
            rows = self.finish(logits if len(places) == len(wanted) else logits[places])
            for i, row in zip(places, rows, strict=True):
                for job in wanted[i]:
                    job.row = None if job.targets else row

    def forward_alone(self, job: Job, span: Span, attend: Attend, start: int = 0) -> None:
        """Run tokens of one context in a pass of their own, and hand the job its outputs.

        Args:
            job: Whose tokens they are.
            span: The tokens.
            attend: What they attend to.
            start: Number of tokens of the context before them.
        """
        self.check_wanted()
        logits = self.runner.forward([span], attend)
        if not job.targets:
            job.row = next(iter(self.finish(logits)), None) if len(span.outputs) else None
            return
        wanted = [start + position - job.first for position in span.outputs]
        if wanted:
            targets = [job.targets[i] for i in wanted]
            scores = self._score(logits, [*range(len(wanted))], targets)
            for i, score in zip(wanted, scores.tolist(), strict=True):
                job.scores[i] = score

    def _hand_out_scores(self, segments: Sequence[Segment], logits: torch.Tensor) -> None:
        outputs = [output for segment in segments for output in segment.outputs.items()]
        wanted = [
            (place, job, position - job.first)
            for place, (position, jobs) in enumerate(outputs)
            for job in jobs
            if job.targets
        ]
        places = sorted({place for place, _, _ in wanted})
        if len(places) < len(outputs):
            logits = logits[places]
        index = {place: i for i, place in enumerate(places)}
        targets = [job.targets[i] for _, job, i in wanted]
        scores = self._score(logits, [index[place] for place, _, _ in wanted], targets)
        for (_, job, i), score in zip(wanted, scores.tolist(), strict=True):
            job.scores[i] = score

    # ---------------------------------------------------------------- with slots

    def match(self, context: Context, adapter: Adapter | None, most: int) -> int:
        """Return the node of the longest cached prefix of a context, of up to ``most`` tokens.

        It is not evicted before the next batch.
        """
        return self.tree.match(context.packed(0, most), adapter, context.place)

    def pin(self, node: int) -> bool:
        """Keep the path to a node until ``clear()``, and the state that contexts go on from.

        Returns:
            Whether there is such a state, and others have room; nothing is kept otherwise.
        """
        tree = self.tree
        if tree.states.num_states and not tree.states.pin(self.resumed(node)):
            return False
        tree.pin(node)
        return True

    def computed(self, query: Query, answer: Callable[[list[Asked]], object]) -> int | None:
        """Compute a context, with a state that it goes on from when it is asked again.

        Args:
            query: The context.
            answer: Answers questions by these passes.

        Returns:
            Its node on the device; ``None`` if there is no room.
        """
        answer([query])
        tree, size = self.tree, len(query.context)
        num_before = size - self.going_on.fewest
        if tree.states.num_states and num_before > 0 and query.context.pictures is None:
            node = self.match(query.context, query.adapter, num_before)
            if tree.nodes.depth[node] < num_before or not tree.nodes.state[node]:
                answer([Query(query.context[:num_before], query.adapter)])
        node = self.match(query.context, query.adapter, size)
        is_kept = tree.nodes.depth[node] == size and tree.nodes.slot[node] > 0
        has_state = not tree.states.num_states or tree.nodes.state[self.resumed(node)] > 0
        return node if is_kept and has_state else None

    def resumed(self, node: int) -> int:
        """Return the node whose state a context goes on from when it is asked, or its own."""
        tree = self.tree
        depth = max(0, int(tree.nodes.depth[node]) - self.going_on.fewest)
        before = tree.nodes.ancestors(np.array([node], np.int32), np.array([depth], np.int32))
        start = int(tree.states.last(before)[0])
        return start if tree.nodes.depth[start] else node

    def codes_of(self, node: int) -> list[tuple[torch.Tensor, ...]]:
        """Return the keys and values up to a node as the store has them, by layer."""
        nodes = self.tree.nodes
        return self.store.take(nodes.slot[nodes.path(node)])

    def fill(
        self,
        token_ids: Sequence[int],
        codes: Sequence[tuple[torch.Tensor, ...]],
        states: Sequence[torch.Tensor],
        num_resumed: int,
        adapter: Adapter | None,
    ) -> bool:
        """Keep a context whose keys and values are known; return whether there was room.

        Args:
            token_ids: The context.
            codes: The codes of each layer's keys and values, ``[len(token_ids), columns]`` each.
            states: The tensors of a running state, ``[1, *shape]`` each.
            num_resumed: Number of its first tokens that the state is behind.
            adapter: The adapter that it was computed with.
        """
        tree = self.tree
        tree.begin()
        node = tree.match(token_ids, adapter)
        start = int(tree.nodes.depth[node])
        slots = tree.allocate(len(token_ids) - start, [node])
        if slots is None:
            return False
        new = tree.grow_chain(node, np.array(token_ids[start:], np.int32), slots)
        try:
            self.store.put(slots, [tuple(c[start:] for c in layer) for layer in codes])
        except BaseException:
            tree.drop(new)
            raise
        end = tree.link(new)[-1:] if len(new) else np.array([node], np.int32)
        end = tree.nodes.ancestors(end, np.array([num_resumed], np.int32))
        if not states or tree.nodes.state[end[0]]:
            return True
        numbers = tree.states.give(end, np.ones(1, np.int64))  # whatever goes for it
        if numbers[0]:
            with tree.states.filling(end):
                self.states.write(numbers, states)
        return bool(numbers[0])

    def _from_slots(self, questions: list[Asked]) -> list[Found]:
        if not self.keeps:
            return self.whole(questions)
        answers = self.roots.begin(questions) if any(map(_PICTURES, questions)) else {}
        if not answers:
            return self._together(questions)
        others = [question for question in questions if question not in answers]
        if others:
            answers.update(zip(others, self._together(others), strict=True))
        return [answers[question] for question in questions]

    def _together(self, questions: list[Asked]) -> list[Found]:
        """Answer questions from what is kept, roots included."""
        self.tree.begin()
        contexts = [question.context for question in questions]
        # What has an output always goes through the model: logits are not kept.
        are_queries = set(map(type, questions)) == {Query}
        sizes = np.array([*map(len, contexts)], np.int32) - 1
        if not are_queries:
            sizes = np.array([*map(first_output, questions)], np.int32)
        nodes = self.tree.match_all(
            [context.place for context in contexts],
            questions[0].adapter,
            sizes,
            lambda i, start: contexts[i].packed(start, int(sizes[i])),
        )
        known = self.tree.nodes.depth[nodes]
        if self.states.num_states:
            known = np.minimum(known, sizes + 1 - self.going_on.fewest)
            nodes = self._at_states(nodes, sizes, np.array([*map(len, contexts)], np.int32))
        self.tree.use(nodes)
        if are_queries and self.is_step(questions, nodes, sizes):
            answers: list[Found] | None = self._steps.answers(questions, contexts, nodes)
        else:
            answers = self._planned(questions, nodes, known)
        if answers is not None:
            return answers
        if len(questions) == 1:
            return self.whole(questions)
        return _in_halves(questions, self._from_slots)

    def _at_states(
        self, nodes: NDArray[np.int32], sizes: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Return where contexts go on: the last node with a running state, or the root.

        Args:
            nodes: The nodes of their cached prefixes: ``[n]``.
            sizes: Number of tokens before the first output of each: ``[n]``.
            lengths: Number of tokens of each: ``[n]``.
        """
        tree, fewest, most = self.tree, self.going_on.fewest, self.going_on.most
        if fewest > 1:
            nodes = tree.nodes.ancestors(nodes, np.maximum(sizes + 1 - fewest, 0).astype(np.int32))
        nodes = tree.states.last(nodes)
        if most is not None:  # where whole contexts are faster than many passes
            num_passes = -(-(lengths - tree.nodes.depth[nodes]) // most)
            is_far = (num_passes - 1) * self.cost.per_forward > lengths
            nodes[is_far] = tree.nodes.root[nodes[is_far]]
        return nodes

    def is_step(
        self, questions: Sequence[Asked], nodes: NDArray[np.int32], sizes: NDArray[np.int32]
    ) -> bool:
        """Return whether contexts are one token each behind what is kept, and fit one pass."""
        depths = self.tree.nodes.depth[nodes]
        least, deepest = int(depths.min()), int(depths.max())
        return (
            len(questions) <= min(self.cost.max_tokens, self.cost.max_rows)
            and bool((depths == sizes).all())
            and (not self.states.num_states or least > 0 or deepest == 0)
            and (deepest == least if self.aligns else deepest <= 2 * least + 64)
            and not any(map(_PICTURES, questions))
        )

    def _planned(
        self, questions: list[Asked], nodes: NDArray[np.int32], known: NDArray[np.int32]
    ) -> list[Found] | None:
        """Answer questions by segments and waves; ``None`` if there is no room for all.

        Args:
            questions: The questions.
            nodes: The nodes that they go on from: ``[n]``.
            known: Number of first tokens of each that the tree has: ``[n]``.
        """
        starts = self.tree.nodes.depth[nodes].tolist()
        jobs = [Job.of(*one) for one in zip(questions, nodes.tolist(), starts, strict=True)]
        for job, num_known in zip(jobs, known.tolist(), strict=True):
            job.num_known = num_known
            job.shift = self.roots.shift(job.context)
        if not all(map(_has_root, jobs)):
            return None
        has_states = self.states.num_states > 0
        segments = plan_segments(jobs, self.cost, self.going_on if has_states else None)
        if has_states and len(questions) > 1 and not self._has_room(segments):
            return None
        slots = self.tree.allocate(sum(segment.num_tokens for segment in segments), nodes)
        if slots is None:
            return None
        try:
            self._run(jobs, segments, slots)
        except _OutOfStates:
            return None
        self.tokens_reused += sum(starts)
        places = self.tree.nodes.places(np.array([job.node for job in jobs], np.int32))
        for question, place in zip(questions, places, strict=True):
            question.context.place = place
        answers = [job.answer for job in jobs]
        spoilt = [i for i, job in enumerate(jobs) if job.is_spoilt(job.outputs)]
        return self.sound_answers(questions, answers, spoilt)

    def sound_answers(
        self, questions: Sequence[Asked], answers: list[Found], spoilt: Sequence[int]
    ) -> list[Found]:
        """Return answers, of which those at some places have NaN and are computed whole.

        Attention gives what it masks a weight of zero, and zero times NaN is NaN. So a context
        that overflows spoils its own beginning too, and the answers of others that end there.
        """
        if not spoilt:
            return answers
        again = self.whole([questions[i] for i in spoilt], pads=False)
        for i, answer in zip(spoilt, again, strict=True):
            answers[i] = answer
        return answers

    def _run(self, jobs: list[Job], segments: list[Segment], slots: NDArray[Any]) -> None:
        """Compute the jobs' answers, and keep what none of them shows to have overflown.

        Where nobody waits for them any more, what has been computed is kept all the same.
        """
        start, has_states = 0, self.states.num_states > 0
        for segment in segments:
            own = slots[start : start + segment.num_tokens]
            tokens = np.asarray(segment.token_ids, np.int32)
            segment.nodes = self.tree.grow_chain(segment.before, tokens, own)
            start += segment.num_tokens
        if has_states:
            self.tree.states.hold(np.array([segment.before for segment in segments], np.int32))
        held = {segment: segment.nodes for segment in segments}  # which are not linked
        computed: list[Segment] = []
        try:
            for wave in plan_waves(segments):
                sizes = [segment.size for segment in wave]
                for group in plan_groups(
                    sizes, self.cost, aligns=self.aligns, has_states=has_states
                ):
                    self._forward([wave[i] for i in group], self.attend)
                    computed += [wave[i] for i in group]
            if any(job.is_spoilt(job.outputs) for job in jobs):
                cut_to_sound(segments)
                computed = [segment for segment in segments if segment.num_tokens]
            self._link(computed, held)
        except QueryDroppedError:
            # There may be no row yet that would tell whether they have overflown.
            own = [segment.nodes for segment in computed]
            if own and self._are_finite(np.concatenate(own)):
                self._link(computed, held)
            raise
        finally:
            for nodes in held.values():
                self.tree.drop(nodes)

    # ---------------------------------------------------------------- running states

    def states_behind(self, nodes: NDArray[np.int32]) -> RowStates | None:
        """Return the running states of rows that go on from nodes; ``None`` where there are none.

        Either all are roots or none is.
        """
        if not self.states.num_states:
            return None
        begins = not self.tree.nodes.depth[nodes].any()
        before = None if begins else self.states.read(self.tree.nodes.state[nodes])
        return self.runner.running_states(self.states.layout, before)

    def keep_states(
        self,
        nodes: NDArray[np.int32],
        num_needed: NDArray[Any],
        before: NDArray[np.int32],
        states: RowStates,
    ) -> None:
        """Give the states that rows have come to to nodes, as far as there is room.

        Args:
            nodes: The node that each row has come to, or 0 for one that is not kept: ``[B]``.
            num_needed: How often each is needed in this batch: ``[B]``.
            before: The node that each row went on from: ``[B]``.
            states: The states.
        """
        _, rows = np.unique(nodes, return_index=True)
        rows = np.sort(rows[nodes[rows] > 0])
        own = nodes[rows]
        numbers = self.tree.states.give(own, num_needed[rows], before[rows])
        if (numbers[num_needed[rows] > 0] == 0).any():
            raise _OutOfStates
        given = np.flatnonzero(numbers)
        with self.tree.states.filling(own[given]):
            self.states.write(numbers[given], states.behind(rows[given]))

    def _keep_states(
        self, segments: Sequence[Segment], before: NDArray[np.int32], states: RowStates
    ) -> None:
        self.tree.states.release(before)
        ends = np.array([self._end(segment) for segment in segments], np.int32)
        num_behind = np.array([segment.num_behind for segment in segments])
        self.keep_states(ends, num_behind, before, states)

    def _end(self, segment: Segment) -> int:
        """Return the node at the end of a segment; 0 where another one has its state already."""
        if not segment.num_behind:
            tokens = np.asarray(segment.token_ids, np.int32)
            known = self.tree.nodes.walk(segment.before, tokens)
            if self.tree.nodes.depth[known] == segment.stop and self.tree.nodes.state[known]:
                return 0
        return int(segment.nodes[-1])

    def _has_room(self, segments: Sequence[Segment]) -> bool:
        """Return whether the states that others go on from could be kept while they have to."""
        starts = [segment.job.node for segment in segments if segment.parent is None]
        inner = Counter(segment.wave for segment in segments if segment.num_behind)
        # What a wave has come to is needed by the next one, while that one comes to its own.
        count = max((inner[wave] + inner[wave + 1] for wave in inner), default=0)
        return self.tree.states.has_room(count, np.array(starts, np.int32))

    def _are_finite(self, nodes: NDArray[np.int32]) -> bool:
        """Return whether nothing that is kept of nodes is infinite or NaN."""
        states = self.tree.nodes.state[nodes]
        return self.store.is_finite(self.tree.nodes.slot[nodes]) and self.states.is_finite(
            states[states > 0]
        )

    def _link(self, segments: Sequence[Segment], held: dict[Segment, NDArray[np.int32]]) -> None:
        """Have the tokens of segments found, and their jobs be where they end."""
        if not segments:
            return
        sizes = [segment.num_tokens for segment in segments]
        new = [segment.nodes[:size] for segment, size in zip(segments, sizes, strict=True)]
        for segment, size in zip(segments, sizes, strict=True):
            held[segment] = segment.nodes[size:]
        linked = np.split(self.tree.link(np.concatenate(new)), np.cumsum(sizes)[:-1])
        for segment, nodes in zip(segments, linked, strict=True):
            for position, jobs in segment.outputs.items():
                if position < segment.stop:
                    for job in jobs:
                        job.node = int(nodes[position - segment.start])


_PICTURES: Final = attrgetter("context.pictures")


@final
class _OutOfStates(Exception):
    """There is no room for a running state that others of the batch go on from."""


def _has_root(job: Job) -> bool:
    """Return whether the root of a context is kept: it may have had to go for another one's."""
    pictures = job.context.pictures
    return pictures is None or job.start >= pictures.num_tokens


def _in_halves(
    questions: list[Asked], evaluate: Callable[[list[Asked]], list[Found]]
) -> list[Found]:
    middle = len(questions) // 2
    return evaluate(questions[:middle]) + evaluate(questions[middle:])
