"""vLLM starts beside tries, whose compiler it would stumble over."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from llvmlite.binding import ffi

from genlm_backend.backends.vllm.release import let_modules_be_scanned
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


SCRIPT = """
import numba
from tests.llm.vllm import real

@numba.njit
def doubled(number):
    return 2 * number

assert doubled(4) == 8
if __name__ == "__main__":
    engine = real.load_tiny()
    assert not engine._core.is_local
    engine.close()
    print("it has started")
"""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM")
@pytest.mark.timeout(300)
def test_processes_of_vllm_start_though_the_program_that_they_import_compiles(tmp_path):
    (tmp_path / "program.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "it has started" in done.stdout
