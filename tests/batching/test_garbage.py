"""While a large batch is evaluated, young garbage is looked for less often."""

import asyncio
import gc
import os
import threading

import pytest
import torch

from genlm_backend.batching import Batcher
from genlm_backend.runtime.threads import MANY_QUERIES, OBJECTS_PER_QUERY, fewer_collections
from tests.llm import families
from tests.llm.conftest import word_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

MANY = MANY_QUERIES


@pytest.fixture(autouse=True)
def before():
    threshold = gc.get_threshold()
    assert gc.isenabled()
    assert threshold[0]
    yield threshold
    gc.set_threshold(*threshold)
    gc.enable()


def with_more(threshold, num_queries):
    return (threshold[0] + num_queries * OBJECTS_PER_QUERY, *threshold[1:])


def test_batches_add_up_and_the_last_puts_the_threshold_back(before):
    first, second = fewer_collections(MANY), fewer_collections(100)
    with first:
        assert gc.get_threshold() == with_more(before, MANY)
        second.__enter__()
        assert gc.get_threshold() == with_more(before, MANY + 100)
    assert gc.get_threshold() == with_more(before, 100)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
    with pytest.raises(KeyError), fewer_collections(MANY):
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.isenabled()


def test_collection_that_is_turned_off_stays_off(before):
    gc.disable()
    with fewer_collections(MANY):
        assert not gc.isenabled()
    assert not gc.isenabled()
    gc.enable()
    with fewer_collections(MANY):
        gc.disable()
    assert not gc.isenabled()
    gc.set_threshold(0)  # another way to say it
    off = gc.get_threshold()
    with fewer_collections(MANY):
        assert gc.get_threshold() == off
    assert gc.get_threshold() == off


def test_a_threshold_that_is_set_meanwhile_is_kept(before):
    with fewer_collections(MANY):
        gc.set_threshold(123, 4, 5)
        with fewer_collections(MANY):
            assert gc.get_threshold() == (123, 4, 5)
        assert gc.get_threshold() == (123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)
    with fewer_collections(MANY):
        assert gc.get_threshold() == with_more((123, 4, 5), MANY)
    assert gc.get_threshold() == (123, 4, 5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
def test_a_fork_made_meanwhile_has_the_threshold_from_before(before):
    with fewer_collections(MANY):
        child = os.fork()
        if not child:
            os._exit(0 if gc.get_threshold() == before else 1)
        _, status = os.waitpid(child, 0)
        assert gc.get_threshold() == with_more(before, MANY)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_worker_thread_raises_it_for_as_long_as_a_batch_takes(before, fails):
    seen = []

    def evaluate(queries):
        seen.append((threading.current_thread(), gc.get_threshold()))
        return [1 / 0] if fails else queries

    batcher = Batcher(evaluate)
    batcher.set_policy(max_batch_size=MANY)

    async def ask():
        return await asyncio.gather(*map(batcher.submit, range(MANY)), return_exceptions=True)

    answers = asyncio.run(ask())
    batcher.call(lambda: None)  # the worker is past the batch
    assert all(isinstance(answer, ArithmeticError) == fails for answer in answers)
    assert gc.get_threshold() == before
    ((thread, threshold),) = seen
    assert thread is not threading.main_thread()
    assert threshold == with_more(before, MANY)
    batcher.close()


def test_a_batch_leaves_nothing_to_collect():
    from genlm_backend import AsyncTransformer

    model = families.make("llama")
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0, batch_size=50) as lm:
        asked = [[5, 6, 7, n] for n in range(23)] + [[9, n] for n in range(23)]
        lm.batch_next_token_logprobs_sync(asked)
        lm.batch_next_token_logprobs_sync([[*context, 2] for context in asked])
        gc.collect()  # of what is compiled for the first step, too
        rows = lm.batch_next_token_logprobs_sync([[*context, 1] for context in asked])
        assert gc.collect() == 0
    assert rows.isfinite().any()
    assert isinstance(rows, torch.Tensor)
