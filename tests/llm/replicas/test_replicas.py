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
import torch

from genlm_backend import load_model_by_name
from genlm_backend.errors import (
    AdapterError,
    EngineDiedError,
    ModelNotFoundError,
    ModelStateError,
    OptionError,
    OptionTypeError,
)
from genlm_backend.llm import (
    AsyncReplicas,
    EvaluatorInfo,
    ProcessEvaluator,
    Query,
    StatelessEvaluator,
)
from tests.llm.conftest import word_tokenizer
from tests.llm.elsewhere.over_there import Told, saved
from tests.llm.elsewhere.test_process import close_to, is_there, nothing_is_left, until
from tests.llm.toy import VOCAB

__all__ = ["nothing_is_left"]  # which every test here uses


class Mortal(StatelessEvaluator):
    """Rows that tell their context; dies when it is told to, and lives on when restarted."""

    def __init__(self, width=VOCAB):
        super().__init__(width)
        self.info = EvaluatorInfo(width, num_slots=10_000, can_forget=True)
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


async def test_contexts_go_on_where_they_were_and_are_spread():
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
async def test_a_replica_that_dies_gives_its_contexts_to_the_others(is_sync):
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
        with pytest.raises(ModelStateError, match="replica 1 is of a kind"):
            lm.restart()
        for evaluator in evaluators:
            evaluator.dies_with = True
        with pytest.raises(EngineDiedError):
            await lm.next_token_logprobs([1])
        with pytest.raises(EngineDiedError, match="no replica is alive; the last one: by the test"):
            await lm.next_token_logprobs([1])
        with pytest.raises(EngineDiedError, match="no replica is alive"):
            lm.batch_next_token_logprobs_sync([[1], [2]])
        assert lm.num_alive == 0
        lm.clear_cache()


async def test_loads_are_even_again_after_errors_and_cancelled_callers():
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


async def test_a_death_that_is_known_late_goes_to_another_replica():
    """An old choice is not taken for one of the replica that has come back since."""
    lm, evaluators = make(2)
    with lm:
        distributor = lm._distributor
        choice = distributor._send(Query([1]))
        distributor.died(lm._set.replicas[choice.replica], EngineDiedError("by the test"))
        distributor.back(choice.replica, lm._set.infos[0])
        evaluators[choice.replica].dies_with = True
        close_to(await lm.next_token_logprobs([1]), [1])
        distributor._ended(Query([1]), choice)
        assert evaluators[1 - choice.replica].asked == [[(1,)]]


def test_coroutines_collected_at_any_moment_lock_nobody_out():
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


async def test_where_all_are_dead_callers_are_not_kept():
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


def test_nothing_is_remembered_of_replicas_that_keep_nothing():
    with AsyncReplicas(word_tokenizer(), [Told(), Told()], row_cache_bytes=0) as lm:
        lm.batch_next_token_logprobs_sync([[i, j] for i in range(10) for j in range(10)])
        assert lm._distributor._router._sent.num_tokens == [0, 0]


def test_mistakes_are_told_before_anything_is_queued():
    with pytest.raises(OptionError, match="evaluators is empty"):
        AsyncReplicas(word_tokenizer(), [])
    one = Mortal()
    with pytest.raises(OptionError, match="evaluators has one twice"):
        AsyncReplicas(word_tokenizer(), [one, one])
    with pytest.raises(OptionTypeError, match="evaluators must be an Evaluator"):
        AsyncReplicas(word_tokenizer(), [one, 5])
    with pytest.raises(OptionError, match=r"of one model, got vocabularies of \[96, 95\] ids"):
        AsyncReplicas(word_tokenizer(), [Mortal(), Mortal(95)])
    with make()[0] as lm, pytest.raises(OptionError, match="another model's"):
        AsyncReplicas(word_tokenizer(), lm._set.evaluators)
    for wrong, error in ((0, OptionError), ("2", OptionTypeError), (True, OptionTypeError)):
        with pytest.raises(error, match="replicas"):
            load_model_by_name("smollm2", llm_opts={"replicas": wrong})
    with pytest.raises(OptionError, match="of transformers, and not of 'vllm'"):
        load_model_by_name("smollm2", backend="vllm", llm_opts={"replicas": 2})
    with pytest.raises(OptionTypeError, match="num_treads"):
        load_model_by_name("smollm2", llm_opts={"replicas": 2, "num_treads": 2})
    with pytest.raises(OptionError, match="num_threads"):
        load_model_by_name("smollm2", llm_opts={"replicas": 2, "num_threads": 0})
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        load_model_by_name("no-such-model", llm_opts={"replicas": 2})


class WithAdapters(Mortal):
    def __init__(self, refuses):
        super().__init__()
        self.info = EvaluatorInfo(VOCAB, can_forget=True, takes_adapters=True)
        self.refuses = refuses


# Of a stateless evaluator, adapters are final.
def add(self, adapter, path):
    if self.refuses:
        raise AdapterError("by the test")
    self.adapters.append(adapter)


WithAdapters.add_adapter = add
WithAdapters.remove_adapter = lambda self, adapter: self.adapters.remove(adapter)


def test_an_adapter_is_on_all_replicas_or_on_none():
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
        lm.remove_lora("one")
        assert [len(e.adapters) for e in evaluators] == [0, 0, 0]


# ---------------------------------------------------------------- processes


@pytest.mark.timeout(300)
async def test_processes_that_are_killed_come_back_and_callers_notice_nothing():
    """Particles go on while one process after another is killed."""
    evaluators = [ProcessEvaluator(Told) for _ in range(2)]
    with AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0) as lm:
        done = []

        async def particle(index):
            generator, context = random.Random(index), [index]
            while len(context) < 60:
                close_to(await lm.next_token_logprobs(context), context)
                context.append(generator.randrange(80))
                done.append(1)
                await asyncio.sleep(0.05)

        async def killer():
            for number in (0, 1):
                enough = min(len(done) + 60, 8 * 59)  # of all that there will be
                while len(done) < enough:
                    await asyncio.sleep(0.01)
                os.kill(evaluators[number].process_id, signal.SIGKILL)
                while lm.num_alive == 2:  # until somebody asks it
                    await ask_all(lm, [[i, number] for i in range(20)])
                while lm.num_alive < 2:
                    await asyncio.sleep(0.01)

        await asyncio.wait_for(asyncio.gather(killer(), *map(particle, range(8))), 250)
        assert lm.num_alive == 2
        processes = [evaluator.process_id for evaluator in evaluators]
        for process in processes:
            os.kill(process, signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            await lm.next_token_logprobs([1])
        lm.restart()
        assert lm.num_alive == 2
        close_to(await lm.next_token_logprobs([1]), [1])
        processes = [evaluator.process_id for evaluator in evaluators]
    until(lambda: not any(map(is_there, processes)))


def test_a_model_is_loaded_several_times():
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = saved("llama")
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()).save_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    options = {"replicas": 2, "kv_cache_bytes": 1 << 20, "batch_size": 4, "self_check": False}
    with load_model_by_name(folder, llm_opts=options) as lm:
        assert isinstance(lm, AsyncReplicas)
        assert (lm.num_replicas, lm.num_alive, lm.batch_size) == (2, 2, 4)
        contexts = [[i, 1, 2, j] for i in range(5) for j in range(4)]
        rows = lm.batch_next_token_logprobs_sync(contexts)
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor(contexts)).logits[:, -1]
        torch.testing.assert_close(rows, logits.log_softmax(-1), rtol=0, atol=2e-5)
        used = [replica.answering.counts.tokens_computed for replica in lm._set.replicas]
        assert all(used)
        lm.cache_kv([7, 7, 7, 7])
        assert asyncio.run(lm.num_cached_tokens([7, 7, 7, 7, 1])) == 4
        process = lm._set.evaluators[0].process_id
        os.kill(process, signal.SIGKILL)
        lm.clear_cache()
        torch.testing.assert_close(
            lm.batch_next_token_logprobs_sync(contexts), rows, rtol=0, atol=2e-5
        )


def test_those_that_died_while_nobody_asked_are_restarted():
    evaluators = [ProcessEvaluator(Told) for _ in range(2)]
    with AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0) as lm:
        for evaluator in evaluators:
            os.kill(evaluator.process_id, signal.SIGKILL)
        time.sleep(0.3)
        lm.restart()
        assert lm.num_alive == 2
        close_to(lm.next_token_logprobs_sync([1]), [1])
        for evaluator in evaluators:
            os.kill(evaluator.process_id, signal.SIGKILL)
        time.sleep(0.3)
        with pytest.raises(EngineDiedError):
            lm.cache_kv([1, 2])


def test_close_while_one_is_being_restarted():
    evaluators = [ProcessEvaluator(Told) for _ in range(2)]
    lm = AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0)
    before = threading.active_count()
    os.kill(evaluators[0].process_id, signal.SIGKILL)
    lm.batch_next_token_logprobs_sync([[i] for i in range(10)])
    time.sleep(0.3)
    start = time.monotonic()
    lm.close()
    assert time.monotonic() - start < 3
    assert threading.active_count() < before
    assert all(evaluator.process_id is None for evaluator in evaluators)
