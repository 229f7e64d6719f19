"""Models for engines, and what their requests are compared with."""

import asyncio
import threading

from genlm_backend.generation import generate
from tests.llm.conftest import word_tokenizer
from tests.llm.hooked import HookedMock

COLD = {"warm_up": False}
GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": [7, 30], "pad_token_id": 0}


class GatedLM(HookedMock):
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


def serve(engine, lm, **fields):
    engine.install_model("m", lm, **{**COLD, **fields})
    engine.start_model("m")


def alone(lm, prompt, **fields):
    return asyncio.run(generate(lm, prompt, **fields))


def same(found, expected):
    return [g.token_ids for g in found] == [g.token_ids for g in expected]
