"""Loading tells where mlx-lm's rows are others than those of transformers, which is asked."""

import json
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from genlm_backend import AsyncMlxLM
from genlm_backend.backends.mlx import present
from tests.llm import families
from tests.llm.conftest import fresh_row, random_contexts, word_tokenizer

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not present.is_present(), reason="needs MLX"),
]

OTHERS = {
    "ernie": lambda: families._config(  # the bias by which experts are chosen
        "Ernie4_5_MoeConfig", moe_num_experts=4, moe_k=2, moe_intermediate_size=16
    ),
    "jamba": lambda: families._config(  # the chosen experts' weights, which add up to one there
        "JambaConfig",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "llama with another activation": lambda: families._config("LlamaConfig", hidden_act="relu"),
    "phi3 with a window": lambda: families._config("Phi3Config", sliding_window=5),
}
"""Configs of which mlx-lm leaves something out."""

ALIKE = {
    "llama": families.PER_TOKEN["llama"],
    "mistral": families.PER_TOKEN["mistral-sliding"],
    "mixtral": families.PER_TOKEN["mixtral"],
    "deepseek-v3": families.PER_TOKEN["deepseek-v3"],
    "mamba": families.RUNNING["mamba"],
    "glm": lambda: families._config("GlmConfig", head_dim=8),  # turns half of each head
    "smollm3": lambda: families._config(  # names a window that no layer has
        "SmolLM3Config", sliding_window=5, layer_types=["full_attention"] * 2
    ),
}
"""Configs of which it leaves out nothing."""


def loaded(model):
    """Return what mlx-lm makes of a model of transformers, and what was said of it."""
    from genlm_backend.backends.mlx.mlx_loader import MlxLoader

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.save_pretrained(folder)
        own = MlxLoader(folder).model()
    texts = [str(each.message) for each in said if each.category is UserWarning]
    return own, [text for text in texts if "mlx-lm" in text]


def distance(model, own):
    with AsyncMlxLM(own, word_tokenizer(), row_cache_bytes=0) as lm:
        contexts = random_contexts(6, seed=4, max_length=20)
        rows = lm.batch_next_token_logprobs_sync(contexts)
    pairs = zip(rows, contexts, strict=True)
    return max(float((row - fresh_row(model, ids)).abs().max()) for row, ids in pairs)


@pytest.mark.parametrize("name", OTHERS)
def test_rows_that_are_others_are_told(name):
    model = families.of(OTHERS[name]())
    own, said = loaded(model)
    assert distance(model, own) > 0.05
    kind = model.config.model_type
    assert len(said) == 1
    what = "leaves out the sliding window of 5" if "window" in name else f"computes {kind!r} other"
    assert what in said[0]


@pytest.mark.parametrize("name", ALIKE)
def test_nothing_is_said_of_rows_that_are_the_same(name):
    model = families.of(ALIKE[name]())
    own, said = loaded(model)
    assert distance(model, own) < 1e-4
    assert said == []


def test_a_large_model_is_asked_by_a_small_one():
    from genlm_backend.backends.mlx.differences import _small, distances
    from genlm_backend.backends.mlx.mlx_loader import load_directory

    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_000,
        "eos_token_id": [5, 100_000],
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 64,
            "long_factor": [2.0] * 64,
        },
    }
    small = _small(config)
    assert small is not None
    assert small["hidden_size"] == 64
    assert small["num_key_value_heads"] == 2
    assert small["rope_parameters"]["long_factor"] == [2.0] * 8
    assert distances(config, load_directory)[24] > 0.01  # turned by others than the short factors
    del config["rope_parameters"]
    assert max(distances(config, load_directory).values()) < 1e-4


def test_nothing_is_said_of_what_cannot_be_asked(tmp_path):
    from genlm_backend.backends.mlx.differences import distances
    from genlm_backend.backends.mlx.mlx_loader import load_directory

    for config in (
        {"model_type": "strange"},
        {},
        {"model_type": "llama", "hidden_size": "wide"},
        {"model_type": "gpt_oss"},  # whose directories mlx-lm does not load
        {"model_type": "olmo"},  # whose module ends the interpreter
    ):
        assert distances(config, load_directory) == {}


def test_asking_leaves_no_trace(capfd, tmp_path, monkeypatch):
    from genlm_backend.backends.mlx.differences import _distances, distances
    from genlm_backend.backends.mlx.mlx_loader import load_directory

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _distances.cache_clear()
    before = torch.get_rng_state(), torch.get_default_dtype(), logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    capfd.readouterr()
    assert distances(json.loads(json.dumps({"model_type": "qwen2"})), load_directory)
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), logging.get_verbosity()) == before[1:]
    assert logging.is_progress_bar_enabled() == bars
    assert list(Path(tmp_path).iterdir()) == []
