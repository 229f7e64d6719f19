"""Adapters by name, several in one batch, against models that they are merged into."""

import asyncio
import random
import shutil
import threading

import pytest
import torch

from genlm_backend import AsyncVirtualLM
from genlm_backend.errors import AdapterError, UnknownAdapterError
from genlm_backend.queries.query import Adapter
from tests.llm.families import VOCAB
from tests.llm.vllm import adapters, real
from tests.llm.vllm.fake import FakeEngine
from tests.naive import naive_row, naive_scores


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    merged = {name: adapters.make_adapter(folder / name, i) for i, name in enumerate(("a", "b"))}
    return folder, {None: real.tiny_model(), **merged}


@pytest.fixture(scope="module")
def lm(models):
    real.close_tiny_engine()
    engine = real.load_tiny(enable_lora=True, max_loras=3, max_lora_rank=adapters.RANK)
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm:
        for name in ("a", "b"):
            lm.add_new_lora(str(models[0] / name), name)
        yield lm


@pytest.mark.vllm
@pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
async def test_rows_of_several_adapters_in_one_batch_match_merged_models(lm, models):
    contexts = [[5, 6, 7], [5, 6, 7, 8], [9]]
    for _ in range(3):
        asked = [(context, name) for context in contexts for name in models[1]]
        rows = await asyncio.gather(*(lm.next_token_logprobs(*pair) for pair in asked))
        for row, (context, name) in zip(rows, asked, strict=True):
            expected = naive_row(models[1][name], context)
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-4)
        for context in contexts:
            context.append(3 * context[-1] % VOCAB)
    rows = [lm.next_token_logprobs_sync([1, 2], name) for name in models[1]]
    assert float((rows[0] - rows[1]).abs().max()) > 0.1
    assert float((rows[1] - rows[2]).abs().max()) > 0.1


@pytest.mark.vllm
@pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
async def test_adapter_reloaded_from_changed_files_while_sampling_is_used(lm, tmp_path):
    context = [(7 * i) % VOCAB for i in range(200)]  # of more than a block
    adapters.make_adapter(tmp_path / "c", 5)
    lm.add_new_lora(str(tmp_path / "c"), "c")
    await lm.next_token_logprobs(context, "c")
    is_over, sizes = False, list[int]()

    async def sample():
        while not is_over:
            sizes.append(len(await lm.sample([1, 2], 240, eos_token_ids=[], temperature=0)))

    sampling = asyncio.ensure_future(sample())
    await lm.next_token_logprobs([5])  # which goes with the steps of the sample
    await asyncio.to_thread(lm.remove_lora, "c")
    shutil.rmtree(tmp_path / "c")
    merged = adapters.make_adapter(tmp_path / "c", 6)
    await asyncio.to_thread(lm.add_new_lora, str(tmp_path / "c"), "c")
    row = await lm.next_token_logprobs(context, "c")
    torch.testing.assert_close(row, naive_row(merged, context), rtol=0, atol=1e-4)
    is_over = True
    await sampling
    assert set(sizes) == {240}
    lm.remove_lora("c")


@pytest.mark.vllm
@pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
async def test_greedy_samples_with_adapters_match_merged_models(lm, models):
    for name, model in models[1].items():
        context = [1, 2]
        for _ in range(4):
            context.append(int(naive_row(model, context).argmax()))
        sampled = await lm.sample([1, 2], 4, [], temperature=0, lora_name=name)
        assert sampled == context[2:]


@pytest.mark.vllm
@pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
async def test_scores_with_and_without_adapters_match_merged_models(lm, models):
    text = [random.Random(0).randrange(VOCAB) for _ in range(40)]
    asked = [lm.score(text[:10], text[10:], lora_name=name) for name in models[1]]
    for found, model in zip(await asyncio.gather(*asked), models[1].values(), strict=True):
        expected = naive_scores(model, text, 10)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.vllm
@pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
def test_missing_adapter_files_leave_other_adapters_intact(lm, models, tmp_path):
    with pytest.raises(AdapterError, match="cannot load the adapter 'c'"):
        lm.add_new_lora(str(tmp_path / "nowhere"), "c")
    row = lm.next_token_logprobs_sync([1, 2], "a")
    torch.testing.assert_close(row, naive_row(models[1]["a"], [1, 2]), rtol=0, atol=1e-4)


async def test_unknown_lora_name_is_refused_and_a_loaded_one_rebound():
    engine = FakeEngine()
    with AsyncVirtualLM(engine) as lm:
        with pytest.raises(UnknownAdapterError, match=r"'poet' is loaded \(loaded: none\)"):
            lm.next_token_logprobs_sync([1], "poet")
        lm.add_new_lora("somewhere", "poet")
        lm.next_token_logprobs_sync([1], "poet")
        assert engine.adapters == {Adapter("poet", 1): "somewhere"}
        with pytest.raises(AdapterError, match="nowhere"):
            lm.add_new_lora("/nowhere", "poet")
        assert engine.adapters == {Adapter("poet", 1): "somewhere"}
        lm.add_new_lora("elsewhere", "poet")
        assert engine.adapters == {Adapter("poet", 3): "elsewhere"}
        with pytest.raises(ValueError, match=r"'cook' is loaded \(loaded: 'poet'\)"):
            await lm.sample([1], 3, [], lora_name="cook")


@pytest.mark.vllm
@pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
def test_removed_adapter_frees_its_slot_and_its_name(lm, models):
    folder, merged = models
    before = lm.next_token_logprobs_sync([1, 2, 3, 4, 5], "a")
    torch.testing.assert_close(before, naive_row(merged["a"], [1, 2, 3, 4, 5]), rtol=0, atol=1e-4)
    lm.remove_lora("a")
    with pytest.raises(UnknownAdapterError, match=r"'a' is loaded \(loaded: 'b'\)"):
        lm.next_token_logprobs_sync([1, 2, 3, 4, 5], "a")
    for name in (None, "b"):
        row = lm.next_token_logprobs_sync([1, 2, 3, 4, 5], name)
        torch.testing.assert_close(row, naive_row(merged[name], [1, 2, 3, 4, 5]), rtol=0, atol=1e-4)
    lm.add_new_lora(str(folder / "b"), "a")  # another adapter under the name
    row = lm.next_token_logprobs_sync([1, 2, 3, 4, 5], "a")
    torch.testing.assert_close(row, naive_row(merged["b"], [1, 2, 3, 4, 5]), rtol=0, atol=1e-4)
    for _ in range(3):  # more than there are places
        lm.remove_lora("a")
        lm.add_new_lora(str(folder / "a"), "a")
    row = lm.next_token_logprobs_sync([1, 2, 3, 4, 5], "a")
    torch.testing.assert_close(row, before, rtol=0, atol=1e-4)


@pytest.mark.vllm
@pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
async def test_lora_name_is_rebound_while_sampling_with_all_slots_taken(lm, models, tmp_path):
    merged = adapters.make_adapter(tmp_path / "c", 7)
    lm.add_new_lora(str(tmp_path / "c"), "c")
    for seed in (8, 9):
        context = [1, 2]
        for _ in range(40):
            context.append(int(naive_row(merged, context).argmax()))
        sample = lm.sample([1, 2], 40, [], temperature=0, lora_name="c")
        sampling = asyncio.ensure_future(sample)
        await lm.next_token_logprobs([5])  # which goes with the steps of the sample
        shutil.rmtree(tmp_path / "c")
        merged = adapters.make_adapter(tmp_path / "c", seed)
        await asyncio.to_thread(lm.add_new_lora, str(tmp_path / "c"), "c")
        assert await sampling == context[2:]
        exact = {**models[1], "c": merged}
        rows = await asyncio.gather(*(lm.next_token_logprobs([1, 2, 3], name) for name in exact))
        for row, model in zip(rows, exact.values(), strict=True):
            torch.testing.assert_close(row, naive_row(model, [1, 2, 3]), rtol=0, atol=1e-4)
    with pytest.raises(AdapterError, match="max_loras=3"):
        lm.add_new_lora(str(tmp_path / "c"), "d")
    lm.remove_lora("c")


def hold(lm):
    """Give the worker something else to do, which it has begun, until the event is set."""
    begun, held = threading.Event(), threading.Event()
    lm._batcher.call_soon(lambda: begun.set() or held.wait())
    assert begun.wait(60)
    return held


async def test_removing_an_adapter_fails_only_its_waiting_queries():
    engine = FakeEngine()
    with AsyncVirtualLM(engine) as lm:
        for name in ("poet", "cook"):
            lm.add_new_lora("somewhere", name)
        engine.may_sample.clear()
        samples = {
            name: asyncio.ensure_future(lm.sample([1, 2], 3, [], lora_name=name, seed=1))
            for name in ("poet", "cook", None)
        }
        await asyncio.sleep(0)
        held = hold(lm)  # a batch that is sent before the removal is answered before it
        removal = asyncio.ensure_future(asyncio.to_thread(lm.remove_lora, "poet"))
        while lm._batcher._worker._calls.qsize() < 2:  # the next step of the samples, and it
            await asyncio.sleep(0)
        rows = {
            name: asyncio.ensure_future(lm.next_token_logprobs([3], name))
            for name in ("poet", "cook", None)
        }
        await asyncio.sleep(0)
        held.set()
        await removal
        engine.may_sample.set()
        for name in ("cook", None):
            assert len(await samples[name]) == 3
            assert (await rows[name]).isfinite().all()
        with pytest.raises(UnknownAdapterError, match="'poet'"):
            await samples["poet"]
        with pytest.raises(UnknownAdapterError, match="'poet'"):
            await rows["poet"]
        with pytest.raises(UnknownAdapterError, match="'poet'"):
            lm.remove_lora("poet")
        assert engine.adapters == {Adapter("cook", 2): "somewhere"}


async def test_running_samples_finish_when_their_lora_name_is_rebound():
    engine = FakeEngine()
    with AsyncVirtualLM(engine) as lm:
        lm.add_new_lora("somewhere", "poet")
        engine.may_sample.clear()
        asked = [lm.sample([1, 2], 40, [], lora_name="poet"), lm.next_token_logprobs([3], "poet")]
        tasks = [asyncio.ensure_future(one) for one in asked]
        await asyncio.sleep(0)
        binding = asyncio.ensure_future(asyncio.to_thread(lm.add_new_lora, "elsewhere", "poet"))
        while len(engine.adapters) < 2 and not binding.done():
            await asyncio.sleep(0)
        engine.may_sample.set()
        await binding
        assert engine.adapters == {Adapter("poet", 2): "elsewhere"}
        sampled, row = await asyncio.gather(*tasks)
        assert len(sampled) == 40
        assert row.isfinite().all()


async def test_samples_of_an_adapter_removed_before_they_begin_fail_alone():
    engine = FakeEngine()
    with AsyncVirtualLM(engine) as lm:
        lm.add_new_lora("somewhere", "poet")
        held = hold(lm)
        removal = asyncio.ensure_future(asyncio.to_thread(lm.remove_lora, "poet"))
        while lm._batcher._worker._calls.empty():
            await asyncio.sleep(0)
        other = asyncio.ensure_future(lm.sample([5], 2, []))
        sample = asyncio.ensure_future(lm.sample([1], 2, [], lora_name="poet"))
        row = asyncio.ensure_future(lm.next_token_logprobs([1], lora_name="poet"))
        await asyncio.sleep(0)
        held.set()
        await removal
        with pytest.raises(UnknownAdapterError, match="'poet' was removed"):
            await sample
        with pytest.raises(UnknownAdapterError, match="'poet'"):
            await row
        assert len(await other) == 2


async def test_queries_of_a_removed_adapter_are_not_answered_by_its_successor():
    engine = FakeEngine()
    with AsyncVirtualLM(engine) as lm:
        lm.add_new_lora("somewhere", "poet")
        held = hold(lm)
        changes = [lambda: lm.remove_lora("poet"), lambda: lm.add_new_lora("elsewhere", "poet")]
        changing = []
        for number, change in enumerate(changes, 1):
            changing.append(asyncio.ensure_future(asyncio.to_thread(change)))
            while lm._batcher._worker._calls.qsize() < number:
                await asyncio.sleep(0)
        sample = asyncio.ensure_future(lm.sample([1], 2, [], lora_name="poet"))
        row = asyncio.ensure_future(lm.next_token_logprobs([1], lora_name="poet"))
        await asyncio.sleep(0)
        held.set()
        await asyncio.gather(*changing)
        for asked in (sample, row):
            with pytest.raises(UnknownAdapterError, match="'poet' was removed"):
                await asked
        assert (await lm.next_token_logprobs([1], lora_name="poet")).isfinite().all()


def test_concurrent_adapter_changes_keep_names_and_engine_consistent():
    engine = FakeEngine()
    found = []

    def change(lm, seed):
        choose = random.Random(seed)
        for _ in range(60):
            name = choose.choice("ab")
            try:
                lm.add_new_lora("somewhere", name) if choose.random() < 0.5 else lm.remove_lora(
                    name
                )
            except AdapterError:  # UnknownAdapterError is one
                pass
            except BaseException as error:
                found.append(error)

    with AsyncVirtualLM(engine) as lm:
        threads = [threading.Thread(target=change, args=(lm, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == []
        assert lm._adapters._loaded == set(lm._adapters._named.values()) == set(engine.adapters)
