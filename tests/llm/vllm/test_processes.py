"""Engines in other processes: the same rows, whatever the history, and an end that is told."""

import asyncio
import os
import pickle
import random
import signal
import sys
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import psutil
import pytest
import torch

from genlm_backend import AsyncVirtualLM
from genlm_backend.errors import EngineDiedError
from genlm_backend.llm import Readout, RowQuery
from tests.llm.families import VOCAB
from tests.llm.vllm import real
from tests.naive import naive_row, naive_scores

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.slow)],
    ids=["one worker", "two workers"],
)
def lm(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == 1:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        else:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if os.cpu_count() > 1 else "0|0")
        engine = real.load_tiny(
            tensor_parallel_size=request.param, block_size=32, num_gpu_blocks_override=40
        )
        assert not engine._core.is_local
        with AsyncVirtualLM(engine, row_cache_bytes=0) as lm:
            yield lm


def check(row, context):
    expected = naive_row(real.tiny_model(), context)
    torch.testing.assert_close(row, expected, rtol=0, atol=1e-4)


async def test_rows_and_samples_are_exact_amid_forks_evictions_and_cancels(lm):
    randomness = random.Random(0)
    pool = [[randomness.randrange(VOCAB) for _ in range(n)] for n in (3, 17, 60, 200)]

    async def ask(context):
        row = await lm.next_token_logprobs(context)
        if randomness.random() < 0.3:
            check(row, context)

    async def sample(prompts, seed):
        return await lm.batch_sample(prompts, 5, [], seed=seed)

    samples = []
    for turn in range(60):
        asked = []
        for _ in range(randomness.randrange(1, 20)):
            base = randomness.choice(pool)
            fork = base[: randomness.randrange(1, len(base) + 1)]
            new = [randomness.randrange(VOCAB) for _ in range(randomness.randrange(1, 4))]
            asked.append((fork + new)[:255])
        pool.extend(asked)
        tasks = [asyncio.create_task(ask(context)) for context in asked]
        if turn % 7 == 3:
            samples.append(([asked[0][:200]], turn))
            tasks.append(asyncio.create_task(sample(*samples[-1])))
        if turn % 5 == 2:
            await asyncio.sleep(0.002)
            tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [r for r in results if isinstance(r, Exception)]
        assert not failures, failures
        if turn % 7 == 3:
            samples[-1] += (results[-1],)
    for prompts, seed, sampled in samples:
        assert await sample(prompts, seed) == sampled
    assert lm.statistics().num_evicted_tokens > 0


def test_round_of_particles_is_one_forward_pass(lm):
    contexts = [[i, i + 1, i + 2] for i in range(20)]
    lm.batch_next_token_logprobs_sync(contexts)
    before = lm.statistics()
    for step in range(4):
        contexts = [[*context, step] for context in contexts]
        lm.batch_next_token_logprobs_sync(contexts)
    after = lm.statistics()
    assert after.num_forwards - before.num_forwards == 4
    assert after.tokens_computed - before.tokens_computed == 80


async def test_readouts_are_sent_between_processes_without_their_rows(lm, monkeypatch):
    sizes = []
    ask = lm._vllm.engine._core._ask

    def sized(method, *args):
        found = ask(method, *args)
        sizes.append(len(pickle.dumps(found)))
        return found

    contexts = [[i, i + 1] for i in range(6)]
    rows = await lm.batch_next_token_logprobs(contexts)
    lm.clear_cache()
    monkeypatch.setattr(lm._vllm.engine._core, "_ask", sized)
    numpy = np.random.default_rng(0)
    found = await asyncio.gather(
        *(lm.next_token_top(context, 3) for context in contexts),
        *(lm.next_token_logprobs_of(context, [5, 7]) for context in contexts),
        *(lm.draw_next_token(context, generator=numpy, allowed=[4, 5, 9]) for context in contexts),
    )
    assert sizes
    assert max(sizes) < 18 * 100  # bytes, and a row has four for each token
    numpy = np.random.default_rng(0)
    for row, top, chosen, drawn in zip(rows, found[:6], found[6:12], found[12:], strict=True):
        best = row.topk(3)
        assert top.token_ids.tolist() == best.indices.tolist()
        torch.testing.assert_close(top.logprobs, best.values, rtol=0, atol=1e-4)
        torch.testing.assert_close(chosen, row[[5, 7]], rtol=0, atol=1e-4)
        masked = torch.full_like(row, -torch.inf)
        masked[[4, 5, 9]] = row[[4, 5, 9]]
        assert drawn.token_id == lm.draw(masked, generator=numpy)
    row, top = await asyncio.gather(
        lm.next_token_logprobs(contexts[0]), lm.next_token_top(contexts[0], 1)
    )
    torch.testing.assert_close(row, rows[0], rtol=0, atol=1e-4)
    assert top.token_ids.tolist() == [int(row.argmax())]


async def test_readout_of_a_local_class_is_evaluated_in_the_callers_process(lm):
    @dataclass(frozen=True)
    class Least(Readout):
        query: RowQuery
        wanted: ClassVar[str] = "a float"

        @classmethod
        def of_rows(cls, readouts, rows):
            return rows.amin(-1).tolist()

        def is_answered_by(self, answer, vocab_size):
            return isinstance(answer, float)

    row = await lm.next_token_logprobs([3, 4, 5])
    lm.clear_cache()
    assert await lm.read([3, 4, 5], Least) == pytest.approx(float(row.min()), abs=1e-4)


async def test_readout_of_a_module_missing_in_the_engine_is_answered(lm, monkeypatch):
    module = types.ModuleType("module_of_one_process")
    monkeypatch.setitem(sys.modules, "module_of_one_process", module)
    source = """
from dataclasses import dataclass
from typing import ClassVar
from genlm_backend.llm import Readout, RowQuery
@dataclass(frozen=True)
class Least(Readout):
    query: RowQuery
    wanted: ClassVar[str] = "a float"
    @classmethod
    def of_rows(cls, readouts, rows):
        return rows.amin(-1).tolist()
    def is_answered_by(self, answer, vocab_size):
        return isinstance(answer, float)
"""
    exec(source, vars(module))
    row = await lm.next_token_logprobs([6, 4, 5])
    lm.clear_cache()
    least, top = await asyncio.gather(
        lm.read([6, 4, 5], module.Least), lm.next_token_top([6, 4, 5], 1)
    )
    assert least == pytest.approx(float(row.min()), abs=1e-4)
    assert top.token_ids.tolist() == [int(row.argmax())]


async def test_text_scored_together_with_a_row_takes_at_most_three_passes(lm):
    randomness = random.Random(3)
    text = [randomness.randrange(VOCAB) for _ in range(120)]
    for start in (30, 1, 119, 30):  # the last time its prompt's keys and values are there
        before = lm.statistics().num_forwards
        scores, row = await asyncio.gather(
            lm.score(text[:start], text[start:]), lm.next_token_logprobs(text[:start])
        )
        chosen = naive_scores(real.tiny_model(), text, start)
        torch.testing.assert_close(scores, chosen, rtol=0, atol=1e-4)
        check(row, text[:start])
        assert lm.statistics().num_forwards - before <= 3


async def test_sample_outgrowing_the_free_blocks_evicts_sessions(lm):
    lm.clear_cache()
    context = [1]
    for _ in range(3):
        context.append(int(naive_row(real.tiny_model(), context).argmax()))
    await asyncio.gather(*(lm.next_token_logprobs([i, 2] * 100) for i in range(5)))  # 35 of 39
    before = lm.statistics().num_evicted_tokens
    sampled = await asyncio.wait_for(lm.sample([1], 220, [], temperature=0), 60)
    assert len(sampled) == 220
    assert sampled[:3] == context[1:]
    assert lm.statistics().num_evicted_tokens - before >= 200
    check(lm.next_token_logprobs_sync([0, 2] * 100), [0, 2] * 100)


@pytest.mark.parametrize("method", ["row", "score"])
async def test_late_step_reports_of_a_slow_engine_evict_no_session(lm, monkeypatch, method):
    text = [5, 9, 7, 3, 8]
    lm.clear_cache()
    await asyncio.gather(*(lm.next_token_logprobs([i, 4]) for i in range(8)))
    core, before = lm._vllm.engine._core, lm.statistics().num_evicted_tokens
    own, late = core.step, [[]] * 6 + [None] * 60

    def step(timeout):
        if not late:
            return own(timeout)
        core.num_running, core.is_fresh = 0, True  # as many requests as there were
        return late.pop(0)

    monkeypatch.setattr(core, "step", step)
    if method == "row":
        check(await lm.next_token_logprobs(text), text)
    else:
        (score,) = await lm.score(text[:4], text[4:])
        expected = naive_row(real.tiny_model(), text[:4])[text[4]]
        torch.testing.assert_close(score, expected, rtol=0, atol=1e-4)
    assert late == []
    assert lm.statistics().num_evicted_tokens == before


def test_row_after_clear_cache_is_exact(lm):
    lm.next_token_logprobs_sync([1, 2, 3])
    lm.clear_cache()
    check(lm.next_token_logprobs_sync([1, 2, 3, 4]), [1, 2, 3, 4])


def children():
    return set(psutil.Process().children(recursive=True))


def core_of(processes):
    return next(p for p in processes if "EngineCore" in " ".join([p.name(), *p.cmdline()]))


@pytest.mark.parametrize(
    "method",
    [
        "rows",
        pytest.param("row", marks=pytest.mark.slow),
        pytest.param("clear_cache", marks=pytest.mark.slow),
    ],
)
def test_engine_killed_before_answering_raises_engine_died_error(monkeypatch, method):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    before = children()
    with AsyncVirtualLM(real.load_tiny(), row_cache_bytes=0) as lm:
        lm.next_token_logprobs_sync([1, 2, 3])
        core = core_of(children() - before)
        core.send_signal(signal.SIGSTOP)  # it takes what it is sent, and answers nothing

        def ask():
            if method == "row":
                lm.next_token_logprobs_sync([1, 2, 4])
            elif method == "rows":
                lm.batch_next_token_logprobs_sync([[1, 2], [3, 4]])
            else:
                lm.clear_cache()

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            with pytest.raises(TimeoutError):
                asked.result(timeout=2)
            core.kill()
            with pytest.raises(EngineDiedError, match="load it again"):
                asked.result(timeout=60)
        with pytest.raises(EngineDiedError, match="load it again"):
            lm.next_token_logprobs_sync([1, 2, 5])


def test_killed_engine_fails_its_callers_and_spares_the_local_model(monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    first = AsyncVirtualLM(real.tiny_engine(), row_cache_bytes=0)
    before = children()
    engine = real.load_tiny()
    second = AsyncVirtualLM(engine, row_cache_bytes=0)
    new = children() - before
    assert (first._evaluator.engine._core.is_local, engine._core.is_local) == (True, False)
    for context in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 9]):
        check(first.next_token_logprobs_sync(context), context)
        check(second.next_token_logprobs_sync(context), context)

    async def main():
        asked = asyncio.gather(
            *(second.next_token_logprobs([i, 1] * 60) for i in range(60)),
            second.sample([1], 200, []),
            return_exceptions=True,
        )
        await asyncio.sleep(0.02)
        core_of(new).kill()
        results = await asyncio.wait_for(asked, 60)
        assert isinstance(results[-1], EngineDiedError)
        for i, row in enumerate(results[:-1]):
            if not isinstance(row, EngineDiedError):
                check(row, [i, 1] * 60)
        assert any(isinstance(row, EngineDiedError) for row in results[:-1])
        assert repr(second).endswith("has died>")
        for error in (row for row in results if isinstance(row, EngineDiedError)):
            assert len("".join(traceback.format_exception(error)).splitlines()) < 80
        for _ in range(2):
            with pytest.raises(EngineDiedError, match="load it again"):
                await asyncio.wait_for(second.next_token_logprobs([1, 2]), 10)
            with pytest.raises(EngineDiedError, match="load it again"):
                await asyncio.wait_for(second.sample([1, 2], 3, []), 10)

    asyncio.run(main())
    second.close()
    second.close()
    check(first.next_token_logprobs_sync([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5])
    first.close()
    real.close_tiny_engine()
    _, alive = psutil.wait_procs(new, timeout=20)
    assert not [p for p in alive if "resource_tracker" not in " ".join(p.cmdline())]
