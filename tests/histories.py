"""Programs whose process is forked, exits or is interrupted; `python -m tests.histories NAME`.

Each prints what it saw, one thing a line, and `test_histories.py` reads it.
"""

import atexit

late = []
# Registered before anything else is imported, so that it runs after every other exit handler.
atexit.register(lambda: [function() for function in late])

import asyncio  # noqa: E402
import dataclasses  # noqa: E402
import faulthandler  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from genlm_backend import (  # noqa: E402
    AsyncGLM,
    AsyncTokenCharacterTrie,
    AsyncTransformer,
    AsyncVirtualLM,
    Engine,
    MockAsyncLM,
    TokenCharacterTrie,
)
from genlm_backend.errors import ForkedError  # noqa: E402
from genlm_backend.llm import threads  # noqa: E402
from genlm_backend.llm.batched import BatchedLM  # noqa: E402
from genlm_backend.llm.evaluator import StatelessEvaluator  # noqa: E402
from genlm_backend.llm.hf import lora  # noqa: E402
from tests.llm import families  # noqa: E402
from tests.llm.conftest import fresh_row, word_tokenizer  # noqa: E402
from tests.llm.vllm.fake import FakeEngine  # noqa: E402


def say(*words):
    print(*words, flush=True)


# ---------------------------------------------------------------- what is asked


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


def error_of(function):
    """The class of what a call raises, or what it returned."""
    try:
        found = function()
    except Exception as error:
        return type(error).__name__
    return f"returned {type(found).__name__}"


# ---------------------------------------------------------------- forks


class Gate:
    """Holds one function of an object until it is let go."""

    def __init__(self, owner, verb):
        self.is_held, self._may_go = threading.Event(), threading.Event()
        original = getattr(owner, verb)

        def held(*args):
            self.is_held.set()
            assert self._may_go.wait(60)
            return original(*args)

        setattr(owner, verb, held)

    def let_go(self):
        self._may_go.set()


class Holding:
    """Another thread, which evaluates and holds locks."""

    def __init__(self, locks):
        self._is_held, self._may_go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(locks,))
        self._thread.start()
        assert self._is_held.wait(60)

    def _hold(self, locks):
        with threads.frequent_switches():
            for lock in locks:
                getattr(lock, "native", lock).acquire()
            self._is_held.set()
            assert self._may_go.wait(250)
            for lock in locks:
                getattr(lock, "native", lock).release()

    def let_go(self):
        self._may_go.set()
        self._thread.join()


def in_fork(function):
    """Run a function in a fork that goes on to exit as any program; return how it ended."""
    process = os.fork()
    if process == 0:
        signal.alarm(120)  # ends what hangs
        faulthandler.dump_traceback_later(60)  # and tells where
        function()
        sys.exit(0)
    _, status = os.waitpid(process, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def fork():
    """Fork with a query under way and every lock held by another thread."""
    for make in MAKE.values():
        holder = make()
        expected = holder.ask(3)
        gate = Gate(holder.worked_by, holder.verb)
        found = []
        asking = threading.Thread(target=lambda h=holder, f=found: f.append(h.ask(4)))
        asking.start()
        assert gate.is_held.wait(60)
        holding = Holding(holder.locks)

        def child(holder=holder):
            ways = {**holder.ways(5), **holder.more_ways()}
            for way, function in ways.items():
                with pytest.raises(ForkedError, match="spawn") as raised:
                    say(holder.name, way, "was answered by", function())
                assert isinstance(raised.value, RuntimeError)
            holder.close()
            gc.collect()

        say(holder.name, "ended", in_fork(child))
        holding.let_go()
        gate.let_go()
        asking.join()
        assert found == [pytest.approx(make().ask(4), abs=2e-5)]
        assert holder.ask(3) == pytest.approx(expected, abs=2e-5)
        holder.close()


def fork_fresh():
    """What nobody has asked before the fork works in it, and so does what is made there.

    Other threads hold every lock of the library's own at that moment.
    """
    fresh = [MAKE["mock"](), OfTrie()]
    expected = {name: make().ask(3) for name, make in MAKE.items()}
    trie = TokenCharacterTrie([b"a", b"ab", b"b"])
    sums = trie.weight_sum([1.0, 2.0, 3.0]).tolist()
    interval = sys.getswitchinterval()

    def child():
        assert sys.getswitchinterval() == interval
        assert trie.weight_sum([1.0, 2.0, 3.0]).tolist() == sums
        for holder in [*fresh, *(make() for make in MAKE.values())]:
            assert holder.ask(3) == expected[holder.name], holder.name
            holder.close()

    model = MAKE["hf"]().holder.model
    of_adapters = [lora._locks._making, lora._locks.of(model)]
    holding = Holding([threads._numbers, threads._interval._lock, trie._spare._lock, *of_adapters])
    say("ended", in_fork(child))
    holding.let_go()
    for holder in fresh:  # and still here, since nobody has asked it here before
        assert holder.ask(3) == expected[holder.name]


# ---------------------------------------------------------------- exit


class AtShutdown:
    """Asks when the interpreter takes the modules apart."""

    def __init__(self, holders, fresh):
        self.holders, self.fresh = holders, fresh

    def __del__(self):
        for holder in [*self.holders, *self.fresh]:
            for way, function in holder.ways(8).items():
                say("del", holder.name, way, error_of(function))
        say("del ended")


class Endless(StatelessEvaluator):
    """Computes for ever, unless nobody waits for it."""

    def __init__(self):
        super().__init__()
        self.is_begun = threading.Event()

    def evaluate(self, queries):
        self.is_begun.set()
        while True:
            self.check_wanted()


def exit():
    """Ask after the main thread has ended, in the last exit handler, and later still."""
    global at_shutdown
    holders = [make() for make in MAKE.values()]
    fresh = [MAKE["mock"](), OfTrie()]
    expected = [holder.ask(3) for holder in holders]

    def outliving():
        threading.main_thread().join()
        assert [holder.ask(3) for holder in holders] == expected
        say("outliving answered")

    threading.Thread(target=outliving).start()

    evaluator = Endless()
    endless, engine = BatchedLM(word_tokenizer(), evaluator), Engine()
    engine.install_model("endless", endless, warm_up=False)
    engine.start_model("endless")
    request = engine.start_request_ids("endless", [7], max_new_tokens=1)
    seen = []

    def wait(i):
        seen.append(error_of(lambda: endless.next_token_logprobs_sync([i])))

    assert evaluator.is_begun.wait(60)
    waiting = [threading.Thread(target=wait, args=(i,), daemon=True) for i in range(2)]
    for thread in waiting:
        thread.start()
    while endless._batcher.statistics().num_submitted < 3:
        pass

    def at_the_end():
        for holder in holders:
            for way, function in holder.ways(5).items():
                say("late", holder.name, way, error_of(function))
        for thread in waiting:
            thread.join()
        say("late waiting", *seen)
        say("late request", error_of(request.result))
        for holder in fresh:
            say("late fresh", holder.name, error_of(lambda h=holder: h.ask(3)))
        for closing in (*holders, *fresh, engine, endless):
            closing.close()
        say("late ended")

    late.append(at_the_end)
    at_shutdown = AtShutdown(holders, [MAKE["mock"](), OfTrie()])


# ---------------------------------------------------------------- interruption


class Interrupting:
    """Sends SIGINT in the first forward pass, and counts the passes; on a model of transformers."""

    def __init__(self, lm):
        self.num_passes = 0
        self.is_noticed = threading.Event()
        self._lm = lm
        lm.model.register_forward_pre_hook(self._count)
        lm._evaluator.passes.cost = dataclasses.replace(lm._evaluator.passes.cost, max_segment=8)

    def _count(self, *_):
        self.num_passes += 1
        # Python does not notice a signal that comes just before the main thread begins to wait;
        # it does with the next one.
        while not self.is_noticed.wait(3 if self.num_passes > 1 else 0.2):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def __enter__(self):
        self.num_passes = 0
        self.is_noticed.clear()

    def __exit__(self, kind, error, traceback):
        self.is_noticed.set()
        assert kind is KeyboardInterrupt
        if self._lm._batcher.is_closed:
            return True
        self._lm._batcher.call(lambda: None)  # comes behind what was interrupted
        return True


PROMPT = [(7 * i) % 90 + 3 for i in range(80)]


def interrupt():
    """Interrupt each way to block; the last goes through to the end of the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lm = tiny(row_cache_bytes=0)
    interrupting = Interrupting(lm)
    engine = Engine()
    engine.install_model("m", lm, max_length=80)
    ways = {
        "sync": lambda: lm.next_token_logprobs_sync(PROMPT),
        "batch": lambda: lm.batch_next_token_logprobs_sync([PROMPT, PROMPT[::-1]]),
        "await": lambda: asyncio.run(lm.next_token_logprobs(PROMPT)),
        "pin": lambda: lm.cache_kv(PROMPT),
        "warm-up": lambda: engine.start_model("m"),
    }
    for way, function in ways.items():
        lm.clear_cache()
        with interrupting:
            function()
        say(way, "passes", interrupting.num_passes)
    interrupting.is_noticed.set()
    row = lm.next_token_logprobs_sync(PROMPT)
    torch.testing.assert_close(row, fresh_row(lm.model, PROMPT), rtol=0, atol=2e-5)
    lm._evaluator.passes.tree.check_integrity()

    late.append(lambda: say("exit passes", interrupting.num_passes))
    lm.clear_cache()
    interrupting.__enter__()
    try:
        lm.next_token_logprobs_sync(PROMPT)
    except KeyboardInterrupt:
        interrupting.is_noticed.set()
        raise


def interrupt_a_request():
    """Interrupt a program that waits for an engine's request: exiting ends the evaluation."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lm = tiny(row_cache_bytes=0)
    interrupting = Interrupting(lm)
    engine = Engine()
    engine.install_model("m", lm, warm_up=False)
    engine.start_model("m")
    closing = threading.Thread(target=wait_for_stop, args=(lm, interrupting), daemon=True)
    late.append(lambda: say("exit passes", interrupting.num_passes))
    try:
        engine.start_request_ids("m", PROMPT, max_new_tokens=2).result()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        closing.start()
        raise


def wait_for_stop(lm, interrupting):
    """End the first pass once the interpreter has begun to end the threads."""
    while not lm._batcher._worker.is_stopped:
        pass
    interrupting.is_noticed.set()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
