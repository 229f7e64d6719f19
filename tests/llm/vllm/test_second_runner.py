"""vLLM's second model runner, whose kernels are Triton's: its rows, by Triton's interpreter.

PyPI's Triton compiles nothing for a CPU, and vLLM refuses the runner without it. The interpreter of
Triton computes the same kernels here, which takes some fifty milliseconds for a step.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.llm.vllm import real

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.timeout(400),
]

SCRIPT = """
import asyncio, random, tempfile
from types import SimpleNamespace
from triton.backends import backends
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

import numpy as np
import torch
from genlm_backend import AsyncVirtualLM
from tests.naive import naive_row, naive_scores
from tests.llm.families import VOCAB
from tests.llm.vllm import adapters, real

def load(**options):
    engine = real.load_tiny(max_num_batched_tokens=64, **options)  # longer prompts come in chunks
    assert engine._llm.llm_engine.vllm_config.use_v2_model_runner
    return AsyncVirtualLM(engine, row_cache_bytes=0)

def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

async def check_rows(lm, models):
    randomness = random.Random(0)
    pool = [[randomness.randrange(VOCAB) for _ in range(n)] for n in (3, 40, 200)]
    for _ in range(4):
        asked = []
        for name in [*models] * 3:
            base = randomness.choice(pool)
            new = [randomness.randrange(VOCAB) for _ in range(randomness.randrange(1, 4))]
            asked.append((base[: randomness.randrange(1, len(base) + 1)] + new, name))
        pool.extend(context for context, _ in asked)
        rows = await asyncio.gather(*(lm.next_token_logprobs(*pair) for pair in asked))
        for row, (context, name) in zip(rows, asked, strict=True):
            close(row, naive_row(models[name], context))
    assert lm.statistics().tokens_reused > 0

async def check_what_is_read_off(lm, model):
    row = naive_row(model, [7, 5, 3])
    top, drawn, sampled = await asyncio.gather(
        lm.next_token_top([7, 5, 3], 3),
        lm.draw_next_token([7, 5, 3], allowed=[4, 5, 9], generator=np.random.default_rng(0)),
        lm.sample([7, 5, 3], 1, [], temperature=0),
    )
    assert top.token_ids.tolist() == row.topk(3).indices.tolist()
    close(top.logprobs, row.topk(3).values)
    masked = torch.full_like(row, -torch.inf)
    masked[[4, 5, 9]] = row[[4, 5, 9]]
    assert drawn.token_id == lm.draw(masked, generator=np.random.default_rng(0))
    assert list(sampled) == [int(row.argmax())]

async def check_scores(lm, model):
    text = [random.Random(1).randrange(VOCAB) for _ in range(100)]
    for start in (30, 99, 30):
        before = lm.statistics().num_forwards
        found = await lm.score(text[:start], text[start:])
        close(found, naive_scores(model, text, start))
        assert lm.statistics().num_forwards - before <= 4

if __name__ == "__main__":
    tiny = real.tiny_model()
    with load() as lm:
        asyncio.run(check_rows(lm, {None: tiny}))
        asyncio.run(check_what_is_read_off(lm, tiny))
        asyncio.run(check_scores(lm, tiny))
    with tempfile.TemporaryDirectory() as folder:
        models = {None: tiny, "a": adapters.make_adapter(folder + "/a", 0)}
        with load(enable_lora=True, max_loras=1, max_lora_rank=adapters.RANK) as lm:
            lm.add_new_lora(folder + "/a", "a")
            asyncio.run(check_rows(lm, models))
    print("all agree")
"""


def test_second_runner_gives_the_models_rows_scores_draws_and_samples():
    pytest.importorskip("vllm.v1.worker.gpu.sample.logits_processor", reason="before vLLM 0.31")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all agree" in done.stdout
