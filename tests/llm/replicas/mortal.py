"""Evaluators that die when a test wants them to."""

import asyncio

from genlm_backend.errors import EngineDiedError
from genlm_backend.llm import AsyncReplicas, EvaluatorInfo, StatelessEvaluator
from tests.llm.conftest import word_tokenizer
from tests.llm.elsewhere.over_there import Told
from tests.llm.elsewhere.test_process import close_to
from tests.llm.toy import VOCAB


class Mortal(StatelessEvaluator):
    """Rows that tell their context; dies when it is told to, and lives on when restarted."""

    def __init__(self, width=VOCAB):
        super().__init__(width)
        self.info = EvaluatorInfo(width, num_slots=10_000)
        self.asked, self.adapters = [], []
        self.dies_with = self.is_dead = False

    def evaluate(self, queries):
        self.asked.append([query.token_ids for query in queries])
        self.is_dead = self.is_dead or self.dies_with
        if self.is_dead:
            raise EngineDiedError("by the test")
        return Told.evaluate(self, queries)

    log = []
    told = Told.told
    take_long = Told.take_long


def make(count=3, **options):
    evaluators = [Mortal() for _ in range(count)]
    return AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0, **options), evaluators


async def ask_all(lm, contexts):
    rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
    for row, context in zip(rows, contexts, strict=True):
        close_to(row, context)
