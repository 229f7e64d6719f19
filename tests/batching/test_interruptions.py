"""An interrupt, or the garbage collector, at any moment: whoever asks afterwards is answered."""

import asyncio
import linecache
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from genlm_backend.batching import Batcher, BatchPolicy, batcher, pending_query, worker

FILES = {module.__file__ for module in (batcher, pending_query, worker)}
PATIENT = BatchPolicy(timeout=1000.0)


def interrupted_at(number, function):
    """Call a function, and raise a KeyboardInterrupt before its line of that number, if it has one.

    Only lines of the batcher and what is beside it count, on this thread, and none with a ``with``:
    Python shows them a second time where a real interrupt cannot come, between a block and its end.
    Returns whether the function came to its end before.
    """
    count = 0

    def of_lines(frame, event, argument):
        nonlocal count
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith("with "):
            count += 1
            if count == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return of_lines

    def of_calls(frame, event, argument):
        return of_lines if frame.f_code.co_filename in FILES else None

    before = sys.gettrace()
    sys.settrace(of_calls)
    try:
        function()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True


def answers(asked, pool):
    """What two other threads get, who ask the context of the interrupted caller and another."""
    return [pool.submit(asked.submit_sync, [query]).result(60) for query in (1, 2)]


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("how", ["submit_sync", "flush", "call"])
def test_an_interrupt_at_any_line_leaves_the_batcher_answering(is_started, how):
    with ThreadPoolExecutor(2) as pool:
        for number in range(1, 1000):
            asked = Batcher(lambda queries: [-query for query in queries], PATIENT)
            if is_started:
                asked.submit_sync([0])
            loop = asyncio.new_event_loop()
            if how == "submit_sync":
                interrupted = partial(asked.submit_sync, [1])
            elif how == "call":
                interrupted = partial(asked.call, int)
            else:
                waiting = pending_query.MultiWaiter(loop)
                asked._ask(waiting, loop, [1])
                interrupted = asked.flush
            is_whole = interrupted_at(number, interrupted)
            assert answers(asked, pool) == [[-1], [-2]], number
            if how == "flush":
                loop.run_until_complete(asyncio.wait_for(waiting.future, 60))
                assert waiting.future.result() == [-1]
            loop.close()
            assert asked.statistics().num_pending == asked.statistics().num_in_flight == 0
            asked.close()
            if is_whole:
                return
    pytest.fail("it never came to its end")


def test_interrupt_during_thread_start_starts_no_second_thread(monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        monkeypatch.setattr(threading.Thread, "start", start)
        raise KeyboardInterrupt

    at_once, most = 0, 0
    lock = threading.Lock()

    def evaluate(queries):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        assert asked._worker.is_current_thread()
        with lock:
            at_once -= 1
        return queries

    asked = Batcher(evaluate, PATIENT, name="started-twice")
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            asked.call(int)
        assert answers(asked, pool) == [[1], [2]]
    assert most == 1
    asked.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "genlm-started-twice"]


def test_coroutine_collected_under_the_batchers_lock_does_not_deadlock():
    asked = Batcher(lambda queries: queries, PATIENT)
    loop = asyncio.new_event_loop()

    async def begin():
        coroutine = asked.submit(1)
        future = coroutine.send(None)  # it waits for its row
        return coroutine, future

    coroutine, _ = loop.run_until_complete(begin())
    with asked._lock.here:  # as where an allocation under it begins a collection
        coroutine.close()
    assert asked.submit_sync([2]) == [2]
    assert asked.statistics().num_skipped in (0, 1)  # the loop may have fired before
    loop.run_until_complete(asyncio.sleep(0))
    asked.close()
    loop.close()
