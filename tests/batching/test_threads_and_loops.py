"""One batcher, several loops and threads at once."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from genlm_backend.batching import Batcher, BatchPolicy

PATIENT = BatchPolicy(max_batch_size=64, timeout=1000.0, max_turns=1_000_000)


def test_successive_event_loops_share_one_batcher(recorder):
    batcher = Batcher(recorder, PATIENT)
    for i in range(20):
        assert asyncio.run(batcher.submit(i)) == 2 * i
    assert len(batcher._quiet_detectors) <= 2  # closed loops are not kept
    batcher.close()


def test_event_loops_in_threads_share_one_batcher(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=16, timeout=0.02))

    async def program(offset):
        total = []
        for step in range(20):
            values = range(offset + 10 * step, offset + 10 * step + 10)
            total += await asyncio.gather(*map(batcher.submit, values))
        return total

    def thread(offset):
        return asyncio.run(program(offset))

    with ThreadPoolExecutor(8) as pool:
        for index, result in enumerate(pool.map(thread, range(0, 8000, 1000))):
            assert result == [2 * (1000 * index + i) for i in range(200)]
    assert max(map(len, recorder.batches)) <= 16
    batcher.close()


def test_a_blocked_loop_does_not_hold_up_another(recorder):
    batcher = Batcher(recorder, PATIENT)
    is_blocked, may_go_on = threading.Event(), threading.Event()

    async def blocked():
        task = asyncio.ensure_future(batcher.submit(1))
        await asyncio.sleep(0)
        is_blocked.set()
        assert may_go_on.wait(30)
        return await task

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(asyncio.run, blocked())
        assert is_blocked.wait(30)
        assert asyncio.run(asyncio.wait_for(batcher.submit(2), 30)) == 4
        may_go_on.set()
        assert other.result(30) == 2
    batcher.close()


def test_blocking_calls_from_many_threads_get_their_own_results(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=8, timeout=0.02))
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: batcher.submit_sync([i, i + 1]), range(200)))
    assert results == [[2 * i, 2 * i + 2] for i in range(200)]
    batcher.close()


def test_blocking_call_is_split_into_full_batches(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=4, timeout=1000.0))
    assert batcher.submit_sync(range(10)) == [2 * i for i in range(10)]
    assert recorder.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    batcher.close()


async def test_a_blocking_call_works_inside_a_running_loop(recorder):
    batcher = Batcher(recorder, PATIENT)
    waiting = asyncio.ensure_future(batcher.submit(1))
    await asyncio.sleep(0)
    assert batcher.submit_sync([2]) == [4]  # takes the waiting one along
    assert await waiting == 2
    assert recorder.batches == [[1, 2]]
    batcher.close()


async def test_evaluation_that_calls_its_own_batcher_raises_runtime_error():
    batcher = Batcher(lambda queries: batcher.submit_sync(queries), PATIENT)
    with pytest.raises(RuntimeError, match="its own batcher"):
        await batcher.submit(1)
    batcher.close()


def test_close_from_another_thread_gives_callers_results_or_errors(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=4, timeout=0.01))
    started = threading.Barrier(9)

    def ask(offset):
        started.wait()
        answers = []
        for i in range(200):
            try:
                answers.append(batcher.submit_sync([offset + i])[0] == 2 * (offset + i))
            except RuntimeError:  # dropped or closed, and told so
                return answers
        return answers

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ask, 1000 * i) for i in range(8)]
        started.wait()
        batcher.close()
        assert all(all(future.result(30)) for future in futures)


async def test_blocking_call_joining_a_running_batch_hurries_no_later_query(recorder):
    batcher = Batcher(recorder, PATIENT)
    recorder.hold()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(batcher.submit_sync, [1])
        assert recorder.is_held.wait(30)
        joined = pool.submit(batcher.submit_sync, [1])
        while batcher.statistics().num_joined == 0:
            assert not joined.done()
        recorder.let_go()
        assert (first.result(30), joined.result(30)) == ([2], [2])
    assert batcher.submit_sync([]) == []
    assert await asyncio.gather(*map(batcher.submit, range(5))) == [0, 2, 4, 6, 8]
    assert recorder.batches == [[1], [0, 1, 2, 3, 4]]
    batcher.close()


async def test_concurrent_policy_updates_are_not_lost_and_bound_batches(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=5))
    is_over = threading.Event()
    lost = []

    def set_size():
        while not is_over.is_set():
            for size in (5, 50):
                batcher.set_policy(max_batch_size=size)
                if batcher.policy.max_batch_size != size:
                    lost.append(size)

    def set_timeout():
        while not is_over.is_set():
            for timeout in (0.02, 0.03):
                batcher.set_policy(timeout=timeout)
                if batcher.policy.timeout != timeout:
                    lost.append(timeout)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=target) for target in (set_size, set_timeout)]
    try:
        for thread in threads:
            thread.start()
        for first in range(0, 4000, 1000):
            results = await asyncio.gather(*map(batcher.submit, range(first, first + 1000)))
            assert results == [2 * i for i in range(first, first + 1000)]
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert max(map(len, recorder.batches)) <= 50
    assert not lost
    batcher.close()
