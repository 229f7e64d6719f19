"""A model of vLLM whose forks have other rows than whole contexts is refused when it is loaded."""

import importlib

import pytest
import torch

from genlm_backend import load_model_by_name
from genlm_backend.backends.vllm.vllm_evaluator import VLLMEvaluator, compare_rows
from genlm_backend.errors import UnsupportedModelError
from tests.llm.vllm import real

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def evaluator():
    found = VLLMEvaluator(real.tiny_engine(), torch.device("cpu"))
    yield found
    found.clear()


def test_passed_row_check_leaves_no_sessions_and_no_counts(evaluator):
    compare_rows(evaluator)
    assert len(evaluator.planner.table) == 0
    assert evaluator.counts().tokens_computed == evaluator.counts().num_forwards == 0


def test_model_whose_forks_have_wrong_keys_and_values_is_refused(evaluator, monkeypatch):
    fork = importlib.import_module("genlm_backend.backends.vllm.fork")
    monkeypatch.setattr(fork.ForkConnector, "update_state_after_alloc", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"vLLM [\d.]+, rows .* check_rows=False"):
        compare_rows(evaluator)
    monkeypatch.undo()
    compare_rows(evaluator)


@pytest.mark.slow  # compiling the model takes a minute
@pytest.mark.real
def test_compiled_16_bit_model_passes_the_row_check():
    with load_model_by_name("smollm2", backend="vllm") as lm:
        row = lm.next_token_logprobs_sync(lm.tokenizer.encode("The capital of France is"))
        assert lm.byte_vocab[int(row.argmax())].byte_string == b" Paris"
