"""Several evaluators of one model: deaths, adapters, mistakes."""

import asyncio
import gc
import os
import random
import signal
import threading
import time
import warnings
import weakref

import pytest

from genlm_backend import load_model_by_name
from genlm_backend.backends.hf.hf_evaluator import HFEvaluator
from genlm_backend.errors import (
    AdapterError,
    BatcherClosedError,
    EngineDiedError,
    ModelNotFoundError,
    ModelStateError,
    OptionError,
    OptionTypeError,
    QueryDroppedError,
)
from genlm_backend.llm import AsyncReplicas, EvaluatorInfo, RestartableEvaluator, RowQuery
from genlm_backend.queries.evaluator import EvaluatorCounts
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.elsewhere.over_there import Told
from tests.llm.elsewhere.test_process import close_to, nothing_is_left, until
from tests.llm.replicas.mortal import Mortal, ask_all, make
from tests.llm.toy import VOCAB, ToyEvaluator

__all__ = ["nothing_is_left"]  # which every test here uses


async def test_contexts_are_spread_and_continue_on_the_same_replica():
    lm, evaluators = make()
    with lm:
        contexts = [[i, *range(10), i] for i in range(12)]
        await ask_all(lm, contexts)
        first = [{ids for batch in e.asked for ids in batch} for e in evaluators]
        assert all(first)
        for token in range(5):
            contexts = [[*context, token] for context in contexts]
            await ask_all(lm, contexts)
        for evaluator, own in zip(evaluators, first, strict=True):
            for batch in evaluator.asked:
                assert all(ids[:12] in own for ids in batch)


@pytest.mark.parametrize("is_sync", [False, True])
async def test_contexts_of_a_dead_replica_go_to_the_others(is_sync):
    lm, evaluators = make()
    contexts = [[i, *range(10), i] for i in range(12)]
    with lm:
        await ask_all(lm, contexts)
        evaluators[1].dies_with = True
        longer = [[*context, 5] for context in contexts]
        if is_sync:
            rows = lm.batch_next_token_logprobs_sync(longer)
            for row, context in zip(rows, longer, strict=True):
                close_to(row, context)
        else:
            await ask_all(lm, longer)
        assert lm.num_alive == 2
        assert evaluators[1].is_dead
        asked = len(evaluators[1].asked)
        await ask_all(lm, [[*context, 6] for context in longer])
        assert len(evaluators[1].asked) == asked
        with pytest.raises(ModelStateError, match="replica 1 cannot restart"):
            lm.restart()
        for evaluator in evaluators:
            evaluator.dies_with = True
        with pytest.raises(EngineDiedError):
            await lm.next_token_logprobs([1])
        with pytest.raises(EngineDiedError, match="no replica is alive; the last error: by the"):
            await lm.next_token_logprobs([1])
        with pytest.raises(EngineDiedError, match="no replica is alive"):
            lm.batch_next_token_logprobs_sync([[1], [2]])
        assert lm.num_alive == 0
        lm.clear_cache()


async def test_loads_return_to_zero_after_errors_and_cancellations():
    lm, _ = make()
    with lm:
        for seed in range(30):
            generator = random.Random(seed)
            tasks = [
                asyncio.ensure_future(lm.next_token_logprobs([generator.randrange(80), 1 + i % 3]))
                for i in range(20)
            ]
            tasks.append(asyncio.ensure_future(lm.next_token_logprobs([94])))
            await asyncio.sleep(generator.random() / 500)
            for task in generator.sample(tasks, 6):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        router = lm._distributor._router
        assert [(load.num_contexts, load.num_tokens) for load in router.loads] == [(0, 0)] * 3
        assert not lm._distributor._asked


async def test_query_of_a_replica_that_died_twice_goes_to_another():
    """An old choice is not taken for one of the replica that has come back since."""
    lm, evaluators = make(2)
    with lm:
        distributor = lm._distributor
        choice = distributor._send(RowQuery([1]))
        distributor.died(lm._set.replicas[choice.replica], EngineDiedError("by the test"))
        lm._set.replicas[choice.replica].is_dead = False
        distributor.back(choice.replica, lm._set.infos[0])
        evaluators[choice.replica].dies_with = True
        close_to(await lm.next_token_logprobs([1]), [1])
        distributor._ended(RowQuery([1]), choice)
        assert evaluators[1 - choice.replica].asked == [[(1,)]]


def test_coroutines_garbage_collected_at_any_time_cause_no_deadlock():
    lm, _ = make(2)
    threshold = gc.get_threshold()
    gc.set_threshold(5, 2, 2)  # so that it happens inside of locks
    try:
        with lm, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(150):
                generator = random.Random(seed)
                contexts = [[generator.randrange(80) for _ in range(4)] for _ in range(8)]
                loop = asyncio.new_event_loop()
                tasks = [loop.create_task(lm.next_token_logprobs(ids)) for ids in contexts]
                for _ in range(3):
                    loop.call_soon(loop.stop)
                    loop.run_forever()
                for task in tasks:
                    task._log_destroy_pending = False
                loop.close()
                del tasks, loop, task
                asyncio.run(ask_all(lm, contexts[:3]))

            def is_idle():
                gc.collect()
                asyncio.run(ask_all(lm, [[i, j] for i in range(9) for j in range(9)]))
                return not any(load.num_contexts for load in lm._distributor._router.loads)

            until(is_idle)
    finally:
        gc.set_threshold(*threshold)


def test_an_interrupt_reaches_a_blocked_caller_at_once():
    lm, evaluators = make(2)
    with lm:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            lm.batch_next_token_logprobs_sync([[90], [1, 90], [2, 90], [3, 90]])
        assert time.monotonic() - start < 3
        close_to(lm.next_token_logprobs_sync([1]), [1])
        assert [len(evaluator.asked) for evaluator in evaluators] != [0, 0]


async def test_contexts_are_not_retained_once_all_replicas_are_dead():
    lm, evaluators = make(2)
    with lm:
        for evaluator in evaluators:
            evaluator.dies_with = True

        class Kept(list):
            pass

        references = []
        for _ in range(5):
            kept = Kept([1])
            references.append(weakref.ref(kept))
            with pytest.raises(EngineDiedError):
                await lm.next_token_logprobs(kept)
            del kept
        gc.collect()
        assert not any(reference() for reference in references)


def test_router_remembers_no_tokens_of_replicas_without_a_cache():
    with AsyncReplicas(word_tokenizer(), [Told(), Told()], row_cache_bytes=0) as lm:
        lm.batch_next_token_logprobs_sync([[i, j] for i in range(10) for j in range(10)])
        assert lm._distributor._router._sent.num_tokens == [0, 0]


def test_invalid_evaluators_and_replica_options_are_refused():
    with pytest.raises(OptionError, match="evaluators is empty"):
        AsyncReplicas(word_tokenizer(), [])
    one = Mortal()
    with pytest.raises(OptionError, match="evaluators contains an evaluator twice"):
        AsyncReplicas(word_tokenizer(), [one, one])
    with pytest.raises(OptionTypeError, match="evaluators must be an Evaluator"):
        AsyncReplicas(word_tokenizer(), [one, 5])
    with pytest.raises(OptionError, match=r"of one model, got vocabularies of \[96, 95\] ids"):
        AsyncReplicas(word_tokenizer(), [Mortal(), Mortal(95)])
    with make()[0] as lm, pytest.raises(OptionError, match="belongs to another model"):
        AsyncReplicas(word_tokenizer(), lm._set.evaluators)
    for wrong, error in ((0, OptionError), ("2", OptionTypeError), (True, OptionTypeError)):
        with pytest.raises(error, match="replicas"):
            load_model_by_name("smollm2", llm_opts={"replicas": wrong})
    with pytest.raises(OptionError, match="needs backend 'hf', not 'vllm'"):
        load_model_by_name("smollm2", backend="vllm", llm_opts={"replicas": 2})
    with pytest.raises(OptionTypeError, match="num_treads"):
        load_model_by_name("smollm2", llm_opts={"replicas": 2, "num_treads": 2})
    with pytest.raises(OptionError, match="num_threads"):
        load_model_by_name("smollm2", llm_opts={"replicas": 2, "num_threads": 0})
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        load_model_by_name("no-such-model", llm_opts={"replicas": 2})


@pytest.mark.parametrize("first", [0, 1])
async def test_particles_use_replicas_of_which_only_one_takes_steps(first):
    evaluators = [HFEvaluator(families.make("llama")), ToyEvaluator()]
    with AsyncReplicas(word_tokenizer(), evaluators[first:] + evaluators[:first]) as lm:
        group = lm.particles([[i, 1] for i in range(40)], 1, seed=0)
        for _ in range(2):
            draws = await group.draw()
            assert (draws.token_ids >= 0).all()
            group.append(draws.token_ids)


class WithAdapters(Mortal):
    def __init__(self, refuses):
        super().__init__()
        self.info = EvaluatorInfo(VOCAB, takes_adapters=True)
        self.refuses = refuses


# Of a stateless evaluator, adapters are final.
def add(self, adapter, path):
    if self.refuses:
        raise AdapterError("by the test")
    self.adapters.append(adapter)


WithAdapters.add_adapter = add
WithAdapters.remove_adapter = lambda self, adapter: self.adapters.remove(adapter)


def test_adapter_is_loaded_on_all_replicas_or_on_none():
    evaluators = [WithAdapters(False) for _ in range(3)]
    with AsyncReplicas(word_tokenizer(), evaluators) as lm:
        lm.add_new_lora("here", "one")
        assert [len(e.adapters) for e in evaluators] == [1, 1, 1]
        evaluators[1].refuses = True
        with pytest.raises(AdapterError, match="by the test"):
            lm.add_new_lora("there", "two")
        assert [len(e.adapters) for e in evaluators] == [1, 1, 1]
        with pytest.raises(AdapterError, match="two"):
            lm.next_token_logprobs_sync([1], lora_name="two")
        close_to(lm.next_token_logprobs_sync([1], lora_name="one"), [1])
        with pytest.raises(AdapterError, match="by the test"):
            lm.add_new_lora("there", "one")
        close_to(lm.next_token_logprobs_sync([1], lora_name="one"), [1])
        evaluators[1].refuses = False
        lm.add_new_lora("there", "one")
        assert [[a.number for a in e.adapters] for e in evaluators] == [[4]] * 3
        lm.remove_lora("one")
        assert [len(e.adapters) for e in evaluators] == [0, 0, 0]


class Reluctant(RestartableEvaluator, Mortal):
    """One that is restarted when the test wants it to be, with the adapters that are there then."""

    def __init__(self):
        super().__init__()
        self.info = EvaluatorInfo(VOCAB, num_slots=10_000, takes_adapters=True)
        self.adapters, self.loaded = {}, {}
        self.may_restart = threading.Event()

    def restart(self):
        while not self.may_restart.wait(0.01):
            self.check_cancelled()
        self.dies_with = self.is_dead = False
        self.loaded = {}
        self.load_adapters()
        return self.info

    def load_adapters(self):
        self.loaded = dict(self.adapters)


def add_to(self, adapter, path):
    check_alive(self)
    self.adapters = {**self.adapters, adapter: path}
    self.load_adapters()


def check_alive(self):
    if self.is_dead:
        raise EngineDiedError("by the test")


def remove_from(self, adapter):
    check_alive(self)
    self.adapters = {own: path for own, path in self.adapters.items() if own != adapter}
    self.load_adapters()


Reluctant.add_adapter, Reluctant.remove_adapter = add_to, remove_from
Reluctant.num_cached = lambda self, query, tier=None: check_alive(self) or 0


@pytest.mark.parametrize("is_sync", [False, True])
async def test_callers_of_a_dead_replica_do_not_wait_for_its_restart(is_sync):
    evaluators = [Reluctant(), Reluctant()]
    with AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0, batch_size=1) as lm:
        evaluators[0].dies_with = True
        contexts = [[i, 1] for i in range(12)]
        if is_sync:
            lm.batch_next_token_logprobs_sync(contexts)
        else:
            await asyncio.wait_for(ask_all(lm, contexts), 10)
        assert lm.num_alive == 1
        assert len(evaluators[0].asked) == 1
        evaluators[0].may_restart.set()
        until(lambda: lm.num_alive == 2)
        await ask_all(lm, contexts)
        assert len(evaluators[0].asked) > 1


async def test_restarted_replica_has_the_adapters_of_the_others():
    evaluators = [Reluctant(), Reluctant()]
    with AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0) as lm:
        lm.add_new_lora("before", "one")
        lm.add_new_lora("before too", "two")
        evaluators[0].dies_with = True
        await ask_all(lm, [[i, 1] for i in range(12)])
        assert lm.num_alive == 1
        lm.add_new_lora("meanwhile", "three")
        lm.add_new_lora("for a moment", "four")
        lm.remove_lora("one")
        lm.remove_lora("four")
        evaluators[0].may_restart.set()
        until(lambda: lm.num_alive == 2)
        for evaluator in evaluators:
            found = [(adapter.name, path) for adapter, path in evaluator.loaded.items()]
            assert sorted(found) == [("three", "meanwhile"), ("two", "before too")]


async def test_adapter_removed_while_a_replica_is_dead_stays_removed():
    """Nobody had noticed its death."""
    evaluators = [Reluctant(), Reluctant()]
    with AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0) as lm:
        lm.add_new_lora("here", "one")
        evaluators[0].is_dead = True
        lm.remove_lora("one")
        evaluators[0].may_restart.set()
        until(lambda: lm.num_alive == 2)
        await ask_all(lm, [[i, 1] for i in range(12)])
        assert [evaluator.loaded for evaluator in evaluators] == [{}, {}]
        for evaluator in evaluators:
            evaluator.may_restart.clear()
            evaluator.is_dead = True
        with pytest.raises(EngineDiedError, match="no replica is alive"):
            lm.add_new_lora("there", "two")
        for evaluator in evaluators:
            evaluator.may_restart.set()
        lm.restart()
        assert [evaluator.loaded for evaluator in evaluators] == [{}, {}]


async def test_replica_death_without_waiting_callers_is_noticed():
    evaluators = [Reluctant(), Reluctant()]
    with AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0) as lm:
        task = asyncio.ensure_future(lm.next_token_logprobs([1, 87]))  # which takes a moment
        while not any(evaluator.asked for evaluator in evaluators):
            await asyncio.sleep(0.01)
        (asked,) = [evaluator for evaluator in evaluators if evaluator.asked]
        asked.is_dead = True
        task.cancel()
        await lm.num_cached_tokens([1])
        until(lambda: lm.num_alive == 1)
        asked.may_restart.set()
        until(lambda: lm.num_alive == 2)


class Remembering(Mortal):
    """One that keeps all contexts that it was asked."""


def longest_kept(self, query, tier=None):
    asked, wanted = {ids for batch in self.asked for ids in batch}, query.token_ids
    sizes = range(len(wanted) + 1)
    return max(n for n in sizes if n == 0 or any(ids[:n] == wanted[:n] for ids in asked))


Remembering.num_cached = longest_kept
Remembering.counts = lambda self: EvaluatorCounts(num_forwards=len(self.asked))


async def test_num_cached_tokens_ignores_queries_sent_after_it():
    evaluators = [Remembering(), Remembering()]
    with AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0) as lm:
        release = threading.Event()
        other = lm._batcher.call_soon(release.wait)  # something else that is done to all replicas
        try:
            counted = asyncio.ensure_future(lm.num_cached_tokens([1, 2, 3]))
            await ask_all(lm, [[1, 2, 3]])
        finally:
            release.set()
        assert await counted == 0
        assert await lm.num_cached_tokens([1, 2, 3]) == 3
        other.result()


async def test_statistics_sum_the_forward_passes_of_all_replicas():
    evaluators = [Remembering(), Remembering()]
    with AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0) as lm:
        for token in range(20):
            await ask_all(lm, [[i, token] for i in range(6)])
            total = sum(len(evaluator.asked) for evaluator in evaluators)
            assert lm.statistics().num_forwards == total
        assert all(evaluator.asked for evaluator in evaluators)


def test_close_raises_an_error_in_every_blocked_caller():
    def ask(lm, start, errors):
        try:
            for i in range(10**6):
                lm.batch_next_token_logprobs_sync([[start, i % 80, j] for j in range(3)])
        except Exception as error:
            errors.append(error)

    for history in range(40):
        lm, _ = make(2)
        errors = []
        threads = [threading.Thread(target=ask, args=(lm, i, errors)) for i in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.005 + history % 10 / 1000)
        lm.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert {type(error) for error in errors} <= {BatcherClosedError, QueryDroppedError}
        assert len(errors) == 4


def test_prompt_sent_to_all_replicas_counts_as_known_on_each():
    lm, _ = make(2)
    with lm:
        lm._distributor.sent_to_all(RowQuery([*range(50)]))
        matches = lm._distributor._router._sent.matches(
            None, RowQuery([*range(50)]).context.packed().tobytes()
        )
        assert [(match.num_known, match.num_waiting) for match in matches] == [(50, 0)] * 2
