"""Tasks from threads: each gets its own result, once, and nobody waits for ever."""

import asyncio
import queue
import threading
import time
from concurrent.futures import CancelledError

import pytest

from genlm_backend import AsyncTransformer
from genlm_backend.errors import ContextError, GenerationConfigError, ModelStateError
from genlm_backend.generation import AsyncGLM, generate
from tests.generation.serving import GREEDY, GatedLM
from tests.llm.conftest import word_tokenizer


def test_task_too_long_for_memory_raises_context_error(model):
    with AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=10_000) as lm:
        assert lm.kv_capacity is not None
        length = lm.kv_capacity
        with AsyncGLM(lm) as glm:
            with pytest.raises(
                ContextError, match=f"cache has room for {length}: lower max_new_tok"
            ):
                glm.submit([1] * 5, {"max_new_tokens": length})
            short = glm.submit([2] * 5, {"max_new_tokens": 3})
            assert glm.get_result(short, 60).shape == (1, 8)


def test_contexts_are_accepted_as_inputs_of_their_own_model_only(lm, model):
    with (
        AsyncTransformer(model, word_tokenizer()) as other,
        AsyncGLM(lm, generation_kwargs={"max_new_tokens": 2}) as glm,
    ):
        own = lm.context([1, 2, 3])
        for inputs in (own, [own], [own, [1, 2, 3]], {"input_ids": own}, {"input_ids": [own]}):
            result = glm.get_result(glm.submit(inputs), 60)
            assert result[0].tolist() == glm.get_result(glm.submit([1, 2, 3]), 60)[0].tolist()
        for inputs in (other.context([1, 2]), [other.context([1, 2])]):
            with pytest.raises(ContextError, match="made by another model"):
                glm.submit(inputs)


def test_submit_to_a_full_queue_blocks_or_times_out():
    lm = GatedLM()
    kwargs = {"max_new_tokens": 2}
    with AsyncGLM(lm, max_queue_size=2, generation_kwargs=kwargs, max_running=1) as glm:
        ids = [glm.submit([i]) for i in range(3)]
        assert glm.queue_size() == 2
        begin = time.monotonic()
        with pytest.raises(queue.Full):
            glm.submit([9], timeout=0.05)
        assert time.monotonic() - begin >= 0.05
        with pytest.raises(TimeoutError, match=r"task 0 is not complete after 0\.01 s"):
            glm.get_result(ids[0], timeout=0.01)
        assert not glm.is_ready(ids[0])
        threading.Timer(0.05, lm.let).start()
        ids.append(glm.submit([9]))  # waits for a place
        assert [glm.get_result(i, 60)[0, 0].item() for i in ids] == [0, 1, 2, 9]
        with pytest.raises(KeyError):
            glm.get_result(ids[0])
        with pytest.raises(KeyError):
            glm.is_ready(12345)
    lm.close()


def test_failing_task_raises_its_exception_and_others_complete():
    lm = GatedLM()
    lm.let()
    with AsyncGLM(lm, generation_kwargs={"max_new_tokens": 2}) as glm:
        bad = glm.submit([13])
        with pytest.raises(ZeroDivisionError, match="thirteen"):
            glm.get_result(bad, 60)
        good = glm.submit([1])
        assert glm.get_result(good, 60).shape == (1, 3)
        with pytest.raises(KeyError):
            glm.get_result(bad)
    lm.close()


def test_tasks_submitted_before_start_complete_by_shutdown(lm):
    glm = AsyncGLM(lm, generation_kwargs={"max_new_tokens": 3})
    task_id = glm.submit([1, 2])
    assert glm.queue_size() == 1
    glm.start()
    glm.start()
    glm.shutdown(wait=True)
    assert glm.get_result(task_id).shape == (1, 5)
    glm.shutdown()
    for use in (lambda: glm.submit([1]), glm.start):
        with pytest.raises(RuntimeError, match="shut down"):
            use()


def test_waiting_before_start_raises_at_once_and_keeps_the_task(lm):
    glm = AsyncGLM(lm, max_queue_size=1, generation_kwargs=GREEDY)
    task = glm.submit([[5, 6]])
    for wait in (
        lambda: glm.get_result(task),
        lambda: glm.get_result(task, timeout=1000),
        lambda: glm.submit([[5, 6]]),  # the queue is full, and nobody works at it
        lambda: glm.submit([[5, 6]], timeout=1000),
    ):
        with pytest.raises(ModelStateError, match=r"call start\(\), or use it in a with") as raised:
            wait()
        assert isinstance(raised.value, RuntimeError)
    with pytest.raises(queue.Full):
        glm.submit([[5, 6]], timeout=0)
    assert not glm.is_ready(task)
    with glm:
        expected = asyncio.run(generate(lm, [5, 6], max_new_tokens=8, eos_token_id=[7, 30]))
        assert glm.get_result(task)[0].tolist()[2:] == expected[0].token_ids


def test_get_result_after_shutdown_without_start_raises_cancelled_error(lm):
    glm = AsyncGLM(lm, generation_kwargs=GREEDY)
    task = glm.submit([[5, 6]])
    glm.shutdown()
    with pytest.raises(CancelledError):
        glm.get_result(task)


def test_task_of_several_rows_counts_once_in_the_queue():
    lm = GatedLM()
    kwargs = {"max_new_tokens": 2}
    with AsyncGLM(lm, max_queue_size=2, generation_kwargs=kwargs, max_running=2) as glm:
        ids = [glm.submit([[i], [i + 1], [i + 2]]) for i in (20, 30, 40)]
        assert glm.queue_size() == 2
        with pytest.raises(queue.Full, match="the queue is full: 2 tasks are waiting"):
            glm.submit([[1], [2], [3]], timeout=0)
        assert glm.queue_size() == 2
        lm.let()
        for first, task_id in zip((20, 30, 40), ids, strict=True):
            assert glm.get_result(task_id, 60)[:, 0].tolist() == [first, first + 1, first + 2]
    lm.close()


def test_failing_row_fails_its_own_task_only():
    class Failing(GatedLM):
        def evaluate(self, queries):
            if any(query.token_ids[0] == 7 for query in queries):
                raise ZeroDivisionError("seven")
            return super().evaluate(queries)

    lm = Failing()
    with AsyncGLM(lm, generation_kwargs={"max_new_tokens": 2}, max_running=1) as glm:
        first = glm.submit([1])
        bad = glm.submit([[7], [8]])
        assert (glm.queue_size(), glm.is_ready(bad)) == (1, False)
        lm.let()
        with pytest.raises(ZeroDivisionError, match="seven"):
            glm.get_result(bad, 60)
        assert glm.get_result(first, 60).shape == (1, 3)
        assert glm.queue_size() == 0
    lm.close()


def test_shutdown_fails_blocked_submit_and_completes_queued_tasks():
    lm = GatedLM()
    glm = AsyncGLM(lm, max_queue_size=1, generation_kwargs={"max_new_tokens": 2}, max_running=1)
    ids, told = [], threading.Event()

    def submit():
        with pytest.raises(ModelStateError, match="has been shut down"):
            glm.submit([5])
        told.set()
        lm.let()

    glm.start()
    ids = [glm.submit([i]) for i in (1, 2)]
    blocked = threading.Thread(target=submit)
    blocked.start()
    while not glm._engine._served("model")._room._waiters:
        time.sleep(0.001)
    glm.shutdown()  # which waits for those that wait for the gate
    assert told.is_set()
    blocked.join(30)
    assert [glm.get_result(task_id)[0, 0].item() for task_id in ids] == [1, 2]
    lm.close()


def test_shutdown_without_waiting_cancels_incomplete_tasks():
    lm = GatedLM()
    glm = AsyncGLM(lm, generation_kwargs={"max_new_tokens": 2}, max_running=1)
    glm.start()
    ids = [glm.submit([i]) for i in range(3)]

    def wait():
        with pytest.raises(CancelledError):
            glm.get_result(ids[2])

    waiting = threading.Thread(target=wait)
    waiting.start()
    threading.Timer(0.1, lm.let).start()
    glm.shutdown(wait=False)
    waiting.join(30)
    assert not waiting.is_alive()
    for task_id in ids[:2]:
        with pytest.raises(CancelledError):
            glm.get_result(task_id, 30)
    assert not [t for t in threading.enumerate() if t.name == "genlm-engine"]
    lm.close()


@pytest.mark.parametrize(
    ("inputs", "kwargs", "kind", "message"),
    [
        ([], {}, ContextError, "empty"),
        ([[]], {}, ContextError, "empty"),
        ([1.5], {}, ContextError, "must be integers"),
        ([[[1]]], {}, ContextError, "shape"),
        ([96], {}, ContextError, "96"),
        ({"ids": [1]}, {}, ContextError, "input_ids"),
        ({"input_ids": [[1]], "pixel_values": [0.5]}, {}, ContextError, "read 'pixel_values'"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, {}, ContextError, "attention_mask"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, {}, ContextError, "empty"),
        ([1], {"penalty_alpha": 0.6}, GenerationConfigError, "penalty_alpha is not a supported"),
        ([1], {"num_beams": 2, "do_sample": True}, GenerationConfigError, "num_beams"),
        ([1], {"num_beams": 21}, GenerationConfigError, "num_beams=21 exceeds max_running=20"),
        ([1], {"num_return_sequences": 2}, GenerationConfigError, "n must be 1"),
        ([1], {"temperature": -1, "do_sample": True}, GenerationConfigError, "temperature"),
        ([1, 2], {"max_length": 2}, ContextError, "no room"),
    ],
)
def test_invalid_submission_raises_before_anything_is_queued(lm, inputs, kwargs, kind, message):
    with AsyncGLM(lm, generation_kwargs={"max_new_tokens": 3}) as glm:
        with pytest.raises(kind, match=message):
            glm.submit(inputs, kwargs)
        assert glm.queue_size() == 0
        assert glm.get_result(glm.submit([1]), 30).shape == (1, 4)
    with pytest.raises(GenerationConfigError, match="penalty_alpha"):
        AsyncGLM(lm, generation_kwargs={"penalty_alpha": 0.6})
    for name in ("max_queue_size", "max_running"):
        with pytest.raises(GenerationConfigError, match=name):
            AsyncGLM(lm, **{name: 0})
