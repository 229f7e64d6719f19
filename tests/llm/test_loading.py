"""Loading by name: options first, and a hub that does not answer is asked once."""

import os
import subprocess
import sys

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerFast

from genlm_backend import AsyncTransformer, Engine, MockAsyncLM, load_model_by_name
from genlm_backend.errors import (
    DeviceError,
    GenlmBackendError,
    ModelNotFoundError,
    OptionError,
    OptionTypeError,
)
from genlm_backend.llm import loading
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
        ({"bach_size": 3}, OptionTypeError, "bach_size is no option .* did you mean batch_size?"),
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
def test_options_are_checked_before_anything_is_looked_for(hub, backend, options, error, message):
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
def test_options_of_transformers_are_checked_first_too(hub, options):
    name = next(iter(options.get("hf_opts") or options)) if options != {"hf_opts": 5} else "hf_opts"
    with pytest.raises(GenlmBackendError, match=name):
        load_model_by_name("no-such-model", "hf", options)


def test_an_option_that_bitsandbytes_does_not_have_is_told(hub):
    pytest.importorskip("bitsandbytes")
    options = {"bitsandbytes_opts": {"load_in_3bit": True}}
    with pytest.raises(OptionTypeError, match="load_in_3bit is no option of BitsAndBytesConfig"):
        load_model_by_name("no-such-model", "hf", options)


def test_an_engine_checks_them_when_a_model_is_installed(hub):
    with Engine() as engine:
        with pytest.raises(OptionTypeError, match="did you mean batch_size"):
            engine.install_model("m", "no-such-model", backend="hf", llm_opts={"bach_size": 3})
        assert engine.models == {}


@pytest.mark.parametrize("name", [5, None, "", b"smollm2", ["smollm2"]], ids=str)
def test_a_name_is_a_string(hub, name):
    for load in (load_model_by_name, MockAsyncLM.from_name, AsyncTransformer.from_name):
        with pytest.raises(GenlmBackendError, match="name must be a string"):
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


def test_without_a_network_the_hub_is_asked_once_and_the_cache_is_used(tmp_path):
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


def test_a_loader_without_options_looks_before_it_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "hub_answers", lambda: False)
    monkeypatch.setattr(loading, "cached_models", lambda: ["someone/tiny"])
    loading.check_reachable("someone/tiny")
    loading.check_reachable(str(tmp_path))
    with (
        pytest.raises(ModelNotFoundError, match="did you mean 'someone/tiny'"),
        loading.explained("someone/tinny"),
    ):
        loading.check_reachable("someone/tinny")


def test_a_directory_without_a_model_is_told(hub, tmp_path):
    with pytest.raises(ModelNotFoundError, match="without a config"):
        load_model_by_name(str(tmp_path), backend="hf")
