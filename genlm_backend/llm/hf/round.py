"""Round: a decode step of many contexts, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.llm.context import Context
from genlm_backend.llm.hf.attend.sharing import Reading
from genlm_backend.llm.hf.job import Asked, Found
from genlm_backend.llm.hf.packing import pack_step
from genlm_backend.llm.hf.paths import Paths
from genlm_backend.llm.row import Row

if TYPE_CHECKING:
    from genlm_backend.llm.hf.passes import Passes


class _Last(NamedTuple):
    """The last decode step.

    Attributes:
        of: The tree, its state and the way to attend, all of which are to be the same.
        reading: How it was read.
        places: The nodes of its rows by number and use, ascending: int64 ``[B]``.
        rows: Row of each of them: ``[B]``.
    """

    of: tuple[object, ...]
    reading: Reading
    places: NDArray[np.int64]
    rows: NDArray[np.intp]


@final
class Round:
    """Decode steps: contexts of which everything but the last token is kept.

    A row of a step is three integers: the node before it, its token and its slot. What a step
    reads is what the last one read, its rows permuted and one column more, where each row goes on
    from one of that; and is found out anew otherwise.

    Args:
        passes: What runs the model and keeps keys and values.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._last: _Last | None = None

    def answers(
        self, questions: Sequence[Asked], contexts: Sequence[Context], nodes: NDArray[np.int32]
    ) -> list[Found] | None:
        """Return the rows behind contexts; ``None`` if there is no room for their tokens.

        Args:
            questions: Queries of one adapter.
            contexts: Their contexts.
            nodes: The nodes of the tokens before the last ones, used in this batch: ``[B]``.
        """
        tree = self._passes.tree
        tokens = np.frombuffer(b"".join([c.last_packed for c in contexts]), np.int32)
        distinct, rank = _distinct(nodes, tokens)
        nodes, tokens = nodes[distinct], tokens[distinct]
        slots = tree.allocate(len(nodes), nodes)
        if slots is None:
            return None
        rows, kept = self._computed(nodes, tokens, slots)
        self._passes.tokens_reused += int(tree.nodes.depth[nodes].sum())
        for context, place in zip(contexts, tree.nodes.places(kept[rank]), strict=True):
            context.place = place
        answers: list[Found] = [rows[i] for i in rank.tolist()]
        spoilt: list[int] = np.flatnonzero(kept == 0).tolist()
        return self._whole_in_place_of(spoilt, questions, rank, answers) if spoilt else answers

    def _computed(
        self, nodes: NDArray[np.int32], tokens: NDArray[np.int32], slots: NDArray[np.int64]
    ) -> tuple[list[Row], NDArray[np.int32]]:
        """Compute one token behind each node, and keep those that no NaN came of.

        Returns:
            The rows, and the nodes of the tokens; 0 for one that is not kept.
        """
        passes, tree = self._passes, self._passes.tree
        new, last = tree.grow(nodes, tokens, slots), self._last
        self._last = None
        try:
            passes.check_wanted()
            reading = self._reading(nodes, last)
            past = self._past(nodes)
            batch = pack_step(tokens.astype(np.int64), past.num_tokens, slots, past, reading)
            rows = passes.finish(passes.runner.forward(batch, passes.attend))
            is_sound = np.array([not row.is_nan for row in rows])
        except BaseException:
            tree.drop(new)
            raise
        if not is_sound.all():
            kept = np.zeros(len(rows), np.int32)
            kept[is_sound] = tree.link(new[is_sound])
            tree.drop(new[~is_sound])
            return rows, kept
        kept = tree.link(new)
        if reading is not None:
            places = tree.nodes.numbers(kept)
            order = np.argsort(places)
            self._last = _Last(self._state(), reading, places[order], order)
        return rows, kept

    def _state(self) -> tuple[object, ...]:
        """Return what a reading depends on beside its nodes: that these are where they were."""
        tree = self._passes.tree
        return tree.nodes.key, tree.num_returned, self._passes.attend

    def _past(self, nodes: NDArray[np.int32]) -> Paths:
        tree = self._passes.tree.nodes
        return Paths(tree.parent, tree.depth, tree.slot, nodes.astype(np.int64))

    def _reading(self, nodes: NDArray[np.int32], last: _Last | None) -> Reading | None:
        """Return how a step behind nodes reads what is cached."""
        tree = self._passes.tree.nodes
        if last is not None and last.of == self._state() and not last.reading.is_worn:
            places = tree.numbers(nodes)
            found = np.searchsorted(last.places, places).clip(max=len(last.places) - 1)
            if (last.places[found] == places).all():
                return last.reading.stepped(last.rows[found], tree.slot[nodes].astype(np.int64))
        return self._passes.attend.reading(self._past(nodes), np.ones(len(nodes), np.int64))

    def _whole_in_place_of(
        self,
        spoilt: Sequence[int],
        questions: Sequence[Asked],
        rank: NDArray[np.intp],
        answers: list[Found],
    ) -> list[Found]:
        """Return answers, of which those of some rows are computed whole and alone."""
        places = np.flatnonzero(np.isin(rank, spoilt)).tolist()
        asked = [questions[i] for i in places]
        for i, answer in zip(places, self._passes.whole(asked, pads=False), strict=True):
            answers[i] = answer
        return answers


def _distinct(
    nodes: NDArray[np.int32], tokens: NDArray[np.int32]
) -> tuple[NDArray[Any] | slice, NDArray[np.intp]]:
    """Return the first row of each distinct token behind a node, and which of these each is."""
    keys = (nodes.astype(np.int64) << 32) | tokens.view(np.uint32)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    if len(first) == len(keys):
        return slice(None), np.arange(len(keys))
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse]
