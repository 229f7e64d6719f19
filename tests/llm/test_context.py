"""A Context is a tuple that grows cheaply: each operation against the tuple of the same ids."""

import copy
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.errors import ContextError, ContextTypeError
from genlm_backend.llm import Context
from genlm_backend.queries.context import TOKENS_PER_BLOCK, ContextFactory

VOCAB = 100
bounds = st.none() | st.integers(-1200, 1200)


@st.composite
def long_ids(draw):
    """Ids of a length around whole blocks, or anywhere."""
    near = draw(st.sampled_from([0, 1, 2])) * TOKENS_PER_BLOCK
    length = max(0, near + draw(st.integers(-2, 9)))
    seed = draw(st.integers(0, 3))
    return tuple((7 * i + seed) % VOCAB for i in range(length))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, VOCAB - 1)),
        st.tuples(st.just("add"), long_ids()),
        st.tuples(st.just("add"), st.lists(st.integers(0, VOCAB - 1), max_size=3)),
        st.tuples(st.just("behind"), st.lists(st.integers(0, VOCAB - 1), max_size=3)),
        st.tuples(st.just("slice"), st.tuples(bounds, bounds, st.sampled_from([None, 1, 2, -1]))),
    ),
    max_size=12,
)


def check_equal(context, ids):
    assert isinstance(context, Sequence)
    assert (len(context), tuple(context), bool(context)) == (len(ids), ids, bool(ids))
    afresh = ContextFactory(VOCAB).of(ids)
    assert context == afresh
    assert hash(context) == hash(afresh)
    assert pickle.loads(pickle.dumps(context)) == context
    assert tuple(reversed(context)) == ids[::-1]
    for start, stop in ((0, None), (3, 600), (512, 513), (600, 3), (len(ids), None)):
        assert tuple(context.packed(start, stop)) == ids[start:stop]
    for index in {0, -1, len(ids) // 2, -len(ids)} if ids else ():
        assert context[index] == ids[index]
    for index in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError, match=f"{index} is outside a context of {len(ids)} tok"):
            context[index]


@settings(deadline=None)
@given(long_ids(), steps, st.data())
def test_extended_and_sliced_contexts_equal_tuples_of_their_ids(ids, steps, data):
    """Each step goes on from any of the contexts so far, none of which changes by it."""
    made = [(ContextFactory(VOCAB).of(ids), ids)]
    for action, value in steps:
        context, ids = made[data.draw(st.integers(0, len(made) - 1))]
        if action == "extend":
            made.append((context.extend(value), (*ids, value)))
        elif action == "add":
            made.append((context + value, (*ids, *value)))
        elif action == "behind":
            made.append((value + context, (*value, *ids)))
        else:
            made.append((context[slice(*value)], ids[slice(*value)]))
    for context, ids in made:
        check_equal(context, ids)
    for first, own in made:
        for second, other in made:
            assert (first == second) == (own == other)


def test_context_is_an_immutable_hashable_value():
    context = ContextFactory(VOCAB).of([3, 4, 5])
    assert context.index(4) == 1
    assert context.count(5) == 1
    assert 3 in context
    assert 9 not in context
    assert context != [3, 4, 5]
    assert context != (3, 4, 5)
    assert {context: 1}[context[:2].extend(5)] == 1
    assert copy.copy(context) is copy.deepcopy(context) is context
    assert repr(context) == "Context([3, 4, 5])"
    assert repr(context + range(50)) == "Context([3, … 49], 53 ids)"
    with pytest.raises(TypeError, match=r"lm\.context"):
        Context([1, 2])
    with pytest.raises(AttributeError):
        context.more = 1


def test_many_threads_may_extend_one_context():
    context = ContextFactory(VOCAB).of(range(40)) + [1] * 990

    def grow(seed):
        mine = context
        for step in range(600):
            mine = mine.extend((seed * step) % VOCAB)
        return tuple(mine[1030:])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(grow, range(16)))
    assert found == [tuple((seed * step) % VOCAB for step in range(600)) for seed in range(16)]
    assert tuple(context) == (*range(40), *[1] * 990)


def test_extending_a_context_validates_the_new_ids():
    context = ContextFactory(VOCAB).of([1])
    for wrong in (VOCAB, -1, 1 << 40):
        for extend in (context.extend, lambda i: context + [i], lambda i: context + [2, i]):
            with pytest.raises(ContextError, match=f"token id {wrong} is outside"):
                extend(wrong)
    for wrong in (True, 1.0, "1", None):
        for extend in (context.extend, lambda i: context + [i], lambda i: context + (2, i)):
            with pytest.raises(ContextTypeError):
                extend(wrong)
    for wrong in (5, "12", b"12", {"input_ids": [1]}, np.zeros((2, 2), int)):
        with pytest.raises(ContextTypeError):
            context + wrong
    assert tuple(context + np.array([1, 2])) == (1, 1, 2)
    for ids in ([1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2])):
        assert tuple(ids + context) == (1, 2, 1)
    with pytest.raises(ContextError, match="token id 100"):
        [100] + context
    with pytest.raises(ContextTypeError, match="append several with context \\+ token_ids"):
        context.extend([5, 6])
    with pytest.raises(ContextTypeError, match="got 5; put it into a list"):
        context + 5
    with pytest.raises(TypeError, match="indices must be integers or slices, got 'a'"):
        context["a"]
    assert tuple(context.extend(np.int64(5)) + context + torch.tensor([7])) == (1, 5, 1, 7)


def test_foreign_context_is_refused_and_an_unpickled_one_validated():
    ours, theirs = ContextFactory(VOCAB), ContextFactory(VOCAB)
    context = theirs.of([1, 2])
    for use in (ours.of, ours.check_context, ours.of([1]).__add__):
        with pytest.raises(ContextError, match="another model"):
            use(context)
    loaded = pickle.loads(pickle.dumps(context)) + [99]
    assert ours.of(loaded).contexts is ours
    with pytest.raises(ContextError, match="token id 99"):
        ContextFactory(50).of(loaded)
    assert ours.of(list(context)) == context


# -------------------------------------------------------------------- lists that begin alike


def test_changing_the_input_ids_leaves_earlier_contexts_unchanged():
    contexts, ids = ContextFactory(VOCAB), [5] * 1100
    made = [contexts.of(ids) for _ in range(3)]
    ids[:3] = [6, 6, 6]
    ids.append(7)
    made.append(contexts.of(ids))
    assert [tuple(context) for context in made[:3]] == [(5,) * 1100] * 3
    assert tuple(made[3]) == (6, 6, 6, *[5] * 1097, 7)
    tensors = [torch.tensor(5) for _ in range(600)]
    for value in (5, 6, 7):
        for tensor in tensors:
            tensor.fill_(value)
        assert set(contexts.of(tensors)) == {value}
