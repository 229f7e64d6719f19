"""A readout of a program's own fails for whoever asks it, wherever the model lives."""

import asyncio
import sys
import threading
import types
from functools import partial

import pytest
import torch

from genlm_backend.backends.mock import MockEvaluator
from genlm_backend.errors import EvaluationError, QueryDroppedError
from genlm_backend.llm import BatchedLM, ProcessEvaluator, Row, StatelessEvaluator
from tests.llm.elsewhere import unruly
from tests.llm.elsewhere.over_there import word_tokenizer

VOCAB = 96


@pytest.fixture(scope="module", params=["here", "in a process"])
def lm(request):
    make = partial(MockEvaluator, VOCAB)
    evaluator = make() if request.param == "here" else ProcessEvaluator(make)
    with BatchedLM(word_tokenizer(), evaluator, row_cache_bytes=0) as lm:
        yield lm


def is_here(lm):
    return not isinstance(lm._evaluator, ProcessEvaluator)


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


@pytest.mark.parametrize(
    "extra", [lambda: 0, threading.Lock(), unruly.Bomb()], ids=["lambda", "lock", "bomb"]
)
async def test_what_cannot_be_sent_is_of_whoever_asks_it(lm, extra):
    found, row = await beside_others(lm, partial(unruly.Last, extra=extra))
    if is_here(lm):
        assert found == pytest.approx(float(row[-1]), abs=1e-6)
    else:
        assert isinstance(found, Exception)


async def test_a_class_of_a_module_that_is_only_here(lm, monkeypatch):
    module = types.ModuleType("only_here")
    module.Kind = type("Kind", (unruly.Last,), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", module)
    found, _ = await beside_others(lm, module.Kind)
    if not is_here(lm):
        assert isinstance(found, ModuleNotFoundError)
    module.Kind = None  # the class is of before it was loaded again
    found, _ = await beside_others(lm, type("Kind", (unruly.Last,), {"__module__": "only_here"}))
    if not is_here(lm):
        assert "not the same object" in str(found)


async def test_a_row_that_a_kind_answers_with_is_not_kept():
    with BatchedLM(word_tokenizer(), MockEvaluator(VOCAB)) as lm:
        assert isinstance(await lm.read([5, 6], unruly.WholeRow), Row)
        row = await lm.next_token_logprobs([5, 6])
        assert float(row.exp().sum()) == pytest.approx(1, abs=1e-4)
        assert lm.statistics().row_cache_hits == 0


@pytest.mark.parametrize("kind", [unruly.Lambda, unruly.Bombs, unruly.Exits])
async def test_answers_that_cannot_be_sent(lm, kind):
    found, _ = await beside_others(lm, kind)
    if is_here(lm):
        assert not isinstance(found, Exception)
    else:
        assert type(found) is EvaluationError
        assert "the answer of a readout cannot be" in str(found)


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (unruly.Leaving, EvaluationError, r"Leaving.of_rows raised SystemExit\(3\)"),
        (unruly.LeavingLate, EvaluationError, r"LeavingLate.of_rows ended with SystemExit\(3\)"),
        (unruly.Cancelling, EvaluationError, r"raised CancelledError\('its own'\)"),
        (unruly.Unsayable, ZeroDivisionError, "no repr"),
    ],
)
async def test_faults_of_a_kind_are_told_to_whoever_asks_it(lm, kind, error, said):
    found, _ = await beside_others(lm, kind)
    with pytest.raises(error, match=said):
        raise found


async def test_a_kind_need_not_know_of_adapters(lm):
    found, row = await beside_others(lm, unruly.WithoutAdapter)
    assert found == pytest.approx(float(row[-1]), abs=1e-6)


class Slow(StatelessEvaluator):
    """Waits to be let on."""

    def __init__(self):
        super().__init__(VOCAB)
        self.let = threading.Event()

    def evaluate(self, queries):
        self.let.wait(10)
        return [Row(torch.zeros(VOCAB).log_softmax(-1), 0.0) for _ in queries]


@pytest.mark.parametrize("way", ["reset", "close", "answer"])
async def test_one_that_is_modified_while_it_waits_is_still_found(way):
    made, evaluator = [], Slow()

    def make(query):
        made.append(unruly.Last(query))
        return made[-1]

    lm = BatchedLM(word_tokenizer(), evaluator)
    first = asyncio.ensure_future(lm.next_token_entropy([50]))
    await asyncio.sleep(0.05)  # it is under evaluation
    waiting = [asyncio.ensure_future(lm.read([5], make))]
    waiting += [asyncio.ensure_future(lm.next_token_entropy([i])) for i in (6, 7)]
    await asyncio.sleep(0)
    made[-1].extra = []  # and has no hash any more
    if way == "reset":
        lm.reset_async_queries()
    threading.Timer(0.05, evaluator.let.set).start()
    if way == "close":
        await asyncio.to_thread(lm.close)
    done, pending = await asyncio.wait([first, *waiting], timeout=10)
    assert not pending
    kinds = {type(each.exception()) for each in done if each.exception() is not None}
    assert kinds == (set() if way == "answer" else {QueryDroppedError})
    lm.close()
