"""A model with recurrent states is refused before its weights are loaded, and disturbs nobody."""

import psutil
import pytest
import torch

from genlm_backend import AsyncVirtualLM
from genlm_backend.errors import UnsupportedModelError
from tests.llm import families
from tests.llm.vllm import real
from tests.naive import naive_row

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


FAMILIES = [
    "qwen3_next",
    "mamba",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("jamba", "falcon_h1", "lfm2")),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "is_apart",
    ["0", pytest.param("1", marks=pytest.mark.slow)],
    ids=["here", "in a process of its own"],
)
def test_recurrent_model_is_refused_before_weights_load(monkeypatch, tmp_path, family, is_apart):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", is_apart)
    families.make(family).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # it would not get so far
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(UnsupportedModelError, match=r"recurrent states.* backend='hf'"):
        AsyncVirtualLM.from_name(str(tmp_path), real.TINY_OPTIONS)
    assert set(psutil.Process().children(recursive=True)) == before


def test_model_loaded_after_a_refused_one_gives_correct_rows(tmp_path):
    real.close_tiny_engine()
    families.make("qwen3_next").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError):
        AsyncVirtualLM.from_name(str(tmp_path), real.TINY_OPTIONS)
    with AsyncVirtualLM(real.load_tiny(), row_cache_bytes=0) as lm:
        assert lm._vllm.engine._core.is_local
        row = lm.next_token_logprobs_sync([1, 2, 3])
        expected = naive_row(real.tiny_model(), [1, 2, 3])
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-4)
