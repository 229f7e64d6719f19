"""Models of mlx-lm against the same weights in transformers."""

import asyncio
import json
import random
import sys
import warnings

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from genlm_backend import AsyncMlxLM, load_model_by_name
from genlm_backend.backends.mlx import present
from genlm_backend.backends.registry import default_backend
from genlm_backend.errors import (
    CacheError,
    MissingExtraError,
    ModelNotFoundError,
    ModelStateError,
    OptionError,
    OptionTypeError,
    UnsupportedModelError,
)
from tests.llm import families
from tests.llm.conftest import random_contexts, word_tokenizer
from tests.llm.mlx import converted, over, sharpened
from tests.naive import naive_row
from tests.tree_integrity import check_integrity

pytestmark = [pytest.mark.mlx, pytest.mark.filterwarnings("ignore")]
needs_mlx = pytest.mark.skipif(not present.is_present(), reason="needs MLX")

MORE = {
    # Gemma 3 of this width: mlx-lm rounds the root of it to bfloat16.
    "gemma3": lambda: families._config(
        "Gemma3TextConfig",
        hidden_size=64,
        head_dim=8,
        sliding_window=5,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "glm": lambda: families._config("GlmConfig", head_dim=8),
    "olmo2": lambda: families._config("Olmo2Config"),
    "olmo3": lambda: families._config(
        "Olmo3Config",
        sliding_window=5,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}

# Of Gemma 2 and StarCoder 2, mlx-lm leaves the windows out, and its Gemma computes an activation
# exactly that transformers approximates.
TOLERANCES = {
    **dict.fromkeys(
        ["llama", "qwen2", "qwen3", "deepseek-v3", "mixtral", "cohere", "granite", "stablelm"], 1e-4
    ),
    **dict.fromkeys(["mistral-sliding", "gemma3", "olmo2", "olmo3", "qwen3-moe"], 1e-4),
    **dict.fromkeys(["phi", "gptj", "mamba", "glm"], 1e-4),
    "gemma": 5e-3,
}


def make(name):
    return families.of(MORE[name]()) if name in MORE else families.make(name)


@needs_mlx
@pytest.mark.parametrize("name", TOLERANCES)
def test_rows_of_extended_and_truncated_contexts_match_transformers(name):
    model, generator = make(name), random.Random(0)
    with over(model, kv_cache_bytes=1 << 20) as lm:
        assert lm.kv_reuse
        contexts = random_contexts(12, seed=1)
        for _ in range(3):
            rows = lm.batch_next_token_logprobs_sync(contexts)
            for row, context in zip(rows, contexts, strict=True):
                expected = naive_row(model, context)
                torch.testing.assert_close(row, expected, atol=TOLERANCES[name], rtol=0)
            longer = [[*c, *generator.choices(range(families.VOCAB), k=2)] for c in contexts]
            contexts = [*longer, [*contexts[0], 1], contexts[1][:1]]
        check_integrity(lm._mlx.scheduler.tree)


@needs_mlx
def test_step_computes_only_its_new_tokens():
    with over(families.make("llama"), kv_cache_bytes=1 << 20) as lm:
        prompt = list(range(30))
        lm.batch_next_token_logprobs_sync([prompt] * 5)
        assert lm.statistics().tokens_computed == 30
        lm.batch_next_token_logprobs_sync([[*prompt, i] for i in range(20)])
        assert lm.statistics().tokens_computed == 50
        assert asyncio.run(lm.num_cached_tokens([*prompt, 3, 4])) == 31
        lm.clear_cache()
        assert lm.statistics().kv_bytes_used == 0


@needs_mlx
def test_prompt_is_prefilled_in_chunks_of_prefill_step_size():
    model, prompt = families.make("llama"), list(range(30))
    for size, num_passes in ((None, 1), (10, 3), (1, 30)):
        with over(model, kv_cache_bytes=1 << 20, prefill_step_size=size) as lm:
            row = lm.next_token_logprobs_sync(prompt)
            torch.testing.assert_close(row, naive_row(model, prompt), atol=1e-4, rtol=0)
            assert lm.statistics().num_forwards == num_passes


@needs_mlx
def test_cache_size_and_cache_opts_bound_the_row_cache():
    model = converted(families.make("llama"))
    # The order of parameters is that of genlm-backend 0.3.1.
    with AsyncMlxLM(model, word_tokenizer(), 0.01, 512, 2, {"max_bytes": 1 << 20}) as lm:
        for context in ([1], [2], [3], [2], [1]):
            lm.next_token_logprobs_sync(context)
        assert lm.timeout == 0.01
        assert (lm.statistics().row_cache_hits, lm.statistics().num_forwards) == (1, 4)
    with AsyncMlxLM(model, word_tokenizer(), cache_opts={"max_bytes": 0}) as lm:
        for _ in range(2):
            lm.next_token_logprobs_sync([1])
        assert lm.statistics().num_forwards == 2
    with pytest.raises(OptionTypeError, match="max_byte"):
        AsyncMlxLM(model, word_tokenizer(), cache_opts={"max_byte": 1})


@needs_mlx
def test_rows_with_dynamic_rope_do_not_depend_on_the_batch():
    """A context has the row that it has alone, beside longer ones too."""
    from transformers import LlamaConfig

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = {**families.COMMON, "max_position_embeddings": 20, "rope_parameters": rope}
    with over(families.of(LlamaConfig(**config)), max_length=60) as lm:
        assert not lm.kv_reuse
        contexts = random_contexts(10, seed=7, max_length=50)
        assert {len(context) > 20 for context in contexts} == {False, True}
        rows = lm.batch_next_token_logprobs_sync(contexts)
        for row, context in zip(rows, contexts, strict=True):
            alone = lm.next_token_logprobs_uncached(context)
            torch.testing.assert_close(row, alone, atol=1e-4, rtol=0)


@needs_mlx
def test_evaluation_writes_no_files_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with over(families.make("gemma")) as lm:
        lm.next_token_logprobs_sync([1, 2])
    assert list(tmp_path.iterdir()) == []


@needs_mlx
def test_kv_pool_grows_only_with_the_tokens_in_use():
    with over(families.make("llama"), kv_cache_bytes=1 << 30) as lm:
        expected = lm.next_token_logprobs_uncached([1, 2, 3])
        for start in range(60):
            lm.next_token_logprobs_sync([start, *range(40)])
        row = lm.next_token_logprobs_sync([1, 2, 3])
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)
        long = [59, *range(40), 5]
        row, whole = lm.next_token_logprobs_sync(long), lm.next_token_logprobs_uncached(long)
        torch.testing.assert_close(row, whole, atol=1e-5, rtol=0)
        assert lm._mlx.scheduler.cache.pool._kept[0][0].shape[1] < 5000


@needs_mlx
def test_model_in_training_mode_raises_model_state_error():
    with over(families.make("llama")) as lm:
        model = lm._mlx.scheduler.runner.model
        model.train()
        with pytest.raises(ModelStateError, match=r"eval\(\)"):
            lm.next_token_logprobs_sync([1, 2, 3])
        model.eval()
        assert lm.next_token_logprobs_sync([1, 2, 3]).isfinite().all()


@needs_mlx
def test_tiny_kv_budget_changes_no_row():
    model = families.make("qwen3")
    with over(model, kv_cache_bytes=60 * 256) as lm:
        generator = random.Random(2)
        contexts = [[1]] * 8
        for _ in range(12):
            contexts = [[*generator.choice(contexts), generator.randrange(90)] for _ in range(8)]
            rows = lm.batch_next_token_logprobs_sync(contexts)
            for row, context in zip(rows, contexts, strict=True):
                torch.testing.assert_close(row, naive_row(model, context), atol=1e-4, rtol=0)
        check_integrity(lm._mlx.scheduler.tree)


@needs_mlx
def test_pinned_prompts_stay_cached_and_overlong_ones_raise_cache_error():
    with over(families.make("llama"), kv_cache_bytes=41 * 256) as lm:
        assert lm.kv_capacity == 40
        lm.cache_kv(list(range(30)))
        for start in range(40, 50):
            lm.next_token_logprobs_sync([start, 1, 2, 3, 4])
        assert asyncio.run(lm.num_cached_tokens([*range(30), 1])) == 30
        with pytest.raises(CacheError, match="41 tokens does not fit"):
            lm.cache_kv(list(range(41)))
        lm.clear_kv_cache()
        assert asyncio.run(lm.num_cached_tokens([*range(30), 1])) == 0


@needs_mlx
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_models_reuse_cached_keys_and_values(bits):
    import mlx.nn as nn

    model = converted(wide_llama())
    nn.quantize(model, group_size=32, bits=bits)
    with AsyncMlxLM(model, word_tokenizer(), row_cache_bytes=0) as lm:
        assert lm.kv_reuse
        contexts = random_contexts(10, seed=3)
        rows = lm.batch_next_token_logprobs_sync([[*c, 5] for c in contexts + contexts[:3]])
        for row, context in zip(rows, contexts, strict=False):
            whole = lm.next_token_logprobs_uncached([*context, 5])
            torch.testing.assert_close(row, whole, atol=1e-4, rtol=0)


def wide_llama():
    """A model whose matrices can be quantised in groups of 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=families.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


# -------------------------------------------------------------------- loading


@pytest.fixture
def directory(tmp_path):
    families.make("qwen2").save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()).save_pretrained(tmp_path)
    return tmp_path


@needs_mlx
def test_loaded_directory_uses_the_rope_theta_of_its_config(directory):
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 37.0
    (directory / "config.json").write_text(json.dumps(config))
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(directory)
    options = {"self_check": False, "kv_cache_bytes": 1 << 20}
    with load_model_by_name(str(directory), backend="mlx", llm_opts=options) as lm:
        for context in random_contexts(8, seed=5):
            row = lm.next_token_logprobs_sync(context)
            torch.testing.assert_close(row, naive_row(exact, context), atol=1e-4, rtol=0)


@needs_mlx
def test_unusable_models_and_options_are_refused_with_the_reason(directory):
    with pytest.raises(OptionTypeError, match="bach_size"):
        AsyncMlxLM.from_name("/no/such/model", bach_size=3)
    with pytest.raises(OptionError, match="kv_cache_bytes"):
        AsyncMlxLM.from_name("/no/such/model", kv_cache_bytes=-1)
    with pytest.raises(OptionError, match="prefill_step_size"):
        AsyncMlxLM.from_name("/no/such/model", prefill_step_size=0)
    with pytest.raises(ModelNotFoundError):
        AsyncMlxLM.from_name("/no/such/model", cache_size=10, cache_opts={})
    with pytest.raises(UnsupportedModelError, match=r"load a model .* with mlx_lm\.load"):
        AsyncMlxLM("smollm2", word_tokenizer())
    weights = directory / "model.safetensors"
    weights.rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match=r"mlx_lm\.convert"):
        AsyncMlxLM.from_name(str(directory))
    (directory / "pytorch_model.bin").rename(weights)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "strange"}))
    with pytest.raises(
        UnsupportedModelError, match=r"'strange'.*backend='hf'.*allow_untested=True"
    ):
        AsyncMlxLM.from_name(str(directory))
    with pytest.raises((UnsupportedModelError, ModelNotFoundError), match="strange"):
        AsyncMlxLM.from_name(str(directory), allow_untested=True)


@needs_mlx
def test_rope_parameters_take_precedence_over_legacy_config_keys():
    from transformers import StableLmConfig

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    settings = {n: v for n, v in families.COMMON.items() if n != "head_dim"}
    model = families.of(StableLmConfig(**settings, rope_parameters=rope))
    with over(model) as lm:
        for context in random_contexts(5, seed=7):
            row = lm.next_token_logprobs_sync(context)
            torch.testing.assert_close(row, naive_row(model, context), atol=1e-4, rtol=0)


@needs_mlx
def test_layers_sharing_keys_and_values_give_the_models_own_rows():
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.gemma3n import Model, ModelArgs

    text = {
        "model_type": "gemma3n",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": families.VOCAB,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": families.VOCAB,
        "sliding_window": 8,
        "max_position_embeddings": 128,
        "rope_local_base_freq": 1e4,
        "rope_theta": 1e6,
        "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 4,
        "rope_scaling": None,
    }
    model = sharpened(Model(ModelArgs.from_dict({"model_type": "gemma3n", "text_config": text})))
    contexts, expected = random_contexts(6, seed=8), []
    for context in contexts:
        cache = make_prompt_cache(model)
        for token_id in context:
            logits = model(mx.array([[token_id]]), cache=cache)
        expected.append(torch.tensor(logits[0, -1].tolist()).log_softmax(-1))
    with AsyncMlxLM(model, word_tokenizer(), row_cache_bytes=0) as lm:
        rows = lm.batch_next_token_logprobs_sync(contexts)
        torch.testing.assert_close(rows, torch.stack(expected), atol=1e-4, rtol=0)


@needs_mlx
def test_architecture_whose_import_exits_python_is_refused(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "olmo"}))
    with pytest.raises(UnsupportedModelError, match=r"cannot load .*olmo"):
        AsyncMlxLM.from_name(str(directory), allow_untested=True)


@needs_mlx
def test_half_precision_on_a_cpu_warns_that_it_is_slow():
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("is for the CPU")
    model = converted(families.make("llama"))
    model.set_dtype(mx.bfloat16)
    with pytest.warns(UserWarning, match="half precision"):
        lm = AsyncMlxLM(model, word_tokenizer())
    with lm:
        assert lm.next_token_logprobs_sync([1, 2]).dtype is torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with over(families.make("llama")):
            pass


def test_missing_mlx_raises_an_error_naming_the_extra(monkeypatch):
    monkeypatch.setattr(present, "is_present", lambda: False)
    for use in (
        lambda: AsyncMlxLM.from_name("gpt2"),
        lambda: AsyncMlxLM(None, None),
        lambda: load_model_by_name("gpt2", backend="mlx"),
    ):
        with pytest.raises(MissingExtraError, match=r"genlm-backend\[mlx\]"):
            use()


@pytest.mark.parametrize(
    ("platform", "is_there", "expected"),
    [("darwin", True, "mlx"), ("darwin", False, "hf"), ("linux", True, "hf")],
)
def test_mlx_is_the_default_on_macos_if_installed(platform, is_there, expected, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(present, "is_present", lambda: is_there)
    assert default_backend() == expected


@needs_mlx
@pytest.mark.real
@pytest.mark.timeout(300)
def test_bundled_model_gives_the_rows_of_transformers():
    with load_model_by_name("smollm2", backend="mlx") as lm:
        ids = lm.tokenizer.encode("The capital of France is")
        row = lm.next_token_logprobs_sync(ids)
        assert lm.byte_vocab[int(row.argmax())].byte_string == b" Paris"
    with load_model_by_name("smollm2", backend="hf") as other:
        expected = other.next_token_logprobs_sync(ids)
        torch.testing.assert_close(row, expected, atol=2e-4, rtol=0)
