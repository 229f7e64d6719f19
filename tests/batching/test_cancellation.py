"""A caller that goes away disturbs nobody, and nothing is computed for nobody."""

import asyncio
import contextlib
import signal
import threading

import pytest

from genlm_backend.batching import Batcher, BatchPolicy
from genlm_backend.errors import BatcherClosedError, QueryDroppedError

PATIENT = BatchPolicy(max_batch_size=100, timeout=1000.0, max_turns=1_000_000)


async def passes(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def until_held(recorder):
    while not recorder.is_held.is_set():
        await asyncio.sleep(0)


async def test_cancelled_query_without_other_waiters_is_skipped(recorder):
    batcher = Batcher(recorder, PATIENT)
    tasks = [asyncio.ensure_future(batcher.submit(i)) for i in range(4)]
    await passes(1)
    tasks[2].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[2], asyncio.CancelledError)
    assert [results[0], results[1], results[3]] == [0, 2, 6]
    assert recorder.batches == [[0, 1, 3]]
    assert batcher.statistics().num_skipped == 1
    batcher.close()


async def test_cancelled_query_shared_with_another_caller_is_still_answered(recorder):
    batcher = Batcher(recorder, PATIENT)
    first = asyncio.ensure_future(batcher.submit(5))
    second = asyncio.ensure_future(batcher.submit(5))
    await passes(1)
    first.cancel()
    assert await second == 10
    assert recorder.batches == [[5]]
    batcher.close()


async def test_cancelling_all_evaluates_nothing(recorder):
    batcher = Batcher(recorder, PATIENT)
    tasks = [asyncio.ensure_future(batcher.submit(i)) for i in range(5)]
    await passes(1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await passes(20)
    assert await batcher.submit(9) == 18
    assert recorder.batches == [[9]]
    batcher.close()


async def test_wait_for_timeout_in_flight_leaves_other_queries_intact(recorder):
    batcher = Batcher(recorder, PATIENT)
    recorder.hold()
    impatient = asyncio.ensure_future(asyncio.wait_for(batcher.submit(1), 0.01))
    patient = asyncio.ensure_future(batcher.submit(2))
    await until_held(recorder)
    with pytest.raises(TimeoutError):
        await impatient
    recorder.let_go()
    assert (await patient, await batcher.submit(1)) == (4, 2)
    batcher.close()


async def test_cancelling_first_query_of_a_batch_leaves_the_others_intact(recorder):
    batcher = Batcher(recorder, PATIENT)
    recorder.hold()
    tasks = [asyncio.ensure_future(batcher.submit(i)) for i in range(3)]
    await until_held(recorder)
    tasks[0].cancel()
    await passes(3)
    recorder.let_go()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [2, 4]
    batcher.close()


async def test_query_of_manually_closed_coroutine_is_not_evaluated(recorder):
    batcher = Batcher(recorder, PATIENT)
    coroutine = batcher.submit(7)
    coroutine.send(None)
    coroutine.close()
    assert await batcher.submit(8) == 16
    assert recorder.batches == [[8]]
    batcher.close()


def test_closed_coroutine_of_an_ended_loop_is_no_longer_pending(recorder):
    batcher = Batcher(recorder, PATIENT)

    async def close_by_hand():
        coroutine = batcher.submit_all([7, 8])
        coroutine.send(None)
        assert batcher.statistics().num_pending == 2
        coroutine.close()

    asyncio.run(close_by_hand())
    statistics = batcher.statistics()
    assert (statistics.num_pending, statistics.num_skipped) == (0, 2)
    assert batcher.submit_sync([9]) == [18]
    assert recorder.batches == [[9]]
    batcher.close()


def test_loop_closed_after_cancelling_leaves_batcher_usable(recorder):
    batcher = Batcher(recorder, PATIENT)
    loop = asyncio.new_event_loop()
    abandoned = loop.create_task(batcher.submit(1))
    loop.run_until_complete(asyncio.sleep(0))
    abandoned.cancel()
    loop.run_until_complete(asyncio.gather(abandoned, return_exceptions=True))
    loop.close()
    assert asyncio.run(batcher.submit(2)) == 4
    assert recorder.batches == [[2]]
    batcher.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_loop_closed_without_cancelling_leaves_batcher_usable(recorder):
    batcher = Batcher(recorder, PATIENT)
    loop = asyncio.new_event_loop()
    abandoned = loop.create_task(batcher.submit(1))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert asyncio.run(batcher.submit(2)) == 4
    assert recorder.batches == [[2]]
    abandoned._log_destroy_pending = False  # pyright: ignore
    batcher.close()


def test_loop_closed_during_evaluation_leaves_batcher_usable(recorder):
    batcher = Batcher(recorder, PATIENT)
    recorder.hold()

    async def abandon():
        task = asyncio.ensure_future(batcher.submit(1))
        await until_held(recorder)
        task.cancel()

    asyncio.run(abandon())
    threading.Timer(0.01, recorder.let_go).start()
    assert asyncio.run(batcher.submit(2)) == 4
    assert recorder.batches == [[1], [2]]
    batcher.close()


async def test_cancelled_call_leaves_the_worker_alive(recorder):
    batcher, called = Batcher(recorder, PATIENT), []
    recorder.hold()
    first = asyncio.ensure_future(batcher.submit(1))
    batcher.flush()
    await until_held(recorder)
    waiting = [batcher.call_soon(lambda i=i: called.append(i)) for i in range(3)]
    waiting[1].cancel()
    recorder.let_go()
    assert await first == 2
    assert [await asyncio.wrap_future(waiting[i]) for i in (0, 2)] == [None, None]
    assert called == [0, 2]

    is_held, gate = threading.Event(), threading.Event()

    def hold():
        is_held.set()
        assert gate.wait(30)

    under_way = batcher.call_soon(hold)
    assert is_held.wait(30)
    assert not under_way.cancel()  # it is too late
    gate.set()
    assert batcher.submit_sync([4]) == [8]
    batcher.close()


@pytest.fixture
def interruptible():
    """Listen to SIGINT, which a shell makes its background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupted_while_held(recorder):
    """Expect that the block waits for an evaluation, and interrupt it then."""
    is_noticed = threading.Event()

    def interrupt():
        assert recorder.is_held.wait(30)
        # Python does not notice a signal that comes just before the main thread begins to wait;
        # it does with the next one, and takes both for one.
        while not is_noticed.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            is_noticed.wait(15)  # longer than a busy machine makes the main thread wait

    recorder.hold()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    is_noticed.set()
    thread.join()  # before anything else is held, which it would interrupt
    recorder.let_go()


@pytest.mark.usefixtures("interruptible")
def test_a_keyboard_interrupt_during_an_evaluation_leaves_the_batcher_usable(recorder):
    batcher = Batcher(recorder, PATIENT)
    with interrupted_while_held(recorder):
        asyncio.run(batcher.submit(1))
    assert asyncio.run(batcher.submit(2)) == 4
    with interrupted_while_held(recorder):
        batcher.submit_sync([3])
    assert batcher.submit_sync([4, 5]) == [8, 10]
    batcher.close()


class Steps:
    """Doubles numbers in steps that the test allows one by one, asking before each."""

    def __init__(self, num_steps=5):
        self.num_steps, self.num_made = num_steps, 0
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)
        self.batches = []
        self.batcher = Batcher(self, PATIENT)

    def __call__(self, queries):
        self.batches.append(queries)
        for _ in range(self.num_steps):
            self.batcher.check_cancelled()
            self.num_made += 1
            self.begun.release()
            assert self.allowed.acquire(timeout=30)
        return [2 * query for query in queries]

    async def until_begun(self):
        while not self.begun.acquire(blocking=False):
            await asyncio.sleep(0)

    def let_go(self):
        self.allowed.release(1000)


async def gone(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_evaluation_without_waiters_ends_at_its_next_step():
    steps = Steps()
    tasks = [asyncio.ensure_future(steps.batcher.submit(i)) for i in range(3)]
    await steps.until_begun()
    await gone(*tasks)
    steps.let_go()
    assert await steps.batcher.submit(9) == 18
    assert steps.batches == [[0, 1, 2], [9]]
    assert steps.num_made == 1 + steps.num_steps
    counts = steps.batcher.statistics()
    assert counts.num_skipped == 0  # they were being evaluated
    assert dict(counts.batch_sizes) == {3: 1, 1: 1}
    assert counts.num_submitted == 4
    assert steps.batcher.statistics().num_failed == 0
    steps.batcher.close()


async def test_evaluation_with_a_remaining_waiter_continues():
    steps = Steps()
    tasks = [asyncio.ensure_future(steps.batcher.submit(i)) for i in range(3)]
    await steps.until_begun()
    await gone(*tasks[:2])
    steps.let_go()
    assert await tasks[2] == 4
    assert steps.num_made == steps.num_steps
    steps.batcher.close()


async def given_up(steps, monkeypatch):
    """Give up a batch of the query 1, which ends when the event that is returned is set."""
    is_given_up, joined = threading.Event(), threading.Event()
    check = steps.batcher.check_cancelled

    def check_and_wait():
        try:
            check()
        except QueryDroppedError:
            is_given_up.set()
            assert joined.wait(30)
            raise

    monkeypatch.setattr(steps.batcher, "check_cancelled", check_and_wait)
    task = asyncio.ensure_future(steps.batcher.submit(1))
    await steps.until_begun()
    await gone(task)
    steps.let_go()
    assert await asyncio.to_thread(is_given_up.wait, 30)
    return joined


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_caller_joining_an_abandoned_batch_is_answered(is_blocking, monkeypatch):
    steps = Steps()
    joined = await given_up(steps, monkeypatch)
    if is_blocking:
        later = asyncio.ensure_future(asyncio.to_thread(steps.batcher.submit_sync, [1]))
    else:
        later = asyncio.ensure_future(steps.batcher.submit(1))
    while steps.batcher.statistics().num_joined == 0:
        await asyncio.sleep(0)
    joined.set()
    assert await asyncio.wait_for(later, 30) in (2, [2])
    assert steps.batches == [[1], [1]]
    steps.batcher.close()


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_abandoned_query_asked_again_runs_after_pending_ones_leave(is_dropped, monkeypatch):
    steps = Steps()
    joined = await given_up(steps, monkeypatch)
    behind = asyncio.ensure_future(steps.batcher.submit_all([2, 3]))
    await passes(1)
    if is_dropped:
        assert steps.batcher.drop(LookupError("by the test")) == 1
        with pytest.raises(LookupError):
            await behind
    else:
        await gone(behind)
    asked = ([1], [4], [1, 5], [4, 1, 5, 4])
    tasks = [asyncio.ensure_future(steps.batcher.submit_all(queries)) for queries in asked]
    await passes(1)
    joined.set()
    results = await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert results == [[2 * query for query in queries] for queries in asked]
    assert steps.batches == [[1], [1, 4, 5]]
    steps.batcher.close()


async def test_closing_and_dropping_end_an_evaluation_at_its_next_step():
    for end in ("drop", "close"):
        steps = Steps()
        task = asyncio.ensure_future(steps.batcher.submit(1))
        await steps.until_begun()
        ending = asyncio.ensure_future(asyncio.to_thread(getattr(steps.batcher, end)))
        with pytest.raises(QueryDroppedError):
            await task
        steps.let_go()
        await ending
        await asyncio.to_thread(steps.batcher.close)
        assert steps.num_made == 1


async def test_an_evaluation_ends_at_its_next_step_when_the_interpreter_exits():
    """It ends the worker threads then, and nobody has closed the batcher."""
    steps = Steps()
    task = asyncio.ensure_future(steps.batcher.submit(1))
    await steps.until_begun()
    ending = asyncio.ensure_future(asyncio.to_thread(steps.batcher._worker.stop))
    while not steps.batcher._worker.is_stopped:
        await asyncio.sleep(0)
    steps.let_go()
    with pytest.raises(QueryDroppedError, match=r"was answered: the interpreter is exiting$"):
        await task
    await ending
    assert steps.num_made == 1


async def test_a_call_ends_at_its_next_step_when_the_batcher_closes():
    steps = Steps()
    under_way = asyncio.ensure_future(asyncio.to_thread(steps.batcher.call, lambda: steps([1])))
    await steps.until_begun()
    closing = asyncio.ensure_future(asyncio.to_thread(steps.batcher.close))
    while not steps.batcher.is_closed:
        await asyncio.sleep(0)
    steps.let_go()
    with pytest.raises(QueryDroppedError):
        await under_way
    await closing
    assert steps.num_made == 1
    with pytest.raises(BatcherClosedError):
        steps.batcher.call(lambda: None)


def test_check_cancelled_off_the_worker_thread_raises_nothing(recorder):
    batcher = Batcher(recorder, PATIENT)
    batcher.check_cancelled()
    batcher.close()
    batcher.check_cancelled()


async def test_drop_with_a_given_error_raises_that_error(recorder):
    batcher = Batcher(recorder, PATIENT)
    task = asyncio.ensure_future(batcher.submit(1))
    await passes(1)
    error = KeyError("by the test")
    assert batcher.drop(error) == 1
    with pytest.raises(KeyError) as raised:
        await task
    assert raised.value is error
    assert batcher.drop(error) == 0
    batcher.close()


async def test_query_whose_key_raises_is_not_left_pending(recorder):
    def key(query):
        if query == 2:
            raise LookupError("by the test")
        return query

    batcher = Batcher(recorder, PATIENT, key)
    task = asyncio.ensure_future(batcher.submit(1))
    with pytest.raises(LookupError, match="by the test"):
        await batcher.submit(2)
    with pytest.raises(LookupError, match="by the test"):
        batcher.submit_sync([3, 2])
    batcher.flush()
    assert await task == 2
    assert recorder.batches == [[1]]
    assert batcher.statistics().num_pending == 0
    batcher.close()


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "beside others"])
async def test_task_cancelled_in_a_signal_handler_ends_before_its_evaluation(is_shared):
    """As a notebook's stop button does it, which does not wake the loop."""
    main, handled, told = threading.main_thread().ident, threading.Event(), threading.Event()
    was_told = []

    def evaluate(queries):
        signal.pthread_kill(main, signal.SIGUSR1)
        handled.wait(10)
        for _ in range(1000):  # what ends it is that nobody waits, or that the one has been told
            batcher.check_cancelled()
            if told.wait(0.01):
                break
        was_told.append(told.is_set())
        return queries

    def stop(*_):
        first.cancel()
        handled.set()

    batcher = Batcher(evaluate, PATIENT)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        first = asyncio.ensure_future(batcher.submit(1))
        others = [asyncio.ensure_future(batcher.submit(i)) for i in (2, 3) if is_shared]
        await passes(1)
        batcher.flush()
        with pytest.raises(asyncio.CancelledError):
            await first
        told.set()
        assert await asyncio.gather(*others) == [2, 3][: len(others)]
        assert was_told == ([True] if is_shared else [])
    finally:
        signal.signal(signal.SIGUSR1, before)
        batcher.close()
