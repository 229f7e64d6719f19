"""What is left when a model of vLLM is closed, or never closed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.llm.vllm import real

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.real,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.timeout(300),
]

LOAD = """
import ctypes, gc, os, random, sys
import numpy, psutil, torch
from genlm_backend import load_model_by_name

def resident():
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what is free, though the allocator has it still
    return psutil.Process().memory_info().rss / 2**20

def load():
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512,
               "max_num_seqs": 24, "kv_cache_memory_bytes": 1 << 30}
    return load_model_by_name("smollm2", backend="vllm", llm_opts={"engine_opts": options})
"""


def run(script, **variables):
    """Run a program of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD + script],
        env={**os.environ, **variables},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_close_frees_the_memory_and_reloading_does_not_leak():
    printed = run("""
states = random.getstate(), torch.get_rng_state().sum()
sizes = []
for _ in range(3):
    with load() as lm:
        lm.batch_next_token_logprobs_sync([[5] * 400 + [i] for i in range(20)])
        sizes.append(resident())
    lm.close()
    gc.collect()
    sizes.append(resident())
for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_USE_V2_MODEL_RUNNER"):
    assert name not in os.environ, name
assert (random.getstate(), torch.get_rng_state().sum()) == states
print(*map(round, sizes))
""")
    sizes = [int(size) for size in printed.split("\n")[-2].split()]
    for loaded, closed in zip(sizes[::2], sizes[1::2], strict=True):
        assert loaded - closed > 1000, sizes  # megabytes; the keys and values alone are 1,024
    assert sizes[-1] - sizes[1] < 200, sizes


@pytest.mark.parametrize("multiprocessing", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_unclosed_model_lets_the_interpreter_exit(multiprocessing):
    import psutil

    before = {p.pid for p in psutil.process_iter()}
    script = """
if __name__ == "__main__":
    lm = load()
    print(float(lm.next_token_logprobs_sync([1, 2, 3]).exp().sum()))
"""
    assert run(script, VLLM_ENABLE_V1_MULTIPROCESSING=multiprocessing).split("\n")[-2][:4] in (
        "1.00",
        "0.99",
    )
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not [p for p in left if "EngineCore" in " ".join(p.info["cmdline"] or [])]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_vllm_benchmark_workloads_run_one_round():
    for call in ("vllm_sis(1)", "vllm_plain(1)"):
        printed = run(f"from benchmarks import virtual; print(virtual.{call})")
        assert "tokens_per_second" in printed
