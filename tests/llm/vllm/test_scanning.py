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
def test_scanned_compiler_library_looks_empty_and_numba_still_compiles():
    let_modules_be_scanned()
    assert vars(ffi.lib) == {}
    assert numba.njit(doubled)(21) == 42


@pytest.mark.vllm
@pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
def test_vllm_starts_after_numba_has_compiled_a_function():
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
def test_vllm_processes_start_if_the_main_program_uses_numba(tmp_path):
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
