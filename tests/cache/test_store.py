import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.cache import PADDING_SLOT, KVLayout, KVStore, LayerLayout

CPU = torch.device("cpu")
LAYOUT = KVLayout(
    (LayerLayout(2, 4, 2, 4, torch.float32, CPU), LayerLayout(1, 6, 1, 3, torch.bfloat16, CPU))
)


def test_bytes_are_counted_over_heads_dims_layers_and_dtypes():
    assert LAYOUT.bytes_per_slot == (2 * 4 + 2 * 4) * 4 + (6 + 3) * 2


@given(st.integers(0, 5000))
def test_the_buffers_never_exceed_the_budget(budget):
    num_slots = LAYOUT.num_slots(budget)
    store = KVStore(LAYOUT, num_slots)
    size = sum(tensor.nbytes for tensor in [*store.keys, *store.values])
    assert size <= max(budget, LAYOUT.bytes_per_slot)  # at the least the padding slot
    assert size == (num_slots + 1) * store.bytes_per_slot
    assert size + LAYOUT.bytes_per_slot > budget  # as many as fit


def test_a_model_that_keeps_nothing_has_no_slots():
    assert KVLayout().num_slots(1 << 30) == 0
    store = KVStore(KVLayout(), 0)
    assert (store.bytes_per_slot, store.keys, store.is_finite([])) == (0, [], True)


def test_the_padding_slot_is_zero():
    store = KVStore(LAYOUT, 20)
    assert all(not tensor[PADDING_SLOT].any() for tensor in [*store.keys, *store.values])


@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_written_is_read_in_any_order_and_other_slots_and_layers_stay(layer):
    store = KVStore(LAYOUT, 9)
    for tensor in [*store.keys, *store.values]:
        tensor.zero_()
    keys = torch.randn(3, store.keys[layer].shape[1]).to(store.keys[layer].dtype)
    values = torch.randn(3, store.values[layer].shape[1]).to(store.values[layer].dtype)
    store.write(layer, torch.tensor([4, 9, 2]), keys, values)
    found = store.read(layer, torch.tensor([2, 4, 4, 0, 9]))
    for tensor, written in zip(found, (keys, values), strict=True):
        zero = torch.zeros_like(written[0])
        expected = [written[2], written[0], written[0], zero, written[1]]
        assert torch.equal(tensor, torch.stack(expected))
        tensor.fill_(7)  # a copy
    assert not store.keys[layer][[0, 1, 3, 5, 6, 7, 8]].any()
    assert torch.equal(store.read(layer, torch.tensor([9]))[0][0], keys[1])
    assert not store.keys[1 - layer].any()


def test_whether_slots_are_finite():
    store = KVStore(LAYOUT, 19)
    slots = [3, 5, 6]
    for tensor in [*store.keys, *store.values]:
        tensor[slots] = 1
    store.values[1][slots[2]] = torch.nan
    assert store.is_finite([])
    assert store.is_finite(slots[:2])
    assert not store.is_finite(slots)
