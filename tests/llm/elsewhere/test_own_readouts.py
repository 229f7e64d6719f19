"""A readout of a program's own fails for whoever asks it, wherever the model lives."""

import asyncio
from functools import partial

import pytest
import torch

from genlm_backend.backends.mock import MockEvaluator
from genlm_backend.errors import EvaluationError
from genlm_backend.llm import BatchedLM, ProcessEvaluator, Row
from tests.llm.elsewhere import unruly
from tests.llm.elsewhere.over_there import word_tokenizer

VOCAB = 96


@pytest.fixture(scope="module", params=["here", "in a process"])
def lm(request):
    make = partial(MockEvaluator, VOCAB)
    evaluator = make() if request.param == "here" else ProcessEvaluator(make)
    with BatchedLM(word_tokenizer(), evaluator, row_cache_bytes=0) as lm:
        yield lm


async def beside_others(lm, readout):
    """Ask a readout beside others, whose answers have to be right; return its own."""
    row = await lm.next_token_logprobs([3, 4])
    found = await asyncio.gather(
        lm.next_token_logprobs([3, 4]),
        lm.read([3, 4], readout),
        lm.next_token_entropy([5]),
        lm.read([3, 4], unruly.Last),
        lm.next_token_logprobs_of([3, 4], [1]),
        return_exceptions=True,
    )
    assert torch.equal(found[0], row)
    assert found[2] == pytest.approx(4, abs=1)
    assert found[3] == pytest.approx(float(row[-1]), abs=1e-6)
    assert found[4].item() == pytest.approx(float(row[1]), abs=1e-6)
    return found[1], row


async def test_unpicklable_readout_is_still_answered(lm):
    found, row = await beside_others(lm, partial(unruly.Last, extra=lambda: 0))
    assert found == pytest.approx(float(row[-1]), abs=1e-6)


async def test_row_returned_by_a_readout_is_not_cached():
    with BatchedLM(word_tokenizer(), MockEvaluator(VOCAB)) as lm:
        assert isinstance(await lm.read([5, 6], unruly.WholeRow), Row)
        row = await lm.next_token_logprobs([5, 6])
        assert float(row.exp().sum()) == pytest.approx(1, abs=1e-4)
        assert lm.statistics().row_cache_hits == 0


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (unruly.Leaving, EvaluationError, r"SystemExit\(3\)"),
        (unruly.LeavingLate, EvaluationError, r"SystemExit\(3\)"),
        (unruly.Unsayable, ZeroDivisionError, "no repr"),
    ],
)
async def test_faulty_readout_raises_for_its_caller_only(lm, kind, error, said):
    found, _ = await beside_others(lm, kind)
    with pytest.raises(error, match=said):
        raise found
