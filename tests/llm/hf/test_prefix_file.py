"""Prefixes in files: what is loaded is what was saved, and nothing else is taken for it."""

import asyncio
import json
import math
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf import prefix_file
from genlm_backend.errors import CacheError, PrefixFileError, UnknownAdapterError
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row
from tests.tree_integrity import check_integrity

PROMPT = [random.Random(0).randrange(families.VOCAB) for _ in range(50)]


def model_of(seed=0, name="llama"):
    return families.make(name, seed)


def over(model, **options):
    return AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0, **options)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompt.safetensors"


@pytest.fixture
def saved(path):
    with over(model_of()) as lm:
        lm.save_prefix(PROMPT, path)
    return path


@pytest.mark.parametrize("kept", [None, "int8", "uint4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
@pytest.mark.filterwarnings("ignore")
def test_loaded_prefix_is_not_recomputed_and_gives_same_rows(name, kept, path):
    model = families.make(name)
    contexts = [[*PROMPT, 7, 3], [*PROMPT, 9], PROMPT, [*PROMPT[:20], 3, 4], [5]]
    with over(model, kv_cache_dtype=kept) as lm:
        lm.save_prefix(PROMPT, path)
        expected = lm.batch_next_token_logprobs_sync(contexts)
    with over(model, kv_cache_dtype=kept) as lm:
        prompt = lm.load_prefix(str(path))
        assert list(prompt) == PROMPT
        assert lm.statistics().tokens_computed == 0
        rows = [lm.next_token_logprobs_sync(prompt.extend(7))]
        assert lm.statistics().tokens_computed == 1
        rows = lm.batch_next_token_logprobs_sync(contexts)
        assert lm.statistics().tokens_computed == 1 + 1 + 1 + 1 + 2 + 1
        torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-4)
        if kept is None:
            for row, context in zip(rows, contexts, strict=True):
                expected_row = naive_row(model, context)
                torch.testing.assert_close(row, expected_row, atol=2e-5, rtol=1e-4)
        check_integrity(lm._evaluator.scheduler.tree)


def test_loading_prefix_keeps_tokens_already_cached(saved):
    model = model_of()
    with over(model) as lm:
        lm.next_token_logprobs_sync([*PROMPT[:20], 3])
        used = lm.statistics().kv_bytes_used
        for _ in range(3):
            assert lm.load_prefix(saved) == lm.context(PROMPT)
        per_slot = lm._evaluator.scheduler.cache.pool.bytes_per_slot
        assert lm.statistics().kv_bytes_used == used + 30 * per_slot
        row = lm.next_token_logprobs_sync([*PROMPT, 1])
        torch.testing.assert_close(row, naive_row(model, [*PROMPT, 1]), atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:host_cache_bytes gains nothing")
def test_loading_prefix_evicts_others_or_raises_cache_error(saved):
    with over(model_of()) as lm:
        per_slot = lm._evaluator.scheduler.cache.pool.bytes_per_slot
    with over(model_of(), kv_cache_bytes=61 * per_slot, host_cache_bytes=90 * per_slot) as lm:
        for start in range(3):
            lm.next_token_logprobs_sync([start, *PROMPT[:30]])
        lm.load_prefix(saved)
        check_integrity(lm._evaluator.scheduler.tree)
        assert asyncio.run(lm.num_cached_tokens([*PROMPT, 1])) == 50
    with over(model_of(), kv_cache_bytes=40 * per_slot) as lm:
        with pytest.raises(CacheError, match=r"50 tokens of .* do not fit"):
            lm.load_prefix(saved)
        with pytest.raises(CacheError, match="50 tokens does not fit"):
            lm.save_prefix(PROMPT, saved)
        check_integrity(lm._evaluator.scheduler.tree)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: over(model_of(seed=1)), "its weights differ"),
        (lambda: over(model_of(name="qwen3")), "its config differs"),
        (lambda: over(model_of(), kv_cache_dtype="int8"), "another number format"),
        (lambda: over(model_of().bfloat16()), "its weights differ"),
    ],
)
def test_a_file_of_another_model_is_refused(saved, other, reason):
    with other() as lm:
        with pytest.raises(PrefixFileError, match=reason):
            lm.load_prefix(saved)
        assert lm.statistics().kv_bytes_used == 0


def test_changing_one_weight_invalidates_prefix_file(saved):
    model = model_of()
    with over(model) as lm:
        lm.load_prefix(saved)
        lm.clear_cache()
        weight = model.model.layers[1].mlp.down_proj.weight
        with torch.no_grad():
            weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
        with pytest.raises(PrefixFileError, match="its weights differ"):
            lm.load_prefix(saved)


def test_prefix_file_is_bound_to_its_adapter(tmp_path, path):
    pytest.importorskip("peft")
    from tests.llm.hf import adapter_kinds

    model = model_of()
    first, second = tmp_path / "1", tmp_path / "2"
    adapter_kinds.save("lora", model, first, seed=1)
    adapter_kinds.save("lora", model, second, seed=2)
    with over(model) as lm:
        lm.add_new_lora(first, "a")
        lm.add_new_lora(second, "b")
        lm.save_prefix(PROMPT, path, "a")
        expected = lm.next_token_logprobs_sync([*PROMPT, 1], "a")
        with pytest.raises(UnknownAdapterError):
            lm.save_prefix(PROMPT, path, "c")
    with over(model) as lm:
        lm.add_new_lora(second, "a")
        lm.add_new_lora(first, "another name")
        for wrong in (None, "a"):
            with pytest.raises(PrefixFileError, match="another adapter"):
                lm.load_prefix(path, wrong)
        with pytest.raises(UnknownAdapterError):
            lm.load_prefix(path, "b")
        prompt = lm.load_prefix(path, "another name")
        row = lm.next_token_logprobs_sync(prompt.extend(1), "another name")
        assert lm.statistics().tokens_computed == 1
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-4)


def test_prefix_of_adapter_with_other_scaling_is_refused(tmp_path, path):
    pytest.importorskip("peft")
    from tests.llm.hf import adapter_kinds

    model = model_of()
    first, second = tmp_path / "1", tmp_path / "2"
    adapter_kinds.save("lora", model, first, seed=1)
    shutil.copytree(first, second)
    config = json.loads((second / "adapter_config.json").read_text())
    config["lora_alpha"] *= 4
    (second / "adapter_config.json").write_text(json.dumps(config))
    with over(model) as lm:
        lm.add_new_lora(first, "a")
        lm.save_prefix(PROMPT, path, "a")
        lm.add_new_lora(second, "b")
        with pytest.raises(PrefixFileError, match="another adapter"):
            lm.load_prefix(path, "b")


def test_prefix_file_depends_on_active_adapter_of_owner(tmp_path, path):
    peft = pytest.importorskip("peft")
    from tests.llm.hf import adapter_kinds

    for seed, name in enumerate("ac"):
        adapter_kinds.save("lora", model_of(), tmp_path / name, seed=seed)
    owned = peft.PeftModel.from_pretrained(model_of(), tmp_path / "a", adapter_name="a")

    def is_taken():
        with over(owned.get_base_model()) as lm:
            try:
                lm.load_prefix(path)
            except PrefixFileError:
                return False
            row = lm.next_token_logprobs_sync([*PROMPT, 1])
            whole = lm.next_token_logprobs_uncached([*PROMPT, 1])
            torch.testing.assert_close(row, whole, atol=1e-4, rtol=1e-4)
            return True

    with over(owned.get_base_model()) as lm:
        lm.save_prefix(PROMPT, path)
    assert is_taken()
    owned.load_adapter(tmp_path / "c", "c")  # idle
    assert is_taken()
    owned.set_adapter("c")
    assert not is_taken()
    owned.set_adapter("a")
    assert is_taken()
    with owned.disable_adapter():
        assert not is_taken()


def test_loading_prefix_for_removed_adapter_raises_unknown_adapter_error(tmp_path, path):
    pytest.importorskip("peft")
    from tests.llm.hf import adapter_kinds

    adapter_kinds.save("lora", model_of(), tmp_path / "a", seed=1)
    with over(model_of()) as lm, ThreadPoolExecutor(2) as threads:
        lm.add_new_lora(tmp_path / "a", "a")
        lm.save_prefix(PROMPT, path, "a")
        go_on = threading.Event()
        lm._batcher.call_soon(go_on.wait)  # removed before it is loaded, and after it is asked for
        removed = threads.submit(lm.remove_lora, "a")
        loaded = threads.submit(lm.load_prefix, path, "a")
        go_on.set()
        removed.result()
        with pytest.raises(UnknownAdapterError):
            loaded.result()


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_file_that_was_changed_or_cut_short_is_refused(saved, data):
    content = saved.read_bytes()
    broken = saved.with_name("broken")
    if data.draw(st.booleans()):
        broken.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    else:
        where = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 3000))
        changed = bytearray(content)
        changed[where % len(content)] ^= data.draw(st.integers(1, 255))
        header = int.from_bytes(content[:8], "little")
        if 8 <= where < 8 + header:  # another spelling of the same is the same
            try:
                same = json.loads(changed[8 : 8 + header]) == json.loads(content[8 : 8 + header])
            except ValueError:
                same = False
            if same:
                return
        broken.write_bytes(changed)
    with over(model_of()) as lm:
        with pytest.raises(PrefixFileError):
            lm.load_prefix(broken)
        assert lm.statistics().kv_bytes_used == 0


def test_prefix_file_with_changed_tokens_is_refused(saved):
    tensors = load_file(saved)
    with safe_open(saved, "pt") as file:
        said = file.metadata()
    tensors["token_ids"][3] += 1
    save_file(tensors, saved, said)
    with over(model_of()) as lm, pytest.raises(PrefixFileError, match="changed"):
        lm.load_prefix(saved)
    save_file(tensors, saved)
    with over(model_of()) as lm, pytest.raises(PrefixFileError, match="no prefix"):
        lm.load_prefix(saved)


@pytest.mark.parametrize("kept", [None, "uint4"])
@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("token_ids"),
        lambda tensors: tensors.pop("codes.1.0"),
        lambda tensors: tensors.update({"codes.1.9": torch.zeros(50, 1)}),
        lambda tensors: tensors.update({"codes.0.0": tensors["codes.0.0"][:49].clone()}),
        lambda tensors: tensors.update({"codes.0.0": tensors["codes.0.0"].to(torch.float64)}),
        lambda tensors: tensors.update({"token_ids": tensors["token_ids"][:49].clone()}),
        lambda tensors: tensors.update({"token_ids": tensors["token_ids"][:, None].clone()}),
        lambda tensors: tensors.update({"token_ids": tensors["token_ids"].float()}),
        lambda tensors: tensors.update({"mean_key.0": torch.zeros(3)}),
    ],
)
def test_wrong_tensors_with_matching_digest_are_refused(kept, change, path):
    with over(model_of(), kv_cache_dtype=kept) as lm:
        lm.save_prefix(PROMPT, path)
        lm.clear_cache()
        tensors = load_file(path)
        change(tensors)
        recrafted(path, tensors)
        with pytest.raises(PrefixFileError, match="has tensors of other names, dtypes or shapes"):
            lm.load_prefix(path)
        assert lm.statistics().kv_bytes_used == 0


def recrafted(path, tensors):
    """Write other tensors into a file, with the digest that goes with them."""
    with safe_open(path, "pt") as file:
        said = dict(file.metadata())
    del said["digest"]
    said["digest"] = prefix_file._digest(said, tensors)
    save_file(tensors, path, said)


@pytest.mark.parametrize("wrong", [-1, families.VOCAB, 2**31 - 1])
def test_token_ids_outside_vocabulary_are_refused(saved, wrong):
    ids = load_file(saved)["token_ids"]
    ids[7] = wrong
    recrafted(saved, {**load_file(saved), "token_ids": ids})
    with over(model_of()) as lm:
        with pytest.raises(PrefixFileError, match="no tokens, or token ids"):
            lm.load_prefix(saved)
        assert lm.statistics().kv_bytes_used == 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nan_or_infinite_values_are_refused(saved, wrong):
    codes = load_file(saved)["codes.1.0"]
    codes[9, 3] = wrong
    recrafted(saved, {**load_file(saved), "codes.1.0": codes})
    with over(model_of()) as lm:
        with pytest.raises(PrefixFileError, match="infinite"):
            lm.load_prefix(saved)
        assert lm.statistics().kv_bytes_used == 0


def test_prefix_longer_than_max_length_is_refused(saved):
    with over(model_of(), max_length=20) as lm:
        lm.next_token_logprobs_sync([3, 4, 5])
        with pytest.raises(CacheError, match=r"50 tokens of .* more than max_length=20"):
            lm.load_prefix(saved)
        assert asyncio.run(lm.num_cached_tokens([3, 4, 5, 6])) == 3


def test_weights_changed_through_data_are_noticed_after_clear_cache(saved):
    model = model_of()
    with over(model) as lm:
        lm.load_prefix(saved)
        model.model.layers[0].mlp.up_proj.weight.data.mul_(3)
        lm.clear_cache()
        with pytest.raises(PrefixFileError, match="its weights differ"):
            lm.load_prefix(saved)


def test_kv_cache_dtype_equal_to_model_dtype_loads_same_file(path):
    with over(model_of().bfloat16()) as lm:
        lm.save_prefix(PROMPT, path)
    with over(model_of().bfloat16(), kv_cache_dtype="bfloat16") as lm:
        assert list(lm.load_prefix(path)) == PROMPT


def test_uint4_rows_and_files_do_not_depend_on_max_length(path):
    with over(model_of(), kv_cache_dtype="uint4") as lm:
        lm.save_prefix(PROMPT, path)
        expected = lm.next_token_logprobs_sync([*PROMPT, 1])
    with over(model_of(), kv_cache_dtype="uint4", max_length=60) as lm:
        row = lm.next_token_logprobs_sync([*PROMPT, 1])
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)
        lm.clear_cache()
        lm.load_prefix(path)


@pytest.mark.filterwarnings("ignore")
def test_uncached_model_refuses_to_save_or_load_prefixes(saved):
    for lm in (over(families.make("recurrent-gemma")), over(model_of(), kv_cache_bytes=0)):
        with lm:
            with pytest.raises(CacheError, match="keeps no keys and values"):
                lm.save_prefix(PROMPT, saved.with_name("other"))
            with pytest.raises(CacheError, match="keeps no keys and values"):
                lm.load_prefix(saved)
