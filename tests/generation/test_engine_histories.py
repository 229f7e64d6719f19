"""Many callers of every kind, faults and little memory: each request ends, and nothing is left.

What there is of a text is the beginning of what it is alone.
"""

import asyncio
import contextlib
import random

import pytest

from genlm_backend import AsyncTransformer
from genlm_backend.errors import ContextError, RequestQueueFullError
from genlm_backend.generation import Engine, GenerationStatus
from tests.generation.serving import alone, serve
from tests.llm.conftest import word_tokenizer
from tests.tree_integrity import check_integrity

EXPECTED = (ZeroDivisionError, RequestQueueFullError, ContextError)


class Faulty(AsyncTransformer):
    """Fails now and then."""

    fault_rate = 0.0
    generator = random.Random(0)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        evaluate = self._evaluator.evaluate

        def faulty(queries):
            if self.generator.random() < self.fault_rate:
                raise ZeroDivisionError("fault")
            return evaluate(queries)

        self._evaluator.evaluate = faulty


def random_fields(generator, way):
    fields = {
        "max_new_tokens": generator.choice([1, 5, 15, 60]),
        "stop": generator.choice([(), "<5>"]),
        "seed": 1,
    }
    kind = "greedy" if way == "stream" else generator.choice(["greedy", "sample", "beams"])
    if kind == "sample":
        fields |= {"do_sample": True, "n": generator.randint(1, 3)}
    if kind == "beams":
        penalty = generator.choice([1.0, -1.0])
        fields |= {"num_beams": 2, "n": generator.randint(1, 2), "length_penalty": penalty}
    return fields


async def use(engine, generator, handles):
    """Ask for a text in some way, and perhaps give up."""
    way = generator.choice(["await", "cancel", "stream", "stop", "release"])
    prompt = [generator.randrange(96) for _ in range(generator.randint(1, 12))]
    fields, patience = random_fields(generator, way), 0.02 * generator.random()
    if way == "stream":
        async for elements in engine.stream("m", prompt, **fields):
            if len(elements.token_ids) > 1 or generator.random() < 0.3:
                break
    elif way in ("await", "cancel"):
        task = asyncio.ensure_future(engine.generate("m", prompt, **fields))
        if way == "cancel":
            await asyncio.sleep(patience)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        else:
            await task
    else:
        handle = engine.start_request_ids("m", prompt, timeout=0, **fields)
        handles.append((handle, prompt, fields))
        await asyncio.sleep(patience)
        (engine.stop_request if way == "stop" else engine.release_request)(handle)
        await handle


@pytest.mark.parametrize("seed", range(12))
def test_random_callers_and_faults_leave_no_request_unfinished(model, seed):
    generator = random.Random(seed)
    handles = []

    async def caller(number):
        own = random.Random(100 * seed + number)
        for _ in range(6):
            with contextlib.suppress(*EXPECTED):
                await use(engine, own, handles)

    async def callers():
        async with asyncio.timeout(60):
            await asyncio.gather(*map(caller, range(6)))

    with (
        Faulty(
            model,
            word_tokenizer(),
            max_length=generator.choice([20, 40, None]),
            kv_cache_bytes=generator.choice([12_000, 60_000, None]),
            row_cache_bytes=0,
        ) as lm,
        Engine() as engine,
    ):
        lm.fault_rate, lm.generator = generator.choice([0.0, 0.05]), random.Random(seed)
        serve(
            engine,
            lm,
            max_batch=generator.choice([2, 4, 20]),
            max_queue_size=generator.choice([None, 3]),
        )
        asyncio.run(callers())
        served = engine._models["m"]
        engine.loop.submit(served._join()).result(60)
        lm._batcher.call(lambda: None)  # what was cancelled may still have been evaluated
        assert all(handle.is_done for handle, _, _ in handles)
        assert not served._requests
        assert not served._tasks
        check_integrity(lm._evaluator.scheduler.tree)
        lm.fault_rate = 0.0
        for handle, prompt, fields in handles:
            if handle.status() is GenerationStatus.FAILED:
                continue
            is_whole = handle.status() is GenerationStatus.FINISHED
            for one, whole in zip(handle.result(), alone(lm, prompt, **fields), strict=True):
                if one.token_ids and (is_whole or "num_beams" not in fields):
                    most = None if is_whole else len(one.token_ids)
                    assert one.token_ids == whole.token_ids[:most]
