"""A queue hands out every token once, to whoever waits however, and is settled once."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from genlm_backend.generation.engine.request import ResultQueue
from genlm_backend.generation.generated import GeneratedToken, GenerationStatus


def token(token_id, reason=None, index=0):
    return GeneratedToken(token_id, f"<{token_id}>", finish_reason=reason, index=index)


def make(num_texts=1):
    return ResultQueue(num_texts, 5, with_logprobs=False)


def test_threads_and_coroutines_read_each_token_once():
    results, count = make(), 300
    seen, lock = [], threading.Lock()

    def read():
        for piece in results:
            with lock:
                seen.extend(piece.token_ids)

    async def aread():
        async for piece in results:
            with lock:
                seen.extend(piece.token_ids)

    async def two():
        await asyncio.gather(aread(), aread())

    with ThreadPoolExecutor(5) as pool:
        readers = [*(pool.submit(read) for _ in range(3)), pool.submit(asyncio.run, two())]
        for number in range(count):
            results.put([token(number)])
        results.end(GenerationStatus.FINISHED)
        for reader in readers:
            reader.result(30)
    assert sorted(seen) == list(range(count))


async def test_cancelled_reader_takes_no_token():
    results = make()
    first, second = asyncio.create_task(results.aget()), asyncio.create_task(results.aget())
    for _ in range(3):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    results.put([token(7)])
    assert (await second).token_ids == [7]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(results.await_end(), 0.01)
    results.end(GenerationStatus.FINISHED)
    await results.await_end()


async def test_timed_out_waiters_are_not_kept():
    results = make()
    for _ in range(100):
        assert results.get_with_timeout(0) is None
    for _ in range(50):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(results.aget(), 0.001)
    assert len(results._changed._waiters) < 5
