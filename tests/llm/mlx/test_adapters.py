"""Adapters of models of mlx-lm, in the format that it writes."""

import asyncio
import json

import pytest
import torch

from genlm_backend import AsyncMlxLM
from genlm_backend.backends.mlx import present
from genlm_backend.errors import AdapterError, UnknownAdapterError
from tests.llm import families
from tests.llm.conftest import random_contexts, word_tokenizer
from tests.llm.mlx import converted, over
from tests.naive import naive_row

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not present.is_present(), reason="needs MLX"),
]


def save_adapter(model, path, seed):
    """Write an adapter as ``mlx_lm.lora`` does, and return the weights that it comes to."""
    import mlx.core as mx

    path.mkdir()
    parameters = {"rank": 4, "scale": 5.0, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "num_layers": 2}
    config["lora_parameters"] = {**parameters, "keys": ["self_attn.q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights, merged = {}, {}
    for number, layer in enumerate(model.model.layers):
        base = layer.self_attn.q_proj.weight.detach()
        a = torch.randn(base.shape[1], 4, generator=generator) * 0.3
        b = torch.randn(4, base.shape[0], generator=generator) * 0.3
        name = f"model.layers.{number}.self_attn.q_proj"
        weights[f"{name}.lora_a"] = mx.array(a.numpy())
        weights[f"{name}.lora_b"] = mx.array(b.numpy())
        merged[f"{name}.weight"] = base + 5.0 * (a @ b).t()
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    return merged


def test_rows_by_adapter_name_match_the_merged_weights(tmp_path):
    model = families.make("llama")
    exact = {None: model}
    for seed, name in enumerate("ab"):
        merged = save_adapter(model, tmp_path / name, seed)
        exact[name] = families.make("llama")
        exact[name].load_state_dict(merged, strict=False)
    contexts = random_contexts(6, seed=4)
    with over(model, kv_cache_bytes=1 << 20) as lm:
        for name in "ab":
            lm.add_new_lora(tmp_path / name, name)

        async def ask():
            asked = [(c, name) for c in contexts for name in exact]
            rows = await asyncio.gather(*(lm.next_token_logprobs(*pair) for pair in asked))
            for row, (context, name) in zip(rows, asked, strict=True):
                expected = naive_row(exact[name], context)
                torch.testing.assert_close(row, expected, atol=2e-4, rtol=0)

        for _ in range(2):
            asyncio.run(ask())
        lm.cache_kv(contexts[0], "a")
        whole = lm.next_token_logprobs_uncached(contexts[0], "a")
        torch.testing.assert_close(whole, naive_row(exact["a"], contexts[0]), atol=2e-4, rtol=0)
        with pytest.raises(AdapterError):
            lm.add_new_lora(tmp_path / "nowhere", "a")
        asyncio.run(ask())
        lm.add_new_lora(tmp_path / "b", "a")  # the name is bound anew
        row = lm.next_token_logprobs_sync(contexts[0], "a")
        torch.testing.assert_close(row, naive_row(exact["b"], contexts[0]), atol=2e-4, rtol=0)
        lm.remove_lora("a")
        with pytest.raises(UnknownAdapterError):
            lm.next_token_logprobs_sync([1], "a")
        with pytest.raises(UnknownAdapterError):
            lm.cache_kv([1], "a")
        row = lm.next_token_logprobs_sync(contexts[1], "b")
        torch.testing.assert_close(row, naive_row(exact["b"], contexts[1]), atol=2e-4, rtol=0)


def test_adapters_that_fail_to_load_leave_the_model_unchanged(tmp_path):
    import mlx.core as mx

    model = families.make("llama")
    save_adapter(model, tmp_path / "good", 0)

    def broken(name, **changes):
        save_adapter(model, tmp_path / name, 0)
        path = tmp_path / name / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return tmp_path / name

    of_peft = broken("peft", peft_type="LORA")
    whole = broken("full", fine_tune_type="full")
    other = broken("rank", lora_parameters={"rank": 2, "scale": 1.0, "dropout": 0.0})
    (tmp_path / "empty").mkdir()
    half, strange, bare = broken("half"), broken("strange", fine_tune_type="zzz"), broken("bare")
    (bare / "adapter_config.json").write_text("{}")
    weights = mx.load(str(half / "adapters.safetensors"))
    kept = {name: weights[name] for name in sorted(weights)[:2]}
    mx.save_safetensors(str(half / "adapters.safetensors"), kept)
    with over(model) as lm:
        expected = lm.next_token_logprobs_sync([1, 2, 3])
        for path, reason in (
            (of_peft, "an adapter of PEFT"),
            (whole, "whole model's weights"),
            (other, "does not match"),
            (tmp_path / "empty", "adapter_config"),
            (half, "lacks 2 of the weights"),
            (strange, "'zzz'"),
            (bare, r"has no \['lora_parameters', 'num_layers'\]"),
            (tmp_path / "none", "neither a local directory"),
        ):
            with pytest.raises(AdapterError, match=reason):
                lm.add_new_lora(path, "x")
            lm.clear_cache()
            assert torch.equal(lm.next_token_logprobs_sync([1, 2, 3]), expected)


def test_adapter_of_tied_embeddings_gives_the_rows_of_lora_layers(tmp_path):
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, changed = families.make("gemma"), converted(families.make("gemma"))
    parameters = {"rank": 2, "scale": 3.0, "dropout": 0.0, "keys": ["model.embed_tokens"]}
    linear_to_lora_layers(changed, 2, parameters)
    flat = dict(tree_flatten(changed.parameters()))
    made = {n: mx.random.normal(v.shape) * 0.1 for n, v in flat.items() if ".lora_" in n}
    changed.load_weights(list(made.items()), strict=False)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), made)
    with over(model) as lm, AsyncMlxLM(changed, word_tokenizer()) as exact:
        lm.add_new_lora(tmp_path, "a")
        row = lm.next_token_logprobs_sync([1, 2, 3], "a")
        expected = exact.next_token_logprobs_uncached([1, 2, 3])
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
