"""Forks, exits and interruptions: whoever asks then is told, and every process ends."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from genlm_backend.runtime.forks import ProcessLock

HOLDERS = ("hf", "mock", "vllm", "trie", "engine", "glm")
MODELS = ("hf", "mock", "vllm")
MODEL_WAYS = ("sync", "cached", "await", "batch", "await batch", "sample")
CLOSED = {f"{name} {way}": "BatcherClosedError" for name in MODELS for way in MODEL_WAYS}
CLOSED |= {f"trie {way}": "BatcherClosedError" for way in ("sum", "max")}
CLOSED |= {f"engine {way}": "ModelStateError" for way in ("start", "generate")}
CLOSED["glm submit"] = "ModelStateError"

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that can fork"),
    pytest.mark.timeout(300),
]


def run(*name, code=0):
    """Run one of the programs of `tests.histories` and return the lines that it printed."""
    done = subprocess.run(
        # To fork beside other threads is what later Pythons warn of, and what is tested here.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.histories", *name],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-5000:]
    if code == 0:
        assert "Traceback" not in done.stderr, done.stderr[-5000:]
    return done.stdout.splitlines()


def test_queries_in_a_fork_raise_forked_error_and_its_parent_goes_on():
    assert run("fork") == [f"{name} ended 0" for name in HOLDERS]


def test_unused_and_newly_made_objects_work_in_a_fork():
    assert run("fork_fresh") == ["ended 0"]


def test_queries_at_exit_raise_closed_errors_and_the_process_ends():
    lines = run("exit")
    assert lines[0] == "outliving answered"
    for line, error in CLOSED.items():
        assert f"late {line} {error}" in lines
        assert f"del {line} {error}" in lines
    assert "late waiting BatcherClosedError BatcherClosedError" in lines
    # An engine's request fails, or is interrupted with what it has, whichever thread ends first.
    assert {f"late request {end}" for end in ("returned list", "QueryDroppedError")} & {*lines}
    # Whether a thread may still begin is Python's to say; 3.12 and later say no.
    for name in ("mock", "trie"):
        ends = {f"late fresh {name} {end}" for end in ("returned list", "BatcherClosedError")}
        assert ends & {*lines}
    assert "late ended" in lines
    assert lines[-1] == "del ended"


@pytest.mark.parametrize("where", ["here", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_waiting_daemon_threads_get_errors_if_the_interpreter_exits(where):
    lines = run("wait", where, "daemon")
    children = [int(line.split()[1]) for line in lines if line.startswith("child ")]
    assert len(children) == (3 if where == "elsewhere" else 0)
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    told = dict(line.split(": ", 1) for line in lines if not line.startswith("child "))
    assert len(told) == (8 if where == "elsewhere" else 17)
    if where == "here":  # a batch of a trie ends as it has begun
        assert told.pop("trie running") == "returned ndarray"
    for error in told.values():
        assert error.split(": ")[0] in ("QueryDroppedError", "BatcherClosedError")
        assert error.endswith(": the interpreter is exiting")


@pytest.mark.parametrize("where", ["here", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_waiting_non_daemon_threads_are_answered_before_the_exit(where):
    lines = run("wait", where, "other")
    told = [line.split(": ", 1)[1] for line in lines if not line.startswith("child ")]
    assert len(told) == (8 if where == "elsewhere" else 17)
    assert {answer.split()[0] for answer in told} == {"returned"}


def test_interrupted_program_ends_after_the_current_forward_pass():
    lines = run("interrupt", code=-signal.SIGINT)
    ways = ("sync", "batch", "await", "pin", "warm-up", "exit")
    assert lines == [f"{way} passes 1" for way in ways]


def test_interrupted_program_does_not_wait_for_engine_requests():
    assert run("interrupt_a_request", code=-signal.SIGINT) == ["exit passes 1"]


def test_process_lock_has_no_enter_method_of_its_own():
    """An interrupt within an `__enter__` of one's own would leave it locked for ever."""
    for is_reentrant in (False, True):
        lock = ProcessLock(is_reentrant)
        assert type(lock.here) in (type(threading.Lock()), type(threading.RLock()))
        assert not hasattr(lock, "__enter__")
