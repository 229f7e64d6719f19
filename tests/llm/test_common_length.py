"""The longest common prefix, compared with a loop."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.queries.context import common_length
from tests.naive import naive_longest_prefix

few_letters = st.lists(st.integers(0, 2), max_size=40)
kinds = st.sampled_from([tuple, list, bytes, lambda ids: array("q", ids)])


@given(shared=few_letters, first=few_letters, second=few_letters, kind=kinds)
def test_common_length_equals_that_found_by_a_loop(shared, first, second, kind):
    one, other = kind(shared + first), kind(shared + second)
    assert common_length(one, other) == naive_longest_prefix(one, [other])
    assert common_length(other, one) == naive_longest_prefix(one, [other])
    assert common_length(one, one) == len(one)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 1000, 1001])
def test_single_difference_is_found_at_any_position(length):
    ids = list(range(length))
    for place in {0, length // 2, length - 1} & set(range(length)):
        other = [*ids[:place], -1, *ids[place + 1 :]]
        assert common_length(ids, other) == place


def test_equal_elements_need_not_be_the_same_objects():
    ids = tuple(range(1000, 2000))
    assert common_length(ids, tuple(int(str(token_id)) for token_id in ids)) == 1000
