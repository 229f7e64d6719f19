"""Awaited prefix weights: one batch an operation, and nobody disturbs anybody."""

import asyncio
import gc
import math
import random
import threading
import weakref

import numpy as np
import pytest
import torch

from genlm_backend import AsyncTokenCharacterTrie, Token, TokenCharacterTrie
from genlm_backend.errors import QueryDroppedError, WeightsError, WeightsTypeError

DECODE = [
    Token(i, word) for i, word in enumerate([b"ab", b"ac", b"a", b"", b"b", b"bcd", b"a", b"\x00"])
]
PLAIN = TokenCharacterTrie(DECODE)
METHODS = ["weight_sum", "weight_max", "log_weight_sum", "mass_sum"]


def weights(seed):
    return np.random.default_rng(seed).normal(size=len(DECODE)).astype(np.float32)


def expected(method, ws):
    return getattr(PLAIN, method)(ws)


@pytest.fixture(params=["sequential", "parallel", None])
def trie(request):
    options = {} if request.param == "sequential" else {"device": "cpu"}
    made = AsyncTokenCharacterTrie.from_vocab(DECODE, backend=request.param, **options)
    yield made
    made.shutdown()


class Blocker:
    """Holds the evaluation of a trie until it is told to go on."""

    def __init__(self, trie):
        self.entered, self.go = threading.Event(), threading.Event()
        self.evaluate = trie.trie.evaluate_rows
        trie.trie.evaluate_rows = self

    def __call__(self, operation, batch):
        self.entered.set()
        assert self.go.wait(60)
        return self.evaluate(operation, batch)


@pytest.mark.parametrize("method", METHODS)
async def test_awaited_weights_equal_those_of_the_plain_trie(trie, method):
    rows = await asyncio.gather(*(getattr(trie, method)(weights(i)) for i in range(30)))
    for i, row in enumerate(rows):
        np.testing.assert_allclose(row, expected(method, weights(i)), rtol=2e-6, atol=1e-6)


async def test_concurrent_awaits_are_one_batch_per_operation(trie):
    await asyncio.gather(
        *(getattr(trie, method)(weights(i)) for i in range(25) for method in METHODS)
    )
    statistics = trie.statistics()
    assert dict(statistics.sum.batch_sizes) == {50: 1}
    assert dict(statistics.max.batch_sizes) == {25: 1}
    assert dict(statistics.log_sum.batch_sizes) == {25: 1}
    assert statistics.sum.num_submitted == 50


async def test_equal_requests_get_separate_arrays(trie):
    ws = weights(0)
    first, second = await asyncio.gather(trie.weight_sum(ws), trie.weight_sum(ws))
    first[:] = 0
    np.testing.assert_allclose(second, expected("weight_sum", ws), rtol=1e-6)


async def test_one_bad_request_fails_alone(trie):
    good = [trie.weight_sum(weights(i)) for i in range(10)]
    bad = [trie.weight_sum(np.zeros(3)), trie.weight_max(torch.zeros(2, 8)), trie.mass_sum("x")]
    mixed = [*good[:5], *bad, *good[5:]]
    results = await asyncio.gather(*mixed, return_exceptions=True)
    assert [type(r) for r in results[5:7]] == [WeightsError] * 2
    assert isinstance(results[7], (ValueError, TypeError))
    for i, row in enumerate([*results[:5], *results[8:]]):
        np.testing.assert_allclose(row, expected("weight_sum", weights(i)), rtol=1e-6)


async def test_a_failing_evaluation_fails_its_batch_only(trie):
    evaluate = trie.trie.evaluate_rows

    def fail_once(operation, batch):
        trie.trie.evaluate_rows = evaluate
        raise ZeroDivisionError("once")

    trie.trie.evaluate_rows = fail_once
    failed = await asyncio.gather(
        *(trie.weight_sum(weights(i)) for i in range(3)), return_exceptions=True
    )
    row = await trie.weight_sum(weights(0))
    assert [type(error) for error in failed] == [ZeroDivisionError] * 3
    np.testing.assert_allclose(row, expected("weight_sum", weights(0)), rtol=1e-6)


async def test_cancelled_callers_leave_the_results_of_others_intact(trie):
    blocker = Blocker(trie)
    first = asyncio.create_task(trie.weight_sum(weights(0)))
    assert await asyncio.to_thread(blocker.entered.wait, 60)
    waiting = [asyncio.create_task(trie.weight_sum(weights(i))) for i in range(1, 20)]
    await asyncio.sleep(0)
    random.Random(0).shuffle(waiting)
    for task in [first, *waiting[:10]]:
        task.cancel()
    blocker.go.set()
    done = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in done[:11])
    rows = done[11:]
    assert len(rows) == 9
    wanted = {expected("weight_sum", weights(i))[0].item() for i in range(1, 20)}
    for row in rows:
        assert any(abs(row[0] - value) < 1e-5 for value in wanted)
    assert trie.statistics().sum.num_skipped == 10


@pytest.mark.parametrize("close", ["cleanup", "shutdown"])
async def test_closing_fails_every_waiter_and_later_requests_are_answered(trie, close):
    blocker = Blocker(trie)
    running = [asyncio.create_task(trie.weight_sum(weights(0)))]
    assert await asyncio.to_thread(blocker.entered.wait, 60)
    waiting = [asyncio.create_task(trie.weight_sum(weights(i))) for i in range(5)]
    other = asyncio.create_task(trie.weight_max(weights(0)))
    await asyncio.sleep(0)
    threading.Timer(0.05, blocker.go.set).start()
    if close == "cleanup":
        await trie.cleanup()
    else:
        trie.shutdown()
    done = await asyncio.gather(*running, *waiting, return_exceptions=True)
    assert all(isinstance(result, QueryDroppedError) for result in done)
    await asyncio.gather(other, return_exceptions=True)
    await trie.cleanup()
    trie.start()
    row = await trie.weight_sum(weights(3))
    np.testing.assert_allclose(row, expected("weight_sum", weights(3)), rtol=1e-6)


async def test_cleanup_frees_the_spare_memory_of_results():
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE, backend="sequential")
    assert trie.trie._spare.num_bytes == 0
    trie.trie.weight_sum(weights(0))  # nobody keeps the row
    assert trie.trie._spare.num_bytes == 4 * PLAIN.num_nodes
    await trie.cleanup()
    assert trie.trie._spare.num_bytes == 0


async def test_async_with_ends_the_threads():
    before = {t for t in threading.enumerate() if t.name == "genlm-trie-sum"}
    async with AsyncTokenCharacterTrie.from_vocab(DECODE, backend="sequential") as trie:
        await trie.weight_sum(weights(0))
        assert any(t.name == "genlm-trie-sum" for t in threading.enumerate())
    gc.collect()
    assert {t for t in threading.enumerate() if t.name == "genlm-trie-sum"} <= before


def test_trie_answers_successive_loops_and_concurrent_threads(trie):
    async def ask(seeds):
        return await asyncio.gather(*(trie.weight_max(weights(seed)) for seed in seeds))

    for _ in range(3):
        assert len(asyncio.run(ask(range(4)))) == 4
    results = {}

    def run(k):
        results[k] = [asyncio.run(ask(range(10 * k + j, 10 * k + j + 5))) for j in range(10)]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for k in range(4):
        for j, rows in enumerate(results[k]):
            for i, row in enumerate(rows):
                np.testing.assert_array_equal(row, expected("weight_max", weights(10 * k + j + i)))


def test_kept_row_does_not_keep_its_batch_in_memory(trie):
    async def main():
        return await asyncio.gather(*(trie.weight_sum(weights(i)) for i in range(50)))

    rows = asyncio.run(main())
    bases = [row if row.base is None else row.base for row in rows]
    assert len({id(base) for base in bases}) == 50
    kept = rows[7]
    assert kept.nbytes == 4 * PLAIN.num_nodes
    gone = [weakref.ref(base) for i, base in enumerate(bases) if i != 7]
    gc.disable()  # nothing waits for the garbage collector either
    try:
        del rows, bases
        trie.shutdown()  # the worker has let go
        assert not any(ref() is not None for ref in gone)
    finally:
        gc.enable()
    np.testing.assert_allclose(kept, expected("weight_sum", weights(7)), rtol=1e-6)


async def test_tensor_rows_own_their_memory():
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE, device="cpu", as_tensor=True)
    rows = await asyncio.gather(*(trie.weight_sum(torch.from_numpy(weights(i))) for i in range(5)))
    trie.shutdown()
    for i, row in enumerate(rows):
        assert row.untyped_storage().nbytes() == 4 * PLAIN.num_nodes
        np.testing.assert_allclose(row.numpy(), expected("weight_sum", weights(i)), rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4])
async def test_largest_batch_has_the_configured_batch_size(batch_size):
    trie = AsyncTokenCharacterTrie.from_vocab(DECODE, "sequential", batch_size=batch_size)
    await asyncio.gather(*(trie.weight_sum(weights(i)) for i in range(10)))
    assert max(trie.statistics().sum.batch_sizes) == batch_size
    trie.shutdown()


@pytest.mark.parametrize("timeout", [0, math.inf])
async def test_query_is_answered_with_a_timeout_of_zero_or_infinity(timeout):
    """A quiet loop sends it in any case."""
    trie = AsyncTokenCharacterTrie(PLAIN, timeout=timeout)
    np.testing.assert_array_equal(await trie.weight_sum(weights(0)), PLAIN.weight_sum(weights(0)))
    await trie.cleanup()


async def test_random_interleavings_of_callers_and_closing_give_correct_rows(trie):
    """Callers that ask, wait, give up and close the trie, interleaved at random."""
    randomness = random.Random(0)

    async def caller(seed):
        method = randomness.choice(METHODS)
        for step in range(6):
            ws = weights(1000 * seed + step)
            try:
                async with asyncio.timeout(randomness.choice([None, None, 0.0005])):
                    row = await getattr(trie, method)(ws)
            except (TimeoutError, QueryDroppedError):
                continue
            np.testing.assert_allclose(row, expected(method, ws), rtol=2e-6, atol=1e-6)
            for _ in range(randomness.randrange(4)):
                await asyncio.sleep(0)

    async def closer():
        for _ in range(5):
            await asyncio.sleep(0.002)
            await trie.cleanup()

    await asyncio.gather(closer(), *(caller(seed) for seed in range(40)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(len(DECODE), device="meta"),
        torch.zeros(len(DECODE), dtype=torch.float8_e4m3fn),
        torch.zeros(len(DECODE), dtype=torch.float8_e5m2),
    ],
    ids=["meta", "float8_e4m3fn", "float8_e5m2"],
)
async def test_tensor_of_unsupported_device_or_dtype_fails_alone(trie, method, wrong):
    ask = getattr(trie, method)
    bad, *good = await asyncio.gather(
        ask(wrong), *(ask(weights(i)) for i in range(5)), return_exceptions=True
    )
    assert isinstance(bad, WeightsTypeError)
    for i, row in enumerate(good):
        np.testing.assert_allclose(row, expected(method, weights(i)), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int8, torch.bool, torch.bfloat16])
async def test_every_dtype_of_real_numbers_is_accepted(trie, dtype):
    ws = torch.arange(len(DECODE)).to(dtype)
    row = await trie.weight_sum(ws)
    np.testing.assert_allclose(row, expected("weight_sum", ws.double().numpy()), rtol=1e-6)
