"""An evaluator in a process of its own: its answers, its errors and its end."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from genlm_backend.errors import (
    EngineDiedError,
    EvaluationError,
    OptionTypeError,
    TokenizerDecodeError,
)
from genlm_backend.llm import BatchedLM, ProcessEvaluator
from genlm_backend.queries.row import table_of
from genlm_backend.remote.messages import PackedError
from tests.llm.conftest import word_tokenizer
from tests.llm.elsewhere import over_there
from tests.llm.elsewhere.over_there import Told, expected_row


def is_running(process_id):
    """Whether there is a process of that number that has not ended, not even as a zombie."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def is_there(process_id):
    """Whether the process table has it, be it as a zombie."""
    return Path(f"/proc/{process_id}").exists()


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def make(evaluator=Told, **options):
    return BatchedLM(word_tokenizer(), ProcessEvaluator(evaluator), **options)


@contextlib.contextmanager
def asking(lm, context):
    """Ask on a thread, which gets an error before long: it is in the list that is yielded."""
    errors = []

    def ask():
        try:
            lm.next_token_logprobs_sync(context)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.5)
    yield errors
    thread.join(20)
    assert len(errors) == 1


def nobody_elses(names):
    """Those names in /dev/shm that no other living process has mapped; vLLM and Ray have theirs."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name != str(os.getpid()):
            with contextlib.suppress(OSError):  # It has ended, or is another user's.
                mapped += maps.read_text()
    return {name for name in names if f"/dev/shm/{name}" not in mapped}


@pytest.fixture(autouse=True)
def nothing_is_left():
    shared = set(os.listdir("/dev/shm"))
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    until(lambda: not nobody_elses(set(os.listdir("/dev/shm")) - shared))
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


@pytest.fixture
def lm():
    with make() as lm:
        yield lm
    assert lm._evaluator.process_id is None


def close_to(row, token_ids):
    torch.testing.assert_close(row, expected_row(token_ids), rtol=0, atol=1e-6)


# ---------------------------------------------------------------- answers and errors


async def test_rows_and_scores_come_back_whole_and_in_order(lm):
    contexts = [[i, j] for i in range(1, 9) for j in range(10)]
    rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
    for row, context in zip(rows, contexts, strict=True):
        close_to(row, context)
    rows[0].fill_(0)
    close_to(await lm.next_token_logprobs(contexts[0]), contexts[0])
    assert (await lm.score([1], [2, 3, 4])).tolist() == [0, -1, -2]


class ArrayOps(TorchDispatchMode):
    """Counts torch's operators on this thread, each of which gives the interpreter lock up."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_number_of_torch_operators_does_not_grow_with_rows():
    counts = []
    with contextlib.closing(ProcessEvaluator(Told)) as evaluator:
        evaluator.open()
        for count in (3, 60):
            contexts = [[1, i] for i in range(count)]
            with ArrayOps() as seen:
                rows = evaluator.evaluate([toy_query(context) for context in contexts])
                table = table_of(rows, torch.device("cpu"))
            for row, context in zip(table, contexts, strict=True):
                close_to(row, context)
            counts.append(seen.count)
    assert counts[0] == counts[1]


async def test_returned_row_does_not_keep_other_rows_in_memory(lm):
    rows = await asyncio.gather(*(lm.next_token_logprobs([1, i % 4]) for i in range(8)))
    assert {row.untyped_storage().nbytes() for row in rows} == {rows[0].nbytes}
    for i, row in enumerate(rows):
        close_to(row, [1, i % 4])
        row.fill_(0)


def test_rows_larger_than_shared_memory_arrive_in_parts():
    from genlm_backend.remote.channel import MAX_SHARED_BYTES

    assert over_there.Wide.WIDTH * 4 * 4 > MAX_SHARED_BYTES
    evaluator = ProcessEvaluator(over_there.Wide)
    try:
        evaluator.info = evaluator.open()
        for last in ([5], range(1, 8), [3, 2]):
            queries = [toy_query([1, i]) for i in last]
            rows = evaluator.evaluate(queries)
            assert [float(row.logprobs[-1]) for row in rows] == [-float(i) for i in last]
    finally:
        evaluator.close()


def toy_query(token_ids):
    from genlm_backend.llm import RowQuery

    return RowQuery(token_ids)


def test_errors_of_the_process_are_raised_in_the_caller(lm):
    with pytest.raises(TokenizerDecodeError, match=r"token 5 \('five'\): by the test") as caught:
        lm.next_token_logprobs_sync([94])
    assert "over_there.py" in caught.value.__notes__[0]
    with pytest.raises(torch.OutOfMemoryError):
        lm.next_token_logprobs_sync([85])
    with pytest.raises(EvaluationError, match="Unpicklable: 1 and 2"):
        lm.next_token_logprobs_sync([95])
    with pytest.raises(EvaluationError, match=r"must return a Row of float32 \[96\]"):
        lm.next_token_logprobs_sync([88])
    close_to(lm.next_token_logprobs_sync([1]), [1])


async def test_error_of_one_query_leaves_others_of_the_batch_intact(lm):
    asked = [[1], [89], [2], [88], [95], [3]]
    found = await asyncio.gather(*map(lm.next_token_logprobs, asked), return_exceptions=True)
    for answer, context in zip(found, asked, strict=True):
        if context[0] < 10:
            close_to(answer, context)
    assert [type(found[i]) for i in (1, 3, 4)] == [KeyError, EvaluationError, EvaluationError]


def test_output_of_the_process_is_captured(lm, capfd):
    lm.next_token_logprobs_sync([86])
    until(lambda: "said over there" in "".join(lm._evaluator._child._output))


def test_factory_that_makes_no_evaluator_raises_error():
    with pytest.raises(EvaluationError, match="must return an Evaluator, got <class 'int'>"):
        make(over_there.make_number)
    with pytest.raises(OSError, match="by the test") as caught:
        make(over_there.make_nothing)
    assert caught.value.errno == 28
    with pytest.raises(OptionTypeError, match="make cannot be sent to another process"):
        ProcessEvaluator(lambda: None)
    with pytest.raises(OptionTypeError, match="make"):
        ProcessEvaluator(5)


# ---------------------------------------------------------------- callers that go


async def test_cancelled_batch_ends_in_the_process_too(lm):
    await lm.next_token_logprobs([1])
    task = asyncio.ensure_future(lm.next_token_logprobs([90]))
    await asyncio.sleep(0.3)
    task.cancel()
    start = time.monotonic()
    close_to(await lm.next_token_logprobs([2]), [2])
    assert time.monotonic() - start < 5


def test_close_does_not_wait_for_a_long_batch():
    lm = make()
    process_id = lm._evaluator.process_id
    with asking(lm, [90]):
        start = time.monotonic()
        lm.close()
        assert time.monotonic() - start < 3
    assert not is_there(process_id)
    lm.close()


# ---------------------------------------------------------------- a process that ends


@pytest.mark.parametrize(
    ("last", "how"),
    [(91, "was killed by SIGKILL"), (92, "exit code 3"), (93, "(?s)SIGABRT.*the last words")],
)
async def test_death_of_the_process_fails_every_waiter_until_restart(lm, last, how):
    close_to(await lm.next_token_logprobs([5]), [5])
    process_id = lm._evaluator.process_id
    asked = [[1], [last], [2]]
    found = await asyncio.wait_for(
        asyncio.gather(*map(lm.next_token_logprobs, asked), return_exceptions=True), 30
    )
    assert {type(error) for error in found} == {EngineDiedError}
    with pytest.raises(EngineDiedError, match=how) as caught:
        await lm.next_token_logprobs([1])
    assert "Loading weights" not in str(caught.value)
    assert repr(lm).endswith("has died>")
    close_to(await lm.next_token_logprobs([5]), [5])  # a row that is kept
    lm.clear_cache()
    with pytest.raises(EngineDiedError, match=how):
        lm.next_token_logprobs_sync([5])
    assert not is_there(process_id)
    lm._call(lm._evaluator.restart)
    close_to(await lm.next_token_logprobs([5]), [5])
    assert "died" not in repr(lm)


def test_process_killed_while_idle_raises_engine_died_error(lm):
    os.kill(lm._evaluator.process_id, signal.SIGKILL)
    for _ in range(3):
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            lm.next_token_logprobs_sync([1])
    lm.close()


def test_process_stopped_and_killed_raises_engine_died_error():
    with make() as lm:
        os.kill(lm._evaluator.process_id, signal.SIGSTOP)
        with asking(lm, [1]) as errors:
            os.kill(lm._evaluator.process_id, signal.SIGKILL)
        assert isinstance(errors[0], EngineDiedError)


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_close_does_not_wait_for_a_stopped_process(size):
    lm = make()
    lm.next_token_logprobs_sync([1])
    os.kill(lm._evaluator.process_id, signal.SIGSTOP)
    with asking(lm, [5] * size):
        start = time.monotonic()
        lm.close()
        assert time.monotonic() - start < 3


def test_process_killed_by_unnamed_signal_raises_engine_died_error(lm):
    os.kill(lm._evaluator.process_id, 40)
    with pytest.raises(EngineDiedError, match="killed by signal 40"):
        lm.next_token_logprobs_sync([1])


def test_argument_the_process_cannot_unpickle_raises_attribute_error():
    class Name(str):
        """Which the other process cannot import."""

    with make() as lm:
        evaluator = lm._evaluator
        with pytest.raises(AttributeError, match="Name"):
            evaluator.ask("forget", toy_query([1]), Name("x"))
        close_to(lm.next_token_logprobs_sync([1]), [1])


def test_error_that_cannot_be_unpickled_keeps_its_message():
    packed = PackedError(b"no pickle", "Hidden: the reason", "there")
    error = packed.error()
    assert isinstance(error, EvaluationError)
    assert str(error) == "Hidden: the reason"


def test_failed_start_leaves_no_open_file_descriptors(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(FileNotFoundError):
            make()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_unreferenced_model_ends_its_process():
    lm = make()
    process_id = lm._evaluator.process_id
    close_to(lm.next_token_logprobs_sync([1]), [1])
    del lm
    until(lambda: gc.collect() >= 0 and not is_there(process_id))


# ---------------------------------------------------------------- the process here


def script(body, **popen):
    code = """
    import os, sys, time, signal, threading
    from genlm_backend.llm import BatchedLM, ProcessEvaluator
    from tests.llm.elsewhere.over_there import Told, word_tokenizer
    lm = BatchedLM(word_tokenizer(), ProcessEvaluator(Told))
    print(lm._evaluator.process_id, flush=True)
    """
    code = textwrap.dedent(code) + textwrap.dedent(body)
    root = str(Path(__file__).parents[3])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


BUSY = "threading.Thread(target=lm.next_token_logprobs_sync, args=([90],), daemon=True).start()\n"


@pytest.mark.parametrize("busy", ["", BUSY], ids=["idle", "busy"])
@pytest.mark.parametrize("fork", ["", "os.fork() or time.sleep(60)\n"], ids=["alone", "forked"])
def test_child_ends_when_its_parent_is_killed(busy, fork):
    code = busy + fork + "print('ready', flush=True)\ntime.sleep(60)\n"
    with script(code, start_new_session=True) as here:
        child = int(here.stdout.readline())
        here.stdout.readline()
        assert is_running(child)
        here.kill()
        here.wait()
        until(lambda: not is_running(child))
        os.killpg(here.pid, signal.SIGKILL) if fork else None


@pytest.mark.parametrize(
    "end", ["", "lm.close()\n", "raise SystemExit(5)\n", "os._exit(0)\n", "del lm\n"]
)
def test_child_ends_when_its_parent_exits(end):
    with script("lm.next_token_logprobs_sync([1])\n" + end) as here:
        child = int(here.stdout.readline())
        _, errors = here.communicate(timeout=60)
        assert not errors
        until(lambda: not is_running(child))


def test_interrupt_ends_the_call_and_not_the_child_process():
    code = """
    try:
        lm.next_token_logprobs_sync([90])
    except KeyboardInterrupt:
        print(len(lm.next_token_logprobs_sync([1])), flush=True)
    """
    with script(code, start_new_session=True) as here:
        here.stdout.readline()
        time.sleep(1)
        os.killpg(here.pid, signal.SIGINT)  # as a terminal does it, and a notebook's server
        out, errors = here.communicate(timeout=60)
        assert (out.strip(), errors) == ("96", "")
