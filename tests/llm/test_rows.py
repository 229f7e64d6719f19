"""Rows against the definition in float64."""

import asyncio
import copy

import numpy as np
import pytest
import torch

from genlm_backend import AsyncTransformer, AsyncVirtualLM
from genlm_backend.llm.batched import BatchedLM
from genlm_backend.llm.rows import rows_of_logits, separate_rows
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.vllm.fake import FakeEngine


@pytest.mark.parametrize("size", [1, 96, 49_152, 262_144])
@pytest.mark.parametrize("scale", [1e-3, 3.0, 40.0])
def test_a_row_sums_to_one_and_tells_its_normaliser(size, scale):
    generator = torch.Generator().manual_seed(size)
    logits = scale * torch.randn(3, size, generator=generator) + 17
    logits[1, : size // 2] = -torch.inf
    exact = logits.double().log_softmax(-1)
    for rows in (rows_of_logits(logits), torch.stack(separate_rows(logits))):
        assert rows.dtype == torch.float32
        assert rows.shape == (3, size + 1)
        tolerance = 4e-6 * max(1.0, scale)
        torch.testing.assert_close(rows[:, :-1].double(), exact, rtol=0, atol=tolerance)
        normaliser = logits.double().logsumexp(-1)
        torch.testing.assert_close(rows[:, -1].double(), normaliser, rtol=0, atol=tolerance)
        sums = rows[:, :-1].double().exp().sum(-1).numpy()
        np.testing.assert_allclose(sums, 1, atol=tolerance)


def test_a_token_that_is_certain_and_a_row_that_is_nothing():
    certain = torch.tensor([[-torch.inf, 2.0, -torch.inf]])
    assert rows_of_logits(certain).tolist() == [[-torch.inf, 0.0, -torch.inf, 2.0]]
    assert rows_of_logits(torch.full((1, 3), -torch.inf)).isnan()[0, :3].all()
    for wrong in (torch.nan, torch.inf):
        assert rows_of_logits(torch.tensor([[0.0, wrong]])).isnan().all()
    assert rows_of_logits(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)).dtype == torch.float32


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
def test_extreme_logits_give_rows_that_sum_to_one_and_are_found_again(dtype):
    logits = extreme_logits(dtype)
    for rows in (rows_of_logits(logits), torch.stack(separate_rows(logits))):
        for row, own in zip(rows, logits.float(), strict=True):
            assert_row_is_of(row[:-1], own)
            assert_same_logits(row[:-1] + row[-1], own)


class ExtremeLM(BatchedLM):
    """A backend of one's own, whose logits are the row of the context's first token."""

    def __init__(self, logits):
        self.logits = logits
        super().__init__(word_tokenizer())

    def evaluate(self, queries):
        return separate_rows(self.logits[[query.token_ids[0] for query in queries]])


class ExtremeEngine(FakeEngine):
    """vLLM's part of a model that says such logits."""

    def __init__(self, logits, vocab_size):
        super().__init__()
        self.logits, self.vocab_size = logits, vocab_size

    def run(self, session_ids, relieve):
        super().run(session_ids, relieve)
        return [rows_of_logits(self.logits[self.sessions[i][0]]) for i in session_ids]


def extreme_transformer(logits, **options):
    """A model that says one row of logits whatever it reads."""
    model = copy.deepcopy(families.make("llama")).to(logits.dtype)
    head = torch.nn.Linear(model.config.hidden_size, len(logits)).to(logits.dtype)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(logits)
    model.set_output_embeddings(head)
    return AsyncTransformer(model, word_tokenizer(), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_logits_of_every_backend_are_what_the_model_said(dtype):
    """Whatever the first of them is, and however many are the lowest that there is."""
    logits = extreme_logits(dtype)
    batched = [ExtremeLM(logits), AsyncVirtualLM(ExtremeEngine(logits, None))]
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
async def test_logits_of_a_transformer_are_what_it_said(number, options):
    for dtype in DTYPES:
        logits = extreme_logits(dtype)[number]
        with extreme_transformer(logits, **options) as lm:
            for context in ([1], [1, 2, 3]):
                own = lm.model(torch.tensor([context])).logits[0, -1].detach().float()
                assert torch.equal(own, logits.float())
                assert_row_is_of(await lm.next_token_logprobs(context), own)
                assert_same_logits(await lm.next_token_logits(context), own)


async def test_logits_beside_ids_that_no_token_has():
    """The model is wider than its tokenizer by four ids, of which the first is the likeliest."""
    logits = torch.cat([extreme_logits(torch.float32), torch.full((12, 4), 5.0)], 1)
    logits[:, 96] = 1e4
    with AsyncVirtualLM(ExtremeEngine(logits, 100)) as lm:
        assert lm.undefined_ids == set(range(96, 100))
        for number in (0, 1, 4, 5, 9, 10):
            own = logits[number].index_fill(0, torch.arange(96, 100), -torch.inf)
            atol = 4e-3  # of a number beside 1e4
            said = await lm.next_token_logits([number])
            torch.testing.assert_close(said, own, rtol=1e-6, atol=atol)
            row = await lm.next_token_logprobs([number])
            torch.testing.assert_close(row, own.log_softmax(-1), rtol=2e-6, atol=atol)


def test_separate_rows_own_their_memory():
    first, second = separate_rows(torch.randn(2, 96, dtype=torch.float16))
    for row in (first, second):
        assert row.untyped_storage().nbytes() == row.nbytes == 4 * 97
    assert separate_rows(torch.empty(0, 5)) == []
