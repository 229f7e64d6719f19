import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.llm.hf.packing import Row, pack


def test_the_drawing_in_the_docstring():
    batch = pack(
        [
            Row([51, 52, 53], past_slots=[7, 8], slots=[9, 10, 11], outputs=[2]),
            Row([61], past_slots=[1, 2, 3, 4], slots=[5], outputs=[0]),
        ]
    )
    assert batch.input_ids.tolist() == [[51, 52, 53], [61, 0, 0]]
    assert batch.position_ids.tolist() == [[2, 3, 4], [4, 4, 4]]
    assert batch.gather.view(2, 7).tolist() == [[0, 0, 7, 8, 9, 10, 11], [1, 2, 3, 4, 5, 0, 0]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]
    assert batch.new_slots.tolist() == [9, 10, 11, 5]
    assert batch.new_columns is not None
    assert batch.new_columns.tolist() == [0, 1, 2, 3]
    assert (batch.output_rows.tolist(), batch.output_columns.tolist()) == ([0, 1], [2, 0])
    assert (batch.num_past, batch.num_new_tokens) == (4, 4)


def test_without_slots_the_right_padding_is_masked():
    batch = pack([Row([1, 2, 3], outputs=[2]), Row([4], outputs=[0])])
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert not batch.gather.any()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.booleans()), min_size=1, max_size=8)
)
def test_every_column_is_a_real_token_or_padding(shapes):
    rows, next_slot = [], 1
    for past, new, wants_all in shapes:
        slots = list(range(next_slot, next_slot + past + new))
        next_slot += past + new
        outputs = range(new) if wants_all else [new - 1]
        rows.append(Row([s % 90 for s in slots[past:]], slots[:past], slots[past:], list(outputs)))
    batch = pack(rows)
    num_rows, num_new = batch.input_ids.shape
    gather = batch.gather.view(num_rows, -1).numpy()
    mask = batch.attention_mask.numpy()
    for index, row in enumerate(rows):
        past, new = len(row.past_slots), len(row.token_ids)
        columns = gather[index][gather[index] > 0]
        assert columns.tolist() == [*row.past_slots, *row.slots]
        first = batch.num_past - past
        assert not mask[index, :first].any()
        assert mask[index, first:].all()
        # Column distance is position distance.
        assert batch.position_ids[index, :new].tolist() == list(range(past, past + new))
        assert (np.arange(batch.num_past, batch.num_past + new) - first).tolist() == list(
            range(past, past + new)
        )
    columns = batch.new_columns
    if columns is None:
        columns = torch.arange(num_rows * num_new)
    assert batch.input_ids.flatten()[columns].tolist() == [t for r in rows for t in r.token_ids]
    assert batch.position_ids.max() == max(len(r.past_slots) + len(r.token_ids) for r in rows) - 1
