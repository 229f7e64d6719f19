"""Decode steps as rounds, and without any, against the bare model run whole and alone."""

import asyncio
import copy
import random
import threading
from functools import lru_cache

import pytest
import torch

from genlm_backend import AsyncTransformer
from genlm_backend.attention.reading import Reading
from genlm_backend.passes.decode_steps import DecodeSteps
from tests.llm import families
from tests.llm.conftest import fresh_row, word_tokenizer
from tests.llm.hf.test_families import ALIGNED, GATHERED

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels

FEW_WHOLE = ("cpm-ant", "recurrent-gemma")
WINDOWED = ("gemma2", "gemma3", "gpt-oss", "llama4-tuned", "mistral-sliding")
TIGHT = ("llama", *WINDOWED, "bloom", "deepseek-v3", "gpt-neo-local", "opt")


@lru_cache
def model_of(name):
    return families.make(name)


@lru_cache
def slot_bytes(name):
    with AsyncTransformer(model_of(name), word_tokenizer(), kv_cache_bytes=1 << 16) as lm:
        return lm._evaluator.passes.cache.store.bytes_per_slot


@lru_cache(4096)
def expected(name, context):
    return fresh_row(model_of(name), context)


@pytest.fixture(params=["rounds", "no-rounds"])
def counts(request, monkeypatch):
    """How many rounds have been made, and how many that read as the last one did."""
    found = {"rounds": 0, "advanced": 0, "wanted": request.param == "rounds"}
    answers, advanced = DecodeSteps.rows, Reading.advanced

    def counted(self, *given):
        found["rounds"] += 1
        return answers(self, *given)

    def counted_step(self, *given):
        found["advanced"] += 1
        return advanced(self, *given)

    monkeypatch.setattr(DecodeSteps, "rows", counted)
    monkeypatch.setattr(Reading, "advanced", counted_step)
    if request.param == "no-rounds":
        monkeypatch.setattr(DecodeSteps, "takes", lambda *_: False)
    return found


def opened(name, **options):
    return AsyncTransformer(model_of(name), word_tokenizer(), row_cache_bytes=0, **options)


def tokens(generator, count):
    return generator.choices(range(3, families.VOCAB), k=count)


class History:
    """Contexts that grow, fork and go, each row of which is compared.

    ``row`` is the row that a context has, given it as a tuple and its adapter.
    """

    def __init__(self, lm, generator, row, atol=3e-5, adapters=(None,)):
        self.lm, self.generator, self.row, self.atol = lm, generator, row, atol
        self.adapters = adapters
        prompt = tokens(generator, 12)
        sizes = (12, 12, 12, 12, 9, 5, 1)
        self.contexts = [(lm.context(prompt[:size]), None) for size in sizes]
        self.old = list(self.contexts)

    def check(self, row, context, adapter=None):
        expected = self.row(tuple(context), adapter)
        torch.testing.assert_close(row, expected, rtol=0, atol=self.atol)

    async def steps(self, count):
        """Several steps, each third of them beside something else."""
        for number in range(count):
            await self.step(0.5 if number % 3 == 2 else 0)

    async def step(self, share):
        """All go on, resampled; beside them maybe a prompt, a text, or what has been asked."""
        generator, lm = self.generator, self.lm
        picked = generator.choices(self.contexts, k=generator.randint(4, 8))
        self.contexts = [(c + tokens(generator, 1), adapter) for c, adapter in picked]
        asked = list(self.contexts)
        if generator.random() < share:
            asked.append((tokens(generator, generator.randint(1, 20)), self.any_adapter()))
        if generator.random() < share:
            asked += generator.choices(self.old, k=2)
        if generator.random() < share:  # the same tokens, of which no place is known
            asked.append(([*generator.choice(self.contexts)[0]], self.any_adapter()))
        waits = [lm.next_token_logprobs(context, adapter) for context, adapter in asked]
        texts = generator.choices(self.old, k=2) if generator.random() < share else []
        texts = [(c, c[: generator.randint(1, len(c) - 1)], a) for c, a in texts if len(c) > 1]
        scores = [lm.batch_score([p], [c[len(p) :]], a) for c, p, a in texts]
        *rows, of_texts = await asyncio.gather(*waits, asyncio.gather(*scores))
        for row, (context, adapter) in zip(rows, asked, strict=True):
            self.check(row, context, adapter)
        for (found,), (text, prompt, adapter) in zip(of_texts, texts, strict=True):
            ends = range(len(prompt), len(text))
            wanted = [self.row(tuple(text[:end]), adapter)[text[end]] for end in ends]
            torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=self.atol)
        self.old += generator.sample(self.contexts, 2)
        self.contexts = [
            (context, self.any_adapter() if generator.random() < 0.3 else adapter)
            for context, adapter in self.contexts
        ]
        lm._evaluator.passes.tree.check_integrity()

    def any_adapter(self):
        return self.generator.choice(self.adapters)


@pytest.mark.parametrize("name", [*families.PER_TOKEN, *families.RUNNING, *FEW_WHOLE])
async def test_rows_of_every_family_are_the_bare_models(name, counts):
    generator = random.Random(name)
    with opened(name) as lm:
        atol = 2e-4 if name in families.RUNNING else 3e-5  # where scans add up otherwise
        history = History(lm, generator, lambda context, _: expected(name, context), atol)
        await history.steps(8)
    is_kept = name not in families.WHOLE and counts["wanted"]
    if name not in ALIGNED:  # in which no round has contexts of several lengths
        assert (counts["rounds"] > 3) == is_kept
        assert (counts["advanced"] > 1) == (is_kept and name not in {*GATHERED, "mamba", "mamba2"})


@pytest.mark.parametrize("num_slots", [20, 45])
@pytest.mark.parametrize("name", TIGHT)
async def test_rows_where_little_is_kept(name, num_slots, counts):
    generator = random.Random(f"{name} {num_slots}")
    with opened(name, kv_cache_bytes=(num_slots + 1) * slot_bytes(name)) as lm:
        history = History(lm, generator, lambda context, _: expected(name, context))
        await history.steps(8)
        assert num_slots == 45 or lm.statistics().num_evicted_tokens > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "bloom"])
async def test_rows_where_tokens_go_to_the_host_and_come_back(name, counts):
    generator, per_slot = random.Random(name), slot_bytes(name)
    budgets = {"kv_cache_bytes": 41 * per_slot, "host_cache_bytes": 201 * per_slot}
    with opened(name, **budgets) as lm:
        history = History(lm, generator, lambda context, _: expected(name, context))
        await history.steps(12)
        assert lm.statistics().num_tokens_from_host > 0


@pytest.mark.parametrize("kept", ["float16", "bfloat16", "int8", "uint4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
async def test_rows_where_keys_and_values_are_rounded(name, kept, counts):
    generator = random.Random(name)
    with opened(name, kv_cache_dtype=kept) as lm:

        def row(context, _):
            return lm.next_token_logprobs_uncached(context)

        history = History(lm, generator, row, atol=5e-3)
        await history.steps(6)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Where adapters of a tiny Llama are, and the model that each makes of it."""
    adapters = pytest.importorskip("tests.llm.vllm.adapters")
    pytest.importorskip("peft")
    path, base = tmp_path_factory.mktemp("adapters"), copy.deepcopy(model_of("llama"))
    models = {name: adapters.make_adapter(path / name, i, base) for i, name in enumerate("ab", 1)}
    return path, models


async def test_rows_of_several_adapters(adapters, counts):
    path, models = adapters
    generator = random.Random(0)

    @lru_cache(None)
    def row(context, adapter):
        return fresh_row(models.get(adapter, model_of("llama")), context)

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
    lm._evaluator.passes.tree.check_integrity()
    return rows


async def test_what_is_done_between_steps_changes_no_row(lm, tmp_path):
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
        for keep in (len(contexts[0]) - 1, 10, 0):
            await lm.forget(contexts[0], keep=keep)
            await check(lm, [c + tokens(generator, 1) for c in contexts])


async def test_a_slice_of_a_context_goes_on_otherwise(lm):
    generator = random.Random(0)
    context = lm.context(tokens(generator, 20))
    await check(lm, [context, context[:7], context[:19]])
    for size in (19, 12, 7, 1):
        one = context[:size].extend(5)
        other = context[:size].extend(6).extend(7)
        await check(lm, [one, other, context[:-1], context])
        await check(lm, [one.extend(8), other.extend(9), context.extend(size + 5)])


async def test_a_context_of_two_models():
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
                its.place = mine.place  # as of one that another model has found


async def test_nobody_sees_the_changes_of_another_to_a_row(counts):
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


async def test_those_who_leave_take_nobodys_row_along(lm):
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
        lm._call(lm._evaluator.passes.tree.check_integrity)


async def test_a_loop_that_has_gone_takes_nobodys_row_along(lm):
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
