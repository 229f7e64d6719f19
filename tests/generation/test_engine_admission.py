"""Who runs and who waits: places, queues and memory."""

import asyncio
import queue
import random
import threading
import time

import pytest

from genlm_backend import AsyncTransformer
from genlm_backend.errors import ContextError, ModelStateError, RequestQueueFullError
from genlm_backend.generation import GenerationConfig, GenerationStatus, generate
from tests.generation.serving import GatedLM, alone, same, serve
from tests.llm.conftest import word_tokenizer


def test_at_most_max_batch_requests_run_and_others_wait_in_order(engine, gated):
    serve(engine, gated, max_batch=3)
    requests = [engine.start_request_ids("m", [i], max_new_tokens=2 + i % 3) for i in range(9)]
    assert (engine.num_running("m"), engine.num_waiting("m")) == (3, 6)
    gated.let()
    for request in requests:
        request.result(30)
    assert max(gated.statistics().batch_sizes) <= 3
    firsts = [own.queue._started + own.queue._since["first"] for own in requests]
    assert firsts == sorted(firsts)


def test_prompts_of_one_submission_are_queued_or_refused_together(engine, gated):
    serve(engine, gated, max_batch=1, max_queue_size=1)
    config = GenerationConfig(max_new_tokens=2)
    configs = [config.replace(max_new_tokens=1 + i) for i in range(3)]
    first = engine.start_request_ids("m", [9], config)
    requests = engine.start_requests("m", [[1], [2], [3]], configs)
    assert (engine.num_running("m"), engine.num_waiting("m")) == (1, 1)
    with pytest.raises(RequestQueueFullError):
        engine.start_requests("m", [[4], [5]], [config, config], timeout=0)
    for prompts, given in (([[4], [5, 96]], [config] * 2), ([[4], [5]], [config])):
        with pytest.raises(ValueError, match=r"96|2 entries, one for each prompt, got 1"):
            engine.start_requests("m", prompts, given)
    assert engine.num_waiting("m") == 1
    assert engine.start_requests("m", [], []) == engine.start_requests("m", [], config) == []
    gated.let()
    assert same(first.result(30), alone(gated, [9], max_new_tokens=2))
    for i, request in enumerate(requests):
        assert same(request.result(30), alone(gated, [1 + i], max_new_tokens=1 + i))
    for i, request in enumerate(engine.start_requests("m", [[4], [5]], config)):
        assert same(request.result(30), alone(gated, [4 + i], max_new_tokens=2))


def test_shut_model_completes_its_requests_and_refuses_new_ones(engine, gated):
    serve(engine, gated, max_batch=1)
    running, waiting = (engine.start_request_ids("m", [i], max_new_tokens=2) for i in (1, 2))
    engine.shut_model("m")
    with pytest.raises(ModelStateError, match=r"'m' accepts no requests: .*stopped or shut"):
        engine.start_request_ids("m", [3], max_new_tokens=2)
    gated.let()
    for i, request in ((1, running), (2, waiting)):
        assert same(request.result(30), alone(gated, [i], max_new_tokens=2))
    engine.stop_model("m")
    engine.start_model("m")
    request = engine.start_request_ids("m", [3], max_new_tokens=2)
    assert same(request.result(30), alone(gated, [3], max_new_tokens=2))


async def test_a_full_queue_blocks_times_out_or_refuses(engine, gated):
    serve(engine, gated, max_batch=1, max_queue_size=2)
    requests = [engine.start_request_ids("m", [i], max_new_tokens=2) for i in range(3)]
    for timeout in (0, 0.02):
        with pytest.raises(RequestQueueFullError, match="'m' is full: 2 submissions are waiting"):
            engine.start_request_ids("m", [4], max_new_tokens=2, timeout=timeout)
    assert issubclass(RequestQueueFullError, queue.Full)
    blocked = threading.Thread(
        target=lambda: requests.append(engine.start_request_ids("m", [3], max_new_tokens=2))
    )
    blocked.start()
    with pytest.raises(queue.Full):
        await engine.generate("m", [4], max_new_tokens=2, timeout=0.02)
    waiting = [asyncio.create_task(engine.generate("m", [i], max_new_tokens=2)) for i in (4, 5)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    assert engine.num_waiting("m") == 2
    gated.let()
    found = await waiting[0]
    blocked.join()
    assert same(found, await generate(gated, [4], max_new_tokens=2))
    for i, request in enumerate(requests):
        assert same(request.result(30), await generate(gated, [i], max_new_tokens=2))


def test_stopping_the_model_raises_for_callers_waiting_for_room(engine, gated):
    serve(engine, gated, max_batch=1, max_queue_size=0)
    engine.start_request_ids("m", [1], max_new_tokens=2)
    errors = []

    def start():
        with pytest.raises(ModelStateError, match="stopped"):
            engine.start_request_ids("m", [2], max_new_tokens=2)
        errors.append(True)

    blocked = threading.Thread(target=start)
    blocked.start()
    while not engine._models["m"]._room._waiters:
        time.sleep(0.001)
    stopping = threading.Thread(target=engine.stop_model, args=("m",))
    stopping.start()
    blocked.join(30)
    assert errors == [True]
    gated.let()  # no sooner
    stopping.join(30)


@pytest.mark.parametrize("num_slots", [60, 90, 140])
def test_requests_wait_for_memory_and_compute_no_token_twice(engine, model, num_slots):
    generator = random.Random(3)
    prompts = [[generator.randrange(96) for _ in range(generator.randint(2, 9))] for _ in range(8)]
    with AsyncTransformer(model, word_tokenizer()) as big:
        expected = [alone(big, prompt, max_new_tokens=30) for prompt in prompts]
        slot = big.statistics().kv_bytes_used // big._evaluator.scheduler.tree.slots.num_used
    with AsyncTransformer(
        model, word_tokenizer(), kv_cache_bytes=slot * (num_slots + 1), row_cache_bytes=0
    ) as lm:
        assert lm.kv_capacity == num_slots
        serve(engine, lm, max_batch=8)
        requests = [engine.start_request_ids("m", p, max_new_tokens=30) for p in prompts]
        for request, texts in zip(requests, expected, strict=True):
            assert same(request.result(60), texts)
        assert lm.statistics().tokens_computed <= sum(len(p) + 29 for p in prompts)


def test_requests_wait_for_memory_in_order_and_count_a_prompt_once(engine):
    class Tight(GatedLM):
        kv_capacity = 40

    with Tight() as lm:
        serve(engine, lm)
        first = engine.start_request_ids("m", [1] * 20, max_new_tokens=11)  # 30 tokens at most
        fields = {"do_sample": True, "seed": 1, "n": 3, "max_new_tokens": 6}
        three = engine.start_request_ids("m", [2] * 20, **fields)  # 25 each, 35 together
        short = engine.start_request_ids("m", [3], max_new_tokens=2)
        assert (engine.num_running("m"), engine.num_waiting("m")) == (1, 2)
        engine.stop_request(first)
        assert (engine.num_running("m"), engine.num_waiting("m")) == (4, 0)
        lm.let()
        assert same(three.result(30), alone(lm, [2] * 20, **fields))
        assert same(short.result(30), alone(lm, [3], max_new_tokens=2))


@pytest.mark.parametrize("fields", [{}, {"num_beams": 2}], ids=["alone", "beams"])
def test_request_too_large_for_memory_raises_context_error(engine, fields):
    class Tight(GatedLM):
        kv_capacity = 40

    with Tight() as lm:
        serve(engine, lm)
        width = fields.get("num_beams", 1)
        most = 30 // width + 1  # the last token is never asked for
        with pytest.raises(ContextError, match=r"prompt of 10 tokens .* has room for 40: lower"):
            engine.start_request_ids("m", [1] * 10, max_new_tokens=most + 1, **fields)
        assert engine.num_running("m") == engine.num_waiting("m") == 0
        request = engine.start_request_ids("m", [1] * 10, max_new_tokens=most, **fields)
        lm.let()
        assert len(request.result(30)[0].token_ids) == most
        assert request.status() is GenerationStatus.FINISHED


def test_text_that_fills_memory_exactly_finishes_by_length(engine, model):
    with AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=20_000) as lm:
        serve(engine, lm)
        length = lm.kv_capacity + 1 - 10
        request = engine.start_request_ids("m", [1] * 10, max_new_tokens=length)
        (text,) = request.result(60)
        assert (len(text.token_ids), text.finish_reason) == (length, "length")
        assert request.status() is GenerationStatus.FINISHED
