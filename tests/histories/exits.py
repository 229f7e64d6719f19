"""Exits: what is asked after the main thread has ended, and later still."""

import threading

from genlm_backend import Engine
from genlm_backend.model.batched_lm import BatchedLM
from genlm_backend.queries.evaluator import StatelessEvaluator
from tests.histories import late, say
from tests.histories.holders import MAKE, OfTrie
from tests.llm.conftest import word_tokenizer


def error_of(function):
    """The class of what a call raises, or what it returned."""
    try:
        found = function()
    except Exception as error:
        return type(error).__name__
    return f"returned {type(found).__name__}"


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
            self.check_cancelled()


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
