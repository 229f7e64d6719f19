"""How a model is run: checked when it is made, and with its model."""

import pytest

from genlm_backend import AsyncTransformer
from genlm_backend.generation import RuntimeConfig
from tests.generation.serving import COLD
from tests.llm.conftest import word_tokenizer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "cpuu"}, "device must be a device such as 'cpu'"),
        ({"threads": 0}, "threads must be an integer of 1 or more"),
        ({"max_batch": 0}, "max_batch must be an integer of 1 or more"),
        ({"max_length": 1}, "max_length must be an integer of 2 or more"),
        ({"max_queue_size": -1}, "max_queue_size must be an integer of 0 or more"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes must be an integer of 1 or more"),
        ({"kv_cache_mode": "int7"}, "kv_cache_mode must be one of 'default', 'int8', 'uint4'"),
    ],
)
def test_invalid_runtime_config_raises_value_error(fields, message):
    with pytest.raises(ValueError, match=message):
        RuntimeConfig(**fields)


def test_runtime_config_that_contradicts_its_model_raises_value_error(engine, lm, model):
    with pytest.raises(ValueError, match=r"max_bach is not a field .* did you mean max_batch"):
        engine.install_model("m", lm, max_bach=3)
    with pytest.raises(ValueError, match="model must be an AsyncLM or a name, got 3"):
        engine.install_model("m", 3)
    with pytest.raises(ValueError, match="threads cannot be set for backend 'mock'"):
        engine.install_model("m", "smollm2", backend="mock", threads=2)
    with pytest.raises(ValueError, match="threads applies only to a model that is loaded by name"):
        engine.install_model("m", lm, threads=2)
    with pytest.raises(ValueError, match="llm_opts apply only to a model that is loaded by name"):
        engine.install_model("m", lm, llm_opts={"timeout": 1})
    with AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=1 << 20) as hf:
        own = RuntimeConfig.from_model(hf)
        assert (own.device, own.max_batch, own.max_length) == ("cpu", 20, 256)
        assert own.kv_cache_bytes == 1 << 20
        engine.install_model("hf", hf, own, **COLD)
        wrongs = ({"device": "cuda"}, {"kv_cache_bytes": 1 << 19}, {"kv_cache_mode": "int8"})
        for wrong in wrongs:
            with pytest.raises(ValueError, match="does not fit the loaded model, which has"):
                engine.install_model("other", hf, **wrong)
        with pytest.raises(ValueError, match="max_length=300 exceeds the model's limit of 257"):
            engine.install_model("other", hf, max_length=300)
    assert "m" not in engine.models


def test_loading_options_of_each_backend_follow_the_config():
    config = RuntimeConfig(
        device="cpu", threads=2, max_batch=5, kv_cache_bytes=999, llm_opts={"timeout": 0.5}
    )
    assert config.loading_options("hf") == {
        "batch_size": 5,
        "num_threads": 2,
        "kv_cache_bytes": 999,
        "hf_opts": {"device_map": "cpu"},
        "timeout": 0.5,
    }
    more = config.replace(llm_opts={"hf_opts": {"dtype": "bfloat16"}})
    options = more.loading_options("hf")
    assert options["hf_opts"] == {"device_map": "cpu", "dtype": "bfloat16"}
    vllm = RuntimeConfig(kv_cache_bytes=999, llm_opts={"engine_opts": {"dtype": "float32"}})
    assert vllm.loading_options("vllm") == {
        "engine_opts": {"kv_cache_memory_bytes": 999, "dtype": "float32"}
    }
    with pytest.raises(ValueError, match="device cannot be set for backend 'vllm'"):
        config.loading_options("vllm")


@pytest.mark.parametrize(("mode", "in_vllm"), [("int8", "int8_"), ("uint4", "int4_")])
def test_kv_cache_mode_maps_to_each_backends_dtype_name(mode, in_vllm):
    config = RuntimeConfig(kv_cache_mode=mode)
    assert config.loading_options("hf") == {"kv_cache_dtype": mode}
    assert config.loading_options("vllm") == {
        "engine_opts": {"kv_cache_dtype": f"{in_vllm}per_token_head"}
    }
    assert RuntimeConfig().loading_options("hf") == {}
    with pytest.raises(ValueError, match="kv_cache_dtype cannot be set for backend 'mock'"):
        config.loading_options("mock")


def test_kv_cache_mode_that_contradicts_a_given_model_raises_value_error(engine, model):
    options = {"kv_cache_dtype": "int8"}
    with AsyncTransformer(model, word_tokenizer(), **options) as lm:
        assert RuntimeConfig.from_model(lm).kv_cache_mode == "int8"
        engine.install_model("m", lm, kv_cache_mode="int8", **COLD)
        engine.install_model("n", lm, **COLD)
        with pytest.raises(ValueError, match=r"='uint4' does not .* which has 'int8'"):
            engine.install_model("o", lm, kv_cache_mode="uint4")
