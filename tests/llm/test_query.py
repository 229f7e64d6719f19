import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.model.query import Adapter, Query


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1))
def test_equality_is_identity_of_the_answer(first, second):
    one, two = Query(tuple(first)), Query(tuple(second))
    assert (one == two) == (first == second)
    assert one == Query(tuple(first))
    assert hash(one) == hash(Query(tuple(first)))
    adapters = [Adapter("polite", 1), Adapter("polite", 2), Adapter("rude", 1)]
    read = [one, *(Query(tuple(first), adapter) for adapter in adapters)]
    assert len(set(read)) == 4
    assert [query.lora_name for query in read] == [None, "polite", "polite", "rude"]
    assert Query((*first, 5), adapters[1]).prefix(len(first)) == read[2]
    assert pickle.loads(pickle.dumps(read)) == read
    assert one != tuple(first)


def test_a_query_cannot_be_changed():
    query = Query((1, 2))
    with pytest.raises(AttributeError):
        query.token_ids = (3,)
    assert "[1, 2]" in repr(query)
    assert "300 ids" in repr(Query(tuple(range(300))))
