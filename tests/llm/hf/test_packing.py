"""Spans in the rectangle of a forward pass, and the columns that they attend to."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.attention import packing
from genlm_backend.attention.torch import GatherAttend, WholeAttend
from genlm_backend.attention.torch.gathered_attend import gather
from genlm_backend.backends.hf.state_trial import paths_of
from genlm_backend.prefix import KVLayout, KVStore, LayerLayout


class Span(NamedTuple):
    """A span, and the slots that it has before it."""

    token_ids: list[int]
    past: Sequence[int] = ()
    slots: Sequence[int] = ()
    outputs: Sequence[int] = ()


def pack(spans):
    own = [packing.Span(span.token_ids, span.slots, span.outputs) for span in spans]
    return packing.pack(own, paths_of([span.past for span in spans]))


def test_the_drawing_in_the_docstring():
    spans = [
        Span([51, 52, 53], [7, 8], [9, 10, 11], [2]),
        Span([61], [1, 2, 3, 4], [5], [0]),
    ]
    batch, gathered = pack(spans), gather(pack(spans))
    assert batch.input_ids.tolist() == [[51, 52, 53], [61, 0, 0]]
    assert batch.position_ids.tolist() == [[2, 3, 4], [4, 4, 4]]
    assert gathered.slots.view(2, 7).tolist() == [[0, 0, 7, 8, 9, 10, 11], [1, 2, 3, 4, 5, 0, 0]]
    assert gathered.mask.tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]
    assert batch.new_slots.tolist() == [9, 10, 11, 5]
    assert batch.new_columns is not None
    assert batch.new_columns.tolist() == [0, 1, 2, 3]
    assert (batch.output_rows.tolist(), batch.output_columns.tolist()) == ([0, 1], [2, 0])
    assert (gathered.num_past, batch.num_new_tokens) == (4, 4)


def test_run_whole_the_right_padding_is_masked():
    batch = pack([Span([1, 2, 3], outputs=[2]), Span([4], outputs=[0])])
    with WholeAttend().attending(batch, None) as inputs:
        assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
        assert inputs["use_cache"] is False
    assert not len(batch.new_slots)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 6), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_every_column_is_a_real_token_or_padding(shapes):
    spans, slots_of, next_slot = [], [], 1
    for past, new, wants_all in shapes:
        slots = list(range(next_slot, next_slot + past + new))
        next_slot += past + new
        outputs = list(range(new)) if wants_all else [new - 1]
        ids = [s % 90 for s in slots[past:]]
        spans.append(Span(ids, slots[:past], slots[past:], outputs))
        slots_of.append(slots)
    batch, gathered = pack(spans), gather(pack(spans))
    num_rows, num_new = batch.input_ids.shape
    columns_of = gathered.slots.view(num_rows, -1).numpy()
    mask = gathered.mask.numpy()
    for index, own in enumerate(spans):
        past, new = len(own.past), len(own.token_ids)
        columns = columns_of[index][columns_of[index] > 0]
        assert columns.tolist() == slots_of[index]
        first = gathered.num_past - past
        assert not mask[index, :first].any()
        assert mask[index, first:].all()
        # Column distance is position distance.
        assert batch.position_ids[index, :new].tolist() == list(range(past, past + new))
        assert (np.arange(gathered.num_past, gathered.num_past + new) - first).tolist() == list(
            range(past, past + new)
        )
    columns = batch.new_columns
    if columns is None:
        columns = torch.arange(num_rows * num_new)
    assert batch.input_ids.flatten()[columns].tolist() == [t for s in spans for t in s.token_ids]
    assert batch.position_ids.max() == max(len(s.past) + len(s.token_ids) for s in spans) - 1


def test_a_layer_stores_new_tokens_and_hands_out_past_and_new():
    """Against the states themselves: two heads of three, a row with padding on either side."""
    layout = KVLayout((LayerLayout(2, 3, 1, 4, torch.float32, torch.device("cpu")),))
    store = KVStore(layout, 20)
    spans = [Span([1, 2], [7, 8], [9, 10], [1]), Span([3], [1], [2], [0])]
    (codes,) = store.codes[0]
    codes[1:] = torch.randn_like(codes[1:])
    keys, values = torch.randn(2, 2, 2, 3), torch.randn(2, 1, 2, 4)
    past_keys = codes[:, :6].clone()
    with GatherAttend(store).attending(pack(spans), None) as inputs:
        (layer,) = inputs["cache"].layers
    found_keys, found_values = layer.update(keys, values)
    assert (found_keys.shape, found_values.shape) == ((2, 2, 4, 3), (2, 1, 4, 4))
    assert torch.equal(found_keys[0, :, 2:], keys[0])
    assert torch.equal(found_keys[0, :, :2], past_keys[[7, 8]].view(2, 2, 3).transpose(0, 1))
    assert torch.equal(found_keys[1, :, 2:3], keys[1, :, :1])
    assert not found_keys[1, :, 3].any()
    assert torch.equal(found_values[0, :, 2:], values[0])
    assert torch.equal(codes[2, 6:], values[1, 0, 0])
    assert (layer.get_seq_length(), layer.get_mask_sizes(2)) == (2, (4, 0))


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(-9, 9)), min_size=1, max_size=8
    )
)
def test_positions_are_indices_and_the_shift_of_the_row(shapes):
    """Padding repeats the last position of its row."""
    spans = [packing.Span([7] * new, shift=shift) for _, new, shift in shapes]
    batch = packing.pack(spans, paths_of([range(1, 1 + past) for past, _, _ in shapes]))
    num_columns = max(new for _, new, _ in shapes)
    assert batch.position_ids.tolist() == [
        [past + min(column, new - 1) + shift for column in range(num_columns)]
        for past, new, shift in shapes
    ]
    assert batch.num_new.tolist() == [new for _, new, _ in shapes]
    assert batch.num_past.tolist() == [past for past, _, _ in shapes]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_a_decode_step_is_a_span_of_one_token_for_each_row(sizes):
    token_ids, slots = np.arange(len(sizes)) + 50, np.arange(len(sizes)) + 90
    past = paths_of([range(1, 1 + size) for size in sizes])
    step = packing.pack_step(token_ids, slots, past, None)
    pairs = zip(token_ids.tolist(), slots.tolist(), strict=True)
    spans = packing.pack([packing.Span([token], [slot], [0]) for token, slot in pairs], past)
    assert (step.is_step, spans.is_step) == (True, False)
    assert (step.num_rows, step.num_new_tokens) == (len(sizes), len(sizes))
    assert step.new_columns is spans.new_columns is None
    names = ["input_ids", "position_ids", "new_slots", "output_rows", "output_columns"]
    for name in [*names, "num_new", "num_past"]:
        ours, theirs = getattr(step, name), getattr(spans, name)
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())
