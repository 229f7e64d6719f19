"""A runner that has no model and knows what each slot must hold, and what it is asked."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from genlm_backend.backends.hf.cascade_attention import UncachedAttention
from genlm_backend.errors import QueryDroppedError
from genlm_backend.prefix.kv_pool import KVLayout, KVPool
from genlm_backend.queries.context import of_no_model
from genlm_backend.queries.query import RowQuery
from genlm_backend.readouts.score_query import ScoreQuery
from genlm_backend.scheduling.output_processor import OutputProcessor
from genlm_backend.scheduling.prefill_plan import CostModel
from genlm_backend.scheduling.prefix_cache import PrefixCache
from genlm_backend.scheduling.scheduler import ALL, Scheduler

VOCAB = 5


def logits_after(token_ids):
    """What the pretended model says after a context."""
    seed = hash(tuple(token_ids)) % 2**31
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(VOCAB))


class Slotted:
    """A way to attend that only says that there are slots."""

    def plan(self, past, num_new):
        return None


class Packed(NamedTuple):
    """One row of a packed batch."""

    token_ids: list[int]
    past: list[int]
    slots: list[int]
    outputs: list[int]


def rows_of(batch):
    """Take a packed batch apart."""
    columns = batch.past.columns(max(batch.prefix_lens, default=0))
    stops = np.cumsum(batch.num_new)
    for row, (num_new, prefix_len) in enumerate(zip(batch.num_new, batch.prefix_lens, strict=True)):
        yield Packed(
            batch.input_ids[row, :num_new].tolist(),
            columns[row, columns.shape[1] - prefix_len :].tolist(),
            batch.slot_mapping[stops[row] - num_new : stops[row]].tolist(),
            batch.output_columns[batch.output_rows == row].tolist(),
        )


class FakeRunner:
    """Writes down which context's last token is in a slot, and reads nothing else.

    Attributes:
        written: Adapter and context by slot.
        adapter: The adapter whose turn it is.
        max_outputs: Largest number of outputs that a pass may have, but for one of each row.
        failing: What the next passes raise, the last one first; ``None`` for a pass that is made.
    """

    model = None

    def __init__(self):
        self.written, self.adapter, self.failing = {}, None, []
        self.max_outputs = 512
        self.num_forwards = self.tokens_computed = 0

    def forward(self, batch, attend):
        error = self.failing.pop() if self.failing else None
        if error is not None:
            raise error
        rows, token_chunks = [], list(rows_of(batch))
        num_outputs = sum(len(token_chunk.outputs) for token_chunk in token_chunks)
        assert num_outputs <= max(self.max_outputs, len(token_chunks))
        for token_chunk in token_chunks:
            context = []
            for slot in token_chunk.past:
                adapter, before = self.written[slot]
                context.append(before[-1])
                assert (adapter, before) == (self.adapter, tuple(context))
            assert isinstance(attend, UncachedAttention) == (not token_chunk.slots)
            for index, token_id in enumerate(token_chunk.token_ids):
                context.append(token_id)
                if token_chunk.slots:
                    self.written[token_chunk.slots[index]] = (self.adapter, tuple(context))
                if index in token_chunk.outputs:
                    rows.append(logits_after(context))
            self.tokens_computed += len(token_chunk.token_ids)
        self.num_forwards += 1
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


def make(num_slots, runner=None, **cost):
    runner, wanted = runner or FakeRunner(), []

    def check_cancelled():
        if wanted and not wanted.pop():
            raise QueryDroppedError("by the test")

    cache = None
    if num_slots is not None:
        cache = PrefixCache(runner, Slotted(), KVPool(KVLayout(), num_slots), num_slots)
    passes = passes_over(runner, check_cancelled, cache, **cost)
    runner.max_outputs = passes.cost.max_outputs
    passes.wanted = wanted
    return passes


def passes_over(runner, check_cancelled, cache=None, can=ALL, **cost):
    whole, outputs = UncachedAttention(), OutputProcessor(tuple)
    cache = cache or PrefixCache(runner, whole)
    return Scheduler(runner, outputs, CostModel(**cost), cache, whole, check_cancelled, can)


class Split(NamedTuple):
    """A text and where its prompt ends."""

    text: tuple[int, ...]
    start: int


def question(asked):
    """A query of a context, or a scoring of a text from a place on."""
    if isinstance(asked, Split):
        return ScoreQuery(RowQuery(of_no_model(asked.text)), asked.start)
    return RowQuery(of_no_model(asked))


def logprobs_after(context):
    return logits_after(context).float().log_softmax(-1)


splits = st.builds(
    lambda text, start: Split(text, 1 + start % (len(text) - 1)),
    st.lists(st.integers(0, 2), min_size=2, max_size=12).map(tuple),
    st.integers(0, 10),
)
