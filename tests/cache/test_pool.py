import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.cache import KVLayout, KVPool, LayerLayout
from genlm_backend.errors import CacheError, OutOfSlotsError

CPU = torch.device("cpu")
LAYOUT = KVLayout(
    (LayerLayout(2, 4, 2, 4, torch.float32, CPU), LayerLayout(1, 6, 1, 3, torch.bfloat16, CPU))
)


def test_bytes_are_counted_over_heads_dims_layers_and_dtypes():
    assert LAYOUT.bytes_per_slot == (2 * 4 + 2 * 4) * 4 + (6 + 3) * 2


@given(st.integers(0, 5000))
def test_the_buffers_never_exceed_the_budget(budget):
    pool = KVPool(LAYOUT, budget)
    size = sum(t.numel() * t.element_size() for t in [*pool.keys, *pool.values])
    assert size <= max(budget, LAYOUT.bytes_per_slot)  # at the least the padding slot
    assert pool.num_slots == max(0, budget // LAYOUT.bytes_per_slot - 1)


def test_the_padding_slot_is_zero_and_never_handed_out():
    pool = KVPool(LAYOUT, 20 * LAYOUT.bytes_per_slot)
    assert all(not tensor[0].any() for tensor in [*pool.keys, *pool.values])
    assert 0 not in pool.allocate(pool.num_free)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_slots_are_handed_out_once(steps):
    pool = KVPool(LAYOUT, 21 * LAYOUT.bytes_per_slot)
    held: list[int] = []
    for is_allocation, count in steps:
        if is_allocation and count > pool.num_free:
            with pytest.raises(OutOfSlotsError):
                pool.allocate(count)
        elif is_allocation:
            slots = pool.allocate(count)
            assert not set(slots) & set(held)
            held += slots
        else:
            pool.free(held[:count])
            del held[:count]
        assert pool.num_used == len(held)
        assert pool.bytes_used == len(held) * LAYOUT.bytes_per_slot
        assert pool.recycled_slots() | set(held) == set(range(1, pool.num_touched + 1))


def test_returning_a_slot_twice_is_noticed():
    pool = KVPool(LAYOUT, 4 * LAYOUT.bytes_per_slot)
    slots = pool.allocate(2)
    pool.free(slots)
    with pytest.raises(CacheError):
        pool.free(slots)


def test_whether_slots_are_finite():
    pool = KVPool(LAYOUT, 20 * LAYOUT.bytes_per_slot)
    slots = pool.allocate(3)
    for tensor in [*pool.keys, *pool.values]:
        tensor[slots] = 1
    pool.values[1][slots[2]] = torch.nan
    assert pool.is_finite([])
    assert pool.is_finite(slots[:2])
    assert not pool.is_finite(slots)
