"""One thread that runs what it is given, in order, and ends when it is told."""

import threading

import pytest

from genlm_backend.batching import worker as module
from genlm_backend.batching.worker import Worker
from genlm_backend.errors import BatcherClosedError


def test_calls_run_in_order_and_those_in_the_queue_before_it_stops():
    worker, seen = Worker("order"), []
    for number in range(50):
        worker.put(lambda number=number: seen.append((number, worker.is_current_thread())))
    worker.stop()
    assert seen == [(number, True) for number in range(50)]
    assert not worker.is_current_thread()
    with pytest.raises(BatcherClosedError):
        worker.put(print)
    worker.stop()


def test_it_may_be_stopped_from_its_own_thread():
    worker, told = Worker("own"), threading.Event()
    errors = []

    def stop():
        try:
            worker.stop()
        except Exception as error:
            errors.append(error)
        told.set()

    worker.put(stop)
    assert told.wait(10)
    assert not errors
    assert worker.is_stopped


def test_one_whose_stop_was_interrupted_is_waited_for_by_the_next(monkeypatch):
    worker, proceeds, seen = Worker("slow"), threading.Event(), []
    worker.put(lambda: seen.append(proceeds.wait(10)))

    def interrupted(*threads):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.stop()
    assert worker.is_stopped
    assert not seen
    threading.Timer(0.05, proceeds.set).start()
    worker.stop()
    assert seen == [True]


def test_one_that_has_not_begun_ends_with_nothing_done(monkeypatch):
    begun, proceeds = threading.Event(), threading.Event()
    work = module._work

    def late(calls):
        begun.set()
        proceeds.wait(10)
        work(calls)

    monkeypatch.setattr(module, "_work", late)
    worker, seen = Worker("late"), []
    worker.put(lambda: seen.append(1))
    assert begun.wait(10)
    threading.Timer(0.05, proceeds.set).start()
    worker.stop()  # which waits for it, though it has not claimed its queue
    assert seen == [1]
    never = Worker("never begun")
    never.stop()
    with pytest.raises(BatcherClosedError):
        never.put(print)
    assert never._thread is None
