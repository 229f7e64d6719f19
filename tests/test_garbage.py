"""Garbage is collected between batches, and as whoever else is there wants it."""

import gc
import os
import weakref

import pytest
import torch

from genlm_backend import garbage
from genlm_backend.garbage import MANY_QUERIES, collect_if_due
from tests.llm import families
from tests.llm.conftest import word_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def collection_paused():
    return garbage.collection_paused(MANY_QUERIES)


@pytest.fixture(autouse=True)
def collects():
    assert gc.isenabled()
    yield
    gc.enable()


def test_it_is_paused_inside_and_goes_on_after_the_last():
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_small_batch_changes_nothing():
    with garbage.collection_paused(MANY_QUERIES - 1):
        assert gc.isenabled()


def test_young_garbage_goes_where_a_batch_takes_long(monkeypatch):
    class Ring:
        def __init__(self):
            self.ring = self

    with collection_paused():
        rings = weakref.WeakSet([Ring() for _ in range(5)])
        collect_if_due()
        assert len(rings) == 5
        monkeypatch.setattr(garbage, "MOST_SECONDS", -1.0)
        collect_if_due()
        assert not rings
        rings = weakref.WeakSet([Ring() for _ in range(5)])
        kept = list(rings)
        collect_if_due()
        kept.clear()
        collect_if_due()
        assert len(rings) in (0, 5), "they may be old by now"
        monkeypatch.setattr(garbage, "MOST_SECONDS_OF_OLD", -1.0)
        collect_if_due()
        assert not rings
    gc.disable()
    with collection_paused():
        rings = weakref.WeakSet([Ring() for _ in range(5)])
        collect_if_due()
        assert len(rings) == 5, "whoever has turned it off decides"


def test_who_has_turned_it_off_finds_it_off():
    gc.disable()
    with collection_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_who_turns_it_on_meanwhile_finds_it_on():
    with collection_paused():
        gc.enable()
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
def test_a_fork_made_meanwhile_collects():
    with collection_paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        _, status = os.waitpid(child, 0)
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_batch_is_evaluated_without_and_leaves_nothing_to_collect():
    from genlm_backend import AsyncTransformer

    model = families.make("llama")
    during = []
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0, batch_size=50) as lm:
        asked = [[5, 6, 7, n] for n in range(23)] + [[9, n] for n in range(23)]
        lm.batch_next_token_logprobs_sync(asked)
        hook = model.register_forward_pre_hook(lambda *_: during.append(gc.isenabled()))
        gc.collect()
        rows = lm.batch_next_token_logprobs_sync([[*context, 1] for context in asked])
        assert gc.collect() == 0
        hook.remove()
    assert during == [False]
    assert rows.isfinite().any()
    assert isinstance(rows, torch.Tensor)
