import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.errors import CacheError, OutOfSlotsError
from genlm_backend.prefix import PADDING_SLOT, Slots


def test_the_padding_slot_is_never_handed_out():
    slots = Slots(20)
    assert PADDING_SLOT not in slots.allocate(slots.num_free)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_slots_are_handed_out_once(steps):
    slots = Slots(20)
    held: list[int] = []
    for is_allocation, count in steps:
        if is_allocation and count > slots.num_free:
            with pytest.raises(OutOfSlotsError):
                slots.allocate(count)
        elif is_allocation:
            taken = slots.allocate(count).tolist()
            assert not set(taken) & set(held)
            held += taken
        else:
            slots.free(held[:count])
            del held[:count]
        assert slots.num_used == len(held)
        assert slots.recycled() | set(held) == set(range(1, slots.num_touched + 1))


def test_returning_a_slot_twice_is_noticed():
    slots = Slots(3)
    taken = slots.allocate(2)
    slots.free(taken)
    with pytest.raises(CacheError):
        slots.free(taken)


def test_slots_follow_one_another_where_they_can():
    slots = Slots(100)
    first, second, third = (slots.allocate(20).tolist() for _ in range(3))
    slots.free(second)
    assert slots.allocate(5).tolist() == second[:5]  # the shortest stretch that is long enough
    assert slots.allocate(30).tolist() == list(range(61, 91))
    slots.free(first)
    slots.free(second[:5])  # between two that are free
    assert slots.allocate(40).tolist() == first + second
    slots.free(third[::-1])
    assert slots.allocate(30).tolist() == [*third, *range(91, 101)]


def test_what_is_in_pieces_is_handed_out_too():
    slots = Slots(60)
    taken = slots.allocate(60).tolist()
    slots.free(taken[::2])
    assert sorted(slots.allocate(30)) == taken[::2]
