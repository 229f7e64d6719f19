"""A model of one's own that defines the two methods it has to, and an evaluator of one's own."""

import asyncio
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from genlm_backend import AsyncLM, MockAsyncLM
from genlm_backend.errors import (
    AdapterError,
    CacheError,
    ContextError,
    DeviceError,
    EvaluationError,
    OptionError,
    OptionTypeError,
    PictureError,
    QueryDroppedError,
    UnknownAdapterError,
)
from genlm_backend.llm import (
    Adapter,
    BatchedLM,
    EvaluatorInfo,
    Row,
    RowQuery,
    ScoreQuery,
    StatelessEvaluator,
    rows_of_logits,
)
from tests.llm import toy
from tests.llm.conftest import word_tokenizer


class Counting(AsyncLM):
    """Says that the next token is the length of the context."""

    async def next_token_logprobs(self, token_ids, lora_name=None):
        await asyncio.sleep(0)
        return self.next_token_logprobs_sync(token_ids)

    def next_token_logprobs_sync(self, token_ids, lora_name=None):
        self.check_adapter(lora_name)
        row = torch.full((len(self.byte_vocab),), -torch.inf)
        row[len(list(token_ids))] = 0
        return row


async def test_model_with_two_methods_inherits_all_others():
    async with Counting(word_tokenizer()) as lm:
        rows = await lm.batch_next_token_logprobs([[1], [1, 2, 3]])
        assert rows.argmax(-1).tolist() == [1, 3]
        assert torch.equal(rows, lm.batch_next_token_logprobs_sync([[1], [1, 2, 3]]))
        assert (await lm.batch_next_token_logprobs([])).shape == (0, len(lm.byte_vocab))
        assert await lm.sample([5, 5], 3, [], seed=1) == [2, 3, 4]
        assert (await lm.score([5, 5], [2, 3, 9])).tolist() == [0, 0, -torch.inf]
        assert lm.score_sync([5, 5], [2, 3, 9]).tolist() == [0, 0, -torch.inf]
        assert [s.tolist() for s in await lm.batch_score([[5], [5]], [[], [1]])] == [[], [0]]
        assert lm.batch_score_sync([[5]], [[1, 1]])[0].tolist() == [0, -torch.inf]
        with pytest.raises(ValueError, match="prompt is empty"):
            await lm.score([], [1])
        with pytest.raises(UnknownAdapterError):
            await lm.score([1], [], lora_name="polite")
        assert await lm.batch_sample([[5], [5, 5]], 2, [3]) == [[1, 2], [2]]
        assert int((await lm.next_token_logits([0])).argmax()) == 1
        with pytest.raises(AdapterError, match="Counting accepts no LoRA adapters"):
            lm.add_new_lora("somewhere")
        lm.clear_cache()
        assert lm.statistics().num_awaits == 0


class Handing(AsyncLM):
    """Hands every context on to another model."""

    def __init__(self, other):
        super().__init__(other.tokenizer)
        self.other = other

    async def next_token_logprobs(self, token_ids, lora_name=None):
        return await self.other.next_token_logprobs(token_ids)

    def next_token_logprobs_sync(self, token_ids, lora_name=None):
        return self.other.next_token_logprobs_sync(token_ids)


async def test_model_delegating_to_another_gives_its_answers():
    with MockAsyncLM(word_tokenizer()) as other:
        lm = Handing(other)
        for generator in (np.random.default_rng(3), np.random.default_rng(3)):
            draws = [
                await lm.draw_next_token([1, 2], generator=generator),
                lm.draw_next_token_sync([1, 2], generator=generator),
                *(await lm.batch_draw_next_token([[1, 2], [3]], generator=generator)),
            ]
        generator = np.random.default_rng(3)
        contexts = [[1, 2], [1, 2], [1, 2], [3]]
        assert draws == await other.batch_draw_next_token(contexts, generator=generator)
        assert await lm.sample([4], 5, [], seed=1) == await other.sample([4], 5, [], seed=1)
        for own, its in (
            (await lm.score([1], [2, 3]), await other.score([1], [2, 3])),
            (lm.score_sync([1], [2, 3]), other.score_sync([1], [2, 3])),
        ):
            torch.testing.assert_close(own, its, rtol=0, atol=1e-6)
        assert await lm.next_token_entropy([1]) == await other.next_token_entropy([1])


def test_complete_backend_takes_fewer_than_60_lines():
    """The contract tests run on it, as on every other."""
    lines = Path(toy.__file__).read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) < 60


async def test_max_length_in_class_level_evaluator_info_is_enforced():
    class Short(StatelessEvaluator):
        info = EvaluatorInfo(max_length=3)

        def evaluate(self, queries):
            return rows_of_logits(torch.zeros(len(queries), 96))

    for evaluator in (Short(), Short(96)):
        async with BatchedLM(word_tokenizer(), evaluator) as lm:
            assert lm.max_length == 3
            with pytest.raises(ContextError, match="maximum of 3"):
                await lm.next_token_logprobs([1, 2, 3, 4])


async def test_evaluator_with_only_evaluate_is_a_complete_backend(tmp_path):
    class Successor(StatelessEvaluator):
        def evaluate(self, queries):
            last = torch.tensor([query.token_ids[-1] for query in queries])
            return rows_of_logits(torch.nn.functional.one_hot((last + 1) % 96, 96) * 50.0)

    async with BatchedLM(word_tokenizer(), Successor(), batch_size=3) as lm:
        assert await lm.sample([5], 4, [], temperature=0) == [6, 7, 8, 9]
        assert (await lm.num_cached_tokens([5, 6]), lm.kv_capacity) == (0, None)
        with pytest.raises(AdapterError, match="accepts no LoRA adapters"):
            lm.add_new_lora("somewhere")
        lm.cache_kv([5, 6])  # for which there is nothing to do
        lm.clear_kv_cache()
        assert (lm.kv_reuse, lm.processor) == (False, None)
        with pytest.raises(CacheError, match="Successor cannot save prefixes"):
            lm.save_prefix([5, 6], tmp_path / "prefix")
        with pytest.raises(CacheError, match="Successor cannot load prefixes"):
            lm.load_prefix(tmp_path / "prefix")
        with pytest.raises(PictureError, match="accepts no pictures"):
            lm.context([5], images=[])


@pytest.mark.parametrize("max_length", [None, 100])
async def test_kv_capacity_fits_one_context_at_any_batch_size(max_length):
    """Unused ends of blocks are not counted, but the last context's place is nobody's end."""

    blocks = toy.ToyEvaluator()
    blocks.info = EvaluatorInfo(96, max_length, num_slots=160, slots_per_block=16)
    async with BatchedLM(word_tokenizer(), blocks, batch_size=4) as lm:
        assert lm.kv_capacity == max(160 - 4 * 15, min(145, max_length or 145))
        lm.batch_size = 200
        assert lm.kv_capacity == min(145, max_length or 145)


def test_evaluator_used_by_two_models_is_refused():
    class Silent(StatelessEvaluator):
        def evaluate(self, queries):
            return rows_of_logits(torch.zeros(len(queries), 96))

    evaluator = Silent()
    with (
        BatchedLM(word_tokenizer(), evaluator),
        pytest.raises(OptionError, match="belongs to another model"),
    ):
        BatchedLM(word_tokenizer(), evaluator)


async def test_exception_in_place_of_a_row_reaches_only_its_caller():
    class Picky(StatelessEvaluator):
        def evaluate(self, queries):
            rows = rows_of_logits(torch.zeros(len(queries), 96))
            refused = [query.token_ids == (7,) for query in queries]
            return [KeyError("seven") if no else row for row, no in zip(rows, refused, strict=True)]

    async with BatchedLM(word_tokenizer(), Picky()) as lm:
        asked = [lm.next_token_logprobs([i]) for i in (6, 7, 8)]
        first, error, last = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(error, KeyError)
        assert torch.equal(first, last)
        assert lm.statistics().num_batches == 1


async def test_undefined_ids_get_probability_zero_despite_the_evaluator():
    class Wide(StatelessEvaluator):
        def evaluate(self, queries):
            logits = torch.zeros(len(queries), 100)
            logits[:, 97] = 5.0
            return rows_of_logits(logits)

    async with BatchedLM(word_tokenizer(), Wide(vocab_size=100)) as lm:
        assert lm.undefined_ids == {96, 97, 98, 99}
        row, logits = await lm.next_token_logprobs([1]), await lm.next_token_logits([1])
        expected = torch.full((100,), -np.log(96.0))
        expected[96:] = -torch.inf
        torch.testing.assert_close(row, expected.float(), rtol=0, atol=1e-6)
        torch.testing.assert_close(logits[:96], torch.zeros(96), rtol=0, atol=1e-6)


@pytest.mark.parametrize("omits", [True, False])
async def test_rows_are_not_masked_again_if_evaluator_omits_undefined_ids(omits):
    class Wide(StatelessEvaluator):
        def __init__(self):
            self.info = EvaluatorInfo(100, omits_undefined=omits)

        def evaluate(self, queries):
            logits = torch.arange(100.0).repeat(len(queries), 1)
            seen.append(self.undefined_ids)
            # The last of them is none that it would know of.
            return rows_of_logits(logits, undefined_ids=self.undefined_ids[:-1])

    seen = []
    async with BatchedLM(word_tokenizer(), Wide()) as lm:
        row = await lm.next_token_logprobs([1])
    assert seen == [(96, 97, 98, 99)]
    assert row[96:].isneginf().tolist() == [True, True, True, not omits]
    wanted = torch.arange(100.0).double()
    wanted[96 : 99 if omits else 100] = -torch.inf
    torch.testing.assert_close(row.double(), wanted.log_softmax(-1), rtol=0, atol=2e-5)


def test_evaluator_failing_to_open_is_closed_and_leaves_no_thread():
    class Unready(toy.ToyEvaluator):
        info = property(lambda self: None, lambda self, info: None)

        def open(self):
            raise MemoryError("by the test")

        def close(self):
            self.is_closed = True

    before, evaluator = set(threading.enumerate()), Unready()
    with pytest.raises(MemoryError):
        BatchedLM(word_tokenizer(), evaluator)
    assert evaluator.is_closed
    assert set(threading.enumerate()) == before
    with pytest.raises(TypeError, match="evaluator must be an Evaluator"):
        BatchedLM(word_tokenizer(), object())


def test_queries_rows_and_errors_of_evaluators_pickle():
    evaluator = toy.ToyEvaluator()
    info = evaluator.open()
    query = RowQuery((1, 2, 3), Adapter("polite", 4))
    (row,) = evaluator.evaluate([query])
    values = [info, query, evaluator.counts(), UnknownAdapterError("gone"), QueryDroppedError("x")]
    for value in values:
        loaded = pickle.loads(pickle.dumps(value))
        assert type(loaded) is type(value)
        assert loaded == value or str(loaded) == str(value)
    loaded = pickle.loads(pickle.dumps(row))
    assert torch.equal(loaded.logprobs, row.logprobs)
    assert loaded.logsumexp == row.logsumexp
    assert pickle.loads(pickle.dumps(query)).context == query.context


class Careless(StatelessEvaluator):
    """Gives what the test has put into ``answers``."""

    answers: object = None

    def evaluate(self, queries):
        return self.answers(queries)


def row_of(query, size=96):
    """A row whose likeliest id is the context's last."""
    logits = torch.nn.functional.one_hot(torch.tensor([query.token_ids[-1]]), size) * 20.0
    return rows_of_logits(logits)[0]


@pytest.mark.parametrize(
    "answers",
    [
        lambda queries: [row_of(query) for query in queries][1:],
        lambda queries: [row_of(queries[0]), *(row_of(query) for query in queries)],
        lambda queries: None,
        lambda queries: iter([row_of(query) for query in queries]),
        lambda queries: torch.stack([row_of(query).logprobs for query in queries]),
    ],
    ids=["too few", "too many", "none", "an iterator", "a tensor"],
)
async def test_wrong_number_of_answers_fails_the_batch_and_caches_nothing(answers):
    evaluator = Careless()
    async with BatchedLM(word_tokenizer(), evaluator) as lm:
        evaluator.answers = answers
        asked = [lm.next_token_logprobs([i]) for i in (1, 2, 3)]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, EvaluationError)
            assert "Careless.evaluate returned" in str(error)
        evaluator.answers = lambda queries: [row_of(query) for query in queries]
        for i in (1, 2, 3):
            assert int((await lm.next_token_logprobs([i])).argmax()) == i


def test_a_subclass_may_have_options_of_its_own():
    class Mine(MockAsyncLM):
        def __init__(self, size):
            super().__init__(word_tokenizer(size), batch_size=3)

    with Mine(5) as lm:
        assert (len(lm.byte_vocab), lm.batch_size) == (5, 3)
        with pytest.raises(
            OptionTypeError, match=r"batchsize is not an option of MockAsyncLM.*batch_s"
        ):
            MockAsyncLM(word_tokenizer(5), batchsize=3)


WRONG = {
    "a tensor": lambda row: row.logprobs,
    "None": lambda row: None,
    "too wide": lambda row: Row(torch.zeros(97)),
    "two dimensions": lambda row: Row(row.logprobs[None]),
    "float64": lambda row: Row(row.logprobs.double()),
    "numpy": lambda row: Row(row.logprobs.numpy()),
    "with a gradient": lambda row: Row(row.logprobs.clone().requires_grad_()),
    "a class": lambda row: ValueError,
}


@pytest.mark.parametrize("kind", WRONG)
async def test_invalid_row_fails_only_its_caller(kind):
    evaluator = Careless()
    evaluator.answers = lambda queries: [
        WRONG[kind](row_of(query)) if query.token_ids == (2,) else row_of(query)
        for query in queries
    ]
    async with BatchedLM(word_tokenizer(), evaluator) as lm:
        asked = [lm.next_token_logprobs([i]) for i in (1, 2, 3)]
        first, error, last = await asyncio.gather(*asked, return_exceptions=True)
        assert (int(first.argmax()), int(last.argmax())) == (1, 3)
        assert isinstance(error, EvaluationError)
        assert "must return a Row of float32 [96]" in str(error)
        lm.clear_cache()  # and what is read off rows
        asked = [lm.draw_next_token([i], temperature=0) for i in (1, 2, 3)]
        first, error, last = await asyncio.gather(*asked, return_exceptions=True)
        assert (first.token_id, last.token_id) == (1, 3)
        assert isinstance(error, EvaluationError)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"max_length": "3"}, OptionTypeError),
        ({"max_length": 0}, OptionError),
        ({"max_batch_size": 0}, OptionError),
        ({"num_slots": -5}, OptionError),
        ({"vocab_size": 2.5}, OptionTypeError),
        ({"device": "gpu"}, DeviceError),
        ({"takes_adapters": "no"}, OptionTypeError),
    ],
)
def test_invalid_evaluator_info_fields_are_refused(fields, kind):
    (name,) = fields
    with pytest.raises(kind, match=name):
        EvaluatorInfo(**fields)


def test_evaluator_info_that_is_a_dict_is_refused():
    evaluator = Careless()
    evaluator.info = {"vocab_size": 96}
    with pytest.raises(OptionTypeError, match="info must be an EvaluatorInfo"):
        BatchedLM(word_tokenizer(), evaluator)


async def test_scoring_by_rows_batches_at_most_batch_size_rows():
    class Watched(toy.ToyEvaluator):
        sizes: list[int] = []

        def evaluate(self, queries):
            self.sizes.append(len(queries))
            assert all(isinstance(query, RowQuery) for query in queries)
            return super().evaluate(queries)

    evaluator = Watched()
    async with BatchedLM(word_tokenizer(), evaluator, batch_size=6, row_cache_bytes=0) as lm:
        texts = [[i, *range(1, 20)] for i in range(3)]
        found = await lm.batch_score([t[:1] for t in texts], [t[1:] for t in texts])
        assert evaluator.sizes == [6] * 9 + [3]
        for text, scores in zip(texts, found, strict=True):
            rows = lm.batch_next_token_logprobs_sync([text[:n] for n in range(1, 20)])
            assert torch.equal(scores, rows[range(19), text[1:]])


class Scores(StatelessEvaluator):
    """Answers scorings by what the test has put into ``answer``, and queries by zeros."""

    info = EvaluatorInfo(scores=True)

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def evaluate(self, queries):
        self.asked.append(list(queries))
        (row,) = rows_of_logits(torch.zeros(1, 96))
        return [row if isinstance(query, RowQuery) else self.answer(query) for query in queries]


async def test_evaluator_may_answer_scores_and_rows_in_one_batch():
    evaluator = Scores(lambda scoring: torch.tensor(scoring.targets).float())
    async with BatchedLM(word_tokenizer(), evaluator) as lm:
        asked = lm.score([1, 2], [3, 4]), lm.next_token_logprobs([5]), lm.score([1, 2], [3, 4])
        scores, row, again = await asyncio.gather(*asked)
        assert scores.tolist() == again.tolist() == [3, 4]
        assert row.shape == (96,)
        (batch,) = evaluator.asked
        scoring = ScoreQuery(RowQuery((1, 2, 3, 4)), 2)
        assert len(batch) == 2
        assert set(batch) == {scoring, RowQuery((5,))}
        assert scoring not in (ScoreQuery(RowQuery((1, 2, 3, 4)), 3), RowQuery((1, 2, 3, 4)))
        assert pickle.loads(pickle.dumps(scoring)) == scoring
        assert (tuple(scoring.context), scoring.adapter) == ((1, 2, 3), None)


@pytest.mark.parametrize(
    "answer",
    [
        lambda scoring: None,
        lambda scoring: torch.zeros(3),
        lambda scoring: torch.zeros(1, 2),
        lambda scoring: torch.zeros(2).double(),
        lambda scoring: [0.0, 0.0],
        lambda scoring: rows_of_logits(torch.zeros(1, 96))[0],
        lambda scoring: torch.zeros(2, requires_grad=True),
    ],
)
async def test_invalid_scores_fail_only_their_caller(answer):
    async with BatchedLM(word_tokenizer(), Scores(answer)) as lm:
        asked = lm.next_token_logprobs([1]), lm.score([1], [2, 3])
        row, error = await asyncio.gather(*asked, return_exceptions=True)
        assert row.shape == (96,)
        assert isinstance(error, EvaluationError)
        assert "must return a tensor of float32 [2]" in str(error)
