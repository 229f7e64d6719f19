"""What is asked: models, a trie, an engine and tasks; equal numbers are equal contexts."""

import asyncio

from genlm_backend import (
    AsyncGLM,
    AsyncTokenCharacterTrie,
    AsyncTransformer,
    AsyncVirtualLM,
    Engine,
    MockAsyncLM,
)
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.vllm.fake import FakeEngine


class OfModel:
    """A model, and every way to ask it; equal numbers are equal contexts."""

    def __init__(self, name, lm):
        self.name, self.holder, self.close = name, lm, lm.close
        self.worked_by, self.verb = lm._evaluator, "evaluate"
        self.locks = [lm._batcher._lock, lm._rows._lock]

    def ask(self, i):
        return self.holder.next_token_logprobs_sync([1, 2, i]).tolist()

    def ways(self, i):
        lm = self.holder
        return {
            "sync": lambda: lm.next_token_logprobs_sync([i]),
            "cached": lambda: lm.next_token_logprobs_sync([1, 2, 3]),
            "await": lambda: asyncio.run(lm.next_token_logprobs([i])),
            "batch": lambda: lm.batch_next_token_logprobs_sync([[i], [i, i]]),
            "await batch": lambda: asyncio.run(lm.batch_next_token_logprobs([[i], [i, i]])),
            "sample": lambda: asyncio.run(lm.sample([i], 3, [])),
        }

    def more_ways(self):
        lm = self.holder
        return {"statistics": lm.statistics, "clear_cache": lm.clear_cache}


class OfTrie:
    def __init__(self, name="trie"):
        self.name = name
        vocab = [bytes([97 + i]) * (1 + i % 3) for i in range(20)]
        self.holder = AsyncTokenCharacterTrie.from_vocab(vocab, backend="sequential")
        self.close = self.holder.shutdown
        self.worked_by, self.verb = self.holder.trie, "evaluate_rows"
        self.locks = [self.holder._lock]
        if self.holder._batchers:
            self.locks += [batcher._lock for batcher in self.holder._batchers.values()]

    def ask(self, i):
        asyncio.run(self.holder.weight_max([float(i)] * 20))
        return asyncio.run(self.holder.weight_sum([float(i)] * 20)).tolist()

    def ways(self, i):
        trie, weights = self.holder, [float(i)] * 20
        return {
            "sum": lambda: asyncio.run(trie.weight_sum(weights)),
            "max": lambda: asyncio.run(trie.weight_max(weights)),
        }

    def more_ways(self):
        return {"statistics": self.holder.statistics}


class OfEngine:
    def __init__(self, name="engine"):
        self.name = name
        self.lm = MockAsyncLM(word_tokenizer(), row_cache_bytes=0)
        self.holder = Engine()
        self.holder.install_model("m", self.lm, warm_up=False)
        self.holder.start_model("m")
        self.worked_by, self.verb = self.lm._evaluator, "evaluate"
        self.locks = [self.holder._lock, self.lm._batcher._lock]
        self.request = None

    def ask(self, i):
        self.request = self.holder.start_request_ids("m", [1, i], max_new_tokens=3)
        return self.request.result()[0].token_ids

    def ways(self, i):
        engine = self.holder
        return {
            "start": lambda: engine.start_request_ids("m", [i], max_new_tokens=2).result(),
            "generate": lambda: asyncio.run(engine.generate("m", [i], max_new_tokens=2)),
        }

    def more_ways(self):
        request = self.request
        return {
            "count": lambda: self.holder.num_running("m"),
            "result": request.result,
            "read": request.queue.get,
            "stop": lambda: self.holder.stop_request(request),
            "status": request.status,
            "is_done": lambda: request.is_done,
            "error": lambda: request.queue.error,
        }

    def close(self):
        self.holder.close()
        self.lm.close()


class OfGLM:
    def __init__(self, name="glm"):
        self.name = name
        self.lm = MockAsyncLM(word_tokenizer(), row_cache_bytes=0)
        self.holder = AsyncGLM(self.lm, generation_kwargs={"max_new_tokens": 3, "pad_token_id": 0})
        self.holder.start()
        self.worked_by, self.verb = self.lm._evaluator, "evaluate"
        self.locks = [self.holder._lock, self.lm._batcher._lock]
        self.task = 0

    def ask(self, i):
        self.task = self.holder.submit([1, i])
        return self.holder.get_result(self.task)[0].tolist()

    def ways(self, i):
        return {"submit": lambda: self.holder.get_result(self.holder.submit([i]))}

    def more_ways(self):
        return {
            "result": lambda: self.holder.get_result(self.task),
            "size": self.holder.queue_size,
        }

    def close(self):
        self.holder.shutdown()
        self.lm.close()


def tiny(**options):
    return AsyncTransformer(
        families.make("llama"), word_tokenizer(), kv_cache_bytes=1 << 20, **options
    )


MAKE = {
    "hf": lambda: OfModel("hf", tiny()),
    "mock": lambda: OfModel("mock", MockAsyncLM(word_tokenizer())),
    "vllm": lambda: OfModel("vllm", AsyncVirtualLM(FakeEngine())),
    "trie": OfTrie,
    "engine": OfEngine,
    "glm": OfGLM,
}
