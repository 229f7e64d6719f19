"""An engine, and models that cost nothing."""

import threading

import pytest

from genlm_backend import MockAsyncLM
from genlm_backend.generation import Engine
from tests.generation import byte_model
from tests.generation.serving import GatedLM
from tests.llm import families
from tests.llm.conftest import word_tokenizer


@pytest.fixture
def lm():
    with MockAsyncLM(word_tokenizer(), row_cache_bytes=0) as lm:
        yield lm


@pytest.fixture
def gated():
    with GatedLM() as lm:
        yield lm
        lm.let()


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine
    assert not [t for t in threading.enumerate() if t.name == "genlm-engine"]


@pytest.fixture(scope="module")
def model():
    return families.make("llama")


@pytest.fixture(scope="module")
def byte_lm():
    with byte_model.make() as lm:
        yield lm
