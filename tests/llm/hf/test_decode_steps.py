"""Decode steps as rounds, and without any, against the bare model run whole and alone."""

import asyncio
import copy
import random
import threading
from functools import lru_cache

import pytest
import torch

from genlm_backend import AsyncTransformer
from genlm_backend.attention.cascade_plan import CascadePlan
from genlm_backend.scheduling.scheduler import Scheduler
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.hf.histories import History, tokens
from tests.llm.hf.test_families import GATHERED
from tests.naive import naive_row
from tests.tree_integrity import check_integrity

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels

FEW_WHOLE = ("cpm-ant", "recurrent-gemma")


@lru_cache
def model_of(name):
    model = families.make(name)
    return model.double() if name in families.IN_FLOAT64 else model


@lru_cache
def slot_bytes(name):
    with AsyncTransformer(model_of(name), word_tokenizer(), kv_cache_bytes=1 << 16) as lm:
        return lm._evaluator.scheduler.cache.pool.bytes_per_slot


@lru_cache(4096)
def expected(name, context):
    return naive_row(model_of(name), context)


with_and_without = pytest.mark.parametrize("counts", [True, False], indirect=True)


@pytest.fixture
def counts(request, monkeypatch):
    """How many rounds have been made, and how many that read as the last one did."""
    found = {"rounds": 0, "advanced": 0}
    answers, advanced = Scheduler.decode, CascadePlan.advanced

    def counted(self, *given):
        found["rounds"] += 1
        return answers(self, *given)

    def counted_step(self, *given):
        found["advanced"] += 1
        return advanced(self, *given)

    monkeypatch.setattr(Scheduler, "decode", counted)
    monkeypatch.setattr(CascadePlan, "advanced", counted_step)
    if not getattr(request, "param", True):
        monkeypatch.setattr(Scheduler, "is_decode", lambda *_: False)
    return found


def opened(name, **options):
    return AsyncTransformer(model_of(name), word_tokenizer(), row_cache_bytes=0, **options)


@pytest.mark.parametrize("name", [*families.PER_TOKEN, *families.FEW_RUNNING, *FEW_WHOLE])
async def test_decode_steps_of_every_family_match_bare_model(name, counts):
    generator = random.Random(name)
    with opened(name) as lm:
        atol = 2e-4 if name in families.RUNNING else 5e-5  # where scans add up otherwise
        history = History(lm, generator, lambda context, _: expected(name, context), atol, share=1)
        await history.steps(6)
        history.share = 0.6
        await history.steps(4)
    is_kept = name not in families.WHOLE
    if name != "llama4-tuned":  # in which no round has contexts of several lengths
        assert (counts["rounds"] > 3) == is_kept
        assert (counts["advanced"] > 1) == (is_kept and name not in {*GATHERED, "mamba", "mamba2"})


@pytest.mark.parametrize("num_slots", [20, 45])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "llama4-tuned", "bloom", "opt"])
async def test_decode_steps_with_small_cache_match_bare_model(name, num_slots, counts):
    generator = random.Random(f"{name} {num_slots}")
    with opened(name, kv_cache_bytes=(num_slots + 1) * slot_bytes(name)) as lm:
        history = History(lm, generator, lambda context, _: expected(name, context), 3e-5)
        await history.steps(8)
        assert num_slots == 45 or lm.statistics().num_evicted_tokens > 0


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Where adapters of a tiny Llama are, and the model that each makes of it."""
    adapters = pytest.importorskip("tests.llm.vllm.adapters")
    pytest.importorskip("peft")
    path, base = tmp_path_factory.mktemp("adapters"), copy.deepcopy(model_of("llama"))
    models = {name: adapters.make_adapter(path / name, i, base) for i, name in enumerate("ab", 1)}
    return path, models


@with_and_without
async def test_decode_steps_with_several_adapters_match_adapted_models(adapters, counts):
    path, models = adapters
    generator = random.Random(0)

    @lru_cache(None)
    def row(context, adapter):
        return naive_row(models.get(adapter, model_of("llama")), context)

    with opened("llama", kv_cache_bytes=200 * slot_bytes("llama")) as lm:
        for name in models:
            lm.add_new_lora(str(path / name), name)
        await History(lm, generator, row, adapters=(None, *models)).steps(12)


# ---------------------------------------------------------------- between steps


@pytest.fixture
def lm(counts):
    with opened("llama", kv_cache_bytes=300 * slot_bytes("llama")) as lm:
        yield lm


async def check(lm, contexts, name="llama"):
    rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
    for row, context in zip(rows, contexts, strict=True):
        torch.testing.assert_close(row, expected(name, tuple(context)), rtol=0, atol=3e-5)
    check_integrity(lm._evaluator.scheduler.tree)
    return rows


@with_and_without
async def test_cache_operations_between_steps_change_no_row(lm, tmp_path):
    generator = random.Random(0)
    prompt = lm.context(tokens(generator, 20))
    contexts = [prompt + tokens(generator, 1) for _ in range(4)]
    between = [
        lambda: None,
        lm.clear_cache,
        lambda: lm.cache_kv(contexts[0]),
        lambda: lm.save_prefix(contexts[1], str(tmp_path / "prefix")),
        lambda: lm.load_prefix(str(tmp_path / "prefix")),
        lm.clear_cache,
        lambda: lm.load_prefix(str(tmp_path / "prefix")),
        lambda: lm.cache_kv(contexts[2]),
        lambda: lm.next_token_logprobs_uncached(contexts[0]),
    ]
    for act in between:
        await check(lm, contexts)
        contexts = [c + tokens(generator, 1) for c in generator.choices(contexts, k=4)]
        await check(lm, contexts)
        act()
        contexts = [c + tokens(generator, 1) for c in contexts]
        await check(lm, contexts)


async def test_extended_slices_of_context_match_bare_model(lm):
    generator = random.Random(0)
    context = lm.context(tokens(generator, 20))
    await check(lm, [context, context[:7], context[:19]])
    for size in (19, 12, 7, 1):
        one = context[:size].extend(5)
        other = context[:size].extend(6).extend(7)
        await check(lm, [one, other, context[:-1], context])
        await check(lm, [one.extend(8), other.extend(9), context.extend(size + 5)])


async def test_cache_hint_of_another_model_changes_no_row():
    generator = random.Random(0)
    with opened("llama") as lm, opened("qwen2") as other:
        contexts = [lm.context(tokens(generator, 6)) for _ in range(4)]
        of_other = [other.context(list(context)) for context in contexts]
        for _ in range(4):
            await check(lm, contexts)
            await check(other, of_other, "qwen2")
            contexts = [c + tokens(generator, 1) for c in generator.choices(contexts, k=4)]
            of_other = [other.context(list(context)) for context in contexts]
            for mine, its in zip(contexts, of_other, strict=True):
                its.cache_hint = mine.cache_hint  # as of one that another model has found


async def test_writing_to_one_row_leaves_other_rows_intact(counts):
    model, generator = model_of("llama"), random.Random(0)
    for row_cache_bytes in (0, 1 << 20):
        with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=row_cache_bytes) as lm:
            contexts = [lm.context(tokens(generator, 6)) for _ in range(4)]
            await check(lm, contexts)
            for _ in range(3):
                contexts = [c + tokens(generator, 1) for c in generator.choices(contexts, k=3)]
                asked = [*contexts, contexts[0], list(contexts[1])]
                rows = await check(lm, asked)
                assert len({row.data_ptr() for row in rows}) == len(rows)
                for row in rows[:2]:
                    row.fill_(7)
                for row, context in zip(rows[2:], asked[2:], strict=True):
                    wanted = expected("llama", tuple(context))
                    torch.testing.assert_close(row, wanted, rtol=0, atol=3e-5)
                await check(lm, asked)


@with_and_without
async def test_cancelled_steps_leave_rows_of_others_intact(lm):
    generator = random.Random(0)
    contexts = [lm.context(tokens(generator, 10)) for _ in range(3)]
    for number in range(12):
        contexts = [c + tokens(generator, 1) for c in generator.choices(contexts, k=12)]
        asked = [asyncio.ensure_future(lm.next_token_logprobs(c)) for c in contexts]
        for _ in range(number % 5):
            await asyncio.sleep(0)
        leaving = set(generator.sample(range(12), 11 if number % 4 == 3 else 4))
        for i in leaving:
            asked[i].cancel()
        rows = await asyncio.gather(*asked, return_exceptions=True)
        for i, (row, context) in enumerate(zip(rows, contexts, strict=True)):
            assert isinstance(row, torch.Tensor) or (
                i in leaving and isinstance(row, asyncio.CancelledError)
            )
            if i not in leaving:
                wanted = expected("llama", tuple(context))
                torch.testing.assert_close(row, wanted, rtol=0, atol=3e-5)
        lm._call(lambda: check_integrity(lm._evaluator.scheduler.tree))


async def test_closed_event_loop_leaves_rows_of_others_intact(lm):
    generator = random.Random(0)
    contexts = [lm.context(tokens(generator, 10)) for _ in range(4)]
    await check(lm, contexts)
    for _ in range(4):
        contexts = [c + tokens(generator, 1) for c in contexts]
        may_go, has_asked = threading.Event(), threading.Event()
        before = lm._batcher.call_soon(may_go.wait)  # so that the worker takes them afterwards

        def ask_and_go(asked=contexts[:3], has_asked=has_asked):
            loop = asyncio.new_event_loop()
            tasks = [loop.create_task(lm.next_token_logprobs(context)) for context in asked]
            loop.run_until_complete(asyncio.sleep(0))
            for task in tasks:
                task._log_destroy_pending = False
            loop.close()
            has_asked.set()

        threading.Thread(target=ask_and_go).start()
        await asyncio.to_thread(has_asked.wait)
        own = [asyncio.ensure_future(lm.next_token_logprobs(c)) for c in contexts[2:]]
        await asyncio.sleep(0)
        may_go.set()
        for row, context in zip(await asyncio.gather(*own), contexts[2:], strict=True):
            wanted = expected("llama", tuple(context))
            torch.testing.assert_close(row, wanted, rtol=0, atol=3e-5)
        assert before.result(10)
        await check(lm, contexts)
