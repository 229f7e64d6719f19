"""Sessions of an engine: the most reused, nothing that is not there, never too many."""

import asyncio
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend import AsyncVirtualLM, MockAsyncLM
from genlm_backend.errors import EvaluationError
from genlm_backend.queries.query import RowQuery
from genlm_backend.readouts.token_readouts import Entropy
from tests.llm.conftest import word_tokenizer
from tests.llm.vllm.fake import FakeEngine

contexts = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(contexts, min_size=1, max_size=6, unique=True), max_size=12),
    st.integers(2, 6),
    st.integers(4, 30),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_rows_are_correct_for_any_order_of_queries_and_shortages(
    rounds, max_sessions, num_blocks, shortages
):
    engine = FakeEngine(max_sessions=max_sessions, num_blocks=num_blocks)
    engine.shortages = shortages
    with AsyncVirtualLM(engine, batch_size=20, row_cache_bytes=0) as lm:
        with MockAsyncLM(word_tokenizer(), row_cache_bytes=0) as other:
            for asked in rounds:
                rows = lm.batch_next_token_logprobs_sync(asked)
                assert torch.equal(rows, other.batch_next_token_logprobs_sync(asked))
                assert set(engine.sessions) == set(lm._evaluator.planner.table._sessions)
        counts = lm.statistics()
        assert counts.tokens_computed + counts.tokens_reused == sum(
            len(context) for asked in rounds for context in asked
        )


def test_each_particle_computes_one_token_per_step_after_resampling():
    engine = FakeEngine(max_sessions=30, num_blocks=300)
    with AsyncVirtualLM(engine, row_cache_bytes=0, batch_size=30) as lm:
        prompt = list(range(10))
        lm.next_token_logprobs_sync(prompt)
        particles = [[*prompt, i] for i in range(20)]
        for step in range(5):
            lm.batch_next_token_logprobs_sync(particles)
            assert lm.statistics().tokens_computed == 10 + 20 * (step + 1)
            particles = [[*particles[i // 2], 3 * i % 60] for i in range(20)]  # resampled
        assert lm.statistics().num_forwards == 6


async def test_contexts_beyond_max_sessions_are_evicted():
    engine = FakeEngine(max_sessions=16, num_blocks=200)
    with AsyncVirtualLM(engine, batch_size=10, row_cache_bytes=0) as lm:
        await asyncio.gather(*(lm.next_token_logprobs([i % 60, i // 60, 7]) for i in range(2000)))
        assert len(engine.sessions) <= 16
        assert lm.statistics().num_evicted_tokens >= 3 * (2000 - 16)


def test_failed_step_fails_its_callers_and_clears_all_sessions():
    engine = FakeEngine()
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm:
        lm.next_token_logprobs_sync([1, 2])
        engine.failures.append(ZeroDivisionError("in the engine"))
        with pytest.raises(ZeroDivisionError, match="in the engine"):
            lm.next_token_logprobs_sync([1, 2, 3])
        assert engine.sessions == engine.added == {}
        with MockAsyncLM(word_tokenizer()) as other:
            expected = other.next_token_logprobs_sync([1, 2, 3])
        assert torch.equal(lm.next_token_logprobs_sync([1, 2, 3]), expected)


def test_queries_that_find_no_room_are_retried_until_answered():
    engine = FakeEngine(max_sessions=6)
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm, MockAsyncLM(word_tokenizer()) as other:
        lm.next_token_logprobs_sync([1, 2])
        engine.shortages = [1, 2, 3]  # the last first
        contexts = [[1, 2, i] for i in range(3)]
        assert lm.batch_read_sync(contexts, Entropy) == other.batch_read_sync(contexts, Entropy)
        assert engine.shortages == []
        assert lm.statistics().num_forwards == 5


def test_engine_without_room_for_any_query_raises_evaluation_error(monkeypatch):
    engine = FakeEngine()
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "run", lambda *args: {})
            with pytest.raises(EvaluationError, match="no room"):
                lm.next_token_logprobs_sync([1, 2])
        assert len(lm.next_token_logprobs_sync([1, 2])) > 0


def test_context_longer_than_the_engine_can_hold_raises_value_error():
    engine = FakeEngine(num_blocks=3)
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm:
        lm.next_token_logprobs_sync(list(range(12)))
        with pytest.raises(ValueError, match="13 tokens, more than the model's maximum of 12"):
            lm.next_token_logprobs_sync(list(range(13)))
        lm.next_token_logprobs_sync([1])


def test_session_names_of_two_models_are_disjoint():
    engines = [FakeEngine(), FakeEngine()]
    models = [AsyncVirtualLM(engine) for engine in engines]
    for lm in models:
        lm.next_token_logprobs_sync([1])
    assert not set(engines[0].sessions) & set(engines[1].sessions)
    for lm in models:
        lm.close()


def test_closing_a_model_twice_closes_its_engine():
    engine = FakeEngine()
    lm = AsyncVirtualLM(engine)
    lm.next_token_logprobs_sync([1])
    lm.clear_cache()
    assert engine.sessions == {}
    lm.close()
    lm.close()
    assert engine.is_closed


async def test_batch_of_cancelled_callers_stops_between_two_rounds(monkeypatch):
    engine = FakeEngine(max_sessions=3)
    is_held, may_go_on = threading.Event(), threading.Event()
    run = engine.run

    def held(*args):
        is_held.set()
        assert may_go_on.wait(30)
        return run(*args)

    monkeypatch.setattr(engine, "run", held)
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm, MockAsyncLM(word_tokenizer()) as other:
        queries = [RowQuery((i,)) for i in range(9)]
        tasks = [asyncio.ensure_future(lm._batcher.submit(query)) for query in queries]
        lm._batcher.set_policy(max_batch_size=9)  # three rounds of three
        await asyncio.to_thread(is_held.wait, 30)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        may_go_on.set()
        row = await lm.next_token_logprobs([50])
        assert torch.equal(row, await other.next_token_logprobs([50]))
        assert engine.num_steps == 2
        assert lm.statistics().batch_sizes == {9: 1, 1: 1}
        assert set(engine.sessions) == set(lm._evaluator.planner.table._sessions)
