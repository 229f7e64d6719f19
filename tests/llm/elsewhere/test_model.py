"""A model of transformers in a process of its own."""

import asyncio
import copy
import os
import shutil
import signal
import threading
from functools import partial

import pytest
import torch

from genlm_backend import AsyncTransformer, load_model_by_name
from genlm_backend.errors import (
    AdapterError,
    EngineDiedError,
    ModelStateError,
    OptionError,
    OptionTypeError,
    PrefixFileError,
)
from genlm_backend.llm import ProcessEvaluator
from tests.llm import toy
from tests.llm.conftest import word_tokenizer
from tests.llm.elsewhere import over_there
from tests.llm.vllm.adapters import make_adapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    folder = over_there.saved("llama")
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:host_cache_bytes gains nothing")
def test_cache_tiers_and_prefix_files_work_in_a_process(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = {"kv_cache_dtype": "int8", "self_check": False, "packs_weights": False}
    with AsyncTransformer.from_name(folder, **kept) as plain:
        per_slot = plain._evaluator.scheduler.cache.pool.bytes_per_slot
        budgets = {"kv_cache_bytes": 21 * per_slot, "host_cache_bytes": 50 * per_slot}
        options = {**kept, **budgets, "process": True, "num_threads": 1}
        contexts = [[i, 2, 3, 4, 5, 6, 7, 8, 9, 10] for i in range(4)]
        with load_model_by_name(folder, backend="hf", llm_opts=options) as lm:
            assert (lm.kv_cache_dtype, lm.has_host_tier, lm.kv_capacity) == ("int8", True, 20)
            for context in contexts:
                row = lm.next_token_logprobs_sync(context)
                expected = plain.next_token_logprobs_sync(context)
                torch.testing.assert_close(row, expected, rtol=0, atol=1e-3)
            assert asyncio.run(lm.num_cached_tokens([*contexts[0], 1], tier="host")) == 10
            statistics = lm.statistics()
            assert statistics.num_tokens_to_host == 20
            assert statistics.host_bytes_budget == 50 * per_slot
            lm.save_prefix(contexts[0], "prompt")
            plain.clear_cache()
            assert list(plain.load_prefix("prompt")) == contexts[0]
            computed = plain.statistics().tokens_computed
            plain.next_token_logprobs_sync([*contexts[0], 1])
            assert plain.statistics().tokens_computed == computed + 1
            plain.save_prefix([1, 2, 3], "prompt")
            assert lm.load_prefix("prompt") == lm.context([1, 2, 3])
            (tmp_path / "prompt").write_text("no prefix")
            with pytest.raises(PrefixFileError, match="no prefix file"):
                lm.load_prefix("prompt")
            with pytest.raises(FileNotFoundError):
                lm.load_prefix("none")
            os.kill(lm.process_id, signal.SIGKILL)
            with pytest.raises(EngineDiedError):
                lm.load_prefix("prompt")
            lm.restart()
            lm.save_prefix([3, 4], "prompt")
            assert list(plain.load_prefix("prompt")) == [3, 4]


def test_model_in_a_process_gives_local_results_and_survives_restart(folder, tmp_path):
    plain = AsyncTransformer.from_name(folder, self_check=False)
    options = {"process": True, "num_threads": 1, "self_check": False, "packs_weights": False}
    with load_model_by_name(folder, backend="hf", llm_opts=options) as lm:
        assert isinstance(lm, AsyncTransformer)
        assert lm.model is None
        assert lm.model_device == plain.model_device == torch.device("cpu")
        assert (lm.max_length, lm.device, lm.kv_reuse) == (plain.max_length, plain.device, True)
        context = [1, 2, 3, 4]
        expected = plain.next_token_logprobs_sync(context)

        def check(row, expected=expected):
            torch.testing.assert_close(row, expected, rtol=0, atol=2e-5)

        check(lm.next_token_logprobs_sync(context))
        check(lm.next_token_logprobs_uncached(context))
        check(lm.score_sync(context[:1], context[1:]), plain.score_sync(context[:1], context[1:]))
        lm.cache_kv(context)
        assert asyncio.run(lm.num_cached_tokens([*context, 5])) == 4
        assert lm.statistics().tokens_computed >= 4
        make_adapter(tmp_path / "poet", 1, copy.deepcopy(plain.model))
        path = str(tmp_path / "poet")
        lm.add_new_lora(path, "one")
        plain.add_new_lora(path, "one")
        tuned = plain.next_token_logprobs_sync(context, lora_name="one")
        assert float((tuned - expected).abs().max()) > 1e-2
        check(lm.next_token_logprobs_sync(context, lora_name="one"), tuned)
        make_adapter(tmp_path / "clerk", 2, copy.deepcopy(plain.model))
        path = str(tmp_path / "clerk")
        for one in (lm, plain):
            one.add_new_lora(path, "one")
        before, tuned = tuned, plain.next_token_logprobs_sync(context, lora_name="one")
        assert float((tuned - before).abs().max()) > 1e-2
        check(lm.next_token_logprobs_sync(context, lora_name="one"), tuned)
        first = lm.process_id
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match=r"reload the model with restart\(\)"):
            lm.next_token_logprobs_sync([7])
        lm.restart()
        assert lm.process_id != first
        lm._rows.clear()
        check(lm.next_token_logprobs_sync(context, lora_name="one"), tuned)
        check(lm.next_token_logprobs_sync(context))
        shutil.rmtree(path)
        lm.restart()
        lm._rows.clear()
        with pytest.raises(AdapterError, match=r"the adapter .* cannot be loaded"):
            lm.next_token_logprobs_sync(context, lora_name="one")
        check(lm.next_token_logprobs_sync(context))
        lm.remove_lora("one")
        lm.restart()
        check(lm.next_token_logprobs_sync([9]), plain.next_token_logprobs_sync([9]))
    assert lm.process_id is None
    with pytest.raises(ModelStateError, match="a model in a child process"):
        plain.restart()
    plain.close()


def test_invalid_process_options_raise_option_error(folder, tiny_llama):
    with pytest.raises(OptionError, match=r"loaded by name.*from_name\(name, process=True\)"):
        AsyncTransformer(tiny_llama, word_tokenizer(), process=True)
    hf_opts = {"key_mapping": threading.Lock()}
    with pytest.raises(OptionTypeError, match=r"hf_opts\['key_mapping'\] cannot be sent to"):
        AsyncTransformer.from_name(folder, process=True, hf_opts=hf_opts)
    with pytest.raises(OptionTypeError, match="process"):
        AsyncTransformer.from_name(folder, process="yes")
    with pytest.raises(OptionError, match="pass num_threads to the function that makes this"):
        AsyncTransformer(
            ProcessEvaluator(partial(toy.ToyEvaluator)), word_tokenizer(), num_threads=1
        )
