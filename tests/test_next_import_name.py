"""``genlm.backend``: the names of the release after genlm-backend 0.3.1."""

import asyncio
import math
import os
import subprocess
import sys
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

import genlm_backend
from genlm.backend.batching import (
    BatchAbandoned,
    batch_abandoned,
    batch_stats,
    fail_futures,
    join_batch,
    take_batch_stats,
)
from genlm.backend.draw import DRAW_METHODS, draw_from, logp_at, logsumexp_from, set_draw_method
from genlm.backend.llm import MockAsyncLM, temper
from tests.llm.conftest import word_tokenizer

INF = math.inf
ROW = torch.tensor([0.2, 0.3, 0.5]).log()
EMPTY = torch.full((3,), -INF)


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(1)
    take_batch_stats()
    yield
    set_draw_method("gumbel_max")
    assert take_batch_stats() is not batch_stats
    assert not batch_stats


def gathered(*awaitables, **options):
    async def main():
        return await asyncio.gather(*awaitables, **options)

    return asyncio.run(main())


async def deep(depth, row=ROW):
    return (await asyncio.gather(deep(depth - 1, row)))[0] if depth else await draw_from(row)


def test_importing_draws_and_batching_loads_no_torch():
    code = """
import sys
from genlm.backend.draw import DRAW_METHODS, draw_from, set_draw_method
from genlm.backend.batching import take_batch_stats
assert not {"torch", "numpy"} & set(sys.modules)
import asyncio, numpy
print(*DRAW_METHODS, asyncio.run(draw_from(numpy.zeros(1))))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ)
    assert done.stdout == "gumbel_max multinomial inverse_cdf (0, 0.0, 0.0)\n", done.stderr


@pytest.mark.parametrize("depths", [[0] * 6, [0, 1, 2] * 3])
def test_concurrent_draws_form_one_batch_at_any_call_depth(depths):
    gathered(*map(deep, depths))
    assert take_batch_stats() == {("draw", len(depths)): 1}
    assert not take_batch_stats()


def test_requests_are_grouped_by_kind_and_row_width():
    four = torch.zeros(4)
    draws = [draw_from(row) for row in [four] * 4 + [ROW.numpy()] * 3]
    found = gathered(*draws, logsumexp_from(four), logsumexp_from(four), logp_at(ROW, 2))
    assert found[-3:] == pytest.approx([math.log(4)] * 2 + [math.log(0.5)])
    assert take_batch_stats() == dict.fromkeys(
        [("draw", 4), ("draw", 3), ("logsumexp", 2), ("at", 1)], 1
    )


def test_an_importance_draw_is_weighted_by_its_target():
    target, proposal = torch.tensor([0.3, -1.0, 2.0]), ROW + 5
    weighted, plain, _ = gathered(draw_from(proposal, target), draw_from(proposal), draw_from(ROW))
    assert take_batch_stats() == {("draw", 3): 1}
    index, logw, logp = weighted
    assert logp == pytest.approx(float(ROW[index]), abs=1e-5)
    assert logw == pytest.approx(float(target[index] - ROW[index]), abs=1e-5)
    assert plain[1:] == pytest.approx((5, float(ROW[plain[0]])), abs=1e-5)
    with pytest.raises(ValueError, match=r"shape of weights, \(3,\), got \(4,\)"):
        asyncio.run(draw_from(ROW, torch.zeros(4)))


def test_logsumexp_from_and_logp_at_match_the_row():
    rows = [ROW + 2, EMPTY, torch.tensor([1e4, -INF, 1e4])]
    asked = [logsumexp_from(row) for row in rows] + [logp_at(ROW + 2, 1), logp_at(EMPTY, -1)]
    expected = [2, -INF, 1e4 + math.log(2), 2 + math.log(0.3), -INF]
    assert gathered(*asked) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(IndexError):
        asyncio.run(logp_at(ROW, 3))
    with pytest.raises(ValueError, match="one dimension"):
        asyncio.run(logp_at(torch.zeros(2, 3), 1))


def test_row_of_two_dimensions_fails_its_group_alone():
    bad = draw_from(torch.zeros(2, 3))
    first, second, third = gathered(bad, deep(0), deep(1, torch.zeros(4)), return_exceptions=True)
    assert type(first) is RuntimeError
    assert first is second
    assert third[1:] == pytest.approx((math.log(4), -math.log(4)))
    assert take_batch_stats() == {("draw", 2): 1, ("draw", 1): 1}
    with pytest.raises(RuntimeError, match=r"one dimension, got the shape \(2, 3\)"):
        asyncio.run(draw_from(torch.zeros(2, 3)))


@pytest.mark.parametrize("method", DRAW_METHODS)
def test_each_method_draws_by_probability_and_accepts_masked_rows(method):
    set_draw_method(method)
    *found, empty, weighted = gathered(
        *(draw_from(ROW) for _ in range(2000)), draw_from(EMPTY), draw_from(EMPTY, ROW)
    )
    indices = np.bincount([index for index, _, _ in found], minlength=3)
    assert indices / 2000 == pytest.approx([0.2, 0.3, 0.5], abs=0.04)
    assert all(abs(logw) < 1e-5 for _, logw, _ in found)
    for index, *weights in (empty, weighted):
        assert 0 <= index < 3
        assert weights == [-INF, -INF]
    assert take_batch_stats() == {("draw", 2002): 1}


@pytest.mark.parametrize("method", DRAW_METHODS)
def test_no_method_draws_an_element_of_zero_probability(method, monkeypatch):
    log_weights = torch.full((2, 5), -INF)
    log_weights[0, 2], log_weights[1, 1] = -1e3, 3
    for uniform, noise in ((0, 0), (1, 700)):  # the least and the largest, once rounded
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand_like", lambda x, to=uniform: torch.full_like(x, to))
            patch.setattr(torch.Tensor, "exponential_", lambda x, noise=noise: x.fill_(noise))
            picked = DRAW_METHODS[method](log_weights)
            assert (picked.dtype, picked.tolist()) == (torch.int64, [2, 1])
            one = DRAW_METHODS[method](log_weights[0])
            assert (one.ndim, int(one)) == (0, 2)
            assert 0 <= int(DRAW_METHODS[method](EMPTY)) < 3


def test_draw_method_is_a_name_or_a_function():
    set_draw_method(lambda rows: torch.full(rows.shape[:1], 1))
    assert gathered(draw_from(ROW), draw_from(ROW))[1][0] == 1
    with pytest.raises(KeyError, match="argmax"):
        set_draw_method("argmax")
    with pytest.raises(TypeError, match="a method name or a function, got 3"):
        set_draw_method(3)


def test_equal_seeds_give_equal_draws_despite_other_requests():
    row, runs = torch.zeros(1000), []
    for others in (0, 1):
        torch.manual_seed(3)
        asked = [draw_from(row) for _ in range(5)]
        asked += [ask for _ in range(others) for ask in (logsumexp_from(row), logp_at(row, 3))]
        runs.append([index for index, _, _ in gathered(*asked)[:5]])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1
    take_batch_stats()


@pytest.mark.parametrize("make", [torch.from_numpy, np.asarray])
def test_results_are_at_least_as_precise_as_the_row(make):
    exact = np.random.default_rng(0).normal(size=1000)
    total = float(np.logaddexp.reduce(exact))
    row = make(exact.copy())
    if isinstance(row, np.ndarray):
        row.flags.writeable = False
    (index, logw, logp), found, element = gathered(
        draw_from(row), logsumexp_from(row), logp_at(row, 7)
    )
    assert (logw, logp) == pytest.approx((total, exact[index] - total), abs=1e-12)
    assert (found, element) == (pytest.approx(total, abs=1e-12), exact[7])
    assert (np.asarray(row) == exact).all()
    for dtype in (torch.bfloat16, torch.float16):  # whose own sums are good to 1e-2
        few = torch.from_numpy(exact).to(dtype)
        wanted = float(few.double().logsumexp(0))
        (index, logw, logp), found = gathered(draw_from(few), logsumexp_from(few))
        assert (logw, found) == pytest.approx((wanted, wanted), abs=1e-5)
        assert logp == pytest.approx(float(few[index]) - wanted, abs=1e-5)
    take_batch_stats()


def test_draw_from_row_with_nan_or_inf_raises_and_others_succeed():
    for bad in (math.nan, INF):
        row = torch.tensor([0.0, bad, 1.0])
        error, found = gathered(draw_from(row), draw_from(ROW), return_exceptions=True)
        assert isinstance(error, ValueError)
        assert found[1] == pytest.approx(0, abs=1e-5)
    take_batch_stats()


async def test_cancelled_batch_holder_raises_batch_abandoned_for_the_others():
    tasks = [asyncio.create_task(deep(0)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[2].cancel()
    holder, other, cancelled = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(holder, asyncio.CancelledError)
    assert isinstance(other, BatchAbandoned)
    assert "CancelledError" in str(other)
    assert isinstance(other.__cause__, asyncio.CancelledError)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert not tasks[1].cancelled()
    assert (await draw_from(ROW))[1] == pytest.approx(0, abs=1e-5)  # a new batch
    assert take_batch_stats() == {("draw", 1): 1}


async def test_cancelled_waiter_leaves_batch_of_others_intact():
    tasks = [asyncio.create_task(deep(0)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    first, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(second, asyncio.CancelledError)
    assert first[1] == third[1] == pytest.approx(0, abs=1e-5)
    take_batch_stats()


def test_interrupt_in_a_draw_is_raised_and_abandons_other_callers():
    def interrupted(rows):
        raise KeyboardInterrupt

    set_draw_method(interrupted)
    loop = asyncio.new_event_loop()
    try:
        tasks = [loop.create_task(deep(0)), loop.create_task(deep(0))]
        tasks.append(loop.create_task(logsumexp_from(ROW)))
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asyncio.wait(tasks))
        assert isinstance(tasks[0].exception(), KeyboardInterrupt)
        others = asyncio.gather(*tasks[1:], return_exceptions=True)
        found = loop.run_until_complete(others)
        assert [type(error) for error in found] == [BatchAbandoned] * 2
        assert "KeyboardInterrupt()" in str(found[0])
    finally:
        loop.close()
    take_batch_stats()


def test_two_event_loops_never_share_a_batch():
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        tasks = [loop.create_task(deep(0)) for loop in (first, second)]
        for loop in (first, second):  # both wait at once
            loop.run_until_complete(asyncio.sleep(0))
        found = [loop.run_until_complete(t) for loop, t in zip((first, second), tasks, strict=True)]
        assert [logw for _, logw, _ in found] == pytest.approx([0, 0], abs=1e-5)
        assert take_batch_stats() == {("draw", 1): 2}
    finally:
        first.close()
        second.close()


async def test_join_batch_gives_all_entries_to_its_first_caller(monkeypatch):
    sleep, waits = asyncio.sleep, []
    monkeypatch.setattr(asyncio, "sleep", lambda delay: waits.append(delay) or sleep(0))
    store, futures = WeakKeyDictionary(), [asyncio.Future() for _ in range(4)]
    entries = [(n, future) for n, future in enumerate(futures)]
    assert await join_batch(store, entries[:1]) == entries[:1]
    assert waits == [0]
    waits.clear()
    joins = [join_batch(store, part, linger=0.5) for part in (entries[:2], entries[2:])]
    assert await asyncio.gather(*joins) == [entries, None]
    assert [wait for wait in waits if wait] == [0.5]
    assert waits[-1] == 0
    futures[0].set_result(7)
    futures[1].cancel()
    error = batch_abandoned(KeyError("why"))
    assert batch_abandoned(error.__cause__) is not error
    fail_futures(entries, error)
    assert futures[0].result() == 7
    assert [future.exception() for future in futures[2:]] == [error, error]
    assert "KeyError('why')" in str(error)
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, asyncio.CancelledError)


def test_temper_scales_rows_and_keeps_minus_inf():
    rows = torch.tensor([[0.1, -INF, 2.0, -3.0], [-1.0, -2.0, -3.0, -4.0]])
    kept = rows.clone()
    assert temper(rows, 1) is rows
    assert temper(rows, 1.0) is rows
    for row in (rows, rows[0]):
        torch.testing.assert_close(temper(row, 0.7), torch.log_softmax(row / 0.7, -1))
    assert temper(rows, 1e-40).exp().tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    assert temper(EMPTY, 2).tolist() == [-INF] * 3
    assert torch.equal(rows, kept)
    for wrong in (0, -1, math.nan, INF):
        with pytest.raises(ValueError, match="temperature must be a number above 0"):
            temper(rows, wrong)


async def test_model_rows_are_on_its_device_and_have_its_vocabulary_size():
    lm = MockAsyncLM(word_tokenizer(9))
    assert lm.device == torch.device("cpu")
    row = await lm.next_token_logprobs([1])
    assert (row.device, len(row)) == (lm.device, 9)
    logits = torch.randn(3, 109).half()
    expected = logits[:, :9].float().log_softmax(-1)
    torch.testing.assert_close(lm._normalize(logits), expected)
    narrow = lm._normalize(logits[0, :7])
    torch.testing.assert_close(narrow[:7], logits[0, :7].float().log_softmax(-1))
    assert narrow[7:].tolist() == [-INF, -INF]
    assert (narrow.dtype, lm._normalize(logits[:, :9]).shape) == (torch.float32, (3, 9))
    with pytest.raises(ValueError, match="no LoRA adapter named 'gone'"):
        await lm.next_token_logprobs([1], lora_name="gone")
    assert BatchAbandoned is genlm_backend.errors.QueryDroppedError
