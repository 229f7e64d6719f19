"""Requests of an engine: each the text it would be alone, from wherever it is asked."""

import asyncio
import itertools
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from genlm_backend import AsyncTransformer, MockAsyncLM
from genlm_backend.errors import (
    ContextError,
    ModelStateError,
    RequestQueueFullError,
    UnknownModelError,
    UnknownRequestError,
)
from genlm_backend.generation import (
    Engine,
    GenerationConfig,
    GenerationStatus,
    ModelState,
    RuntimeConfig,
    generate,
)
from tests.llm import families
from tests.llm.conftest import word_tokenizer

COLD = {"warm_up": False}


class GatedLM(MockAsyncLM):
    """A mock that evaluates one batch for each pass it is given, and fails on token 13."""

    def __init__(self, **options):
        super().__init__(word_tokenizer(), row_cache_bytes=0, **options)
        self.passes = threading.Semaphore(0)

    def let(self, count=100_000):
        self.passes.release(count)

    def evaluate(self, queries):
        assert self.passes.acquire(timeout=60)
        if any(query.token_ids[0] == 13 for query in queries):
            raise ZeroDivisionError("thirteen")
        return super().evaluate(queries)


@pytest.fixture
def lm():
    with MockAsyncLM(word_tokenizer(), row_cache_bytes=0) as lm:
        yield lm


@pytest.fixture
def gated():
    with GatedLM() as lm:
        yield lm
        lm.let()


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine
    assert not [t for t in threading.enumerate() if t.name == "genlm-engine"]


def serve(engine, lm, **fields):
    engine.install_model("m", lm, **{**COLD, **fields})
    engine.start_model("m")


def alone(lm, prompt, **fields):
    return asyncio.run(generate(lm, prompt, **fields))


def same(found, expected):
    return [g.token_ids for g in found] == [g.token_ids for g in expected]


# -------------------------------------------------------------------- models


@pytest.mark.parametrize("steps", list(itertools.product(["start", "stop", "release"], repeat=4)))
def test_a_model_goes_from_state_to_state_and_no_other_way(engine, lm, steps):
    allowed = {
        ("installed", "start"): "running",
        ("stopped", "start"): "running",
        ("running", "stop"): "stopped",
        ("installed", "release"): "released",
        ("stopped", "release"): "released",
    }
    engine.install_model("m", lm, **COLD)
    state = "installed"
    for step in steps:
        change = getattr(engine, f"{step}_model")
        if (state, step) in allowed:
            change("m")
            state = allowed[state, step]
        else:
            with pytest.raises(ModelStateError, match=f"'m' is {state}; to {step} it must be"):
                change("m")
        assert engine.model_state("m") is ModelState(state) is engine.models["m"]
        if state == "running":
            assert len(engine.start_request_ids("m", [1], max_new_tokens=2).result()) == 1
        else:
            with pytest.raises(ModelStateError, match=f"is {state}; to take requests it must be"):
                engine.start_request_ids("m", [1], max_new_tokens=2)


def test_names_are_taken_until_they_are_released(engine, lm):
    serve(engine, lm)
    with pytest.raises(ModelStateError, match="to install another of that name"):
        engine.install_model("m", lm)
    engine.stop_model("m")
    engine.release_model("m")
    serve(engine, lm)
    assert engine.models == {"m": ModelState.RUNNING}
    engine.install_model("smollm2", lm)
    with pytest.raises(UnknownModelError, match=r"no model 'smollm' .*; did you mean 'smollm2'\?"):
        engine.start_model("smollm")


def test_a_given_model_is_its_owners_and_a_loaded_one_is_the_engines(engine, lm):
    serve(engine, lm)
    engine.stop_model("m")
    engine.release_model("m")
    assert lm.next_token_logprobs_sync([1]).shape == (96,)
    before = threading.active_count()
    engine.install_model("own", "smollm2", backend="mock", max_batch=7, max_length=40)
    assert threading.active_count() == before  # nothing has been loaded
    engine.start_model("own")
    served = engine._models["own"].served
    assert (served.max_batch, served.lm.batch_size) == (7, 7)
    own = served.lm
    engine.stop_model("own")
    engine.release_model("own")
    with pytest.raises(RuntimeError, match="closed"):
        own.next_token_logprobs_sync([1])


def test_starting_warms_up_with_the_longest_and_the_widest(engine):
    asked = []

    class Seen(MockAsyncLM):
        def evaluate(self, queries):
            asked.append([len(query.token_ids) for query in queries])
            return super().evaluate(queries)

    with Seen(word_tokenizer(), max_length=50) as lm:
        engine.install_model("a", lm, max_batch=6)
        engine.start_model("a")
        assert asked == [[50], [8] * 6]
        asked.clear()
        engine.stop_model("a")
        engine.start_model("a")
        assert asked == []  # it has been tried
        engine.install_model("b", lm, max_length=20, max_batch=2)
        engine.start_model("b")
        assert asked == [[19], [8] * 2]


def test_what_does_not_fit_fails_when_the_model_is_started(engine):
    class Small(MockAsyncLM):
        def evaluate(self, queries):
            if len(queries[0].token_ids) > 30:
                raise MemoryError("too long")
            return super().evaluate(queries)

    with Small(word_tokenizer(), max_length=50) as lm:
        engine.install_model("m", lm)
        with pytest.raises(MemoryError):
            engine.start_model("m")
        assert engine.model_state("m") is ModelState.INSTALLED
        engine.release_model("m")
        engine.install_model("m", lm, max_length=25)
        engine.start_model("m")


def test_a_model_that_fails_to_start_is_closed_if_it_is_the_engines(engine, monkeypatch):
    def fail(lm, max_batch, max_length):
        loaded.append(lm)
        raise MemoryError("warming up")

    loaded = []
    monkeypatch.setattr("genlm_backend.generation.installed_model._warm_up", fail)
    engine.install_model("own", "smollm2", backend="mock")
    with pytest.raises(MemoryError, match="warming up"):
        engine.start_model("own")
    with pytest.raises(RuntimeError, match="closed"):
        loaded[0].next_token_logprobs_sync([1])
    monkeypatch.undo()
    engine.start_model("own")


def test_an_engine_that_is_closed_says_so_and_ends_what_runs(gated):
    with Engine() as engine:
        serve(engine, gated)
        request = engine.start_request_ids("m", [1], max_new_tokens=5)
        gated.let(1)
        assert request.queue.get().token_ids
        gated.let()
    assert request.status() is GenerationStatus.INTERRUPTED
    assert 1 <= request.queue.generated_length() < 5
    engine.close()
    for use in (lambda: engine.start_model("m"), lambda: engine.start_request_ids("m", [1])):
        with pytest.raises(ModelStateError, match="this engine has been closed"):
            use()


# -------------------------------------------------------------------- requests


@pytest.fixture(scope="module")
def model():
    return families.make("llama")


def test_requests_are_what_each_is_alone(engine, model):
    settings = [
        {},
        {"do_sample": True, "seed": 5, "n": 3},
        {"repetition_penalty": 1.4},
        {"num_beams": 3, "n": 2, "length_penalty": -1.0},
        {"do_sample": True, "top_k": 4, "seed": 9},
    ]
    with AsyncTransformer(model, word_tokenizer()) as lm:
        jobs = [([i, 5, i], {"max_new_tokens": 9, **settings[i % 5]}) for i in range(25)]
        expected = [alone(lm, prompt, **fields) for prompt, fields in jobs]
        lm.clear_cache()
        serve(engine, lm, max_batch=7)
        requests = [engine.start_request_ids("m", prompt, **fields) for prompt, fields in jobs]
        for request, texts in zip(requests, expected, strict=True):
            found = request.result(60)
            assert same(found, texts)
            assert [g.finish_reason for g in found] == [g.finish_reason for g in texts]
            assert [g.score for g in found] == pytest.approx([g.score for g in texts], abs=1e-4)
            assert request.status() is GenerationStatus.FINISHED


@pytest.mark.parametrize(
    "ids",
    [[3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4]), torch.tensor([[3, 4]]), range(3, 5)],
    ids=repr,
)
def test_ids_of_every_kind(engine, lm, ids):
    serve(engine, lm)
    found = engine.start_request_ids("m", ids, GenerationConfig(max_new_tokens=3)).result()
    assert same(found, alone(lm, [3, 4], max_new_tokens=3))


def test_a_response_format_holds_ends_by_length_or_says_that_nothing_can_follow(engine, lm):
    serve(engine, lm)
    fields = {"do_sample": True, "n": 4, "seed": 0, "eos_token_id": 2}
    choice = {"type": "choice", "choice": ["<3><4>", "<8><9><10>"]}
    for text in engine.start_request_ids(
        "m", [1], max_new_tokens=9, response_format=choice, **fields
    ).result():
        assert text.text in ("<3><4>", "<8><9><10>")
        assert text.finish_reason in ("eos", "stop")
    pattern = {"type": "regex", "regex": "(<5>){50}"}
    request = engine.start_request_ids(
        "m", [1], max_new_tokens=9, response_format=pattern, **fields
    )
    assert [g.finish_reason for g in request.result()] == ["length"] * 4
    assert request.status() is GenerationStatus.FINISHED
    nothing = {"type": "regex", "regex": "<5>no such token"}
    request = engine.start_request_ids(
        "m", [1], max_new_tokens=9, response_format=nothing, **fields
    )
    with pytest.raises(ValueError, match=r"the text cannot go on: .* the 1 that there are"):
        request.result()
    every = engine.start_request_ids(
        "m", [1], max_new_tokens=9, bad_words_ids=[[i] for i in range(96)]
    )
    with pytest.raises(ValueError, match="no token may follow the 1 that there are"):
        every.result()


def test_the_queue_has_every_token_once_with_its_numbers(engine, lm):
    serve(engine, lm)
    config = GenerationConfig(
        do_sample=True, n=3, seed=1, max_new_tokens=6, logprobs=True, top_logprobs=2
    )
    request = engine.start_request_ids("m", [1, 2], config)
    pieces = list(request.queue)
    texts = request.result()
    for index, text in enumerate(texts):
        own = [piece for piece in pieces if piece.index == index]
        assert [i for piece in own for i in piece.token_ids] == text.token_ids
        assert "".join(piece.text for piece in own) == text.text
        logprobs = [p for piece in own for p in piece.logprobs]
        assert logprobs == [token.logprob for token in text.tokens]
        tops = [top for piece in own for top in piece.top_logprobs]
        assert tops == [token.top_logprobs for token in text.tokens]
        assert [piece.finish_reason for piece in own][-1] == text.finish_reason == "length"
    assert request.queue.get() is request.queue.get_nowait() is None
    assert request.queue.get_with_timeout(1) is None
    assert request.queue.generated_length() == 18
    statistics = request.statistics()
    assert (statistics.num_prompt_tokens, statistics.num_generated_tokens) == (2, 18)
    assert 0 <= statistics.time_in_queue <= statistics.time_to_first_token
    assert statistics.time_to_first_token + 5 * statistics.time_per_token == pytest.approx(
        statistics.time_in_total, abs=0.1
    )


def test_a_request_tells_how_far_it_has_come(engine, gated):
    serve(engine, gated)
    request = engine.start_request_ids("m", [1], max_new_tokens=3)
    assert request.status() is GenerationStatus.INIT
    assert request.queue.get_nowait() is None
    assert request.queue.get_with_timeout(20) is None
    assert request.statistics().time_to_first_token is None
    with pytest.raises(TimeoutError, match=r"has not ended after 0\.02 s"):
        request.result(0.02)
    with pytest.raises(TimeoutError):
        engine.sync_request(request, 0.02)
    gated.let(1)
    assert len(request.queue.get().token_ids) == 1
    assert request.status() is GenerationStatus.GENERATING
    assert not request.is_done
    gated.let()
    engine.sync_request(request)
    engine.sync_request(request)
    assert request.status() is GenerationStatus.FINISHED
    assert "finished, 3 tokens" in repr(request)


def test_prompt_tokens_found_in_the_cache_are_told(engine, model):
    with AsyncTransformer(model, word_tokenizer()) as lm:
        serve(engine, lm)
        first = engine.start_request_ids("m", [1, 2, 3, 4], max_new_tokens=4)
        first.result()
        second = engine.start_request_ids("m", [1, 2, 3, 9], max_new_tokens=4)
        assert second.queue.get().num_cached_tokens == 3
        assert second.statistics().num_cached_tokens == 3
        assert first.statistics().num_cached_tokens == 0


def test_from_coroutines(engine, lm):
    serve(engine, lm)

    async def main():
        request = engine.start_request_ids("m", [1, 2], max_new_tokens=8)
        pieces = [piece async for piece in request.queue]
        assert [i for piece in pieces for i in piece.token_ids] == (await request)[0].token_ids
        assert await request.queue.aget() is None
        both = await asyncio.gather(request, engine.generate("m", [1, 2], max_new_tokens=8))
        assert same(*both)
        streamed = [piece async for piece in engine.stream("m", [1, 2], max_new_tokens=8)]
        assert [i for piece in streamed for i in piece.token_ids] == both[0][0].token_ids

    asyncio.run(main())
    asyncio.run(main())  # another loop


def test_the_event_loop_is_free_while_requests_are_under_way(engine, gated):
    serve(engine, gated)

    async def main():
        task = asyncio.create_task(engine.generate("m", [1], max_new_tokens=4))
        for _ in range(4):
            await asyncio.sleep(0)
            assert not task.done()
            gated.let(1)
        return await task

    assert len(asyncio.run(main())[0].token_ids) == 4


def test_sixteen_threads_and_four_hundred_requests(engine, lm):
    serve(engine, lm, max_queue_size=5, max_batch=8)
    prompts = [[i % 90, i // 90, 3] for i in range(400)]

    async def together():
        return await asyncio.gather(*(generate(lm, p, max_new_tokens=5) for p in prompts))

    expected = asyncio.run(together())

    def work(thread):
        for index in range(thread, 400, 16):
            request = engine.start_request_ids("m", prompts[index], max_new_tokens=5)
            pieces = [i for piece in request.queue for i in piece.token_ids]
            assert pieces == expected[index][0].token_ids

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert engine.num_running("m") == engine.num_waiting("m") == 0
    assert lm.statistics().mean_batch_size > 2


# -------------------------------------------------------------------- ending early


def test_a_stopped_request_keeps_what_it_has(engine, gated):
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


def test_what_was_held_back_is_handed_out_when_a_request_is_stopped(engine, gated):
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


def test_a_stopped_model_keeps_its_weights_and_no_keys_or_values(engine, model):
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


def test_a_failure_is_the_requests_own_and_what_it_had_is_readable(engine, gated):
    serve(engine, gated)
    gated.let()
    (good,) = alone(gated, [1], max_new_tokens=4)
    request = engine.start_request_ids("m", [13], max_new_tokens=4, n=2, do_sample=True)
    with pytest.raises(ZeroDivisionError, match="thirteen"):
        request.result(30)
    assert request.status() is GenerationStatus.FAILED
    for read in (request.queue.get, request.queue.get_nowait, lambda: list(request.queue)):
        with pytest.raises(ZeroDivisionError):
            read()

    async def main():
        with pytest.raises(ZeroDivisionError):
            await engine.generate("m", [13], max_new_tokens=4)
        return await engine.generate("m", [1], max_new_tokens=4)

    assert same(asyncio.run(main()), [good])
    assert engine.num_running("m") == 0


def test_a_failure_comes_after_the_tokens_before_it(engine):
    class Failing(MockAsyncLM):
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


def test_cancelled_callers_interrupt_their_requests_and_no_others(engine, gated):
    serve(engine, gated, max_batch=4)

    async def main():
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
        return await handle  # which goes on, though a wait for it was given up

    (text,) = asyncio.run(main())
    assert text.finish_reason == "length"
    assert engine.num_running("m") == engine.num_waiting("m") == 0


def test_leaving_a_stream_interrupts_its_request(engine, lm):
    serve(engine, lm)

    async def main():
        stream = engine.stream("m", [1], max_new_tokens=100_000)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(main())
    engine.stop_model("m")
    assert lm.statistics().num_batches < 5000


# -------------------------------------------------------------------- admission


def test_so_many_at_once_and_the_rest_in_order(engine, gated):
    serve(engine, gated, max_batch=3)
    requests = [engine.start_request_ids("m", [i], max_new_tokens=2 + i % 3) for i in range(9)]
    assert (engine.num_running("m"), engine.num_waiting("m")) == (3, 6)
    gated.let()
    for request in requests:
        request.result(30)
    assert max(gated.statistics().batch_sizes) <= 3
    firsts = [request.queue._first for request in requests]
    assert firsts == sorted(firsts)


def test_a_full_queue_blocks_times_out_or_refuses(engine, gated):
    serve(engine, gated, max_batch=1, max_queue_size=2)
    requests = [engine.start_request_ids("m", [i], max_new_tokens=2) for i in range(3)]
    for timeout in (0, 0.02):
        with pytest.raises(RequestQueueFullError, match="2 requests wait for model 'm'"):
            engine.start_request_ids("m", [4], max_new_tokens=2, timeout=timeout)
    assert issubclass(RequestQueueFullError, queue.Full)

    async def main():
        with pytest.raises(queue.Full):
            await engine.generate("m", [4], max_new_tokens=2, timeout=0.02)
        waiting = [asyncio.create_task(engine.generate("m", [i], max_new_tokens=2)) for i in (4, 5)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        assert engine.num_waiting("m") == 2
        gated.let()
        return await waiting[0]

    blocked = threading.Thread(
        target=lambda: requests.append(engine.start_request_ids("m", [3], max_new_tokens=2))
    )
    blocked.start()
    found = asyncio.run(main())
    blocked.join()
    assert same(found, alone(gated, [4], max_new_tokens=2))
    for i, request in enumerate(requests):
        assert same(request.result(30), alone(gated, [i], max_new_tokens=2))


def test_whoever_waits_for_room_is_told_when_the_model_stops(engine, gated):
    serve(engine, gated, max_batch=1, max_queue_size=0)
    engine.start_request_ids("m", [1], max_new_tokens=2)
    errors = []

    def start():
        with pytest.raises(ModelStateError, match="stopped"):
            engine.start_request_ids("m", [2], max_new_tokens=2)
        errors.append(True)

    blocked = threading.Thread(target=start)
    blocked.start()
    while not engine._models["m"].served._room._waiters:
        pass
    engine.stop_model("m")
    blocked.join(30)
    assert errors == [True]


# -------------------------------------------------------------------- memory


@pytest.mark.parametrize("num_slots", [60, 90, 140])
def test_short_of_memory_the_youngest_rest_and_every_text_is_the_same(engine, model, num_slots):
    generator = random.Random(3)
    prompts = [[generator.randrange(96) for _ in range(generator.randint(2, 9))] for _ in range(8)]
    with AsyncTransformer(model, word_tokenizer()) as big:
        expected = [alone(big, prompt, max_new_tokens=30) for prompt in prompts]
        slot = big.statistics().kv_bytes_used // big._evaluator.pool.num_used
    with AsyncTransformer(
        model, word_tokenizer(), kv_cache_bytes=slot * (num_slots + 1), row_cache_bytes=0
    ) as lm:
        assert lm.kv_capacity == num_slots
        serve(engine, lm, max_batch=8)
        requests = [engine.start_request_ids("m", p, max_new_tokens=30) for p in prompts]
        for request, texts in zip(requests, expected, strict=True):
            assert same(request.result(60), texts)
        counts = [request.statistics().num_preemptions for request in requests]
        assert counts[0] == 0
        assert sum(counts) > 0
        computed = lm.statistics().tokens_computed
        # What rests is computed again, but nobody takes another's keys and values in turns.
        assert computed < 3 * sum(len(p) + 30 for p in prompts)


def test_a_text_that_can_never_fit_is_interrupted_and_the_others_go_on(engine, model):
    with AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=20_000) as lm:
        capacity = lm.kv_capacity
        assert capacity is not None
        serve(engine, lm)
        long = engine.start_request_ids("m", [1] * 10, max_new_tokens=capacity + 20)
        short = engine.start_request_ids("m", [2] * 10, max_new_tokens=8)
        too_long = engine.start_request_ids("m", [3] * (capacity + 1), max_new_tokens=8)
        assert same(short.result(60), alone(lm, [2] * 10, max_new_tokens=8))
        (text,) = long.result(60)
        assert long.status() is too_long.status() is GenerationStatus.INTERRUPTED
        assert text.finish_reason == "interrupted"
        assert len(text.token_ids) == capacity + 1 - 10
        assert too_long.result()[0].token_ids == []
        assert text.token_ids[:8] == alone(lm, [1] * 10, max_new_tokens=8)[0].token_ids


def test_a_text_that_ends_where_memory_ends_has_ended(engine, model):
    with AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=20_000) as lm:
        serve(engine, lm)
        length = lm.kv_capacity + 1 - 10
        request = engine.start_request_ids("m", [1] * 10, max_new_tokens=length)
        (text,) = request.result(60)
        assert (len(text.token_ids), text.finish_reason) == (length, "length")
        assert request.status() is GenerationStatus.FINISHED


@pytest.mark.parametrize("fields", [{}, {"num_beams": 3}, {"do_sample": True, "n": 3, "seed": 0}])
def test_without_a_prefix_cache_nothing_stays(engine, model, fields):
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        expected = [alone(lm, [5, 6, i], max_new_tokens=7, **fields) for i in range(4)]
        lm.clear_cache()
        serve(engine, lm, prefix_cache=False)
        requests = [
            engine.start_request_ids("m", [5, 6, i], max_new_tokens=7, **fields) for i in range(4)
        ]
        for request, texts in zip(requests, expected, strict=True):
            assert same(request.result(30), texts)
        again = engine.start_request_ids("m", [5, 6, 0], max_new_tokens=3)
        again.result(30)
        assert again.statistics().num_cached_tokens == 0
        stopped = engine.start_request_ids("m", [7, 8], max_new_tokens=200, **fields)
        while not stopped.status().is_final and lm.statistics().kv_bytes_used == 0:
            pass
        engine.stop_request(stopped)
        engine.loop.submit(engine._models["m"].served._join()).result()
        assert lm.statistics().kv_bytes_used == 0
        lm._evaluator.prefixes.check_integrity()


def test_without_a_prefix_cache_requests_under_way_share_what_they_have_in_common(engine, model):
    prompt = [(7 * i) % 96 for i in range(60)]
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        serve(engine, lm, prefix_cache=False)
        short = engine.start_request_ids("m", prompt, max_new_tokens=3)
        long = engine.start_request_ids("m", prompt, max_new_tokens=20)
        for request in (short, long):
            request.result(30)
        assert lm.statistics().tokens_computed < 2 * len(prompt)


# -------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("prompt", "fields", "kind", "message"),
    [
        ([], {}, ContextError, "empty"),
        (torch.empty(0, dtype=torch.int64), {}, ContextError, "empty"),
        ([1.5], {}, TypeError, "must be integers"),
        (torch.ones(2, 3, dtype=torch.int64), {}, TypeError, "one dimension"),
        ("text", {}, TypeError, "start_request_text"),
        ({"input_ids": [1]}, {}, TypeError, "'input_ids'"),
        ([96], {}, ContextError, "outside the vocabulary"),
        ([1] * 20, {}, ContextError, "leaves no room"),
        ([1] * 21, {}, ContextError, "leaves no room"),
        ([1], {"stop_words_ids": [[5], [7, 96]]}, ValueError, "stop_words_ids has 96"),
        ([1], {"max_tokens": 5}, ValueError, r"max_tokens is no field .* mean max_new_tokens"),
        ([1], {"config": {"n": 2}}, ValueError, "config must be a GenerationConfig, got dict"),
        ([1], {"lora_name": "poet"}, ValueError, "poet"),
        ([1], {"mm_info": {"image": 1}}, ValueError, "mm_info"),
        ([1], {"num_beams": 9}, ValueError, "num_beams=9 does not fit into max_batch=4"),
        ([1], {"response_format": {"type": "xml"}}, ValueError, "response_format"),
    ],
)
def test_mistakes_are_told_at_once_and_disturb_nobody(engine, gated, prompt, fields, kind, message):
    serve(engine, gated, max_length=20, max_batch=4)
    good = engine.start_request_ids("m", [1, 2], max_new_tokens=8)
    with pytest.raises(kind, match=message):
        engine.start_request_ids("m", prompt, **fields)
    assert engine.num_waiting("m") == 0
    assert engine.num_running("m") == 1
    gated.let()
    assert same(good.result(30), alone(gated, [1, 2], max_new_tokens=8))


def test_requests_of_others_are_not_known(engine, lm):
    serve(engine, lm)
    request = engine.start_request_ids("m", [1], max_new_tokens=1)
    with Engine() as other:
        for use in (other.stop_request, other.release_request, other.sync_request):
            for wrong in (request, "request"):
                with pytest.raises(UnknownRequestError, match="is no request of this engine"):
                    use(wrong)


def test_text_needs_a_tokenizer_and_a_chat_its_template(engine, lm):
    class Bare(MockAsyncLM):
        def __init__(self):
            super().__init__(word_tokenizer())
            self.tokenizer = object()

    serve(engine, lm)
    with Bare() as bare:
        engine.install_model("bare", bare, **COLD)
        engine.start_model("bare")
        with pytest.raises(ContextError, match="cannot encode text: pass token ids"):
            engine.start_request_text("bare", "hello")
    chat = [{"role": "user", "content": "hello"}]
    with pytest.raises(ContextError, match="has no chat template"):
        engine.start_request_text("m", chat)
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    with pytest.raises(ContextError, match="images, sounds and other parts"):
        engine.start_request_text("m", image)
    with pytest.raises(ContextError, match="empty"):
        engine.start_request_text("m", "")


def test_several_texts_are_several_requests_or_none(engine, lm):
    serve(engine, lm)
    requests = engine.start_request_text("m", ["<3>", "<4>"], max_new_tokens=3)
    assert [request.prompt_token_ids for request in requests] == [(3,), (4,)]
    assert same(requests[1].result(), alone(lm, [4], max_new_tokens=3))
    before = lm.statistics().num_awaits
    with pytest.raises(ContextError, match="empty"):
        engine.start_request_text("m", ["<3>", ""], max_new_tokens=3)
    assert lm.statistics().num_awaits == before
    assert engine.start_request_text("m", []) == []


# -------------------------------------------------------------------- any history


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_texts_are_beginnings_of_what_they_are_alone(engine, seed):
    """Requests come, are stopped, released and waited for, with little memory and few places."""
    generator = random.Random(seed)

    class Tight(MockAsyncLM):
        kv_capacity = 70

    with Tight(word_tokenizer(), row_cache_bytes=0) as lm:
        serve(engine, lm, max_batch=3, max_queue_size=4)
        live = []
        for _ in range(120):
            action = generator.choice(["start", "start", "stop", "release", "wait", "read"])
            if action == "start":
                prompt = [generator.randrange(6) for _ in range(generator.randint(1, 12))]
                fields = {
                    "max_new_tokens": generator.randint(1, 40),
                    "do_sample": True,
                    "seed": generator.randrange(5),
                    "n": generator.randint(1, 3),
                }
                request = engine.start_request_ids("m", prompt, **fields)
                live.append((request, prompt, fields))
            elif live:
                request, prompt, fields = live[generator.randrange(len(live))]
                if action == "wait":
                    request.result(60)
                elif action == "read":
                    request.queue.get_nowait()
                else:
                    engine.stop_request(request)
                    if action == "release":
                        engine.release_request(request)
        for request, prompt, fields in live:
            found, expected = request.result(60), alone(lm, prompt, **fields)
            assert request.is_done
            for one, whole in zip(found, expected, strict=True):
                assert one.token_ids == whole.token_ids[: len(one.token_ids)]
                if request.status() is GenerationStatus.FINISHED and one.token_ids:
                    assert one.token_ids == whole.token_ids
        assert engine.num_running("m") == engine.num_waiting("m") == 0


# -------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "cpuu"}, "device must be one"),
        ({"device": ""}, "device must be"),
        ({"threads": 0}, "threads must be 1 up"),
        ({"max_batch": 0}, "max_batch must be 1 up"),
        ({"max_batch": True}, "max_batch must be"),
        ({"max_length": 1}, "max_length must be 2 up"),
        ({"max_queue_size": -1}, "max_queue_size must be 0 up"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes must be 1 up"),
        ({"kv_cache_mode": "int8"}, "kv_cache_mode='int8' does not exist yet"),
        ({"kv_cache_mode": "uint4"}, "kv_cache_mode='uint4' does not exist yet"),
        ({"kv_cache_mode": "int7"}, "kv_cache_mode must be 'default'"),
        ({"prefix_cache": 1}, "prefix_cache must be True or False"),
        ({"warm_up": None}, "warm_up must be"),
        ({"llm_opts": 3}, "llm_opts must be"),
    ],
)
def test_a_runtime_configuration_is_right_when_it_is_made(fields, message):
    with pytest.raises(ValueError, match=message):
        RuntimeConfig(**fields)


def test_a_runtime_configuration_goes_with_its_model(engine, lm, model):
    with pytest.raises(ValueError, match=r"max_bach is no field .* did you mean max_batch"):
        engine.install_model("m", lm, max_bach=3)
    with pytest.raises(ValueError, match="model must be an AsyncLM or a name, got 3"):
        engine.install_model("m", 3)
    with pytest.raises(ValueError, match="threads cannot be chosen for backend 'mock'"):
        engine.install_model("m", "smollm2", backend="mock", threads=2)
    with pytest.raises(ValueError, match="threads is chosen when a model is loaded by its name"):
        engine.install_model("m", lm, threads=2)
    with pytest.raises(ValueError, match="llm_opts are for a model that is loaded by its name"):
        engine.install_model("m", lm, llm_opts={"timeout": 1})
    with AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=1 << 20) as hf:
        own = RuntimeConfig.from_model(hf)
        assert (own.device, own.max_batch, own.max_length) == ("cpu", 20, 256)
        assert own.kv_cache_bytes == 1 << 20
        engine.install_model("hf", hf, own, **COLD)
        for wrong in ({"device": "cuda"}, {"kv_cache_bytes": 1 << 19}):
            with pytest.raises(ValueError, match="is chosen when a model is loaded: it has"):
                engine.install_model("other", hf, **wrong)
        with pytest.raises(ValueError, match="max_length=300 is more than the model's 257"):
            engine.install_model("other", hf, max_length=300)
    assert "m" not in engine.models


def test_what_a_runtime_configuration_asks_of_each_backend():
    config = RuntimeConfig(
        device="cpu", threads=2, max_batch=5, kv_cache_bytes=999, llm_opts={"timeout": 0.5}
    )
    assert config.loading_options("hf") == {
        "batch_size": 5,
        "num_threads": 2,
        "kv_cache_bytes": 999,
        "hf_opts": {"device_map": "cpu"},
        "timeout": 0.5,
    }
    more = config.replace(llm_opts={"hf_opts": {"dtype": "bfloat16"}}, prefix_cache=False)
    options = more.loading_options("hf")
    assert options["hf_opts"] == {"device_map": "cpu", "dtype": "bfloat16"}
    assert options["row_cache_bytes"] == 0
    vllm = RuntimeConfig(kv_cache_bytes=999, llm_opts={"engine_opts": {"dtype": "float32"}})
    assert vllm.loading_options("vllm") == {
        "engine_opts": {"kv_cache_memory_bytes": 999, "dtype": "float32"}
    }
    with pytest.raises(ValueError, match="device cannot be chosen for backend 'vllm'"):
        config.loading_options("vllm")
