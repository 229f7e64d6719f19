"""The same rows on a CUDA device, on both of vLLM's model runners, and the memory given back."""

import asyncio
import gc
import random

import pytest
import torch

from genlm_backend import load_model_by_name
from tests.llm.conftest import fresh_row
from tests.llm.vllm import real

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module", params=["0", "1"], ids=["first runner", "second runner"])
def lm(request):
    options = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 48}
    options["gpu_memory_utilization"] = 0.3
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
        with load_model_by_name(
            "smollm2", backend="vllm", llm_opts={"engine_opts": options, "row_cache_bytes": 0}
        ) as lm:
            yield lm


@pytest.fixture(scope="module")
def smollm2():
    from transformers import AutoModelForCausalLM

    from genlm_backend.backends.bundled import bundled_directory

    return AutoModelForCausalLM.from_pretrained(bundled_directory("smollm2"), dtype=torch.float32)


async def test_forks_at_any_token_and_samples_beside_them(lm, smollm2):
    randomness = random.Random(0)
    pool = [[randomness.randrange(49_152) for _ in range(n)] for n in (5, 100, 700)]

    async def ask(context):
        row = await lm.next_token_logprobs(context)
        torch.testing.assert_close(row, fresh_row(smollm2, context), rtol=0, atol=2e-2)

    for turn in range(15):
        asked = []
        for _ in range(8):
            base = randomness.choice(pool)
            fork = base[: randomness.randrange(1, len(base) + 1)]
            asked.append(fork + [randomness.randrange(49_152) for _ in range(2)])
        pool.extend(asked)
        await asyncio.gather(*map(ask, asked), lm.batch_sample(asked[:2], 6, [], seed=turn))


def test_a_round_is_one_step(lm):
    contexts = [[i, i + 1, i + 2] for i in range(20)]
    lm.batch_next_token_logprobs_sync(contexts)
    before = lm.statistics().num_forwards
    for step in range(4):
        contexts = [[*context, step] for context in contexts]
        lm.batch_next_token_logprobs_sync(contexts)
    assert lm.statistics().num_forwards - before == 4


def test_closing_gives_the_memory_back():
    free = torch.cuda.mem_get_info()[0]
    options = {"max_model_len": 1024, "gpu_memory_utilization": 0.5}
    with load_model_by_name("smollm2", llm_opts={"engine_opts": options}) as lm:
        assert type(lm).__name__ == "AsyncVirtualLM"  # the default where both are there
        lm.next_token_logprobs_sync([1, 2, 3])
        assert torch.cuda.mem_get_info()[0] < 0.7 * free
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > 0.95 * free


def test_rows_may_stay_on_the_device_and_be_kept_in_main_memory():
    options = {"max_model_len": 512, "gpu_memory_utilization": 0.3}
    with load_model_by_name(
        "smollm2",
        backend="vllm",
        llm_opts={
            "engine_opts": options,
            "output_device": "cuda:0",
            "cache_opts": {"move_to_cpu": True},
        },
    ) as lm:
        for _ in range(2):
            row = lm.next_token_logprobs_sync([1, 2, 3])
            assert row.device == torch.device("cuda:0")
            assert float(row.exp().sum()) == pytest.approx(1, abs=1e-4)
        assert lm.statistics().row_cache_hits == 1
        assert next(iter(lm._rows._rows.values())).logprobs.device.type == "cpu"
