"""Samples that are drawn where the model is."""

import asyncio
import math
import pickle
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch

from genlm_backend import MockAsyncLM
from genlm_backend.backends.mock import MockEvaluator
from genlm_backend.errors import EvaluationError
from genlm_backend.llm import (
    BatchedLM,
    EvaluatorInfo,
    ProcessEvaluator,
    Readout,
    Row,
    RowQuery,
    StatelessEvaluator,
)
from genlm_backend.readouts.draw import Draw
from genlm_backend.readouts.readout import answers_by_rows
from genlm_backend.readouts.sample_readout import SampleReadout
from tests.llm.elsewhere.over_there import word_tokenizer
from tests.llm.toy import VOCAB


def mock_over_there(**options):
    return BatchedLM(word_tokenizer(), ProcessEvaluator(partial(MockEvaluator, 100)), **options)


@pytest.mark.filterwarnings("ignore:.*ids:UserWarning")
async def test_samples_in_a_process_equal_local_ones_and_send_no_rows():
    """Of 100 ids, the last four are of no token."""
    with MockAsyncLM(word_tokenizer(), vocab_size=100) as here, mock_over_there() as there:
        for temperature in (0, 0.5, 1.0, float("inf")):
            options = {"temperature": temperature, "seed": 5}
            prompts = [[i] for i in range(10)]
            expected = await here.batch_sample(prompts, 8, range(3), **options)
            assert await there.batch_sample(prompts, 8, range(3), **options) == expected
        assert len(there._rows) == 0
        row = await there.next_token_logprobs([1])
        assert not row[96:].exp().any()
        assert await there.sample([1], 1, [], seed=1) == await here.sample([1], 1, [], seed=1)
        assert there.statistics().row_cache_hits == 1


@pytest.mark.filterwarnings("ignore:.*ids:UserWarning")
async def test_readout_class_unknown_to_the_process_is_computed_locally():
    @dataclass(frozen=True)
    class Least(Readout):
        query: RowQuery
        wanted: ClassVar[str] = "a float"

        @classmethod
        def of_rows(cls, readouts, rows):
            return rows[:, :96].amin(-1).tolist()

        def is_answered_by(self, answer, vocab_size):
            return isinstance(answer, float)

    class OfAScript(Least):
        __module__, __qualname__ = "__main__", "OfAScript"

    with mock_over_there() as there:
        found = await asyncio.gather(
            there.read([1], Least),
            there.read([1], OfAScript),
            there.next_token_top([1], 1),
            there.next_token_logprobs([2]),
            there.next_token_entropy([3]),
        )
        row = await there.next_token_logprobs([1])
        assert found[0] == found[1] == pytest.approx(float(row[:96].min()), abs=1e-6)
        assert found[2].token_ids.tolist() == [int(row.argmax())]


class Drawn(StatelessEvaluator):
    """Counts what it is asked; rows of a few kinds."""

    def __init__(self):
        super().__init__(VOCAB)
        self.asked = []

    def evaluate(self, queries):
        self.asked.append(list(queries))
        return [self.row(query.token_ids[-1]) for query in queries]

    def row(self, last):
        if last == 1:
            return Row(torch.full((VOCAB,), torch.nan), 0.0)
        if last == 2:
            return KeyError("by the test")
        return Row(torch.zeros(VOCAB).log_softmax(-1), 0.0)


def test_draws_of_one_context_evaluate_one_row():
    evaluator = Drawn()
    evaluator.undefined_ids = (0, 95)
    drawings = [SampleReadout(RowQuery([5]), 1.0, (i / 20,)) for i in range(20)]
    asked = [*drawings, RowQuery([5]), SampleReadout(RowQuery([7]), 0.0, (0.0,))]
    found = answers_by_rows(evaluator.evaluate, asked, evaluator.undefined_ids)
    assert evaluator.asked == [[RowQuery([5]), RowQuery([7])]]
    assert [drawn.token_id for (drawn,) in found[:20]] == [1 + int(94 * i / 20) for i in range(20)]
    assert found[3][0].logprob == pytest.approx(-math.log(94))
    assert isinstance(found[20], Row)
    assert float(found[20].logprobs[0]) > -10  # excluded once, by whoever drives the evaluator
    assert found[21] == (Draw(1, found[3][0].logprob, 0.0, 0.0),)
    assert pickle.loads(pickle.dumps(drawings[3])) == drawings[3]
    wrong = [SampleReadout(RowQuery([i]), 1.0, (0.5,)) for i in (1, 2)]
    errors = answers_by_rows(evaluator.evaluate, wrong)
    assert [type(error) for error in errors] == [EvaluationError, KeyError]


class DrawsWrong(StatelessEvaluator):
    info = EvaluatorInfo(VOCAB, reads_out=True)

    def __init__(self):
        super().__init__(VOCAB)
        self.info = type(self).info

    def evaluate(self, queries):
        wrong = {3: Draw(VOCAB, 0, 0, 0), 4: Draw(-1, 0, 0, 0), 5: Draw(True, 0, 0, 0), 6: 2}
        return [(wrong.get(q.context[-1], Draw(7, -1.0, 0.0, -1.0)),) for q in queries]


async def test_custom_evaluator_may_draw_and_wrong_draws_raise_error():
    with BatchedLM(word_tokenizer(), DrawsWrong()) as lm:
        assert await lm.sample([1], 3, []) == [7, 7, 7]
        for wrong in (3, 4, 5, 6):
            with pytest.raises(EvaluationError, match="must return a tuple of Draws"):
                await lm.sample([wrong], 1, [])
        with pytest.raises(EvaluationError, match="must return a Row"):
            await lm.next_token_logprobs([1])


async def test_cancelled_sampling_in_a_process_leaves_the_model_usable():
    with mock_over_there() as lm:
        sampled = asyncio.ensure_future(lm.batch_sample([[1], [2]], 10**6, []))
        await asyncio.sleep(0.3)
        sampled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampled
        assert len(await lm.sample([1], 5, [])) == 5
