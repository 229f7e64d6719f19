"""Requests of an engine that end early: stopped, failed, cancelled or left."""

import asyncio
import gc
import subprocess
import sys
import threading
import time

import pytest

from genlm_backend import AsyncTransformer
from genlm_backend.generation import Engine, GenerationConfig, GenerationStatus, generate
from tests.generation.serving import alone, same, serve
from tests.llm.conftest import word_tokenizer
from tests.llm.hooked import HookedMock

LEFT = """
import logging, os, signal, sys
logging.getLogger("asyncio").setLevel(logging.ERROR)  # a slow machine is no fault
sys.path.insert(0, ".")
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell put behind
from genlm_backend import Engine
from tests.generation.serving import GatedLM, serve

lm, engine = GatedLM(), Engine()
serve(engine, lm)
request = engine.start_request_ids("m", [1], max_new_tokens=50)
lm.let(3)
while request.queue.generated_length() < 3:
    request.queue.get()
{end}
"""


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("lm.let()", ""),
        ("lm.let(); os.kill(os.getpid(), signal.SIGINT)", "KeyboardInterrupt"),
        ("lm.let(); del engine, request, lm", ""),
    ],
    ids=["exit", "interrupt", "dropped"],
)
def test_unclosed_engine_exits_without_warnings(end, message):
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", LEFT.format(end=end)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "destroyed" not in done.stderr
    assert done.stderr.strip().endswith(message)
    assert message or not done.stderr


def test_unreferenced_engine_ends_its_thread():
    engine = Engine()
    (thread,) = (t for t in threading.enumerate() if t.name == "genlm-engine")
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_stopped_request_keeps_its_partial_text(engine, gated):
    serve(engine, gated)
    expected = None
    request = engine.start_request_ids("m", [1], max_new_tokens=50, stop="<never>")
    other = engine.start_request_ids("m", [2], max_new_tokens=6)
    gated.let(3)
    while request.queue.generated_length() < 3:
        assert request.queue.get() is not None
    engine.stop_request(request)
    assert request.status() is GenerationStatus.INTERRUPTED
    gated.let()
    (text,) = request.result()
    for end in (engine.stop_request, engine.release_request, engine.release_request):
        end(request)  # and again
    expected = alone(gated, [1], max_new_tokens=50)[0]
    assert text.token_ids == expected.token_ids[: len(text.token_ids)]
    assert expected.text.startswith(text.text)
    assert len(text.text) >= len("".join(token.text for token in text.tokens))
    assert text.finish_reason == "interrupted"
    assert same(other.result(), alone(gated, [2], max_new_tokens=6))
    assert request.queue.generated_length() == 0
    assert request.queue.get() is None


def test_stopping_a_request_releases_text_held_for_a_stop_string(engine, gated):
    serve(engine, gated)
    first = GenerationConfig(max_new_tokens=1)
    gated.let()
    (text,) = alone(gated, [1], config=first)
    while gated.passes.acquire(blocking=False):
        pass
    request = engine.start_request_ids("m", [1], max_new_tokens=9, stop=text.text + "never")
    gated.let(1)
    piece = request.queue.get()
    assert (piece.token_ids, piece.text) == (text.token_ids, "")
    engine.stop_request(request)
    piece = request.queue.get()
    assert (piece.token_ids, piece.text, piece.finish_reason) == ([], text.text, "interrupted")
    assert request.queue.get() is None
    assert request.result()[0].text == text.text


@pytest.mark.parametrize("length_penalty", [1.0, -1.0])
def test_an_interrupted_search_hands_out_its_best_texts_so_far(engine, gated, length_penalty):
    fields = {"num_beams": 3, "n": 2, "length_penalty": length_penalty}
    serve(engine, gated)
    waiting = engine.start_request_ids("m", [1], max_new_tokens=9, **fields)
    engine.stop_request(waiting)
    assert [text.token_ids for text in waiting.result(30)] == [[], []]
    gated.let(1)
    while gated._batcher.statistics().num_in_flight:
        time.sleep(0.001)
    gated.passes.acquire(blocking=False)

    request = engine.start_request_ids("m", [2], max_new_tokens=9, **fields)
    search = engine._models["m"]._running[0].sequence
    gated.let(3)
    while len(search.contexts[0]) < 4:
        time.sleep(0.001)
    engine.stop_request(request)
    gated.let()
    expected = alone(gated, [2], max_new_tokens=3, **fields)
    found = request.result(30)
    assert same(found, expected)
    assert [text.text for text in found] == [text.text for text in expected]
    assert [text.finish_reason for text in found] == ["interrupted"] * 2
    pieces = list(request.queue)
    assert sorted(piece.index for piece in pieces) == [0, 1]
    assert [len(piece.token_ids) for piece in pieces] == [3, 3]
    assert {piece.finish_reason for piece in pieces} == {"interrupted"}
    assert request.queue.generated_length() == 6


def test_stopped_model_frees_its_kv_cache_and_keeps_its_weights(engine, model):
    with AsyncTransformer(model, word_tokenizer()) as lm:
        serve(engine, lm)
        engine.start_request_ids("m", [1, 2], max_new_tokens=4).result()
        assert lm.statistics().kv_bytes_used > 0
        engine.stop_model("m")
        assert lm.statistics().kv_bytes_used == lm.statistics().row_bytes_used == 0
        assert lm.next_token_logprobs_sync([1]).shape == (96,)


def test_stopping_a_model_interrupts_its_requests(engine, gated):
    serve(engine, gated, max_batch=2)
    requests = [engine.start_request_ids("m", [i], max_new_tokens=50) for i in range(4)]
    gated.let(2)
    while requests[0].queue.generated_length() < 2:
        requests[0].queue.get()
    threading.Timer(0.05, gated.let).start()
    engine.stop_model("m")
    assert {request.status() for request in requests} == {GenerationStatus.INTERRUPTED}
    assert [request.result()[0].finish_reason for request in requests] == ["interrupted"] * 4
    assert requests[3].result()[0].token_ids == []
    engine.start_model("m")
    assert len(engine.start_request_ids("m", [1], max_new_tokens=3).result()[0].token_ids) == 3


def test_request_is_settled_even_if_cutting_its_draft_fails(engine, gated, monkeypatch):
    serve(engine, gated)
    request = engine.start_request_ids("m", [1], max_new_tokens=9)
    other = engine.start_request_ids("m", [2], max_new_tokens=3)
    sequence = engine._models["m"]._running[0].sequence
    monkeypatch.setattr(sequence, "cut", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.stop_request(request)
    assert request.result(30)[0].token_ids == []
    assert request.status() is GenerationStatus.INTERRUPTED
    gated.let()
    assert same(other.result(30), alone(gated, [2], max_new_tokens=3))
    assert engine.num_running("m") == engine.num_waiting("m") == 0


async def test_failing_request_raises_for_itself_only(engine, gated):
    serve(engine, gated)
    gated.let()
    (good,) = await generate(gated, [1], max_new_tokens=4)
    request = engine.start_request_ids("m", [13], max_new_tokens=4, n=2, do_sample=True)
    with pytest.raises(ZeroDivisionError, match="thirteen"):
        request.result(30)
    assert request.status() is GenerationStatus.FAILED
    for read in (request.queue.get, request.queue.get_nowait, lambda: list(request.queue)):
        with pytest.raises(ZeroDivisionError):
            read()
    with pytest.raises(ZeroDivisionError):
        await engine.generate("m", [13], max_new_tokens=4)
    assert same(await engine.generate("m", [1], max_new_tokens=4), [good])
    assert engine.num_running("m") == 0


def test_queue_yields_earlier_tokens_before_raising_a_failure(engine):
    class Failing(HookedMock):
        def evaluate(self, queries):
            if len(queries[0].token_ids) == 4:
                raise ZeroDivisionError("four")
            return super().evaluate(queries)

    with Failing(word_tokenizer()) as lm:
        serve(engine, lm)
        request = engine.start_request_ids("m", [1], max_new_tokens=9)
        tokens = []
        pieces = iter(request.queue)
        while len(tokens) < 3:
            tokens += next(pieces).token_ids
        with pytest.raises(ZeroDivisionError):
            next(pieces)
        assert same(request.queue.generations(), alone(lm, [1], max_new_tokens=3))


async def test_cancelled_callers_interrupt_their_requests_and_no_others(engine, gated):
    serve(engine, gated, max_batch=4)
    tasks = [asyncio.create_task(engine.generate("m", [i], max_new_tokens=6)) for i in range(6)]
    await asyncio.sleep(0)
    handle = engine.start_request_ids("m", [7], max_new_tokens=6)
    waiting = asyncio.ensure_future(asyncio.wait_for(handle, 0.01))
    tasks[1].cancel()
    tasks[5].cancel()
    with pytest.raises(TimeoutError):
        await waiting
    assert engine.num_running("m") == 4
    assert engine.num_waiting("m") == 1  # of seven, two have gone
    gated.let()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    for i, found in enumerate(done):
        if i in (1, 5):
            assert isinstance(found, asyncio.CancelledError)
        else:
            assert same(found, await generate(gated, [i], max_new_tokens=6))
    (text,) = await handle  # which goes on, though a wait for it was given up
    assert text.finish_reason == "length"
    assert engine.num_running("m") == engine.num_waiting("m") == 0


async def test_leaving_a_stream_interrupts_its_request(engine, lm):
    serve(engine, lm)
    stream = engine.stream("m", [1], max_new_tokens=100_000)
    async for _ in stream:
        break
    await stream.aclose()
    engine.stop_model("m")
    assert lm.statistics().num_batches < 5000


async def test_coroutine_collected_under_the_models_lock_does_not_deadlock(engine, gated):
    served = serve(engine, gated, max_batch=1) or engine._model("m")
    coroutine = engine.generate("m", [1], max_new_tokens=6)
    coroutine.send(None)  # it waits for its text
    with served._lock.here:  # as where an allocation under it begins a collection
        await asyncio.wait_for(asyncio.to_thread(coroutine.close), 60)
    other = asyncio.create_task(engine.generate("m", [2], max_new_tokens=3))
    gated.let()
    assert same(await other, await generate(gated, [2], max_new_tokens=3))
    assert engine.num_running("m") == engine.num_waiting("m") == 0


def test_repr_of_engine_shows_its_models_and_whether_it_is_closed():
    engine = Engine()
    assert repr(engine) == "<Engine: no model>"
    engine.install_model("m", HookedMock(word_tokenizer(20)))
    assert repr(engine) == "<Engine: m installed>"
    engine.close()
    assert repr(engine) == "<Engine that is closed: m released>"
