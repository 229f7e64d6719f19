"""Keys and values of slots in arrays of MLX, against a dictionary of what was written last."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.backends.mlx import present

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not present.is_present(), reason="needs MLX"),
]

SHAPES = ((2, 3, 4), (1, 5, 2))
"""Heads of each layer, and the elements of a key and of a value."""


def store_of(num_slots, shapes=SHAPES):
    import mlx.core as mx

    from genlm_backend.prefix.mlx_store import LayerShape, MlxStore

    return MlxStore([LayerShape(*shape, mx.float32) for shape in shapes], num_slots)


def new_tokens(generator, count, shapes=SHAPES):
    """Keys and values of some tokens in every layer, ``[heads, n, dim]`` each."""
    return [
        tuple(generator.normal(size=(heads, count, dim)).astype(np.float32) for dim in dims)
        for heads, *dims in shapes
    ]


def write(store, slots, new):
    import mlx.core as mx

    store.write(np.array(slots), [tuple(map(mx.array, layer)) for layer in new])


def num_rows(store):
    """Number of slots that there is memory for."""
    return sum(part.nbytes for kept in store._kept for part in kept) / store.bytes_per_slot


@given(data=st.data(), num_slots=st.integers(1, 40), first_slots=st.sampled_from([1, 4, 1024]))
@settings(deadline=None, max_examples=60)
def test_slots_are_read_as_they_were_written_last(data, num_slots, first_slots):
    generator, written = np.random.default_rng(0), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("genlm_backend.prefix.mlx_store._FIRST_SLOTS", first_slots)
        store = store_of(num_slots)
        for _ in range(data.draw(st.integers(1, 5))):
            start = data.draw(st.integers(1, num_slots))
            stretch = range(start, data.draw(st.integers(start, num_slots)) + 1)
            scattered = st.lists(st.integers(1, num_slots), min_size=1, max_size=6, unique=True)
            slots = data.draw(st.just([*stretch]) | scattered)
            new = new_tokens(generator, len(slots))
            write(store, slots, new)
            for i, slot in enumerate(slots):
                written[slot] = [[part[:, i] for part in layer] for layer in new]
            least = max(min(first_slots, num_slots + 1), max(written) + 1)
            assert least <= num_rows(store) <= max(least, min(2 * max(written), num_slots + 1))
    blank = [[np.zeros((heads, dim)) for dim in dims] for heads, *dims in SHAPES]
    slots = data.draw(st.lists(st.sampled_from(sorted(written)), min_size=2, max_size=8))
    grid = np.array(slots[: len(slots) // 2 * 2]).reshape(2, -1)
    for layer in range(len(SHAPES)):
        expected = [written[slot][layer] for slot in grid.ravel().tolist()]
        check_read(store, layer, grid, expected)
        stretch = slice(0, max(written) + 1)
        of_all = [written.get(slot, blank)[layer] for slot in range(stretch.stop)]
        check_read(store, layer, stretch, of_all)


def check_read(store, layer, slots, expected):
    """Keys and values of slots are the expected ones, in rows of as many each."""
    import mlx.core as mx

    is_stretch = isinstance(slots, slice)
    num_rows = 1 if is_stretch else len(slots)
    found = store.read_by_head(layer, slots if is_stretch else mx.array(slots))
    for number, part in enumerate(found):
        tokens = np.stack([own[number] for own in expected])  # [B * n, heads, dim]
        wanted = tokens.reshape(num_rows, -1, *tokens.shape[1:]).swapaxes(1, 2)
        np.testing.assert_array_equal(np.array(part), wanted)


@pytest.mark.parametrize("layer", range(len(SHAPES)))
@pytest.mark.parametrize("is_value", [False, True])
@pytest.mark.parametrize("spoilt", [np.nan, np.inf, -np.inf])
def test_a_slot_with_what_is_no_number_is_not_finite(layer, is_value, spoilt):
    store, new = store_of(9), new_tokens(np.random.default_rng(0), 3)
    new[layer][is_value][-1, 1, -1] = spoilt
    write(store, [7, 2, 5], new)
    assert [store.is_finite([slot]) for slot in (7, 2, 5, 9)] == [True, False, True, True]
    assert store.is_finite([7, 5])
    assert not store.is_finite([5, 2, 7])


def test_bytes_are_counted_over_heads_and_layers_and_taken_as_slots_are_written():
    store = store_of(1_000_000)
    assert store.bytes_per_slot == 4 * (2 * (3 + 4) + 1 * (5 + 2))
    assert (num_rows(store), num_rows(store_of(10))) == (1024, 11)
    assert (store.is_exact, store.layout.layers) == (True, ())


def test_a_model_without_keys_and_values_writes_none():
    store = store_of(4, shapes=())
    write(store, [1, 2], [])
    assert store.is_finite([1, 2])
