"""Rows against the definition in float64."""

import asyncio
import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch

from genlm_backend import AsyncTransformer, AsyncVirtualLM
from genlm_backend.model.batched_lm import BatchedLM
from genlm_backend.queries import row as row_module
from genlm_backend.queries.evaluator import StatelessEvaluator
from genlm_backend.queries.row import (
    Row,
    alone,
    rows_of_logits,
    rows_without,
    scores_of_logits,
    table_of,
)
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.vllm.fake import FakeEngine


@pytest.mark.parametrize("size", [1, 96, 49_152, 262_144])
@pytest.mark.parametrize("scale", [1e-3, 3.0, 40.0])
def test_row_sums_to_one_and_has_the_logsumexp_of_its_logits(size, scale):
    generator = torch.Generator().manual_seed(size)
    logits = scale * torch.randn(3, size, generator=generator) + 17
    logits[1, : size // 2] = -torch.inf
    exact = logits.double().log_softmax(-1)
    rows = rows_of_logits(logits)
    logprobs = torch.stack([row.logprobs for row in rows])
    assert logprobs.dtype == torch.float32
    assert logprobs.shape == (3, size)
    tolerance = 4e-6 * max(1.0, scale)
    torch.testing.assert_close(logprobs.double(), exact, rtol=0, atol=tolerance)
    normalisers = np.array([row.logsumexp for row in rows])
    np.testing.assert_allclose(normalisers, logits.double().logsumexp(-1), rtol=0, atol=tolerance)
    np.testing.assert_allclose(logprobs.double().exp().sum(-1).numpy(), 1, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("undefined", [(), (3, 95)])
def test_scores_of_logits_equal_entries_of_the_rows(dtype, undefined):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(4, 96, generator=generator) + 1000).to(dtype)
    logits[1, 7] = torch.nan
    logits[2, 5], logits[2, 95] = -torch.inf, torch.nan if undefined else 0
    places, targets = [0, 2, 2, 1, 0, 3, 0], [3, 5, 95, 0, 4, 4, 4]
    before = logits.clone()
    scores = scores_of_logits(logits, places, targets, undefined)
    rows = rows_of_logits(logits, None, undefined)
    expected = [float(rows[i].logprobs[t]) for i, t in zip(places, targets, strict=True)]
    assert scores.dtype == torch.float32
    np.testing.assert_array_equal(scores.numpy(), np.array(expected, np.float32))
    assert scores.isnan().tolist() == [False] * 3 + [True] + [False] * 3
    assert torch.equal(logits[[0, 3]], before[[0, 3]])
    exact = logits[[0, 3]].double()
    if undefined:
        exact[:, list(undefined)] = -torch.inf
    exact = exact.log_softmax(-1)
    np.testing.assert_allclose(scores[5], exact[1, 4], rtol=0, atol=1e-5)


def test_certain_token_has_logprob_zero_and_invalid_logits_give_nan_rows():
    (certain,) = rows_of_logits(torch.tensor([[-torch.inf, 2.0, -torch.inf]]))
    assert (certain.logprobs.tolist(), certain.logsumexp) == ([-torch.inf, 0.0, -torch.inf], 2.0)
    for wrong in ([-torch.inf] * 3, [0.0, torch.nan], [0.0, torch.inf]):
        (row,) = rows_of_logits(torch.tensor([wrong]))
        assert row.logprobs.isnan().all()
        assert row.is_nan
        assert Row(row.logprobs).is_nan
    assert not certain.is_nan
    assert not Row(certain.logprobs).is_nan
    (half,) = rows_of_logits(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16))
    assert half.logprobs.dtype == torch.float32


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.01, 0.4, 0.6, 0.999999, 1 - 1e-12])
def test_row_without_tokens_is_the_conditional_distribution(share):
    """However much of the probability they had."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 500, generator=generator).double()
    ids = torch.tensor([0, 7, 499])
    rest = [i for i in range(500) if i not in ids]
    logits[0, ids] -= logits[0, ids].logsumexp(0) - logits[0, rest].logsumexp(0)
    logits[0, ids] += np.log(share / (1 - share)) if share else -torch.inf
    (row,) = rows_of_logits(logits.float())
    found = row.without(ids)
    exact = logits.float().double().index_fill(1, ids, -torch.inf)
    atol = 2e-5 if share < 1 - 1e-9 else 2e-4
    torch.testing.assert_close(found.logprobs.double(), exact.log_softmax(-1)[0], rtol=0, atol=atol)
    assert float(found.logprobs.double().exp().sum()) == pytest.approx(1, abs=1e-5)
    assert found.logsumexp == pytest.approx(float(exact.logsumexp(-1)), abs=atol)
    assert Row(row.logprobs).without(ids).logsumexp is None


def in_layouts(rows):
    """The same rows in memory of every kind: the name of the layout, and tensors."""
    width = rows.shape[1]
    yield "a table", rows.unbind()
    yield "one twice", [rows[0], rows[0], rows[1], rows[1].view(width)]
    yield "one for all", rows[:1].expand(3, width).unbind()
    yield "columns", rows.t().contiguous().t().unbind()
    wide = torch.zeros(len(rows), 2 * width + 3)
    wide[:, 3::2] = rows
    yield "every second number", wide[:, 3::2].unbind()
    yield "one number", [torch.full((1,), -math.log(width)).expand(width)] * 2
    yield "windows", torch.full((width + 3,), -math.log(width)).unfold(0, width, 1).unbind()
    read_only = rows[0].numpy().copy()
    read_only.flags.writeable = False
    with warnings.catch_warnings(action="ignore"):
        tensor = torch.from_numpy(read_only)
    yield "what may not be written to", [tensor]
    with torch.inference_mode():
        inferred = rows.clone().unbind()
    yield "of inference mode", inferred
    yield "a parameter", [torch.nn.Parameter(rows[0], requires_grad=False)]


LAYOUTS = 10


@pytest.mark.parametrize("width", [40, 5000])
@pytest.mark.parametrize("number", range(LAYOUTS))
def test_rows_in_every_memory_layout_are_copied_and_restricted(number, width):
    table = torch.randn(4, width, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    layouts = list(in_layouts(table))
    assert len(layouts) == LAYOUTS
    _, tensors = layouts[number]
    ids = torch.tensor([3, 38, width - 1])
    rows, before = [Row(own, 2.0) for own in tensors], [own.clone() for own in tensors]
    for row, own in zip(rows, before, strict=True):
        assert alone([row])[0].logprobs.equal(own)
        assert alone([row])[0].logprobs.data_ptr() != row.logprobs.data_ptr()
    for row, own, made in zip(rows, before, rows_without(rows, ids), strict=True):
        assert row.logprobs.equal(own)  # which may be another's too
        exact = own.double().index_fill(0, ids, -torch.inf)
        torch.testing.assert_close(
            made.logprobs.double(), exact - exact.logsumexp(-1), rtol=0, atol=2e-6
        )
        assert made.logsumexp == pytest.approx(2 + float(exact.logsumexp(-1)), abs=2e-6)


DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def extreme_logits(dtype):
    """Rows of 96 logits that are hard to normalise, in a dtype."""
    logits = 3 * torch.randn(12, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    lowest = torch.finfo(dtype).min
    logits[0, 0] = -torch.inf
    logits[1, 0] = lowest
    logits[2, :] = lowest
    logits[3, :] = lowest
    logits[3, 7] = 1
    logits[4, :90] = -torch.inf
    logits[5, :90] = lowest
    logits[6, :] = -torch.inf
    logits[6, 5] = lowest
    logits[7, ::2] = 1e30 if dtype != torch.float16 else 65_504
    logits[8, :] = 3e38 if dtype != torch.float16 else 65_504
    logits[9, :] = 1000
    logits[10, :5] = -torch.inf
    logits[10, 5:9] = lowest
    return logits


def assert_row_is_of(logprobs, logits):
    """As the definition has it in float64."""
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), exact, rtol=2e-6, atol=4e-6)
    assert float(logprobs.double().exp().sum()) == pytest.approx(1, abs=1e-5)


def assert_same_logits(found, logits):
    """To what float32 knows of numbers of the size of the largest, which probabilities are of."""
    atol = 4e-6 + 1e-6 * float(logits.max().abs())
    torch.testing.assert_close(found.double(), logits.double(), rtol=1e-6, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_logits_give_normalised_rows_and_are_recovered(dtype):
    logits = extreme_logits(dtype)
    for row, own in zip(rows_of_logits(logits), logits.float(), strict=True):
        assert_row_is_of(row.logprobs, own)
        assert_same_logits(row.own_logits(torch.device("cpu")), own)


class ExtremeEvaluator(StatelessEvaluator):
    """A backend of one's own, whose logits are the row of the context's first token."""

    def __init__(self, logits):
        super().__init__(logits.shape[1])
        self.logits = logits

    def evaluate(self, queries):
        return rows_of_logits(self.logits[[query.token_ids[0] for query in queries]])


class ExtremeEngine(FakeEngine):
    """vLLM's part of a model that says such logits."""

    def __init__(self, logits, vocab_size):
        super().__init__()
        self.logits, self.vocab_size = logits, vocab_size

    def run(self, session_ids, relieve, wanted=None):
        super().run(session_ids, relieve)
        rows = rows_of_logits(self.logits[[self.sessions[i][0] for i in session_ids]])
        answers = rows if wanted is None else wanted.answers(rows)
        return dict(zip(session_ids, answers, strict=True))


def extreme_transformer(logits, tokenizer=None, **options):
    """A model that says one row of logits whatever it reads."""
    model = copy.deepcopy(families.make("llama")).to(logits.dtype)
    head = torch.nn.Linear(model.config.hidden_size, len(logits)).to(logits.dtype)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(logits)
    model.set_output_embeddings(head)
    return AsyncTransformer(model, tokenizer or word_tokenizer(), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_extreme_logits_are_returned_by_own_and_vllm_backends(dtype):
    """Whatever the first of them is, and however many are the lowest that there is."""
    logits = extreme_logits(dtype)
    own = BatchedLM(word_tokenizer(), ExtremeEvaluator(logits))
    batched = [own, AsyncVirtualLM(ExtremeEngine(logits, None))]
    for lm in batched:
        with lm:
            asked = [[number, 1] for number in range(len(logits))]
            found = await asyncio.gather(*map(lm.next_token_logits, asked))
            rows = await lm.batch_next_token_logprobs(asked)
            for row, said, own in zip(rows, found, logits.float(), strict=True):
                assert_row_is_of(row, own)
                assert_same_logits(said, own)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"kv_cache_bytes": 0, "row_cache_bytes": 0}], ids=str)
@pytest.mark.parametrize("number", range(12))
async def test_extreme_logits_are_returned_by_transformers(number, options):
    for dtype in DTYPES:
        logits = extreme_logits(dtype)[number]
        with extreme_transformer(logits, **options) as lm:
            for context in ([1], [1, 2, 3]):
                own = lm.model(torch.tensor([context])).logits[0, -1].detach().float()
                assert torch.equal(own, logits.float())
                assert_row_is_of(await lm.next_token_logprobs(context), own)
                assert_same_logits(await lm.next_token_logits(context), own)


@pytest.mark.filterwarnings("ignore:.*runs every context whole")  # as its logits are no numbers
@pytest.mark.parametrize("said", [20.0, 1e4, 1e30, torch.inf, torch.nan, -torch.inf])
async def test_logits_of_undefined_ids_are_ignored_for_transformers(said):
    logits = extreme_logits(torch.float32)[11]
    logits[[70, 80, 95]] = said
    own = logits.index_fill(0, torch.arange(70, 96), -torch.inf)
    with extreme_transformer(logits, tokenizer=word_tokenizer(70)) as lm:
        for context in ([1], [1, 2, 3]):
            row = await lm.next_token_logprobs(context)
            torch.testing.assert_close(row, own.log_softmax(-1), rtol=2e-6, atol=4e-6)
            assert_same_logits((await lm.next_token_logits(context))[:70], own[:70])


async def test_returned_and_cached_rows_do_not_keep_their_batch_alive():
    model = families.make("llama")
    for bytes_kept in (0, 1 << 20):
        async with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=bytes_kept) as lm:
            rows = await asyncio.gather(*(lm.next_token_logprobs([i, 5]) for i in range(6)))
            kept = [row.logprobs for row in lm._rows._rows.values()]
            assert len(kept) == (6 if bytes_kept else 0)
            for row in [*rows, *kept]:
                assert row.untyped_storage().nbytes() == 4 * 96


def test_rows_are_views_of_one_table_and_can_be_copied():
    first, second = rows_of_logits(torch.randn(2, 96, dtype=torch.float16))
    for row in (first, second):
        assert row.logprobs.untyped_storage().nbytes() == 2 * row.nbytes == 8 * 96
        assert alone([row])[0].logprobs.untyped_storage().nbytes() == 4 * 96
    assert rows_of_logits(torch.empty(0, 5)) == []
    cpu = torch.device("cpu")
    kept = first.logprobs.clone()
    for copy_of in (first.copy_logprobs(cpu), first.own_logits(cpu)):
        copy_of.fill_(7)
    assert torch.equal(first.logprobs, kept)
    assert first.to(cpu) is first
    many = rows_of_logits(torch.randn(100, 96))
    assert len(pickle.dumps(many[0])) < 20 * 96
    loaded = pickle.loads(pickle.dumps(first))
    assert torch.equal(loaded.logprobs, first.logprobs)
    assert loaded.logsumexp == first.logsumexp


@pytest.mark.parametrize("most_bytes", [1, 5 * 28, 1 << 20])
@pytest.mark.parametrize("by_threads", [False, True])
def test_large_tables_are_moved_between_devices_in_parts(most_bytes, by_threads, monkeypatch):
    """As from a device to the processor; here, nothing is moved."""
    monkeypatch.setattr(row_module, "MAX_PINNED", most_bytes)
    monkeypatch.setattr(row_module, "moved", lambda table, device: table.clone())
    monkeypatch.setattr(row_module, "_MANY_BYTES", 1 if by_threads else 1 << 30)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda table: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    table = torch.randn(12, 7, dtype=torch.float32)
    rows = row_module._rows_moved(table, [float(i) for i in range(12)], torch.device("meta"))
    assert [one.logsumexp for one in rows] == list(range(12))
    assert len({id(one.table) for one in rows}) == {1: 12, 140: 3}.get(most_bytes, 1)
    for one, expected in zip(rows, table, strict=True):
        assert torch.equal(one.logprobs, expected)
    order = [3, 4, 5, 0, 11, 10]
    found = table_of([rows[i] for i in order], torch.device("cpu"))
    assert torch.equal(found, table[order])
    assert row_module._rows_moved(table[:0], [], torch.device("meta")) == []
