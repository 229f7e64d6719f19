"""Waits: what threads get that wait for an answer when the interpreter exits."""

import asyncio
import threading
import time

from genlm_backend import AsyncGLM, AsyncReplicas, AsyncTokenCharacterTrie, Engine, MockAsyncLM
from genlm_backend.llm import ProcessEvaluator
from genlm_backend.model.batched_lm import BatchedLM
from genlm_backend.queries.evaluator import StatelessEvaluator
from tests.histories import late, say
from tests.histories.holders import tiny
from tests.llm.conftest import word_tokenizer

ANSWERED = 9
"""The token that contexts begin with that are answered, after a while; others never are."""
SECONDS = 60


class Slow(StatelessEvaluator):
    """Another evaluator, but that it takes a while, and for ever where nothing is answered.

    Args:
        evaluator: The other one.
        looks: Whether it finds out that nobody waits.
    """

    def __init__(self, evaluator, looks=True):
        super().__init__()
        self.evaluator, self.looks = evaluator, looks
        self._evaluate = evaluator.evaluate
        self.begun = threading.Event()

    def open(self):
        return self.evaluator.open()

    def evaluate(self, queries):
        self.begun.set()
        time.sleep(0.5)
        while any(first_token(query) != ANSWERED for query in queries):
            if self.looks:
                self.check_cancelled()
            time.sleep(0.001)
        return self._evaluate(queries)


def first_token(question):
    return getattr(question, "text", question).token_ids[0]


def slow():
    return Slow(MockAsyncLM(word_tokenizer())._evaluator)


def deaf():
    return Slow(MockAsyncLM(word_tokenizer())._evaluator, looks=False)


class OfModel:
    """A model, and the ways to wait for it."""

    ways = ("sync", "batch", "await", "score")

    def __init__(self, lm, evaluators=()):
        self.lm, self.evaluators = lm, evaluators
        self.num_before = self.num_asked()

    def ask(self, way, first):
        lm = self.lm
        if way == "sync":
            return lm.next_token_logprobs_sync([first, 1])
        if way == "batch":
            return lm.batch_next_token_logprobs_sync([[first, 2], [first, 3]])
        if way == "await":
            return asyncio.run(lm.next_token_logprobs([first, 4]))
        return lm.score_sync([first], [5])

    def num_asked(self):
        return self.lm._batcher.statistics().num_submitted

    def wait_until_asked(self):
        while self.num_asked() - self.num_before < 5:
            time.sleep(0.01)

    def children(self):
        return [evaluator.process_id for evaluator in self.evaluators]


def of_model_here(lm):
    evaluator = lm._evaluator
    inner = Slow(evaluator)
    inner.check_cancelled = evaluator.check_cancelled
    evaluator.evaluate = inner.evaluate
    return OfModel(lm)


def of_processes(make, count):
    evaluators = [ProcessEvaluator(make) for _ in range(count)]
    if count == 1:
        return OfModel(BatchedLM(word_tokenizer(), *evaluators), evaluators)
    return OfModel(AsyncReplicas(word_tokenizer(), evaluators), evaluators)


class OfTrie:
    """A trie, whose batches end as they have begun: the second waits for its turn."""

    ways = ("running", "pending")

    def __init__(self):
        self.trie = AsyncTokenCharacterTrie.from_vocab([b"a", b"ab", b"b"], backend="sequential")
        self.evaluate, self.begun = self.trie.trie.evaluate_rows, threading.Event()
        self.trie.trie.evaluate_rows = self.slow

    def slow(self, operation, rows):
        self.begun.set()
        time.sleep(2)
        return self.evaluate(operation, rows)

    def ask(self, way, first):
        if way == "pending":
            self.begun.wait(SECONDS)
        return asyncio.run(self.trie.weight_sum([first, 1.0, 1.0]))

    def wait_until_asked(self):
        while self.trie.statistics().sum.num_submitted < 2:
            time.sleep(0.01)

    def children(self):
        return []


class OfGeneration:
    """An engine or an AsyncGLM: whoever waits for a result."""

    def __init__(self, make):
        self.evaluator = slow()
        self.holder = make(BatchedLM(word_tokenizer(), self.evaluator))

    def wait_until_asked(self):
        assert self.evaluator.begun.wait(SECONDS)

    def children(self):
        return []


class OfEngine(OfGeneration):
    ways = ("result", "read")

    def __init__(self):
        super().__init__(self.make)

    def make(self, lm):
        engine = Engine()
        engine.install_model("m", lm, warm_up=False)
        engine.start_model("m")
        return engine

    def ask(self, way, first):
        request = self.holder.start_request_ids("m", [first, len(way)], max_new_tokens=1)
        return request.result() if way == "result" else request.queue.get() or request.result()


class OfGLM(OfGeneration):
    ways = ("result",)

    def __init__(self):
        super().__init__(self.make)

    def make(self, lm):
        glm = AsyncGLM(lm, generation_kwargs={"max_new_tokens": 1, "pad_token_id": 0})
        glm.start()
        return glm

    def ask(self, way, first):
        return self.holder.get_result(self.holder.submit([first, 1]))


HERE = {
    "hf": lambda: of_model_here(tiny()),
    "mock": lambda: of_model_here(MockAsyncLM(word_tokenizer())),
    "threads": lambda: OfModel(AsyncReplicas(word_tokenizer(), [slow(), slow()])),
    "trie": OfTrie,
    "engine": OfEngine,
    "glm": OfGLM,
}
ELSEWHERE = {
    "process": lambda: of_processes(deaf, 1),
    "processes": lambda: of_processes(slow, 2),
}


def wait(where, thread):
    """Exit while threads wait: daemons for what is never answered, others for a while."""
    is_daemon = thread == "daemon"
    holders = {name: make() for name, make in (HERE if where == "here" else ELSEWHERE).items()}
    told = {}

    def ask(name, holder, way):
        try:
            found = holder.ask(way, 1 if is_daemon else ANSWERED)
        except BaseException as error:
            told[name, way] = f"{type(error).__name__}: {error}"
        else:
            told[name, way] = f"returned {type(found).__name__}"

    threads = {
        (name, way): threading.Thread(target=ask, args=(name, holder, way), daemon=is_daemon)
        for name, holder in holders.items()
        for way in holder.ways
    }
    for waiting in threads.values():
        waiting.start()
    for holder in holders.values():
        holder.wait_until_asked()
        for child in holder.children():
            say("child", child)

    def at_the_end():
        for (name, way), waiting in threads.items():
            waiting.join(SECONDS)
            say(f"{name} {way}:", told.get((name, way), "waits still"))

    late.append(at_the_end)
