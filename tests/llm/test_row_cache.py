import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.model.batched_lm import BatchedLM
from genlm_backend.queries.evaluator import StatelessEvaluator
from genlm_backend.queries.row import RowCache, rows_of_logits
from tests.llm.conftest import word_tokenizer
from tests.llm.families import VOCAB


def row(value, size=4):
    return torch.full((size,), float(value))


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60),
    st.integers(0, 6),
    st.booleans(),
)
def test_row_cache_is_lru_bounded_by_bytes_or_rows(steps, capacity, is_counted):
    cache = RowCache(1 << 20, max_rows=capacity) if is_counted else RowCache(16 * capacity)
    model: list[int] = []  # keys, oldest first
    for is_put, key in steps:
        if is_put:
            cache.put(key, row(key))
            if capacity:
                model = [k for k in model if k != key] + [key]
                model = model[-capacity:]
        else:
            found = cache.get(key)
            assert (found is not None) == (key in model)
            if found is not None:
                assert found[0] == key
                model = [k for k in model if k != key] + [key]
        assert len(cache) == len(model)
        assert cache.num_bytes == 16 * len(model) <= cache.budget


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=40),
    st.integers(0, 40),
    st.sampled_from([None, 0, 3]),
)
def test_put_all_equals_putting_rows_one_by_one(sizes, budget, most):
    pairs = [(key, row(i, size)) for i, (key, size) in enumerate(sizes)]
    once, each = RowCache(4 * budget, most), RowCache(4 * budget, most)
    once.put_all(pairs)
    for key, own in pairs:
        each.put(key, own)
    assert (len(once), once.num_bytes, once.num_evicted) == (
        len(each),
        each.num_bytes,
        each.num_evicted,
    )
    assert all(once.get(key) is each.get(key) for key in range(10))
    once.put_all(pairs, once.num_clears + 1)  # computed before or after, and not now
    assert len(once) == len(each)


def test_clear_drops_rows_and_refuses_those_computed_before_it():
    cache = RowCache(1000)
    num_clears = cache.num_clears
    cache.put("a", row(1), num_clears)
    cache.clear()
    cache.put("b", row(2), num_clears)
    assert cache.get("a") is None
    assert cache.get("b") is None
    cache.put("b", row(2), cache.num_clears)
    assert cache.get("b") is not None


def test_a_negative_budget_is_refused():
    with pytest.raises(ValueError, match="budget"):
        RowCache(-1)
    with pytest.raises(ValueError, match="max_rows"):
        RowCache(1, max_rows=-1)


def test_concurrent_threads_keep_the_byte_count_consistent():
    cache = RowCache(16 * 50)

    def work(offset):
        for i in range(500):
            cache.put((offset, i % 40), row(i))
            cache.get((offset, (i * 7) % 40))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.num_bytes == 16 * len(cache) <= cache.budget


def test_rows_of_a_batch_sent_before_clear_cache_are_not_cached():
    """It is evaluated behind the call, and before what the call clears."""
    begun, may_end = threading.Event(), threading.Event()

    class Constant(StatelessEvaluator):
        def evaluate(self, queries):
            return rows_of_logits(torch.zeros(len(queries), VOCAB, dtype=torch.float32))

    def hold():
        begun.set()
        assert may_end.wait(30)

    with BatchedLM(word_tokenizer(), Constant()) as lm, ThreadPoolExecutor(2) as pool:
        held = lm._batcher.call_soon(hold)
        assert begun.wait(30)
        asked = pool.submit(lm.next_token_logprobs_sync, [2])
        while lm._batcher.statistics().num_submitted < 1:
            time.sleep(0.001)
        num_calls = len(lm._batcher._fences)
        cleared = pool.submit(lm.clear_cache)
        while len(lm._batcher._fences) == num_calls:  # until it is in the worker's queue
            time.sleep(0.001)
        may_end.set()
        for one in (held, asked, cleared):
            one.result(30)
        assert len(lm._rows) == 0
