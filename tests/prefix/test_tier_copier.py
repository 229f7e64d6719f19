"""Tokens that are copied between stores are coded there as they were."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from genlm_backend.prefix.kv_pool import KVLayout, KVPool, LayerLayout
from genlm_backend.prefix.tier_copier import TierCopier

CPU = torch.device("cpu")
LAYERS = (
    LayerLayout(2, 32, 2, 32, torch.float32, CPU),
    LayerLayout(1, 64, 1, 32, torch.float32, CPU),
)


def stores(kept=None):
    layout = KVLayout(LAYERS).kept_as(kept)
    device, host = KVPool(layout, 40), KVPool(layout.on_host(), 60)
    for layer, shapes in enumerate(LAYERS):
        device.write(layer, torch.arange(1, 41), torch.randn(40, shapes.width))
        host.write(layer, torch.arange(1, 61), torch.randn(60, shapes.width))
    return device, host


def copied(pool):
    return [[codes.clone() for codes in layer] for layer in pool.codes]


@pytest.mark.parametrize("kept", [None, "uint4"])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_copied_slots_reach_their_targets_and_no_others_change(kept, data):
    device, host = stores(kept)
    mover = TierCopier(device.codes, host.codes)
    for source, target, move in (
        (device, host, mover.to_host),
        (host, device, mover.to_device),
    ):
        num_source, num_target = len(source.codes[0][0]) - 1, len(target.codes[0][0]) - 1
        extents = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25)), max_size=4)
        wanted: dict[int, int] = {}
        for start, size in data.draw(extents):  # in a row on both sides
            first = data.draw(st.integers(1, num_target))
            for i in range(size):
                if start + i <= num_source and first + i <= num_target:
                    wanted[first + i] = start + i
        scattered = st.integers(1, num_target), st.integers(1, num_source)
        wanted.update(data.draw(st.dictionaries(*scattered, max_size=6)))
        before_source, before_target = copied(source), copied(target)
        move([*wanted.values()], [*wanted])
        for number, layer in enumerate(target.codes):
            for i, codes in enumerate(layer):
                expected = before_target[number][i]
                for new, old in wanted.items():
                    expected[new] = before_source[number][i][old]
                assert torch.equal(codes, expected)
        for layer, before in zip(source.codes, before_source, strict=True):
            assert all(map(torch.equal, layer, before))


class Called(TorchFunctionMode):
    """Notes the names of the functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.add(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("size", "is_copied_in_place"), [(16, True), (15, False)])
def test_runs_of_16_slots_are_copied_without_gathering(first, size, is_copied_in_place):
    """Rows of stores are slots, or the slots from some number on."""
    device, host = stores()
    old, new = [*range(2, 2 + 2 * size)], [*range(1, 1 + size), *range(40, 40 + size)]
    expected = copied(host)
    for before, layer in zip(expected, device.codes, strict=True):
        for part, codes in zip(before, layer, strict=True):
            part[[slot - first for slot in new]] = codes[[slot - first for slot in old]]
    with Called() as called:
        TierCopier(device.codes, host.codes, first).to_host(old, new)
    assert ("index_select" not in called.names) == is_copied_in_place
    for before, layer in zip(expected, host.codes, strict=True):
        assert all(map(torch.equal, before, layer))
