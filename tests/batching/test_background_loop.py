"""One event loop on a thread: for what runs there, and for callers that block."""

import asyncio
import gc
import os
import threading
import weakref

import pytest

from genlm_backend.errors import BatcherClosedError, ForkedError
from genlm_backend.runtime.background_loop import BackgroundLoop

NAME = "genlm-of tests"


@pytest.fixture
def loop():
    with_one = BackgroundLoop("of tests")
    yield with_one
    with_one.close()
    assert not [thread for thread in threading.enumerate() if thread.name == NAME]


async def on_which_thread():
    await asyncio.sleep(0)
    return threading.current_thread().name


def test_coroutines_run_on_the_loops_thread_and_callbacks_in_order(loop):
    assert loop.run(on_which_thread()) == NAME
    assert loop.submit(on_which_thread()).result() == NAME
    said = []
    for number in range(100):
        loop.call_soon(said.append, number)
    loop.run(on_which_thread())
    assert said == list(range(100))


def test_run_raises_the_exception_of_its_coroutine(loop):
    async def fail():
        raise KeyError("by the test")

    with pytest.raises(KeyError, match="by the test"):
        loop.run(fail())


def begun(loop, coroutine_function):
    """Have a thread wait for a coroutine that has begun; what it gets is in the list."""
    has_begun, found = threading.Event(), []

    async def begin():
        has_begun.set()
        return await coroutine_function()

    def wait():
        try:
            found.append(loop.run(begin()))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    has_begun.wait(30)
    return thread, found


def test_caller_of_endless_coroutine_gets_closed_error_on_close(loop):
    thread, found = begun(loop, asyncio.Event().wait)
    loop.close()
    thread.join(30)
    (error,) = found
    assert type(error) is BatcherClosedError
    assert str(error) == "of tests has been closed and accepts no more calls"


def test_short_coroutine_submitted_before_close_still_returns_its_result():
    async def a_few_passes():
        for _ in range(20):
            await asyncio.sleep(0)
        return "ended"

    for _ in range(20):
        one, gate = BackgroundLoop("of tests"), threading.Event()
        one.call_soon(gate.wait)  # so that nothing has begun when it is told to end
        future = one.submit(a_few_passes())
        closing = threading.Thread(target=one.close)
        closing.start()
        while not one.is_closed:
            pass
        gate.set()
        assert future.result(30) == "ended"
        closing.join(30)


def test_closed_loop_runs_nothing_and_raises_closed_error(loop):
    loop.close()
    assert loop.is_closed
    for ask in (loop.run, loop.submit):
        with pytest.raises(BatcherClosedError, match="of tests has been closed"):
            ask(on_which_thread())
    loop.call_soon(pytest.fail)
    loop.close()


def test_unreferenced_loop_ends_its_thread():
    one = BackgroundLoop("of tests")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == NAME]
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_raises_forked_error_and_parent_keeps_working(loop):
    child = os.fork()
    if child == 0:
        try:
            loop.run(on_which_thread())
        except ForkedError:
            loop.close()
            os._exit(7)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert loop.run(on_which_thread()) == NAME
