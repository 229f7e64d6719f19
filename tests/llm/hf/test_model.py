"""AsyncTransformer's own doors: construction, loading, options."""

import json
import threading

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from genlm_backend import AsyncTransformer, MockAsyncLM, load_model_by_name
from genlm_backend.batching import worker
from genlm_backend.errors import (
    ModelNotFoundError,
    ModelStateError,
    OptionError,
    UnknownBackendError,
    UnsupportedModelError,
)
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A whole small model as a directory, as ``save_pretrained`` leaves it."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    families.make("llama").save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()).save_pretrained(folder)
    return str(folder)


def test_local_directory_is_accepted_as_model_name(folder):
    with load_model_by_name(folder) as lm:
        assert isinstance(lm, AsyncTransformer)
        assert lm.model.dtype == torch.float32
        row = lm.next_token_logprobs_sync([1, 2, 3])
        torch.testing.assert_close(
            row, naive_row(families.make("llama"), [1, 2, 3]), rtol=0, atol=2e-5
        )


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_options_reach_transformers(folder, name):
    options = {"hf_opts": {name: torch.bfloat16}, "batch_size": 7, "timeout": 0.5}
    with load_model_by_name(folder, "hf", options) as lm:
        assert isinstance(lm, AsyncTransformer)
        assert lm.model.dtype == torch.bfloat16
        assert (lm.batch_size, lm.timeout) == (7, 0.5)
        assert lm.next_token_logprobs_sync([1]).dtype == torch.float32


def test_own_option_in_hf_opts_raises_type_error(folder):
    with pytest.raises(TypeError, match="kv_cache_bytes is an option of AsyncTransformer, not"):
        load_model_by_name(folder, "hf", {"hf_opts": {"kv_cache_bytes": 1 << 20}})


def test_remote_code_is_not_trusted_unless_asked_for(folder, tmp_path):
    import shutil

    copy = tmp_path / "remote"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["model_type"] = "unheard-of"
    config["auto_map"] = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
    }
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "code.py").write_text("raise SystemExit('remote code ran')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model_by_name(str(copy))


def test_the_mock_needs_only_the_tokenizer(folder):
    with load_model_by_name(folder, backend="mock", llm_opts={"batch_size": 3}) as lm:
        assert isinstance(lm, MockAsyncLM)
        assert lm.batch_size == 3
        assert lm.next_token_logprobs_sync([1]).shape == (96,)


def test_unknown_backend_error_lists_known_backends(folder):
    with pytest.raises(
        UnknownBackendError, match=r"'tensorrt'.*'hf', 'vllm', 'mlx', 'llama-cpp', 'mock'"
    ):
        load_model_by_name(folder, backend="tensorrt")
    with pytest.raises(UnknownBackendError, match="did you mean 'hf'"):
        load_model_by_name(folder, backend="transformers")


def test_absent_model_raises_model_not_found_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for backend in ("hf", "mock"):
        with pytest.raises(ModelNotFoundError, match=r"(?s)'no-such-model'.*smollm2.*path"):
            load_model_by_name("no-such-model", backend=backend)
    with pytest.raises(TypeError, match="must be a string"):
        load_model_by_name(5)  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": 2.5}, TypeError),
        ({"timeout": -1}, ValueError),
        ({"kv_cache_bytes": -1}, ValueError),
        ({"row_cache_bytes": -1}, ValueError),
        ({"output_device": "nowhere"}, ValueError),
        ({"no_such_option": 1}, TypeError),
    ],
    ids=str,
)
def test_impossible_options_are_refused(tiny_llama, options, error):
    with pytest.raises(error):
        AsyncTransformer(tiny_llama, word_tokenizer(), **options)


@pytest.mark.parametrize("kv_cache_bytes", [0, 1 << 16])
def test_model_converted_after_wrapping_is_refused_at_next_batch(kv_cache_bytes):
    model = families.make("llama")
    with AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=kv_cache_bytes) as lm:
        expected = naive_row(model, [1, 2])
        lm.next_token_logprobs_sync([1, 2])
        for convert in (model.double, model.half, model.bfloat16):
            convert()
            for ask in (lm.next_token_logprobs_sync, lm.next_token_logprobs_uncached):
                with pytest.raises(ModelStateError, match=r"torch.float32 on cpu.* wrap the"):
                    ask([1, 2, 3])
            if convert == model.double:  # and back, which loses nothing
                model.float()
                torch.testing.assert_close(
                    lm.next_token_logprobs_sync([1, 2, 3]),
                    naive_row(model, [1, 2, 3]),
                    rtol=0,
                    atol=2e-5,
                )
                lm.clear_cache()
                row = lm.next_token_logprobs_sync([1, 2])
                torch.testing.assert_close(row, expected, rtol=0, atol=2e-5)
                lm.clear_cache()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2", "hf_model must be a causal .* got 'smollm2'; pass a name to from_name"),
        (None, "hf_model must be"),
        (LlamaForCausalLM, "hf_model must be"),
        (torch.nn.Linear(2, 2), "hf_model must be"),
    ],
    ids=str,
)
def test_object_other_than_causal_lm_is_refused(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        AsyncTransformer(model, word_tokenizer())


def test_model_on_meta_device_is_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(families.make("llama").config)
    with pytest.raises(UnsupportedModelError, match="on the device 'meta'"):
        AsyncTransformer(model, word_tokenizer())


def test_failed_constructor_leaves_no_thread(tiny_llama, monkeypatch):
    def refuse(*_):
        raise UnsupportedModelError("refused while it is examined")

    monkeypatch.setattr("genlm_backend.backends.hf.hf_evaluator.hf_probe", refuse)
    before = set(threading.enumerate())
    with pytest.raises(UnsupportedModelError) as kept:  # its traceback refers to the model
        AsyncTransformer(tiny_llama, word_tokenizer(), num_threads=1)
    assert set(threading.enumerate()) <= before
    del kept


def test_default_max_length_is_that_of_model(tiny_llama):
    with AsyncTransformer(tiny_llama, word_tokenizer()) as lm:
        assert lm.max_length == 256
        assert lm.next_token_logprobs_sync([1] * 256).shape == (96,)
        with pytest.raises(ValueError, match=r"257 tokens.*256"):
            lm.next_token_logprobs_sync([1] * 257)


def test_max_length_beyond_learned_positions_is_refused(tiny_llama):
    gpt2 = families.make("gpt2")
    most = gpt2.config.max_position_embeddings
    with pytest.raises(OptionError, match=f"more than the {most} positions"):
        AsyncTransformer(gpt2, word_tokenizer(), max_length=most + 1)
    with AsyncTransformer(tiny_llama, word_tokenizer(), max_length=300) as lm:  # rotary ones
        assert lm.next_token_logprobs_sync([1] * 300).isfinite().all()


def test_ids_beyond_tokenizer_get_minus_inf(tiny_llama):
    with AsyncTransformer(tiny_llama, word_tokenizer(90)) as lm:
        assert len(lm.byte_vocab) == len(lm.str_vocab) == 96
        assert lm.undefined_ids == set(range(90, 96))
        assert [bytes(t) for t in lm.byte_vocab[90:]] == [b""] * 6
        row = lm.next_token_logprobs_sync([1, 2, 3])
        assert row.shape == (96,)
        assert row[90:].isneginf().all()
        assert float(row.exp().sum()) == pytest.approx(1, abs=1e-5)
        whole = naive_row(tiny_llama, [1, 2, 3])[:90].log_softmax(-1)
        torch.testing.assert_close(row[:90], whole, rtol=0, atol=2e-5)


def test_ids_missing_in_tokenizer_get_minus_inf(tiny_llama):
    vocab = {f"<{i}>": i for i in range(96) if i not in (5, 50)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    with AsyncTransformer(tiny_llama, tokenizer) as lm:
        row = lm.next_token_logprobs_sync([1])
        assert row.isneginf().nonzero().flatten().tolist() == [5, 50]
        assert float(row.exp().sum()) == pytest.approx(1, abs=1e-5)


def test_tokenizer_larger_than_model_is_truncated_with_warning(tiny_llama):
    with pytest.warns(UserWarning, match=r"100 ids, but the model only 96: ids 96 to 99.*<97>"):
        lm = AsyncTransformer(tiny_llama, word_tokenizer(100))
    assert len(lm.byte_vocab) == 96
    assert lm.next_token_logprobs_sync([1]).shape == (96,)
    with pytest.raises(ValueError, match="token id 97"):
        lm.next_token_logprobs_sync([97])
    lm.close()


def test_close_releases_the_model():
    import gc
    import weakref

    model = families.make("gpt2")
    reference = weakref.ref(model)
    lm = AsyncTransformer(model, word_tokenizer())
    lm.next_token_logprobs_sync([1])
    lm.close()
    del model
    gc.collect()
    assert reference() is None


def test_two_models_share_no_rows(tiny_llama):
    with (
        AsyncTransformer(tiny_llama, word_tokenizer()) as one,
        AsyncTransformer(families.make("llama", seed=1), word_tokenizer()) as two,
    ):
        rows = [lm.next_token_logprobs_sync([1, 2]) for lm in (one, two, one, two)]
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[1], rows[3])
    assert not torch.allclose(rows[0], rows[1])


def test_statistics_are_available_during_batch_and_after_close(tiny_llama):
    told = []
    with AsyncTransformer(tiny_llama, word_tokenizer(), row_cache_bytes=0) as lm:
        lm.next_token_logprobs_sync([5, 6, 7, 8])
        hook = tiny_llama.model.register_forward_pre_hook(lambda *_: told.append(lm.statistics()))
        lm.next_token_logprobs_sync([5, 6, 7, 8, 9])
        hook.remove()
        last = lm.statistics()
        assert (last.num_forwards, last.tokens_computed, last.tokens_reused) == (2, 5, 4)
    (during,) = told
    assert (during.num_forwards, during.tokens_computed) == (1, 4)
    assert during.kv_bytes_used == last.kv_bytes_used  # the last token's slot is taken already
    assert lm.statistics() == last


def test_num_threads_applies_only_to_own_model(tiny_llama):
    before = torch.get_num_threads()
    with AsyncTransformer(tiny_llama, word_tokenizer(), num_threads=1) as lm:
        assert lm._batcher.call(torch.get_num_threads) == 1
        assert torch.get_num_threads() == before
        assert lm.next_token_logprobs_sync([1]).shape == (96,)
    with pytest.raises(ValueError, match="num_threads must be an integer of 1 or more, got 0"):
        AsyncTransformer(tiny_llama, word_tokenizer(), num_threads=0)


def test_interrupted_close_can_be_repeated(tiny_llama, monkeypatch):
    before = set(threading.enumerate())
    lm = AsyncTransformer(tiny_llama, word_tokenizer())
    lm.next_token_logprobs_sync([1, 2])
    join = worker._join

    def interrupted(*threads):
        monkeypatch.setattr(worker, "_join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "_join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.close()
    lm.close()
    assert lm.model is None
    assert lm._evaluator.scheduler.tree.num_slots == 0
    assert set(threading.enumerate()) <= before
