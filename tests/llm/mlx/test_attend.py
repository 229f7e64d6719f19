"""Attention of models of mlx-lm to what is cached: every way gives the model's own rows."""

import random

import numpy as np
import pytest
import torch

from genlm_backend import AsyncMlxLM
from genlm_backend.backends.mlx import present
from genlm_backend.errors import ModelStateError
from tests.llm import families
from tests.llm.conftest import random_contexts, word_tokenizer
from tests.llm.mlx import converted, sharpened
from tests.naive import naive_row
from tests.tree_integrity import check_integrity

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not present.is_present(), reason="needs MLX"),
]

WAYS = {
    "llama": "MlxCascadeAttention",
    "mistral-sliding": "MlxCascadeAttention",
    "gemma3": "MlxCascadeAttention",
    "mixtral": "MlxCascadeAttention",
    "gemma2": "MlxGatherAttention",  # has no function for attention
    "stablelm": "MlxGatherAttention",
    "deepseek-v3": "MlxGatherAttention",  # expands what is cached
}


def over(model, **options):
    return AsyncMlxLM(model, word_tokenizer(), row_cache_bytes=0, **options)


def attend_of(lm):
    return lm._mlx.scheduler.cache.attention


def gpt_oss():
    from mlx_lm.models.gpt_oss import Model, ModelArgs

    return Model(
        ModelArgs(
            num_hidden_layers=3,
            num_local_experts=4,
            num_experts_per_tok=2,
            vocab_size=families.VOCAB,
            hidden_size=32,
            intermediate_size=32,
            head_dim=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    )


def own_model(name):
    """A model that transformers has not saved, or one that it has."""
    if name != "gpt-oss":
        return converted(families.make(name))
    model = sharpened(gpt_oss())
    for layer in model.model.layers:  # sinks that weigh as much as some keys
        layer.self_attn.sinks = layer.self_attn.sinks + 1.5
    return model


@pytest.mark.parametrize("name", WAYS)
def test_each_family_gets_the_expected_attention_class(name):
    with over(converted(families.make(name)), kv_cache_bytes=1 << 20) as lm:
        assert lm.kv_reuse
        assert type(attend_of(lm)).__name__ == WAYS[name]


@pytest.mark.parametrize("few_tokens", [0, 8, 40])
@pytest.mark.parametrize("name", [*WAYS, "gpt-oss"])
def test_rows_of_forked_contexts_match_uncached_rows(name, few_tokens):
    generator = random.Random(few_tokens)
    with over(own_model(name), kv_cache_bytes=1 << 20) as lm:
        attend_of(lm)._few_tokens = few_tokens
        root = [generator.randrange(families.VOCAB) for _ in range(20)]
        contexts = [list(root) for _ in range(6)]
        for _ in range(8):
            new = [generator.choices(range(families.VOCAB), k=generator.randint(1, 3))]
            new += [[generator.randrange(families.VOCAB)] for _ in contexts[1:]]
            contexts = [[*c, *n] for c, n in zip(contexts, new, strict=True)]
            rows = lm.batch_next_token_logprobs_sync([*contexts, contexts[0][:9]])
            for row, context in zip(rows, [*contexts, contexts[0][:9]], strict=True):
                whole = lm.next_token_logprobs_uncached(context)
                torch.testing.assert_close(row, whole, atol=5e-5, rtol=0)
            contexts = [list(generator.choice(contexts)) for _ in contexts]
        check_integrity(lm._mlx.scheduler.tree)


def test_shared_prompt_is_read_once_per_layer(monkeypatch):
    from genlm_backend.backends.mlx.mlx_kv_pool import MlxKVPool

    read, own_read = [], MlxKVPool.read_by_head

    def plan(pool, layer, slots):
        found = own_read(pool, layer, slots)
        read.append((isinstance(slots, slice), found[0].shape[0], found[0].shape[2]))
        return found

    model = families.make("llama")
    with over(converted(model), kv_cache_bytes=1 << 20) as lm:
        prompt = random.Random(0).choices(range(families.VOCAB), k=100)
        lm.next_token_logprobs_sync(prompt)
        monkeypatch.setattr(MlxKVPool, "read_by_head", plan)
        contexts = [[*prompt, i] for i in range(8)]
        rows = lm.batch_next_token_logprobs_sync(contexts)
        assert read == [(True, 1, 100)] * 2  # in each of two layers, and nothing beside
        for row, context in zip(rows, contexts, strict=True):
            torch.testing.assert_close(row, naive_row(model, context), atol=1e-4, rtol=0)


# -------------------------------------------------------------------- in the model's place


def test_calls_of_the_model_during_dispatch_use_its_own_attention():
    import mlx.core as mx
    from mlx_lm.models import llama
    from mlx_lm.models.cache import make_prompt_cache

    from genlm_backend.backends.mlx.mlx_cascade import Dispatch

    model, ids = converted(families.make("llama")), mx.array([[1, 2, 3]])
    theirs, expected = llama.scaled_dot_product_attention, np.array(model(ids))
    dispatch = Dispatch(model)
    with dispatch.in_place():
        assert llama.scaled_dot_product_attention is not theirs
        np.testing.assert_array_equal(np.array(model(ids)), expected)
        cached = model(ids, cache=make_prompt_cache(model))
        np.testing.assert_allclose(np.array(cached), expected, atol=1e-5)
    assert llama.scaled_dot_product_attention is theirs
    with pytest.raises(KeyError), dispatch.in_place():
        raise KeyError
    assert llama.scaled_dot_product_attention is theirs


def test_model_with_changed_attention_raises_model_state_error():
    import mlx.core as mx

    model = converted(families.make("llama"))
    with over(model, kv_cache_bytes=1 << 20) as lm:
        attend_of(lm)._few_tokens = 4
        prompt = list(range(30))
        row = lm.next_token_logprobs_sync(prompt)
        layer = model.model.layers[1].self_attn
        kind = type(layer)

        def attend(self, x, mask=None, cache=None):
            return kind.__call__(self, x, mask, None) + mx.zeros_like(x)

        layer.__class__ = type("Other", (kind,), {"__call__": attend})
        with pytest.raises(ModelStateError, match="attends otherwise"):
            lm.batch_next_token_logprobs_sync([[*prompt, i] for i in range(4)])
        layer.__class__ = kind
        rows = lm.batch_next_token_logprobs_sync([[*prompt, i] for i in range(4)])
        for i, found in enumerate(rows):
            whole = lm.next_token_logprobs_uncached([*prompt, i])
            torch.testing.assert_close(found, whole, atol=5e-5, rtol=0)
        check_integrity(lm._mlx.scheduler.tree)
        assert row.shape == (families.VOCAB,)


@pytest.mark.parametrize("window", [3, 12, 64])
def test_sliding_windows_apply_to_shared_prompts(window):
    config = families._config("MistralConfig", sliding_window=window)
    model = families.of(config)
    generator = random.Random(window)
    with over(converted(model), kv_cache_bytes=1 << 20) as lm:
        attend_of(lm)._few_tokens = 16
        prompt = generator.choices(range(families.VOCAB), k=50)
        contexts = [[*prompt, *context] for context in random_contexts(7, seed=1, max_length=20)]
        for _ in range(3):
            rows = lm.batch_next_token_logprobs_sync(contexts)
            for row, context in zip(rows, contexts, strict=True):
                torch.testing.assert_close(row, naive_row(model, context), atol=1e-4, rtol=0)
            contexts = [[*c, generator.randrange(families.VOCAB)] for c in contexts]
