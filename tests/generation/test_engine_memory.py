"""What a model takes while it runs, and gives back when it is released."""

import ctypes
import gc

import psutil
import pytest

from genlm_backend.generation import Engine


def resident():
    """Return the bytes in use, without those that the C library keeps for later."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return psutil.Process().memory_info().rss


@pytest.mark.real
def test_a_released_model_gives_its_memory_back():
    with Engine() as engine:
        left = []
        for _ in range(3):
            before = resident()
            engine.install_model("m", "smollm2", backend="hf", max_length=600)
            engine.start_model("m")
            engine.start_request_ids("m", [1] * 500, max_new_tokens=2).result()
            taken = resident() - before
            engine.stop_model("m")
            engine.release_model("m")
            left.append(resident() - before)
        assert taken > 500 << 20
        # What the first one leaves are libraries; nothing is added to it.
        assert max(left[1:]) < 0.15 * taken


@pytest.mark.real
def test_memory_does_not_grow_with_completed_requests():
    with Engine() as engine:
        engine.install_model("m", "smollm2", backend="hf", max_length=64, kv_cache_bytes=32 << 20)
        engine.start_model("m")

        def work(count):
            for i in range(count):
                engine.start_request_ids("m", [i + 5, 7], max_new_tokens=2).result()

        work(60)  # the rows kept are bounded by their bytes
        lm = engine._models["m"].lm
        lm.clear_cache()
        before = resident()
        work(60)
        lm.clear_cache()
        assert resident() - before < 16 << 20  # 120 rows are 22
        assert len(engine._models["m"]._tasks) <= 1
