"""Loading takes the families that are compared with transformers, and refuses others."""

import tempfile

import pytest
import torch

from genlm_backend import AsyncMlxLM
from genlm_backend.backends.mlx import mlx_loader, present
from genlm_backend.errors import UnsupportedModelError
from tests.llm import families
from tests.llm.conftest import random_contexts, word_tokenizer
from tests.llm.mlx.test_model import TOLERANCES, make
from tests.naive import naive_row

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not present.is_present(), reason="needs MLX"),
]

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPES = {"linear": {}, "llama3": _LLAMA3, "yarn": {}}


def _rope(rope_type):
    more = {} if rope_type == "linear" else {"original_max_position_embeddings": 64}
    return {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, **more, **_ROPES[rope_type]}


TURNED = {
    f"{config}-{rope_type}": lambda config=config, rope_type=rope_type: families._config(
        config, max_position_embeddings=256, rope_parameters=_rope(rope_type)
    )
    for config in ("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config")
    for rope_type in _ROPES
}
TURNED["DeepseekV3Config-yarn"] = lambda: families._config(
    "DeepseekV3Config",
    **families._LATENT,
    max_position_embeddings=256,
    rope_parameters={**_rope("yarn"), "mscale": 1.0, "mscale_all_dim": 1.0},
)

OTHERS = {
    "model_type 'ernie4_5_moe'": lambda: families._config(
        "Ernie4_5_MoeConfig", moe_num_experts=4, moe_k=2, moe_intermediate_size=16
    ),
    "hidden_act='relu'": lambda: families._config("LlamaConfig", hidden_act="relu"),
    "rope_interleave=False": lambda: families._config(
        "DeepseekV3Config", **families._LATENT, rope_interleave=False
    ),
    "other sliding windows": lambda: families._config(
        "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=5
    ),
    "rope_type='longrope'": lambda: families._config(
        "LlamaConfig",
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    ),
}
"""Configs of which mlx-lm leaves something out, by what is refused."""


def distance(model, **options):
    """Return how far the rows of what is loaded from a directory are from those of a model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        own = mlx_loader.MlxLoader(folder, **options).model()
    with AsyncMlxLM(own, word_tokenizer(), row_cache_bytes=0) as lm:
        contexts = random_contexts(6, seed=4, max_length=20)
        rows = lm.batch_next_token_logprobs_sync(contexts)
    expected = torch.stack([naive_row(model, ids) for ids in contexts])
    return float((rows - expected).abs().max())


def test_accepted_families_are_those_compared_with_transformers():
    compared = {make(name).config.model_type for name, most in TOLERANCES.items() if most <= 1e-4}
    assert compared == set(mlx_loader.TESTED)


@pytest.mark.parametrize("name", [name for name, most in TOLERANCES.items() if most <= 1e-4])
def test_directory_of_a_tested_family_gives_the_rows_of_transformers(name):
    assert distance(make(name)) < 1e-4


@pytest.mark.parametrize("name", TURNED)
def test_rows_with_scaled_rope_match_transformers(name):
    assert distance(families.of(TURNED[name]())) < 1e-4


@pytest.mark.parametrize("reason", OTHERS)
def test_untested_config_is_refused_without_allow_untested(reason):
    model = families.of(OTHERS[reason]())
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*allow_untested=True"):
        distance(model)
    assert distance(model, allow_untested=True) > 0.05
