"""Models of an engine: states, names, warming up and closing."""

import itertools
import threading
import time

import pytest

from genlm_backend import MockAsyncLM
from genlm_backend.errors import ModelStateError, UnknownModelError
from genlm_backend.generation import Engine, GenerationStatus, ModelState
from tests.generation.serving import COLD, serve
from tests.llm.conftest import word_tokenizer
from tests.llm.hooked import HookedMock


@pytest.mark.parametrize("steps", list(itertools.product(["start", "stop", "release"], repeat=4)))
def test_model_allows_only_valid_state_transitions(engine, lm, steps):
    allowed = {
        ("installed", "start"): "running",
        ("stopped", "start"): "running",
        ("running", "stop"): "stopped",
        ("installed", "release"): "released",
        ("stopped", "release"): "released",
    }
    engine.install_model("m", lm, **COLD)
    state = "installed"
    for step in steps:
        change = getattr(engine, f"{step}_model")
        if (state, step) in allowed:
            change("m")
            state = allowed[state, step]
        else:
            with pytest.raises(ModelStateError, match=f"'m' is {state}; to {step}, it must be"):
                change("m")
        assert engine.model_state("m") is ModelState(state) is engine.models["m"]
        if state == "running":
            assert len(engine.start_request_ids("m", [1], max_new_tokens=2).result()) == 1
        else:
            with pytest.raises(
                ModelStateError, match=f"is {state}; to accept requests, it must be"
            ):
                engine.start_request_ids("m", [1], max_new_tokens=2)


def test_model_name_is_taken_until_it_is_released(engine, lm):
    serve(engine, lm)
    with pytest.raises(ModelStateError, match="to install another of that name"):
        engine.install_model("m", lm)
    engine.stop_model("m")
    engine.release_model("m")
    serve(engine, lm)
    assert engine.models == {"m": ModelState.RUNNING}
    engine.install_model("smollm2", lm)
    with pytest.raises(UnknownModelError, match=r"no model 'smollm' .*; did you mean 'smollm2'\?"):
        engine.start_model("smollm")


def test_engine_closes_only_models_it_loaded_itself(engine, lm):
    serve(engine, lm)
    engine.stop_model("m")
    engine.release_model("m")
    assert lm.next_token_logprobs_sync([1]).shape == (96,)
    before = threading.active_count()
    engine.install_model("own", "smollm2", backend="mock", max_batch=7, max_length=40)
    assert threading.active_count() == before  # nothing has been loaded
    engine.start_model("own")
    own = engine._models["own"].lm
    assert own.batch_size == 7
    engine.stop_model("own")
    engine.release_model("own")
    with pytest.raises(RuntimeError, match="closed"):
        own.next_token_logprobs_sync([1])


def test_start_warms_up_with_the_longest_context_and_widest_batch(engine):
    asked = []

    class Seen(HookedMock):
        def evaluate(self, queries):
            asked.append([len(query.token_ids) for query in queries])
            return super().evaluate(queries)

    with Seen(word_tokenizer(), max_length=50) as lm:
        engine.install_model("a", lm, max_batch=6)
        engine.start_model("a")
        assert asked == [[50], [8] * 6]
        asked.clear()
        engine.stop_model("a")
        engine.start_model("a")
        assert asked == []  # it has been tried
        engine.install_model("b", lm, max_length=20, max_batch=2)
        engine.start_model("b")
        assert asked == [[19], [8] * 2]


def test_memory_error_of_the_warm_up_fails_the_start_of_a_model(engine):
    class Small(HookedMock):
        def evaluate(self, queries):
            if len(queries[0].token_ids) > 30:
                raise MemoryError("too long")
            return super().evaluate(queries)

    with Small(word_tokenizer(), max_length=50) as lm:
        engine.install_model("m", lm)
        with pytest.raises(MemoryError):
            engine.start_model("m")
        assert engine.model_state("m") is ModelState.INSTALLED
        engine.release_model("m")
        engine.install_model("m", lm, max_length=25)
        engine.start_model("m")


def test_engine_closes_a_loaded_model_that_fails_to_start(engine, monkeypatch):
    def fail(lm, max_batch, max_length):
        loaded.append(lm)
        raise MemoryError("warming up")

    loaded = []
    monkeypatch.setattr("genlm_backend.generation.engine.model_entry._warm_up", fail)
    engine.install_model("own", "smollm2", backend="mock")
    with pytest.raises(MemoryError, match="warming up"):
        engine.start_model("own")
    with pytest.raises(RuntimeError, match="closed"):
        loaded[0].next_token_logprobs_sync([1])
    monkeypatch.undo()
    engine.start_model("own")


def test_closed_engine_interrupts_requests_and_raises_state_error(gated):
    with Engine() as engine:
        serve(engine, gated)
        request = engine.start_request_ids("m", [1], max_new_tokens=5)
        gated.let(1)
        assert request.queue.get().token_ids
        gated.let()
    assert request.status() is GenerationStatus.INTERRUPTED
    assert 1 <= request.queue.generated_length() < 5
    engine.close()
    for use in (lambda: engine.start_model("m"), lambda: engine.start_request_ids("m", [1])):
        with pytest.raises(ModelStateError, match="this engine has been closed"):
            use()


def test_close_from_two_threads_during_a_model_start_releases_all(lm):
    loading, may_load = threading.Event(), threading.Event()

    class Slow(HookedMock):
        def evaluate(self, queries):
            loading.set()
            assert may_load.wait(30)
            return super().evaluate(queries)

    with Slow(word_tokenizer(), max_length=9) as slow:
        engine = Engine()
        serve(engine, lm)
        engine.install_model("slow", slow)
        starting = threading.Thread(target=engine.start_model, args=("slow",))
        starting.start()
        assert loading.wait(30)
        closing = [threading.Thread(target=engine.close) for _ in range(2)]
        for thread in closing:
            thread.start()
        while not engine._is_closed:
            time.sleep(0.001)
        with pytest.raises(ModelStateError, match="has been closed"):
            engine.start_request_ids("m", [1], max_new_tokens=1)
        may_load.set()
        for thread in [starting, *closing]:
            thread.join(30)
            assert not thread.is_alive()
        assert not [t for t in threading.enumerate() if t.name == "genlm-engine"]
        states = {model.state for model in engine._models.values()}
        assert states == {ModelState.RELEASED}


def test_model_that_fails_to_stop_does_not_keep_others_from_closing(lm):
    class Broken(MockAsyncLM):
        def clear_cache(self):
            raise ZeroDivisionError("clearing")

    with Broken(word_tokenizer()) as broken:
        engine = Engine()
        for name, model in (("a", lm), ("b", broken), ("c", lm)):
            engine.install_model(name, model, **COLD)
            engine.start_model(name)
        with pytest.raises(ZeroDivisionError, match="clearing"):
            engine.close()
        assert {model.state for model in engine._models.values()} == {ModelState.RELEASED}
        assert not [t for t in threading.enumerate() if t.name == "genlm-engine"]
        engine.close()
