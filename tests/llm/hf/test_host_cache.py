"""Keys and values that leave the device for the host and come back, against fresh models."""

import functools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genlm_backend import AsyncTransformer, Engine
from genlm_backend.errors import CacheError, OptionError
from genlm_backend.prefix.tier_copier import TierCopier
from tests.generation.serving import serve
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row
from tests.tree_integrity import check_integrity

pytestmark = pytest.mark.filterwarnings("ignore:host_cache_bytes gains nothing")

MODEL = families.make("llama")


@functools.cache
def bytes_per_slot(model=MODEL, **options):
    with AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=1 << 16, **options) as lm:
        return lm._evaluator.scheduler.cache.pool.bytes_per_slot


def tiered(num_slots, num_host_slots, model=MODEL, per_slot=None, **options):
    per_slot = per_slot or bytes_per_slot()
    return AsyncTransformer(
        model,
        word_tokenizer(),
        kv_cache_bytes=(num_slots + 1) * per_slot,
        host_cache_bytes=(num_host_slots + 1) * per_slot,
        row_cache_bytes=0,
        **options,
    )


def check(lm):
    check_integrity(lm._evaluator.scheduler.tree)


def check_rows(rows, contexts, model=MODEL):
    for row, context in zip(rows, contexts, strict=True):
        torch.testing.assert_close(row, naive_row(model, context), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
@pytest.mark.filterwarnings("ignore")
def test_prompt_moved_to_host_returns_without_recomputation(name):
    model = families.make(name)
    generator = random.Random(name)
    prompts = [[generator.randrange(families.VOCAB) for _ in range(30)] for _ in range(4)]
    with tiered(40, 200, model, bytes_per_slot(model)) as lm:
        for prompt in prompts:
            check_rows([lm.next_token_logprobs_sync(prompt)], [prompt], model)
        for turn in range(3):
            for prompt in prompts:
                before = lm.statistics()
                context = [*prompt[:-1], generator.randrange(families.VOCAB)]
                check_rows([lm.next_token_logprobs_sync(context)], [context], model)
                after = lm.statistics()
                assert after.tokens_computed - before.tokens_computed == 1
                if not turn:  # all but what the last one has left to the prompt before it
                    moved = after.num_tokens_from_host - before.num_tokens_from_host
                    assert 20 <= moved <= 29
                check(lm)
        assert after.num_evicted_tokens == 0
        assert 0 < after.host_bytes_used <= after.host_bytes_budget == 201 * bytes_per_slot(model)
        lm.clear_kv_cache()
        assert lm.statistics().host_bytes_used == lm.statistics().kv_bytes_used == 0


async def count(lm, context):
    return [await lm.num_cached_tokens(context, tier=t) for t in (None, "device", "host")]


async def test_cached_tokens_are_counted_per_tier():
    with tiered(32, 64) as lm:
        assert lm.has_host_tier
        first, second = list(range(1, 25)), list(range(30, 50))
        await lm.next_token_logprobs(first)
        assert await count(lm, first) == [23, 23, 0]
        await lm.next_token_logprobs(second)
        assert await count(lm, first) == [23, 12, 11]
        assert await count(lm, [*first[:15], 1]) == [15, 12, 3]
        with pytest.raises(OptionError, match="tier"):
            await lm.num_cached_tokens(first, tier="gpu")
        check(lm)


async def test_pinned_prompt_is_moved_to_device():
    with tiered(40, 64) as lm:
        prompt, other = list(range(1, 25)), list(range(30, 60))
        await lm.next_token_logprobs(prompt)
        await lm.next_token_logprobs(other)
        assert (await count(lm, prompt))[2] > 0
        lm.cache_kv(prompt)
        for _ in range(3):
            await lm.next_token_logprobs([random.randrange(families.VOCAB) for _ in range(15)])
        assert await count(lm, [*prompt, 1]) == [24, 24, 0]
        with pytest.raises(CacheError, match="does not fit"):
            lm.cache_kv(other)
        check(lm)


@pytest.mark.parametrize("kept", [None, "int8", "uint4"])
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    num_slots=st.integers(8, 40),
    num_host_slots=st.sampled_from([3, 12, 40, 300]),
)
def test_rows_do_not_depend_on_history_of_batches(kept, data, num_slots, num_host_slots):
    """Rows are those of a fresh model, or where numbers are rounded of one with room for all."""
    per_slot = bytes_per_slot(kv_cache_dtype=kept)
    plain = AsyncTransformer(MODEL, word_tokenizer(), kv_cache_dtype=kept, row_cache_bytes=0)
    steps = st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.integers(0, families.VOCAB - 1), max_size=6)),
        min_size=1,
        max_size=5,
    )
    seen = [[1]]
    with plain, tiered(num_slots, num_host_slots, per_slot=per_slot, kv_cache_dtype=kept) as lm:
        for batch in data.draw(st.lists(steps, min_size=1, max_size=8)):
            contexts = [(seen[i % len(seen)] + more)[-30:] for i, more in batch]
            rows = lm.batch_next_token_logprobs_sync(contexts)
            if kept is None:
                check_rows(rows, contexts)
            else:
                exact = plain.batch_next_token_logprobs_sync(contexts)
                torch.testing.assert_close(rows, exact, atol=5e-3, rtol=0)
            seen += contexts
            check(lm)


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
def test_failed_copy_between_tiers_raises_and_corrupts_no_row(monkeypatch, direction):
    def fail(*args):
        raise RuntimeError("no such luck")

    with tiered(32, 200) as lm:
        first, second = list(range(1, 25)), list(range(30, 58))
        lm.next_token_logprobs_sync(first)
        if direction == "to_device":
            lm.next_token_logprobs_sync(second)
        with monkeypatch.context() as patch:
            patch.setattr(TierCopier, direction, fail)
            with pytest.raises(RuntimeError, match="no such luck"):
                lm.next_token_logprobs_sync(second if direction == "to_host" else [*first, 7])
        check(lm)
        for context in (first, second, [*first, 7], [*second, 7]):
            check_rows([lm.next_token_logprobs_sync(context)], [context])
            check(lm)


def test_engine_reports_prefix_lengths_per_tier():
    with tiered(40, 200) as lm, Engine() as engine:
        serve(engine, lm)
        found = []
        for prompt in (list(range(1, 25)), list(range(30, 54)), list(range(1, 25))):
            request = engine.start_request_ids("m", prompt, max_new_tokens=2)
            request.result(30)
            part = request.queue.get()
            found.append((part.num_cached_tokens, part.prefix_len_gpu, part.prefix_len_cpu))
        assert found[0] == found[1] == (0, 0, 0)
        total, gpu, cpu = found[2]
        assert total == gpu + cpu == 23
        assert cpu > 0


def test_unusable_host_cache_bytes_raises_or_warns():
    for wrong, error in ((-1, OptionError), (1.5, TypeError)):
        with pytest.raises(error, match="host_cache_bytes"):
            AsyncTransformer(MODEL, word_tokenizer(), host_cache_bytes=wrong)
    with pytest.raises(OptionError, match="needs a cache on the device"):
        AsyncTransformer(MODEL, word_tokenizer(), kv_cache_bytes=0, host_cache_bytes=1 << 20)
    with pytest.warns(UserWarning, match="gains nothing"):
        tiered(10, 10).close()
    with AsyncTransformer(MODEL, word_tokenizer()) as lm:
        assert not lm.has_host_tier
