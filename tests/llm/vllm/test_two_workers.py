"""Two workers that share a model: adapters, scores, all that is read off, and a worker's death."""

import asyncio
import os
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch

from genlm_backend import AsyncVirtualLM
from genlm_backend.errors import EngineDiedError
from tests.llm.families import VOCAB
from tests.llm.vllm import adapters, real
from tests.naive import naive_row, naive_rows, naive_scores

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True, scope="module")
def cores():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if os.cpu_count() > 1 else "0|0")
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    merged = {name: adapters.make_adapter(folder / name, i) for i, name in enumerate(("a", "b"))}
    return folder, {None: real.tiny_model(), **merged}


@pytest.fixture(scope="module")
def lm(models):
    engine = real.load_tiny(
        tensor_parallel_size=2, enable_lora=True, max_loras=2, max_lora_rank=adapters.RANK
    )
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm:
        for name in ("a", "b"):
            lm.add_new_lora(str(models[0] / name), name)
        yield lm


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


async def test_rows_of_forks_are_correct_in_batches_that_mix_adapters(lm, models):
    randomness, names = random.Random(0), [*models[1]]
    pool = [[randomness.randrange(VOCAB) for _ in range(n)] for n in (3, 40, 200)]
    for _ in range(8):
        asked = []
        for name in names * 3:
            base = randomness.choice(pool)
            fork = base[: randomness.randrange(1, len(base) + 1)]
            new = [randomness.randrange(VOCAB) for _ in range(randomness.randrange(1, 4))]
            asked.append(((fork + new)[:255], name))
        pool.extend(context for context, _ in asked)
        rows = await asyncio.gather(*(lm.next_token_logprobs(*pair) for pair in asked))
        for row, (context, name) in zip(rows, asked, strict=True):
            close(row, naive_row(models[1][name], context))
    assert lm.statistics().tokens_reused > 0


async def test_draws_and_readouts_with_adapters_match_merged_models(lm, models):
    for name, model in models[1].items():
        context = [7, 5, 3]
        row = naive_row(model, context)
        top, chosen, masses, drawn = await asyncio.gather(
            lm.next_token_top(context, 3, lora_name=name),
            lm.next_token_logprobs_of(context, [5, 7], lora_name=name),
            lm.next_token_log_masses(context, [[1, 2], [3]], lora_name=name),
            lm.draw_next_token(
                context, generator=np.random.default_rng(0), allowed=[4, 5, 9], lora_name=name
            ),
        )
        assert top.token_ids.tolist() == row.topk(3).indices.tolist()
        close(top.logprobs, row.topk(3).values)
        close(chosen, row[[5, 7]])
        close(masses.float(), torch.stack([row[[1, 2]].logsumexp(0), row[3]]))
        masked = torch.full_like(row, -torch.inf)
        masked[[4, 5, 9]] = row[[4, 5, 9]]
        assert drawn.token_id == lm.draw(masked, generator=np.random.default_rng(0))


async def test_scores_and_samples_with_adapters_match_merged_models(lm, models):
    randomness = random.Random(2)
    text = [randomness.randrange(VOCAB) for _ in range(60)]
    for _ in range(2):  # the second time the keys and values of the prompt are there
        asked = [lm.score(text[:20], text[20:], lora_name=name) for name in models[1]]
        for found, model in zip(await asyncio.gather(*asked), models[1].values(), strict=True):
            close(found, naive_scores(model, text, 20))
    for name, model in models[1].items():
        told = await lm.score_with(text[:50], text[50:], lora_name=name, rank=True, top=3)
        rows = naive_rows(model, text)[49:-1].float()
        close(told.logprobs, naive_scores(model, text, 50))
        close(told.top_logprobs, rows.topk(3).values)
        greedy = text[:20]
        for _ in range(5):
            greedy.append(int(naive_row(model, greedy).argmax()))
        sampled = await lm.sample(text[:20], 5, [], temperature=0, lora_name=name)
        assert sampled == greedy[20:]


def children():
    return set(psutil.Process().children(recursive=True))


def workers_of(processes):
    """The processes of an engine's workers, in the order of their ranks."""
    named = {" ".join([p.name(), *p.cmdline()]): p for p in processes}
    return [named[name] for name in sorted(named) if "Worker" in name]


async def check_that_all_are_told(lm):
    for ask in (lm.next_token_logprobs, lm.draw_next_token, lambda ids: lm.sample(ids, 3, [])):
        with pytest.raises(EngineDiedError, match="load it again"):
            await asyncio.wait_for(ask([1, 2]), 60)
    with pytest.raises(EngineDiedError, match="load it again"):
        await asyncio.wait_for(lm.score([1, 2], [3]), 60)


async def ask_while_a_worker_is_killed(lm, worker):
    asked = asyncio.gather(
        *(lm.next_token_logprobs([i, 1] * 60) for i in range(60)),
        *(lm.draw_next_token([i, 2] * 60) for i in range(20)),
        lm.score([1, 2], [3] * 200),
        lm.sample([1], 200, []),
        return_exceptions=True,
    )
    await asyncio.sleep(0.02)
    worker.kill()
    results = await asyncio.wait_for(asked, 60)
    assert isinstance(results[-1], EngineDiedError)
    failures = [each for each in results if isinstance(each, BaseException)]
    assert all(isinstance(each, EngineDiedError) for each in failures), failures
    for i, row in enumerate(results[:60]):
        if isinstance(row, torch.Tensor):
            close(row, naive_row(real.tiny_model(), [i, 1] * 60))


@pytest.mark.parametrize(
    ("rank", "is_idle"), [(0, False), (1, False), (1, True)], ids=["first", "second", "idle"]
)
def test_killed_worker_fails_waiting_and_later_queries(rank, is_idle):
    before = children()
    with AsyncVirtualLM(real.load_tiny(tensor_parallel_size=2), row_cache_bytes=0) as lm:
        lm.next_token_logprobs_sync([1, 2, 3])
        new = children() - before
        workers = workers_of(new)
        assert len(workers) == 2

        async def main():
            if is_idle:
                workers[rank].kill()
            else:
                await ask_while_a_worker_is_killed(lm, workers[rank])
            await check_that_all_are_told(lm)

        asyncio.run(main())
        with ThreadPoolExecutor(1) as pool, pytest.raises(EngineDiedError, match="load it again"):
            pool.submit(lm.clear_cache).result(timeout=10)
    _, alive = psutil.wait_procs(new, timeout=20)
    assert not [p for p in alive if "resource_tracker" not in " ".join(p.cmdline())]
