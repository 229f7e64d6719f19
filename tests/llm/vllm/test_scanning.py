"""vLLM starts beside tries, whose compiler it would stumble over."""

import numba
import pytest
from llvmlite.binding import ffi

from genlm_backend.backends.vllm.scanning import let_modules_be_scanned
from tests.llm.vllm import real


def doubled(number):
    return 2 * number


@pytest.mark.vllm
def test_modules_can_be_looked_at_and_functions_are_compiled_all_the_same():
    let_modules_be_scanned()
    assert vars(ffi.lib) == {}
    assert numba.njit(doubled)(21) == 42


@pytest.mark.vllm
@pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
def test_vllm_starts_once_something_has_been_compiled():
    real.close_tiny_engine()
    assert numba.njit(doubled)(4) == 8
    engine = real.tiny_engine()
    assert vars(ffi.lib) == {}
    assert engine is not None
