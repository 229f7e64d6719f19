"""Replicas in processes, which are killed."""

import asyncio
import os
import random
import signal
import threading
import time

import pytest
import torch

from genlm_backend import load_model_by_name
from genlm_backend.errors import EngineDiedError, PrefixFileError
from genlm_backend.llm import AsyncReplicas, ProcessEvaluator
from genlm_backend.queries.query import RowQuery
from tests.llm.conftest import word_tokenizer
from tests.llm.elsewhere.over_there import Told, saved
from tests.llm.elsewhere.test_process import close_to, is_there, nothing_is_left, until
from tests.llm.replicas.mortal import ask_all
from tests.naive import naive_row

__all__ = ["nothing_is_left"]  # which every test here uses


@pytest.mark.timeout(300)
async def test_killed_processes_restart_while_particles_get_exact_rows():
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


def test_replicas_option_loads_a_model_into_several_processes():
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
        wanted = torch.stack([naive_row(plain, context) for context in contexts])
        torch.testing.assert_close(rows, wanted, rtol=0, atol=2e-5)
        used = [replica.evaluator.counts().tokens_computed for replica in lm._set.replicas]
        assert all(used)
        lm.cache_kv([7, 7, 7, 7])
        assert asyncio.run(lm.num_cached_tokens([7, 7, 7, 7, 1])) == 4
        process = lm._set.evaluators[0].process_id
        os.kill(process, signal.SIGKILL)
        lm.clear_cache()
        torch.testing.assert_close(
            lm.batch_next_token_logprobs_sync(contexts), rows, rtol=0, atol=2e-5
        )


def test_int8_prefix_saved_by_one_replica_is_loaded_by_all(tmp_path):
    """One replica writes a file, all of them read it, dead ones aside."""
    from transformers import PreTrainedTokenizerFast

    folder = saved("llama")
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()).save_pretrained(folder)
    options = {
        **{"replicas": 2, "kv_cache_bytes": 1 << 20, "kv_cache_dtype": "int8"},
        **{"num_threads": 1, "packs_weights": False, "self_check": False, "row_cache_bytes": 0},
    }
    prompt, path = list(range(1, 30)), tmp_path / "prompt"
    with load_model_by_name(folder, llm_opts=options) as lm:
        assert lm.kv_cache_dtype == "int8"
        expected = lm.next_token_logprobs_sync([*prompt, 5])
        lm.save_prefix(prompt, path)
        os.kill(lm._set.evaluators[0].process_id, signal.SIGKILL)
        lm.save_prefix(prompt, path)
        until(lambda: lm.num_alive == 2)
        lm.clear_cache()
        assert list(lm.load_prefix(path)) == prompt
        caches = [e.num_cached(RowQuery(lm.context([*prompt, 5]))) for e in lm._set.evaluators]
        assert caches == [29, 29]
        torch.testing.assert_close(
            lm.next_token_logprobs_sync([*prompt, 5]), expected, rtol=0, atol=1e-5
        )
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(PrefixFileError, match="is truncated"):
            lm.load_prefix(path)
        for evaluator in lm._set.evaluators:
            os.kill(evaluator.process_id, signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            lm.save_prefix(prompt, path)


def test_replicas_that_died_while_idle_are_restarted():
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


def test_close_during_a_restart_is_quick_and_leaves_no_process():
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
