"""What is read off rows where the model is: the same as from whole rows, on every backend."""

import asyncio
import math
import pickle
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend import MockAsyncLM, TokenCharacterTrie
from genlm_backend.errors import (
    BatcherClosedError,
    ContextError,
    EvaluationError,
    OptionError,
    OptionTypeError,
    UnknownAdapterError,
)
from genlm_backend.llm import BatchedLM, Draw, Readout, Row, RowQuery, StatelessEvaluator, TopTokens
from genlm_backend.readouts import token_readouts
from genlm_backend.readouts.draw import PackedMask
from genlm_backend.readouts.readout import answers_by_rows, read_off
from genlm_backend.readouts.sample_readout import SampleReadout
from genlm_backend.readouts.token_readouts import Chosen, Entropy, Masses, Top
from tests.llm.conftest import random_contexts, word_tokenizer
from tests.llm.toy import VOCAB


def check_top(found, row, k):
    """Compare with NumPy's stable sort, in float64 from then on."""
    row = row.double().numpy()
    order = np.argsort(-row, kind="stable")
    assert found.token_ids.tolist() == order[:k].tolist()
    assert found.logprobs.double().tolist() == row[order[:k]].tolist()
    rest = row[order[k:]]
    log_rest = float(torch.from_numpy(rest).logsumexp(0)) if len(rest) else -math.inf
    assert found.log_rest == pytest.approx(log_rest, abs=1e-5)


def entropy_of(row):
    values = [x for x in row.tolist() if x > -math.inf]
    return -math.fsum(math.exp(x) * x for x in values)


async def test_concurrent_readouts_match_their_rows(lm):
    """At once, and in any order beside rows, draws and scores of the same contexts."""
    contexts = random_contexts(12)
    chosen = [5, 0, 5, VOCAB - 1]
    asked = [
        asked
        for i, ids in enumerate(contexts)
        for asked in (
            lm.next_token_top(ids, 1 + i),
            lm.next_token_logprobs_of(ids, chosen),
            lm.next_token_entropy(ids),
            lm.score(ids, chosen[:2]),
            lm.draw_next_token(ids, temperature=0),
        )
    ]
    found = await asyncio.gather(*asked)
    assert lm.statistics().row_cache_hits == 0
    for i, ids in enumerate(contexts):
        row = await lm.next_token_logprobs(ids)
        top, of_chosen, entropy, _, drawn = found[5 * i : 5 * i + 5]
        near = {"rtol": 0, "atol": 5e-5}
        k = 1 + i
        torch.testing.assert_close(top.logprobs, row.sort(descending=True).values[:k], **near)
        torch.testing.assert_close(top.logprobs, row[top.token_ids], **near)
        assert math.exp(top.log_rest) + float(top.logprobs.double().exp().sum()) == pytest.approx(1)
        assert top.token_ids.dtype is torch.int64
        torch.testing.assert_close(of_chosen, row[chosen], **near)
        assert entropy == pytest.approx(entropy_of(row), abs=1e-4)
        assert float(row[drawn.token_id]) == pytest.approx(float(row.max()), abs=5e-5)


async def test_readouts_of_cached_rows_are_exact_async_and_sync(lm):
    for ids in random_contexts(4, seed=1):
        row = await lm.next_token_logprobs(ids)
        for top in (await lm.next_token_top(ids, 7), lm.next_token_top_sync(ids, 7)):
            check_top(top, row, 7)
        for values in (
            await lm.next_token_logprobs_of(ids, range(9)),
            lm.next_token_logprobs_of_sync(ids, np.arange(9)),
        ):
            assert torch.equal(values, row[:9])
        for entropy in (await lm.next_token_entropy(ids), lm.next_token_entropy_sync(ids)):
            assert entropy == pytest.approx(entropy_of(row), abs=1e-6)
        options = {"allowed": [3, 4, 5], "temperature": 0}
        drawn = await lm.draw_next_token(ids, **options)
        assert drawn == lm.draw_next_token_sync(ids, **options)
        assert drawn.token_id == 3 + int(row[3:6].argmax())


async def test_top_tokens_show_their_texts(lm):
    row = await lm.next_token_logprobs([3, 4])
    for top in (await lm.next_token_top([3, 4], 12), lm.next_token_top_sync([3, 4], 12)):
        ids, logprobs, log_rest = top
        assert top.texts == tuple(lm.str_vocab[i] for i in ids)
        assert repr(top).startswith(f"TopTokens({top.texts[0]!r}: {float(row.max()):.3f}, ")
        assert repr(top).endswith(
            f"{top.texts[9]!r}: {logprobs[9]:.3f}, …; log_rest: {log_rest:.3f})"
        )
        assert pickle.loads(pickle.dumps(top)).texts == top.texts
    bare = TopTokens(torch.tensor([7]), torch.tensor([-1.0]), -0.5)
    assert repr(bare) == "TopTokens(7: -1.000; log_rest: -0.500)"


async def test_log_masses_match_sums_over_the_row(lm, backend):
    """Of groups in any form, and of nodes of a trie."""
    trie = TokenCharacterTrie(lm.byte_vocab)
    nodes = [trie.root, *range(0, trie.num_nodes, 7)]
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[5:20] = True
    packed = PackedMask(np.packbits(mask.numpy()).tobytes(), VOCAB)
    groups = [[3], [], [5, 4, 5], range(VOCAB), mask, mask.numpy(), packed]
    groups += [trie.tokens_below(node) for node in nodes]
    members = [[3], [], [4, 5], range(VOCAB), *3 * [range(5, 20)]]
    members += [trie.tokens_below(node).tolist() for node in nodes]
    for ids in random_contexts(3, seed=2):
        found = await lm.next_token_log_masses(ids, groups)
        row = (await lm.next_token_logprobs(ids)).double()
        assert found.dtype is torch.float64
        expected = torch.stack([row[list(own)].logsumexp(0) for own in members])
        torch.testing.assert_close(found, expected, rtol=0, atol=max(1e-4, backend.tolerance))
        again = lm.next_token_log_masses_sync(ids, groups)  # from the row, which is cached
        torch.testing.assert_close(again, expected, rtol=0, atol=1e-6)
        lm.clear_cache()
        sums = trie.log_weight_sum(row.numpy())[nodes]
        np.testing.assert_allclose(again[-len(nodes) :].numpy(), sums, atol=1e-5)
    assert (await lm.next_token_log_masses([1], [])).shape == (0,)
    first, second = await asyncio.gather(*(lm.next_token_log_masses([1], [[2]]) for _ in "ab"))
    first.zero_()
    assert float(second[0]) < 0


async def test_readouts_of_no_tokens_and_of_the_whole_vocabulary(lm):
    row = await lm.next_token_logprobs([1, 2])
    assert (await lm.next_token_logprobs_of([1, 2], [])).shape == (0,)
    check_top(await lm.next_token_top([1, 2], VOCAB), row, VOCAB)


async def test_equal_readouts_are_separate_copies_and_cache_no_row(lm):
    first, second = await asyncio.gather(*(lm.next_token_top([1, 2], 3) for _ in range(2)))
    first.logprobs.zero_()
    row = await lm.next_token_logprobs([1, 2])
    torch.testing.assert_close(second.logprobs, row[second.token_ids], rtol=0, atol=5e-5)
    assert lm.statistics().row_cache_hits == 0


async def test_invalid_readout_arguments_are_refused_before_any_query(lm):
    asked = lm.statistics().num_awaits
    for call, error, message in (
        (lambda: lm.next_token_top([1], 0), OptionError, "k"),
        (lambda: lm.next_token_top([1], VOCAB + 1), OptionError, "k"),
        (lambda: lm.next_token_top([1], 2.0), OptionTypeError, "k"),
        (lambda: lm.next_token_top([1], True), OptionTypeError, "k"),
        (lambda: lm.next_token_logprobs_of([1], [VOCAB]), OptionError, f"chosen has {VOCAB}"),
        (lambda: lm.next_token_logprobs_of([1], [-1]), OptionError, "chosen has -1"),
        (lambda: lm.next_token_logprobs_of([1], 3), OptionTypeError, "chosen"),
        (lambda: lm.next_token_logprobs_of([1], {2, 3}), OptionTypeError, "must be ordered"),
        (lambda: lm.next_token_logprobs_of([1], ["a"]), OptionTypeError, "chosen"),
        (lambda: lm.next_token_logprobs_of([1], np.ones(3)), OptionTypeError, "chosen"),
        (lambda: lm.next_token_log_masses([1], 3), OptionTypeError, "groups"),
        (lambda: lm.next_token_log_masses([1], [[1], None]), OptionTypeError, r"groups\[1\]"),
        (lambda: lm.next_token_log_masses([1], [[1], [VOCAB]]), OptionError, r"groups\[1\] has"),
        (lambda: lm.next_token_log_masses([1], [3]), OptionTypeError, r"groups\[0\]"),
        (lambda: lm.next_token_log_masses([1], [[True]]), OptionTypeError, r"groups\[0\]"),
        (lambda: lm.next_token_log_masses([1], [np.ones(3, bool)]), OptionError, "shape"),
        (lambda: lm.next_token_entropy([]), ContextError, "empty"),
        (lambda: lm.next_token_entropy([1], "none"), UnknownAdapterError, "none"),
        (lambda: lm.draw_next_token([1], impossible="die"), OptionError, "impossible"),
    ):
        with pytest.raises(error, match=message):
            await call()
    assert lm.statistics().num_awaits == asked
    lm.close()
    with pytest.raises(BatcherClosedError):
        await lm.next_token_entropy([1])
    with pytest.raises(BatcherClosedError):
        lm.next_token_entropy_sync([1])


# ---------------------------------------------------------------- rows of one's own


class OfRows(StatelessEvaluator):
    """A context of one token is answered with that row; a NaN and an error among them."""

    def __init__(self, rows, **info):
        super().__init__(rows.shape[1])
        self.rows, self.num_asked = rows, 0

    def evaluate(self, queries):
        self.num_asked += len(queries)
        table = torch.stack([self.rows[query.context[-1]] for query in queries])
        return [Row(row) for row in table]


async def test_nan_row_fails_only_its_callers():
    rows = torch.zeros(3, VOCAB).log_softmax(-1)
    rows[1] = torch.nan
    rows[1, 0] = -torch.inf  # as of an id that was left out afterwards
    with BatchedLM(word_tokenizer(), OfRows(rows)) as lm:
        found = await asyncio.gather(
            *(lm.next_token_entropy([i]) for i in range(3)),
            lm.next_token_top([1], 2),
            lm.next_token_logprobs_of([1], [2]),
            return_exceptions=True,
        )
    assert [type(each) for each in found] == [float, EvaluationError, float] + 2 * [EvaluationError]
    assert found[0] == pytest.approx(math.log(VOCAB))


async def test_draw_without_possible_token_returns_minus_one_on_request():
    rows = torch.full((2, VOCAB), -torch.inf)
    rows[:, 4] = 0.0
    with BatchedLM(word_tokenizer(), OfRows(rows)) as lm:
        for asked in ({"allowed": [3, 5]}, {"allowed": []}, {"allowed": np.zeros(VOCAB, bool)}):
            dead = await lm.draw_next_token([1], **asked, impossible="return")
            assert dead == Draw(-1, -math.inf, -math.inf, 0.0)
        live = await lm.draw_next_token([1], allowed=[3, 4], impossible="return")
        assert live == Draw(4, 0.0, 0.0, 0.0)
        assert lm.draw_next_token_sync([1], allowed=[3], impossible="return").token_id == -1
        with pytest.raises(ContextError):
            lm.context([1]).extend(dead.token_id)
        with pytest.raises(EvaluationError, match="no token can be chosen"):
            await lm.draw_next_token([1], allowed=[3, 5])


async def test_undefined_ids_are_excluded_from_readouts():
    rows = torch.randn(4, VOCAB + 3).log_softmax(-1)
    with BatchedLM(word_tokenizer(), OfRows(rows)) as lm:
        row = await lm.next_token_logprobs([1])
        lm.clear_cache()
        assert float((await lm.next_token_logprobs_of([1], [VOCAB + 1]))[0]) == -math.inf
        check_top(await lm.next_token_top([1], 5), row, 5)
        assert await lm.next_token_entropy([1]) == pytest.approx(entropy_of(row), abs=1e-9)


@dataclass(frozen=True, slots=True)
class Largest(Readout):
    """A kind of one's own, in one class."""

    query: RowQuery
    wanted: ClassVar[str] = "a float for a Largest"

    @classmethod
    def of_rows(cls, readouts, rows):
        return rows.amax(-1).tolist()

    def is_answered_by(self, answer, vocab_size):
        return isinstance(answer, float)


async def test_custom_readout_class_is_answered(lm):
    row = await lm.next_token_logprobs([3, 4])
    lm.clear_cache()
    assert await lm.read([3, 4], Largest) == pytest.approx(float(row.max()), abs=5e-5)


class Scarce(Largest):
    """A kind for which memory suffices of two rows at a time."""

    @classmethod
    def of_rows(cls, readouts, rows):
        if len(rows) > 2:
            raise MemoryError
        return rows.amax(-1).tolist()


def test_out_of_memory_readouts_are_computed_in_halves():
    rows = [Row(torch.full((4,), float(i)), 0.0) for i in range(7)]
    asked = [Scarce(RowQuery([i])) for i in range(7)]
    assert read_off(asked, rows) == [float(i) for i in range(7)]
    assert read_off(asked, rows[:1] * 7) == [0.0] * 7


@dataclass(frozen=True, slots=True)
class Unruly(Largest):
    """A kind that modifies its rows, or fails in one of several ways."""

    way: str = "modifies"

    @classmethod
    def of_rows(cls, readouts, rows):
        rows.zero_()
        if rows.is_cpu:
            rows.numpy()[:] = 7
        if readouts[0].way == "raises":
            raise ZeroDivisionError("of its own")
        return {"modifies": [1.0] * len(readouts), "says less": [], "says nothing": None}[
            readouts[0].way
        ]


@pytest.mark.parametrize(
    ("way", "error", "message"),
    [
        ("modifies", None, None),
        ("raises", ZeroDivisionError, "of its own"),
        ("says less", EvaluationError, "Unruly.of_rows returned 0 answers for 1 readouts"),
        ("says nothing", EvaluationError, "Unruly.of_rows returned None for 1 readouts"),
    ],
)
async def test_failing_or_modifying_readout_leaves_other_queries_intact(lm, way, error, message):
    row = await lm.next_token_logprobs([3, 4])
    for _ in range(2):
        found = await asyncio.gather(
            lm.read([3, 4], partial(Unruly, way=way)),
            lm.next_token_logprobs([3, 4]),
            lm.next_token_entropy([3, 4]),
            lm.next_token_entropy([5]),
            lm.score([3], [4]),
            return_exceptions=True,
        )
        lm.clear_cache()
        assert not any(isinstance(each, Exception) for each in found[1:])
        torch.testing.assert_close(found[1], row, rtol=0, atol=1e-4)
        assert found[2] == pytest.approx(entropy_of(row), abs=1e-4)
        if error is None:
            assert found[0] == 1.0
        else:
            assert type(found[0]) is error
            assert message in str(found[0])


class Questionless(Largest):
    """A kind whose constructor forgets its query."""

    def __init__(self, query):
        pass


class Unhashable(Largest):
    """A kind that is no value."""

    __hash__ = None


class Mistaken(Largest):
    """A kind that takes no answer of its own."""

    def is_answered_by(self, answer, vocab_size):
        raise ZeroDivisionError("of its own")


async def test_invalid_readout_classes_are_refused_before_any_query(lm):
    asked = lm.statistics().num_awaits
    for wrong in (Questionless, Unhashable, lambda query: Largest(RowQuery([9])), lambda query: 5):
        for row_is_there in (False, True):
            with pytest.raises(OptionTypeError, match="readout must"):
                await lm.read([3, 4], wrong)
            assert lm.statistics().num_awaits == asked
            if not row_is_there:
                lm.next_token_logprobs_sync([3, 4])
                asked = lm.statistics().num_awaits
    lm.clear_cache()
    found = await asyncio.gather(
        lm.read([3, 4], Mistaken),
        *(lm.next_token_entropy([i]) for i in range(40)),
        return_exceptions=True,
    )
    assert isinstance(found[0], ZeroDivisionError)
    assert all(isinstance(each, float) for each in found[1:])


async def test_wrong_readout_answer_raises_for_cached_rows_too(lm):
    for _ in range(2):
        with pytest.raises(EvaluationError, match=r"a float for a Largest.*got"):
            await lm.read([3, 4], Wordy)
        lm.next_token_logprobs_sync([3, 4])


@dataclass(frozen=True, slots=True)
class Wordy(Largest):
    """A kind whose answers are not what it takes."""

    @classmethod
    def of_rows(cls, readouts, rows):
        return ["much"] * len(readouts)


async def test_many_readouts_of_one_context_agree_with_its_row(lm):
    found = await lm.batch_read([[3, 4]] * 1000, Entropy)
    assert len(set(found)) == 1
    draws = await lm.batch_draw_next_token([[3, 4]] * 300, generator=np.random.default_rng(0))
    row = await lm.next_token_logprobs([3, 4])
    assert {round(draw.logprob, 3) for draw in draws} <= {round(float(x), 3) for x in row}


def test_modifying_readout_leaves_the_cached_row_unchanged(lm):
    row = lm.next_token_logprobs_sync([3, 4])
    assert lm.read_sync([3, 4], Unruly) == 1.0
    assert torch.equal(lm.next_token_logprobs_sync([3, 4]), row)


async def test_batch_read_matches_the_entropies_of_the_rows(lm):
    contexts = [[i % 9, 2] for i in range(30)]
    rows = await lm.batch_next_token_logprobs(contexts)
    blocking = lm.batch_read_sync(contexts[:10], Entropy)  # of rows that may be there
    lm.clear_cache()
    found = await lm.batch_read(contexts, Entropy)
    assert found == pytest.approx([entropy_of(row) for row in rows], abs=1e-4)
    assert found[:10] == pytest.approx(blocking, abs=1e-4)
    asked = lm.statistics().num_awaits
    for wrong in (5, lambda query: query, lambda query: None):
        with pytest.raises(OptionTypeError, match="readout must"):
            await lm.batch_read(contexts, wrong)
        with pytest.raises(OptionTypeError, match="readout must"):
            lm.read_sync([1], wrong)
    assert lm.statistics().num_awaits == asked


# ---------------------------------------------------------------- any rows

numbers = st.floats(-60, 0, width=32) | st.sampled_from([-math.inf, 0.0, -1.0])
tables = st.integers(1, 12).flatmap(
    lambda n: st.lists(st.lists(numbers, min_size=n, max_size=n), min_size=1, max_size=5)
)


@given(tables, st.data())
def test_mixed_readouts_of_random_rows_match_their_definitions(table, data):
    rows = torch.tensor(table, dtype=torch.float32)
    rows[:, 0] = rows[:, 0].clamp(min=-30)  # something is possible
    rows = rows.log_softmax(-1)
    width = rows.shape[1]
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    ks = [data.draw(st.integers(1, width)) for _ in picked]
    ids = [tuple(data.draw(st.lists(st.integers(0, width - 1), max_size=4))) for _ in picked]
    queries = [RowQuery([i]) for i in picked]
    packed = [np.packbits([i in own for i in range(width)]).tobytes() for own in ids]
    asked = [
        *map(Top, queries, ks),
        *map(Chosen, queries, ids),
        *map(Entropy, queries),
        *(SampleReadout(query, 1.0, (0.3,)) for query in queries),
        *(Masses(query, (bytes(-(-width // 8)), *packed)) for query in queries),
        *queries,
    ]
    asked = pickle.loads(pickle.dumps(data.draw(st.permutations(list(dict.fromkeys(asked))))))
    evaluator = OfRows(rows)
    found = answers_by_rows(evaluator.evaluate, asked)
    assert evaluator.num_asked == len(set(picked))
    for question, answer in zip(asked, found, strict=True):
        row = rows[question.context[-1]]
        if isinstance(question, RowQuery):
            assert torch.equal(answer.logprobs, row)
            continue
        assert question.is_answered_by(answer, width)
        if isinstance(question, Top):
            assert isinstance(answer, TopTokens)
            check_top(answer, row, question.k)
        elif isinstance(question, Chosen):
            assert torch.equal(answer, row[list(question.token_ids)])
        elif isinstance(question, Masses):
            members = [[], *([*dict.fromkeys(own)] for own in ids)]
            sums = torch.stack([row[own].double().logsumexp(0) for own in members])
            torch.testing.assert_close(answer, sums.clamp(max=0), rtol=0, atol=1e-6)
        elif isinstance(question, Entropy):
            assert answer == pytest.approx(entropy_of(row), abs=1e-9)
        else:
            assert answer == question.of_row(Row(row))


@given(
    levels=st.lists(st.integers(0, 3), min_size=128, max_size=900),
    k=st.integers(1, 12),
    is_tiny=st.booleans(),
)
def test_top_tokens_break_ties_by_lowest_id(levels, k, is_tiny):
    """Here, where a large row is looked through in parts, and as on another device."""
    row = torch.tensor(levels, dtype=torch.float32) * (30.0 if is_tiny else 1.0)
    row = row.log_softmax(-1)
    (here,) = read_off([Top(RowQuery([1]), k)], [Row(row)])
    values, ids = token_readouts._largest(row[None], k)
    log_rest = token_readouts.log_sums(row[None].scatter(1, ids, -torch.inf))
    for top in (here, TopTokens(ids[0], values[0], float(log_rest[0]))):
        check_top(top, row, k)


def test_log_rest_is_exact_for_tiny_remainders():
    row = torch.full((1000,), -20.0 - math.log(997), dtype=torch.float64)
    row[[7, 30]] = math.log(0.5)
    row[999] = -math.inf
    (top,) = read_off([Top(RowQuery([1]), 2)], [Row(row.float())])
    assert top.token_ids.tolist() == [7, 30]
    assert top.log_rest == pytest.approx(-20, abs=1e-6)


def test_stop_iteration_in_a_readout_factory_reaches_the_caller():
    lm = MockAsyncLM(word_tokenizer())
    sizes = iter([2, 3])
    with pytest.raises(StopIteration):
        lm.batch_read_sync([[1], [2], [3]], lambda query: Top(query, next(sizes)))
