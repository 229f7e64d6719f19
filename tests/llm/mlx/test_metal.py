"""What only a Mac with Apple silicon shows: the same answers by Metal's kernels, and memory."""

import gc
import random
import sys

import pytest
import torch

from genlm_backend import AsyncMlxLM, load_model_by_name
from genlm_backend.backends.mlx import present
from tests.llm import families
from tests.llm.conftest import random_contexts, word_tokenizer
from tests.llm.mlx import converted
from tests.naive import naive_row


def has_metal():
    if sys.platform != "darwin" or not present.is_present():
        return False
    import mlx.core as mx

    return mx.metal.is_available()


pytestmark = [
    pytest.mark.mlx,
    pytest.mark.metal,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not has_metal(), reason="needs MLX on Apple silicon"),
]


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-sliding", "mixtral", "deepseek-v3"])
def test_rows_of_growing_contexts_match_transformers(name):
    model, generator = families.make(name), random.Random(0)
    with AsyncMlxLM(converted(model), word_tokenizer(), row_cache_bytes=0) as lm:
        if hasattr(lm._mlx.scheduler.cache.attention, "_few_tokens"):
            lm._mlx.scheduler.cache.attention._few_tokens = 8
        contexts = random_contexts(12, seed=1)
        for _ in range(4):
            rows = lm.batch_next_token_logprobs_sync(contexts)
            for row, context in zip(rows, contexts, strict=True):
                torch.testing.assert_close(row, naive_row(model, context), atol=2e-3, rtol=0)
            contexts = [[*c, generator.randrange(families.VOCAB)] for c in contexts]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_models_reuse_cached_keys_and_values(dtype):
    import mlx.core as mx

    model = converted(families.make("llama"))
    model.set_dtype(getattr(mx, dtype))
    with AsyncMlxLM(model, word_tokenizer(), row_cache_bytes=0) as lm:
        assert lm.kv_reuse
        lm._mlx.scheduler.cache.attention._few_tokens = 8
        prompt = list(range(30))
        lm.next_token_logprobs_sync(prompt)
        rows = lm.batch_next_token_logprobs_sync([[*prompt, i] for i in range(8)])
        for i, row in enumerate(rows):
            whole = lm.next_token_logprobs_uncached([*prompt, i])
            torch.testing.assert_close(row, whole, atol=0.3, rtol=0)


def test_kv_budget_is_at_most_half_of_metal_memory_and_freed_on_close():
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    recommended = mx.device_info()["max_recommended_working_set_size"]
    lm = AsyncMlxLM(converted(families.make("llama")), word_tokenizer())
    assert 0 < lm.statistics().kv_bytes_budget <= recommended / 2
    lm.batch_next_token_logprobs_sync(random_contexts(20, max_length=40))
    lm.close()
    del lm
    gc.collect()
    assert mx.get_active_memory() <= before + (1 << 20)


@pytest.mark.real
def test_bundled_model_runs_on_mlx_by_default():
    with load_model_by_name("smollm2") as lm:
        assert isinstance(lm, AsyncMlxLM)
        row = lm.next_token_logprobs_sync(lm.tokenizer.encode("The capital of France is"))
        assert lm.byte_vocab[int(row.argmax())].byte_string == b" Paris"
