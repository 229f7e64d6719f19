"""The evaluator by its verbs, without a model around it."""

import pytest
import torch

from genlm_backend import AsyncVirtualLM
from genlm_backend.backends.mock import MockEvaluator
from genlm_backend.backends.vllm.completion import Completion
from genlm_backend.backends.vllm.vllm_evaluator import VLLMEvaluator
from genlm_backend.errors import BatcherClosedError, UnknownAdapterError
from genlm_backend.queries.query import Adapter, RowQuery
from genlm_backend.queries.row import Row
from genlm_backend.readouts.score_query import ScoreExtras, ScoreQuery
from genlm_backend.readouts.token_readouts import Entropy
from tests.llm import families
from tests.llm.vllm.fake import FakeEngine

CPU = torch.device("cpu")


def start(evaluator, prompt):
    completion = Completion(prompt, 5, [], 1.0, 0, 0, 63)
    evaluator.planner.start([completion], frozenset())
    return completion


def test_texts_are_scored_in_one_pass_unless_rows_are_needed():
    engine = FakeEngine(max_sessions=3)
    evaluator, passed = VLLMEvaluator(engine, CPU), []
    own = engine.score
    engine.score = lambda texts, relieve: passed.extend(texts) or own(texts, relieve)
    mock = MockEvaluator(families.VOCAB)

    def check(scoring, is_passed, undefined_ids=()):
        evaluator.undefined_ids = undefined_ids
        del passed[:]
        (found,) = evaluator.evaluate([scoring])
        assert passed == ([scoring] if is_passed else [])
        ids = scoring.text.token_ids
        rows = mock.evaluate([RowQuery(ids[:end]) for end in range(scoring.start, len(ids))])
        rows = [row.without(torch.tensor(undefined_ids, dtype=torch.int64)) for row in rows]
        expected = [row.logprobs[i] for row, i in zip(rows, ids[scoring.start :], strict=True)]
        column = found if found.ndim == 1 else found[:, 0].float()
        assert torch.equal(column, torch.stack(expected))
        assert scoring.is_answered_by(found, families.VOCAB)

    text = RowQuery(tuple(range(20)))
    check(ScoreQuery(text, 5), True)
    check(ScoreQuery(text, 5, ScoreExtras(entropy=True, top=2)), False)
    check(ScoreQuery(text, 5), False, (90, 91))
    check(ScoreQuery(RowQuery((1,) * 64), 60), False)  # no room for the token that is sampled
    check(ScoreQuery(RowQuery((1,) * 63), 62), True)
    mixed = [RowQuery((1, 2)), ScoreQuery(text, 3), Entropy(RowQuery((3,))), ScoreQuery(text, 4)]
    evaluator.undefined_ids = ()
    row, first, entropy, second = evaluator.evaluate(mixed)
    assert isinstance(row, Row)
    assert isinstance(entropy, float)
    assert torch.equal(first[1:], second)
    counts = evaluator.counts()
    assert counts.tokens_computed > 0


def test_rows_are_moved_to_the_output_device():
    evaluator = VLLMEvaluator(FakeEngine(), torch.device("meta"))
    rows = evaluator.evaluate([RowQuery((1,)), RowQuery((2,))])
    for row in rows:
        assert row.logprobs.device.type == "meta"
        assert isinstance(row.logsumexp, float)


def test_removing_an_adapter_ends_its_completions_and_closing_the_rest():
    engine = FakeEngine()
    evaluator = VLLMEvaluator(engine, CPU)
    poet, other_poet = Adapter("poet", 1), Adapter("poet", 2)
    evaluator.add_adapter(poet, "somewhere")
    evaluator.evaluate([RowQuery((1,), poet), RowQuery((1,))])
    gone, stays = start(evaluator, RowQuery((1,), poet)), start(evaluator, RowQuery((1,)))
    evaluator.remove_adapter(poet)
    assert isinstance(gone.future.exception(0), UnknownAdapterError)
    assert not stays.future.done()
    assert (engine.sessions, engine.adapters) == ({}, {})
    evaluator.add_adapter(other_poet, "elsewhere")
    evaluator.close()
    assert engine.is_closed
    with pytest.raises(BatcherClosedError):
        stays.future.result(0)


def test_engine_failing_to_close_leaves_no_completion_waiting(monkeypatch):
    engine = FakeEngine()
    evaluator = VLLMEvaluator(engine, CPU)
    completion = start(evaluator, RowQuery((1,)))

    def close():
        raise ZeroDivisionError("in the engine")

    monkeypatch.setattr(engine, "close", close)
    with pytest.raises(ZeroDivisionError):
        evaluator.close()
    assert isinstance(completion.future.exception(0), BatcherClosedError)


async def test_steps_of_a_finished_sample_are_counted():
    with AsyncVirtualLM(FakeEngine()) as lm:
        for number in range(1, 30):
            await lm.sample([number], 5, [])
            assert lm.statistics().num_forwards == 5 * number
