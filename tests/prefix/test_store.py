import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.prefix import KV_CACHE_DTYPES, PADDING_SLOT, KVLayout, KVStore, LayerLayout

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
    size = sum(codes.nbytes for layer in store.codes for codes in layer)
    assert size <= max(budget, LAYOUT.bytes_per_slot)  # at the least the padding slot
    assert size == (num_slots + 1) * store.bytes_per_slot
    assert size + LAYOUT.bytes_per_slot > budget  # as many as fit


def test_a_model_that_keeps_nothing_has_no_slots():
    assert KVLayout().num_slots(1 << 30) == 0
    store = KVStore(KVLayout(), 0)
    assert (store.bytes_per_slot, store.codes, store.is_finite([])) == (0, [], True)


def test_the_padding_slot_is_zero():
    store = KVStore(LAYOUT, 20)
    assert all(not codes[PADDING_SLOT].any() for layer in store.codes for codes in layer)


@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_written_is_read_in_any_order_and_other_slots_and_layers_stay(layer):
    store, shape = KVStore(LAYOUT, 9), LAYOUT.layers[layer]
    for (codes,) in store.codes:
        codes.zero_()
    rows = torch.randn(3, shape.width).to(shape.dtype)
    assert torch.equal(store.write(layer, torch.tensor([4, 9, 2]), rows), rows)
    keys, values = rows[:, : shape.key_width], rows[:, shape.key_width :]
    found = store.read(layer, torch.tensor([2, 4, 4, 0, 9]))
    for tensor, written in zip(found, (keys, values), strict=True):
        zero = torch.zeros_like(written[0])
        expected = [written[2], written[0], written[0], zero, written[1]]
        assert torch.equal(tensor, torch.stack(expected))
        tensor.fill_(7)  # a copy
    assert not store.codes[layer][0][[0, 1, 3, 5, 6, 7, 8]].any()
    assert torch.equal(store.read(layer, torch.tensor([9]))[0][0], keys[1])
    assert not store.codes[1 - layer][0].any()


@pytest.mark.parametrize("kept", [None, *KV_CACHE_DTYPES])
def test_whether_slots_are_finite(kept):
    layout = KVLayout((LayerLayout(2, 4, 2, 4, torch.float32, CPU),)).kept_as(kept)
    store, slots = KVStore(layout, 19), [3, 5, 6]
    for wrong in (torch.nan, torch.inf, -torch.inf):
        rows = torch.randn(3, 16)
        rows[2, 11] = wrong
        store.write(0, torch.tensor(slots), rows)
        assert store.is_finite([])
        assert store.is_finite(slots[:2])
        assert not store.is_finite(slots)


@pytest.mark.parametrize("kept", KV_CACHE_DTYPES)
def test_what_a_store_reads_is_what_writing_said_it_would(kept):
    """Whatever other tokens were written with it, and in whatever layer."""
    layout = KVLayout(
        (LayerLayout(2, 8, 2, 8, torch.float32, CPU), LayerLayout(2, 24, 1, 16, torch.float64, CPU))
    ).kept_as(kept)
    store = KVStore(layout, 30)
    for number, layer in enumerate(layout.layers):
        rows = torch.randn(7, layer.width, dtype=layer.dtype)
        slots = torch.randperm(30)[:7] + 1
        together = store.write(number, slots, rows)
        assert together.dtype is layer.dtype
        found = torch.cat(store.read(number, slots), 1)
        assert torch.equal(found, together)
        for slot, row in zip(slots, rows, strict=True):
            alone = store.write(number, slot.unsqueeze(0), row.unsqueeze(0))
            torch.testing.assert_close(
                alone[0],
                found[slots == slot][0],
                rtol=0,
                atol=1e-6,  # of one matrix product
            )
        padding = torch.cat(store.read(number, torch.tensor([PADDING_SLOT])), 1)
        assert padding.isfinite().all()
