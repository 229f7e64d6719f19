"""Models whose recurrent states are kept, against the bare model run whole and alone."""

import asyncio
import copy
import dataclasses
import inspect
import json
import random
import re
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from transformers.cache_utils import DynamicCache

from genlm_backend import AsyncTransformer
from genlm_backend.errors import (
    CacheError,
    OptionError,
    OptionTypeError,
    PrefixFileError,
    QueryDroppedError,
)
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.hf.histories import History, check_tree, tokens
from tests.naive import naive_row

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels

CLOSE = 2e-4
WHOLE = ("qwen4_exp", "glm5_next")
"""Families that have more to go on from than states and keys, and so are run whole."""

KEPT = [name for name in families.RUNNING if name not in WHOLE]
ONE_BY_ONE = {"mamba", "falcon_mamba", "jamba", "zamba"}
CLAMPED = ("nemotron_h", "zamba2")
"""Families that clamp the time steps of a context to ``time_step_min``, but not of one token."""
FEW = ("qwen3_5", "mamba", "falcon_h1", "zaya", "nemotron_h")
"""One that goes on by several tokens, one by one, two with states in each layer, and Mamba 2."""


@lru_cache
def model_of(name):
    return families.make(name)


@lru_cache(20_000)
def expected(name, context):
    return naive_row(model_of(name), context)


@lru_cache
def sizes_of(name):
    """Bytes of one state and of one slot."""
    with AsyncTransformer(model_of(name), word_tokenizer()) as lm:
        passes = lm._evaluator.scheduler
        return passes.cache.state_pool.layout.bytes_per_state, passes.cache.pool.bytes_per_slot


def budgets(name, num_states, num_slots=400):
    per_state, per_slot = sizes_of(name)
    states = num_states * per_state
    return {"kv_cache_bytes": states + (num_slots + 1) * per_slot, "state_cache_bytes": states}


def on_host(name, num_states, num_slots, times):
    """Room on the host for some times as many states, one at least, and as many slots at least."""
    per_state, per_slot = sizes_of(name)
    states = max(1, int(times * num_states)) * per_state
    return {"host_cache_bytes": 2 * max(states, int(times * num_slots) * per_slot)}


def over(model, **options):
    return AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0, **options)


def opened(name, **options):
    return over(model_of(name), **options)


def set_cost(lm, **changes):
    passes = lm._evaluator.scheduler
    passes.cost = dataclasses.replace(passes.cost, **changes)


def of_bare_model(name):
    return lambda context, _: expected(name, context)


async def check(lm, name, contexts):
    rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
    for row, context in zip(rows, contexts, strict=True):
        torch.testing.assert_close(row, expected(name, tuple(context)), rtol=0, atol=CLOSE)
    check_tree(lm)


# ---------------------------------------------------------------- families


def test_every_recurrent_family_of_transformers_is_tested():
    calls = re.compile(r"\bupdate_(?:conv|recurrent)_state\b")
    files = (Path(tf.__file__).parent / "models").glob("*/modeling_*.py")
    found = {path.parent.name for path in files if calls.search(path.read_text(encoding="utf-8"))}
    assert found == set(families.RUNNING)


@pytest.mark.parametrize("name", families.RUNNING)
@torch.no_grad()
def test_zeroing_any_state_changes_the_row(name):
    """What is compared below would show a state that is another."""
    model, ids = model_of(name), torch.tensor([tokens(random.Random(4), 24)])
    accepted = inspect.signature(model.forward).parameters
    parameter = next(n for n in ("cache", "past_key_values", "cache_params") if n in accepted)
    cache = DynamicCache(config=model.config)
    model(ids[:, :23], **{parameter: cache}, use_cache=True)

    def behind(cache):
        given = {parameter: cache, "use_cache": True}
        if "position_ids" in accepted:
            given["position_ids"] = torch.tensor([[23]])
        return model(ids[:, 23:], **given).logits[0, -1].log_softmax(-1)

    true = behind(copy.deepcopy(cache))
    for number, layer in enumerate(cache.layers):
        for kind in ("conv_states", "recurrent_states"):
            for index, state in getattr(layer, kind, {}).items():
                if state is not None:
                    other = copy.deepcopy(cache)
                    getattr(other.layers[number], kind)[index].zero_()
                    difference = float((behind(other) - true).abs().max())
                    assert difference > 10 * CLOSE, (number, kind, index)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("name", families.RUNNING)
async def test_rows_of_every_family_match_bare_model(name):
    """Zamba in float64: its own rows of float32 are 3e-4 off these for some contexts."""
    generator = random.Random(name)
    model = copy.deepcopy(model_of(name)).double() if name == "zamba" else model_of(name)
    with over(model) as lm:
        passes = lm._evaluator.scheduler
        assert lm.kv_reuse == (name in KEPT)
        if lm.kv_reuse:
            assert passes.can.takes_several_tokens == (name not in ONE_BY_ONE)
        history = History(lm, generator, lambda context, _: naive_row(model, context), CLOSE)
        await history.steps(5)
        set_cost(lm, max_chunk=7, max_outputs=5)
        await history.steps(4)
        assert not lm.kv_reuse or lm.statistics().tokens_reused > 50
        context = history.contexts[0]
        history.check(lm.next_token_logprobs_uncached(context), naive_row(model, context))


@pytest.mark.parametrize(
    ("name", "time_step_min"),
    [*((name, None) for name in KEPT), *((name, 0.02) for name in CLAMPED)],
)
@torch.no_grad()
def test_steps_after_prompt_match_own_cache_of_model(name, time_step_min):
    """As ``generate`` makes them; of some families they are not the rows of whole contexts."""
    generator, model = random.Random(name), model_of(name)
    if time_step_min:
        config = copy.deepcopy(model.config)
        config.time_step_min = time_step_min
        model = families.of(config)
    accepted = inspect.signature(model.forward).parameters
    parameter = next(n for n in ("cache", "past_key_values", "cache_params") if n in accepted)
    context, cache = tokens(generator, 20), DynamicCache(config=model.config)
    given, new = {parameter: cache, "use_cache": True}, context
    with over(model) as lm:
        for _ in range(4):
            if "position_ids" in accepted:
                given["position_ids"] = torch.arange(len(context) - len(new), len(context))[None]
            logits = model(torch.tensor([new]), **given).logits[0, -1]
            row = lm.next_token_logprobs_sync(context)
            torch.testing.assert_close(row, logits.log_softmax(-1), rtol=0, atol=CLOSE)
            new = tokens(generator, 1)
            context = context + new


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
async def test_rows_of_long_histories_match_bare_model(name):
    generator = random.Random(name)
    for options in ({}, budgets(name, 5), budgets(name, 2, 60)):
        with opened(name, **options) as lm:
            history = History(lm, generator, of_bare_model(name), CLOSE)
            await history.steps(12)
            set_cost(lm, max_chunk=generator.choice([1, 3, 16]), max_outputs=3)
            await history.steps(12)


@pytest.mark.parametrize("num_states", [1, 3])
@pytest.mark.parametrize("name", FEW)
async def test_rows_with_few_states_match_bare_model(name, num_states):
    generator = random.Random(f"{name} {num_states}")
    num_slots = generator.choice([20, 45, 400])
    with opened(name, **budgets(name, num_states, num_slots)) as lm:
        await History(lm, generator, of_bare_model(name), CLOSE).steps(6)
        statistics = lm.statistics()
        assert statistics.state_bytes_used <= statistics.state_bytes_budget


@pytest.mark.parametrize("name", ["qwen3_5", "mamba"])
@pytest.mark.parametrize(("every", "most"), [(1, 3.6), (4, 4.7)])
async def test_few_states_avoid_most_recomputation_for_particles(name, every, most):
    """A search that knew all of them came to 1.8 and 3.7 times the new tokens."""
    assert await _times_of_particles(name, 8, every, 16) < most


async def _times_of_particles(name, num_states, every, num_steps):
    """Tokens computed over the distinct new ones of particles that are resampled at times."""
    generator = random.Random(1)
    particles = [tuple(generator.choices(range(families.VOCAB), k=51))] * 20
    with opened(name, **budgets(name, num_states, 1000)) as lm:
        await lm.next_token_logprobs(particles[0])
        before, new = lm.statistics().tokens_computed, set()
        for step in range(num_steps):
            if step and step % every == 0:
                particles = generator.choices(particles, k=20)
            particles = [(*ids, generator.randrange(families.VOCAB)) for ids in particles]
            new |= set(particles)
            await lm.batch_next_token_logprobs(particles)
        return (lm.statistics().tokens_computed - before) / len(new)


async def test_mamba_contexts_advance_together_one_token_per_pass():
    """As many passes as the longest context takes, however many lengths there are."""
    with opened("mamba", batch_size=64) as lm:
        prompt = lm.context(range(3, 33))
        await lm.next_token_logprobs(prompt)
        await lm.next_token_logprobs(prompt.extend(2))
        before = lm.statistics().num_forwards
        contexts = [prompt + [40 + i] * i for i in range(1, 25)]
        rows = await lm.batch_next_token_logprobs(contexts)
        assert lm.statistics().num_forwards - before == 24
        for row, context in zip(rows, contexts, strict=True):
            torch.testing.assert_close(row, expected("mamba", tuple(context)), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "zaya", "nemotron_h"])
async def test_rows_with_tokens_moved_to_host_match_bare_model(name):
    with opened(name, **budgets(name, 30, 30), **on_host(name, 30, 30, 4)) as lm:
        await History(lm, random.Random(name), of_bare_model(name), CLOSE).steps(10)
        assert lm.statistics().num_tokens_to_host > 0


@pytest.mark.parametrize(("num_states", "times"), [(4, 0.5), (2, 2), (4, 10)])
@pytest.mark.parametrize("name", FEW)
async def test_rows_with_states_moved_to_host_match_bare_model(name, num_states, times):
    generator = random.Random(f"{name} {num_states} {times}")
    num_slots = generator.choice([45, 400])
    sizes = name, num_states, num_slots
    with opened(name, **budgets(*sizes), **on_host(*sizes, times)) as lm:
        await History(lm, generator, of_bare_model(name), CLOSE).steps(8)
        counts = lm.statistics()
        assert counts.num_states_to_host > 0 < counts.num_states_from_host or times < 1
        assert 0 < counts.host_bytes_used <= counts.host_bytes_budget
        lm.clear_kv_cache()
        assert lm.statistics().host_bytes_used == 0


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "jamba"])
async def test_rows_with_rounded_keys_and_values_match_uncached_rows(name):
    with opened(name, kv_cache_dtype="int8") as lm:

        def row(context, _):
            return lm.next_token_logprobs_uncached(list(context))

        await History(lm, random.Random(name), row, atol=5e-3).steps(6)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba"])
@pytest.mark.parametrize("max_outputs", [1, 4, 17])
def test_scores_beyond_max_outputs_match_bare_model(name, max_outputs):
    text = tokens(random.Random(0), 24)
    with opened(name) as lm:
        set_cost(lm, max_outputs=max_outputs)
        for start in (1, 5, 7, 23):
            found = lm.batch_score_sync([text[:start]], [text[start:]])[0]
            wanted = [expected(name, tuple(text[:end]))[text[end]] for end in range(start, 24)]
            torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", FEW)
async def test_rows_in_bfloat16_are_near_bare_model(name):
    model = families.make(name, dtype=torch.bfloat16)
    generator = random.Random(name)
    with over(model) as lm:
        assert lm.kv_reuse
        kinds = {(t.name, t.dtype) for t in lm._evaluator.scheduler.cache.state_pool.layout.tensors}
        assert name == "zaya" or ("recurrent_states", torch.float32) in kinds
        contexts = [lm.context(tokens(generator, 12)) for _ in range(3)]
        for _ in range(4):
            rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
            for row, context in zip(rows, contexts, strict=True):
                assert row.dtype == torch.float32
                assert float((row - naive_row(model, context)).square().mean().sqrt()) < 0.25
            contexts = [c + tokens(generator, 1) for c in generator.choices(contexts, k=3)]


# ---------------------------------------------------------------- adapters


def make_adapter(folder, name, seed):
    """Write a random adapter of linear layers; return the model with it merged in."""
    generator, merged = torch.Generator().manual_seed(seed), copy.deepcopy(model_of(name))
    tensors, targets = {}, set()
    for path, module in merged.named_modules():
        is_one = path.endswith(("in_proj", "in_proj_qkv", "v_proj"))
        if is_one and isinstance(module, torch.nn.Linear):
            a = torch.randn(4, module.in_features, generator=generator) * 0.2
            b = torch.randn(module.out_features, 4, generator=generator) * 0.2
            tensors[f"base_model.model.{path}.lora_A.weight"] = a
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
            module.weight.data += 2 * b @ a
            targets.add(path.split(".")[-1])
    assert tensors
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny"}
    settings |= {"r": 4, "lora_alpha": 8, "target_modules": sorted(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return merged


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "falcon_h1", "mamba2"])
async def test_rows_of_several_adapters_match_merged_models(name, tmp_path):
    pytest.importorskip("peft")
    models = {each: make_adapter(tmp_path / each, name, seed) for seed, each in enumerate("ab")}

    @lru_cache(None)
    def row(context, adapter):
        return naive_row(models.get(adapter, model_of(name)), context)

    with opened(name) as lm:
        for each in models:
            lm.add_new_lora(str(tmp_path / each), each)
        generator = random.Random(0)
        await History(lm, generator, row, CLOSE, adapters=(None, *models)).steps(6)


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize("name", FEW)
async def test_cache_operations_between_steps_change_no_row(name, tmp_path):
    generator, path = random.Random(0), str(tmp_path / "prefix")
    with opened(name) as lm:
        contexts = [lm.context(tokens(generator, 12)) + tokens(generator, 1) for _ in range(3)]
        acts = [
            lm.clear_cache,
            lambda: lm.cache_kv(contexts[0]),
            lambda: lm.save_prefix(contexts[1], path),
            lambda: lm.load_prefix(path),
            lm.clear_cache,
            lambda: lm.load_prefix(path),
        ]
        for act in acts:
            await check(lm, name, contexts)
            act()
            contexts = [c + tokens(generator, 1) for c in generator.choices(contexts, k=3)]
            await check(lm, name, contexts)


@pytest.mark.parametrize("name", FEW)
def test_pinning_computes_prompt_once(name):
    with opened(name) as lm:
        for size in (1, 2, 24, 60):
            lm.clear_cache()
            before = lm.statistics().tokens_computed
            lm.cache_kv(tokens(random.Random(size), size))
            assert lm.statistics().tokens_computed - before == size


@pytest.mark.parametrize("name", FEW)
async def test_a_pinned_prompt_is_never_computed_again(name):
    generator = random.Random(0)
    prompt = tokens(generator, 20)
    with opened(name, **budgets(name, 3, 90)) as lm:
        lm.cache_kv(prompt)
        lm.cache_kv(prompt)
        lm.cache_kv([7, 8])
        with pytest.raises(CacheError, match="does not fit"):  # or no other had room for its own
            lm.cache_kv([9, 9])
        for _ in range(10):
            await check(lm, name, [tokens(generator, 9) for _ in range(3)])
            assert await lm.num_cached_tokens([*prompt, 5]) == 19
        before = lm.statistics().tokens_computed
        await check(lm, name, [[*prompt, 5, 6]])
        assert lm.statistics().tokens_computed == before + 3
        lm.clear_kv_cache()
        assert lm.statistics().state_bytes_used == lm.statistics().kv_bytes_used == 0
        lm.cache_kv([9, 9])
        await check(lm, name, [[*prompt, 5], [9, 9, 9]])


@pytest.mark.parametrize("name", FEW)
async def test_pinning_cached_prompt_without_state_computes_its_state(name):
    """Its tokens are those of a longer context, which has gone past it."""
    prompt = tokens(random.Random(0), 20)
    with opened(name) as lm:
        await check(lm, name, [[*prompt, 5, 6, 7]])
        lm.cache_kv(prompt)
        before = lm.statistics().tokens_computed
        await check(lm, name, [[*prompt, 8]])
        assert lm.statistics().tokens_computed - before <= 2


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
@pytest.mark.parametrize("is_scored", [False, True])
async def test_prompt_shared_by_successive_contexts_is_reused_from_third_on(name, is_scored):
    """The second one finds out how far it is shared, and the third goes on from there."""
    generator = random.Random(0)
    prompt, num_computed = tokens(generator, 40), []
    with opened(name) as lm:
        for _ in range(4):
            before, text = lm.statistics().tokens_computed, tokens(generator, 6)
            if is_scored:
                await lm.score(prompt, text)
            else:
                await check(lm, name, [prompt + text])
            num_computed.append(lm.statistics().tokens_computed - before)
    assert num_computed[2:] == [num_computed[2]] * 2
    assert num_computed[2] <= 8 < 40 < num_computed[1]


@pytest.mark.parametrize("name", FEW)
async def test_prefix_file_with_states_is_loaded_without_computation(name, tmp_path):
    path, prompt = str(tmp_path / "prefix"), tokens(random.Random(0), 20)
    with opened(name) as lm:
        lm.save_prefix(prompt, path)
    with opened(name) as lm:
        assert list(lm.load_prefix(path)) == prompt
        assert lm.statistics().tokens_computed == 0
        await check(lm, name, [prompt])
        assert lm.statistics().tokens_computed == 1
        await check(lm, name, [[*prompt, 3, 4], [*prompt, 9, 5]])
        assert lm.statistics().tokens_computed == 5
        await check(lm, name, [prompt, prompt[:5]])
        assert list(lm.load_prefix(path)) == prompt
    other = copy.deepcopy(model_of(name))
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    with over(other) as lm, pytest.raises(PrefixFileError, match="another model"):
        lm.load_prefix(path)


def test_a_file_of_keys_and_values_alone_is_refused(tmp_path):
    path = str(tmp_path / "prefix")
    with over(families.make("llama")) as lm:
        lm.save_prefix([5, 6, 7], path)
    with opened("qwen3_5") as lm, pytest.raises(PrefixFileError, match="another model"):
        lm.load_prefix(path)


@pytest.mark.parametrize("name", FEW)
async def test_nothing_is_cached_with_kv_cache_bytes_zero(name):
    generator = random.Random(0)
    with opened(name, kv_cache_bytes=0) as lm:
        await History(lm, generator, of_bare_model(name), CLOSE).steps(3)
        statistics = lm.statistics()
        assert statistics.state_bytes_used == statistics.tokens_reused == 0


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "mamba"])
async def test_smc_with_resampling_computes_exactly_the_distinct_new_tokens(name):
    assert await _times_computed(name) == 1.0


async def test_few_states_cost_under_six_times_the_tokens():
    assert await _times_computed("qwen3_5", **budgets("qwen3_5", 8, 2000)) < 6


@pytest.mark.parametrize("name", FEW)
async def test_few_states_with_ample_host_room_recompute_no_token(name):
    sizes = name, 8, 2000
    times = await _times_computed(name, **budgets(*sizes), **on_host(*sizes, 40))
    assert times == 1.0


async def _times_computed(name, **options):
    """Tokens computed over the distinct ones, of twenty particles that are resampled at times."""
    generator, seen = random.Random(0), set()
    with opened(name, **options) as lm:
        particles = [lm.context(tokens(generator, 51))] * 20
        for step in range(16):
            await asyncio.gather(*map(lm.next_token_logprobs, particles))
            seen.update(tuple(p[: n + 1]) for p in particles for n in range(len(p)))
            particles = [[*p, generator.randrange(4)] for p in particles]
            if step % 4 == 3:
                particles = generator.choices(particles, k=20)
        check_tree(lm)
        return lm.statistics().tokens_computed / len(seen)


# ---------------------------------------------------------------- trouble


@pytest.mark.parametrize("name", FEW)
async def test_a_nan_stays_in_its_own_row(name):
    model = copy.deepcopy(model_of(name))
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # where it is the embeddings too
    with torch.no_grad():
        model.get_input_embeddings().weight[91] = torch.nan
    generator = random.Random(0)
    sound = [generator.choices(range(3, 80), k=9) for _ in range(3)]
    with over(model) as lm:
        assert lm.kv_reuse
        for _ in range(3):
            spoilt = [[*sound[0], 91], [91], [*sound[1][:4], 91, 5, 6]]
            rows = await asyncio.gather(*map(lm.next_token_logprobs, [*sound, *spoilt]))
            for row, context in zip(rows, sound, strict=False):
                wanted = naive_row(model_of(name), context)
                torch.testing.assert_close(row, wanted, rtol=0, atol=CLOSE)
            assert all(row.isnan().any() for row in rows[3:])
            assert await lm.num_cached_tokens([*sound[0], 91, 5]) <= len(sound[0])
            assert await lm.num_cached_tokens([91, 5]) == 0
            check_tree(lm)
            sound = [[*context, *generator.choices(range(3, 80), k=1)] for context in sound]
        states = lm._evaluator.scheduler.cache.state_pool
        numbers = lm._evaluator.scheduler.tree.nodes.state
        assert states.is_finite(numbers[numbers > 0])


@pytest.mark.parametrize("of_host", [False, True])
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "mamba"])
async def test_failed_write_of_state_in_either_tier_corrupts_no_row(name, of_host):
    generator = random.Random(0)
    with opened(name, **budgets(name, 2), **on_host(name, 2, 400, 10)) as lm:
        cache, prompt = lm._evaluator.scheduler.cache, lm.context(tokens(generator, 3))
        await check(lm, name, [prompt])
        pool, failing = cache.host_state_pool if of_host else cache.state_pool, [True]
        write = pool.write

        def fails(numbers, states):
            if failing:
                failing.pop()
                raise MemoryError
            write(numbers, states)

        pool.write = fails
        contexts = [prompt.extend(token) for token in (10, 11, 12, 13)]
        await check(lm, name, contexts)
        assert not failing
        await check(lm, name, [context.extend(20) for context in contexts])


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "nemotron_h"])
async def test_computed_part_of_cancelled_context_stays_cached(name):
    context = tokens(random.Random(0), 40)
    with opened(name) as lm:
        set_cost(lm, max_chunk=8)
        passes, left = lm._evaluator.scheduler, [3]
        wanted = passes._check_cancelled

        def drop():
            left[0] -= 1
            if left[0] < 0:
                raise QueryDroppedError("by the test")

        passes._check_cancelled = drop
        with pytest.raises(QueryDroppedError):
            await lm.next_token_logprobs(context)
        passes._check_cancelled = wanted
        assert await lm.num_cached_tokens(context) == 24
        check_tree(lm)
        await check(lm, name, [context, context[:24], context[:25]])


async def leaving(name, count, size):
    """Of many callers, some of whom leave, all others get their rows."""
    generator = random.Random(name)
    with opened(name, **budgets(name, 12, 300)) as lm:
        contexts = [lm.context(tokens(generator, 10)) for _ in range(3)]
        for number in range(count // size):
            grown = [c + tokens(generator, 1) for c in generator.choices(contexts, k=size)]
            asked = [asyncio.ensure_future(lm.next_token_logprobs(c)) for c in grown]
            for _ in range(number % 5):
                await asyncio.sleep(0)
            gone = {i for i in range(size) if generator.random() < 0.3}
            for i in gone:
                asked[i].cancel()
            rows = await asyncio.gather(*asked, return_exceptions=True)
            for i, (row, context) in enumerate(zip(rows, grown, strict=True)):
                if i in gone and isinstance(row, asyncio.CancelledError):
                    continue
                wanted = expected(name, tuple(context))
                torch.testing.assert_close(row, wanted, rtol=0, atol=CLOSE)
            contexts = [c if len(c) < 40 else c[:10] for c in grown[:8]]
            check_tree(lm)


@pytest.mark.parametrize("name", FEW)
async def test_cancelled_queries_leave_rows_of_others_intact(name):
    await leaving(name, 60, 12)


# ---------------------------------------------------------------- transformers' kernels


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("qwen3_5", ["causal_conv1d_update", "torch_recurrent_gated_delta_rule"]),
        ("olmo_hybrid", ["causal_conv1d_update", "torch_recurrent_gated_delta_rule"]),
    ],
)
def test_steps_call_functions_that_transformers_replaces_by_kernels(name, kernels, monkeypatch):
    """Where kernels are installed, they stand for functions that a step of one token calls."""
    model = model_of(name)
    module = sys.modules[type(model).__module__]
    with opened(name) as lm:
        generator, calls = random.Random(0), []
        context = lm.context(tokens(generator, 5))
        lm.next_token_logprobs_sync(context)
        for kernel in kernels:
            function = getattr(module, kernel)

            def counted(*args, kernel=kernel, function=function, **options):
                calls.append(kernel)
                return function(*args, **options)

            monkeypatch.setattr(module, kernel, counted)
        lm.batch_next_token_logprobs_sync([context.extend(token) for token in (5, 6)])
        num_layers = model.config.get_text_config().layer_types.count("linear_attention")
        assert sorted(calls) == sorted(kernels * num_layers)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("name", FEW)
def test_budget_below_one_state_error_names_size_of_state(name):
    size, _ = sizes_of(name)
    with pytest.raises(OptionError, match=f"takes {size} bytes.*state_cache_bytes"):
        opened(name, kv_cache_bytes=1 << 20, state_cache_bytes=size - 1)
    with pytest.raises(OptionError, match=f"takes {size} bytes.*kv_cache_bytes"):
        opened(name, kv_cache_bytes=size - 1)
    with pytest.raises(OptionError, match="more than kv_cache_bytes=1048576"):
        opened(name, kv_cache_bytes=1 << 20, state_cache_bytes=(1 << 20) + 1)


@pytest.mark.parametrize("model", ["llama", "cpm-ant", "recurrent-gemma"])
def test_model_without_recurrent_states_refuses_state_cache_bytes(model):
    with pytest.raises(OptionError, match=r"state_cache_bytes=65536 needs .*recurrent states"):
        over(families.make(model), state_cache_bytes=1 << 16)


def test_model_without_keys_and_values_refuses_kv_cache_dtype():
    with pytest.raises(OptionError, match="MambaForCausalLM has only recurrent states"):
        opened("mamba", kv_cache_dtype="int8")


@pytest.mark.parametrize("name", FEW)
def test_host_budget_below_one_state_error_names_size_of_state(name):
    size, _ = sizes_of(name)
    with pytest.raises(OptionError, match=f"takes {size} bytes, but host_cache_bytes"):
        opened(name, **budgets(name, 4), host_cache_bytes=size - 1)


def test_state_cache_bytes_with_kv_cache_bytes_zero_is_refused():
    with pytest.raises(OptionError, match="kv_cache_bytes"):
        opened("qwen3_5", kv_cache_bytes=0, state_cache_bytes=1 << 16)


@pytest.mark.parametrize("wrong", [-1, 1.5, "8", True, [8]])
def test_invalid_state_cache_bytes_is_refused(wrong):
    with pytest.raises((OptionTypeError, OptionError), match="state_cache_bytes"):
        opened("qwen3_5", state_cache_bytes=wrong)
