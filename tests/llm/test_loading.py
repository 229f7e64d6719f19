"""Loading by name: options first, and a hub that does not answer is asked once."""

import os
import re
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from genlm_backend import AsyncTransformer, Engine, MockAsyncLM, load_model_by_name
from genlm_backend.backends import loading
from genlm_backend.backends.hf.options import loading_options
from genlm_backend.errors import (
    DeviceError,
    GenlmBackendError,
    ModelNotFoundError,
    OptionError,
    OptionTypeError,
)
from tests.llm.conftest import word_tokenizer


@pytest.fixture
def hub(monkeypatch):
    """Fails whoever asks it."""

    def ask():
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(loading, "hub_answers", ask)


@pytest.mark.parametrize("backend", ["hf", "mock", "vllm"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bach_size": 3}, OptionTypeError, "bach_size is not an option .* mean batch_size?"),
        ({"batch_size": 0}, OptionError, "batch_size must be an integer of 1 or more, got 0"),
        ({"timeout": "x"}, OptionTypeError, "timeout must be a number of 0 or more, got 'x'"),
        ({"row_cache_bytes": -1}, OptionError, "row_cache_bytes must be"),
        ({"output_device": "meta"}, DeviceError, "output_device must be a device"),
        ({"output_device": "cuda:97"}, DeviceError, "output_device 'cuda:97' cannot be used"),
        (3, OptionTypeError, "llm_opts must be a mapping"),
        ({5: 3}, OptionTypeError, "llm_opts must be a mapping"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_before_any_lookup(hub, backend, options, error, message):
    with pytest.raises(error, match=message):
        load_model_by_name("no-such-model", backend, options)


@pytest.mark.parametrize(
    "options",
    [
        {"hf_opts": 5},
        {"bitsandbytes_opts": 5},
        {"hf_opts": {"device_map": "cuda:97"}},
        {"hf_opts": {"device_map": "meta"}},
        {"kv_cache_bytes": 1.5e6},
        {"num_threads": True},
        {"model_id": "other"},
    ],
    ids=str,
)
def test_invalid_transformers_options_are_refused_before_any_lookup(hub, options):
    name = next(iter(options.get("hf_opts") or options)) if options != {"hf_opts": 5} else "hf_opts"
    with pytest.raises(GenlmBackendError, match=name):
        load_model_by_name("no-such-model", "hf", options)


def test_unknown_bitsandbytes_option_raises_option_type_error(hub):
    pytest.importorskip("bitsandbytes")
    options = {"bitsandbytes_opts": {"load_in_3bit": True}}
    with pytest.raises(OptionTypeError, match="load_in_3bit is not an option of BitsAndBytes"):
        load_model_by_name("no-such-model", "hf", options)


def test_engine_refuses_unknown_options_when_installing_a_model(hub):
    with Engine() as engine:
        with pytest.raises(OptionTypeError, match="did you mean batch_size"):
            engine.install_model("m", "no-such-model", backend="hf", llm_opts={"bach_size": 3})
        assert engine.models == {}


@pytest.mark.parametrize("name", [5, None, "", b"smollm2", ["smollm2"]], ids=str)
def test_empty_or_non_string_model_name_is_refused(hub, name):
    for load in (load_model_by_name, MockAsyncLM.from_name, AsyncTransformer.from_name):
        with pytest.raises(GenlmBackendError, match=r"name must be a .*string"):
            load(name)


OFFLINE = """
import time

def sleep(seconds):
    raise AssertionError("tried again")

time.sleep = sleep
from genlm_backend import load_model_by_name
from genlm_backend.errors import ModelNotFoundError

lm = load_model_by_name("someone/tiny", "mock")
assert len(lm.byte_vocab) == 96, len(lm.byte_vocab)
for backend in ("mock", "hf"):
    for name, near in {"someone/tinny": "someone/tiny", "SmolLm": "smollm2"}.items():
        try:
            load_model_by_name(name, backend)
        except ModelNotFoundError as error:
            assert f"did you mean '{near}'" in str(error), error
        else:
            raise AssertionError(name)
"""


def test_offline_loading_uses_the_cache_without_retries(tmp_path):
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer())
    LlamaConfig().save_pretrained(repository / "snapshots" / ("a" * 40))
    tokenizer.save_pretrained(repository / "snapshots" / ("a" * 40))
    nowhere = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*"}
    elsewhere = ("HF_HUB_OFFLINE", "HF_HUB_CACHE")
    environment = {n: v for n, v in os.environ.items() if n not in elsewhere}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE],
        env={**environment, **nowhere},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_check_reachable_offline_accepts_cached_models_and_directories(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "hub_answers", lambda: False)
    monkeypatch.setattr(loading, "cached_models", lambda: ["someone/tiny"])
    loading.check_reachable("someone/tiny")
    loading.check_reachable(str(tmp_path))
    with (
        pytest.raises(ModelNotFoundError, match="did you mean 'someone/tiny'"),
        loading.explained("someone/tinny"),
    ):
        loading.check_reachable("someone/tinny")


@pytest.mark.parametrize(
    ("backend", "missing"),
    [("hf", r"no config\.json, only "), ("mock", r"no tokenizer\.json or .*config\.json, only ")],
)
@pytest.mark.parametrize("files", [[], ["adapter_config.json"]], ids=str)
def test_directory_without_model_names_the_missing_file(hub, tmp_path, backend, missing, files):
    for name in files:
        (tmp_path / name).write_text("{}")
    message = rf"{re.escape(repr(str(tmp_path)))} contains no model .*{missing}"
    with pytest.raises(ModelNotFoundError, match=message + re.escape(repr(files))) as raised:
        load_model_by_name(str(tmp_path), backend)
    assert "hub" not in str(raised.value).lower()


def test_directory_without_weights_names_the_missing_file(hub, tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()).save_pretrained(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"no model .*model\.safetensors") as raised:
        load_model_by_name(str(tmp_path), "hf")
    assert "repository" not in str(raised.value)


# -------------------------------------------------------------------- options of other libraries


@pytest.mark.parametrize(
    ("backend", "name", "place"),
    [
        ("hf", "dtype", "hf_opts"),
        ("hf", "device_map", "hf_opts"),
        ("vllm", "max_model_len", "engine_opts"),
    ],
)
def test_misplaced_library_option_error_names_the_right_place(hub, backend, name, place):
    told = rf"^{name} is not an option of \w+.* Options of (vLLM|transformers .*) go into {place}$"
    with pytest.raises(OptionTypeError, match=told):
        load_model_by_name("no-such-model", backend, {"batch_size": 3, name: "x"})


def test_subclass_may_define_an_option_named_like_one_of_transformers(hub):
    class Typed(AsyncTransformer):
        def __init__(self, *args, dtype=None, **kwargs):
            super().__init__(*args, **kwargs)

    Typed.check_options({"dtype": "x"})
    with pytest.raises(OptionTypeError, match="hf_opts"):
        Typed.check_options({"dtype": "x", "torch_dtype": "x"})

    class Narrow(AsyncTransformer):
        def __init__(self, hf_model, hf_tokenizer, packs_weights=False):
            super().__init__(hf_model, hf_tokenizer, packs_weights=packs_weights)

    with pytest.raises(OptionTypeError, match=r"batch_size is not .*Narrow; expected one of packs"):
        Narrow.from_name("no-such-model", batch_size=3)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        ("flot32", OptionError, "got 'flot32'; did you mean 'float32'"),
        ("torch.float16", OptionError, "did you mean 'float16'"),
        ("bf16", OptionError, r"did you mean 'bfloat16'\?"),
        ("nn", OptionError, "got 'nn'"),
        ("int8", OptionError, "got 'int8'"),
        (torch.int32, OptionError, r"got torch\.int32"),
        (5, OptionTypeError, "got 5"),
        ({"": "flot32"}, OptionError, "did you mean 'float32'"),
    ],
    ids=str,
)
def test_invalid_weight_dtype_is_refused(hub, name, dtype, error, message):
    pattern = rf"^{name}.* must be 'auto' or a floating-point dtype .*{message}"
    with pytest.raises(error, match=pattern):
        load_model_by_name("no-such-model", "hf", {"hf_opts": {name: dtype}})


@pytest.mark.parametrize(
    "dtype", ["auto", None, "float64", "half", torch.bfloat16, {"": "float32"}]
)
def test_valid_weight_dtype_is_passed_on(dtype):
    assert loading_options(None, {"torch_dtype": dtype})["dtype"] == dtype
