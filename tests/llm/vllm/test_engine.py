"""vLLM itself, on the bundled model: rows against transformers, whatever the history."""

import asyncio
import random

import pytest
import torch

from genlm_backend import load_model_by_name
from genlm_backend.errors import ModelNotFoundError, OptionError, OptionTypeError
from tests.llm.vllm import real
from tests.naive import naive_row, naive_scores

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.real,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def smollm2():
    from transformers import AutoModelForCausalLM

    from genlm_backend.backends.bundled import bundled_directory

    return AutoModelForCausalLM.from_pretrained(bundled_directory("smollm2"), dtype=torch.float32)


@pytest.fixture(
    scope="module",
    params=["0", pytest.param("1", marks=pytest.mark.slow)],
    ids=["here", "in a process of its own"],
)
def lm(request):
    real.close_tiny_engine()
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 32}
    options["kv_cache_memory_bytes"] = 512 << 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", request.param)
        lm = load_model_by_name(
            "smollm2", backend="vllm", llm_opts={"engine_opts": options, "row_cache_bytes": 0}
        )
    with lm:
        yield lm


def check(row, model, context):
    torch.testing.assert_close(row, naive_row(model, context), rtol=0, atol=1e-3)


TEXT = "Sequential Monte Carlo methods are a set of algorithms that estimate the state of a system."


async def test_resampled_particles_get_exact_rows_for_their_new_tokens_alone(lm, smollm2):
    randomness = random.Random(0)
    torch.manual_seed(0)
    before = lm.statistics()
    particles = [lm.tokenizer.encode(TEXT) for _ in range(20)]
    for step in range(9):
        rows = await asyncio.gather(*map(lm.next_token_logprobs, particles))
        for i in (0, 9, 19):
            check(rows[i], smollm2, particles[i])
        particles = [
            [*context, int(torch.multinomial(row.exp(), 1))]
            for context, row in zip(particles, rows, strict=True)
        ]
        if step % 3 == 2:
            particles = [list(randomness.choice(particles)) for _ in particles]
    after = lm.statistics()
    assert after.num_forwards - before.num_forwards <= 10
    assert after.tokens_computed - before.tokens_computed <= 40 + 20 * 9


async def test_rows_of_forks_at_any_token_are_exact_under_eviction(lm, smollm2):
    randomness = random.Random(1)
    pool = [lm.tokenizer.encode(TEXT * n)[:900] for n in (1, 5, 40)]

    async def ask(context):
        check(await lm.next_token_logprobs(context), smollm2, context)

    for _ in range(12):
        asked = []
        for _ in range(6):
            base = randomness.choice(pool)
            cut = base[: randomness.randrange(1, len(base) + 1)]
            asked.append(cut + [randomness.randrange(49_152) for _ in range(3)])
        pool.extend(asked)
        await asyncio.gather(*map(ask, asked))
    assert lm.statistics().num_evicted_tokens > 0


async def test_row_is_exact_after_two_thousand_abandoned_contexts(lm, smollm2):
    await asyncio.gather(*(lm.next_token_logprobs([i, i + 1]) for i in range(2000)))
    context = lm.tokenizer.encode(TEXT)
    check(lm.next_token_logprobs_sync(context), smollm2, context)


async def test_cancelled_callers_leave_rows_of_others_exact(lm, smollm2):
    prompt = lm.tokenizer.encode(TEXT)
    tasks = [asyncio.create_task(lm.next_token_logprobs([*prompt, i])) for i in range(40)]
    await asyncio.sleep(0.01)
    for task in tasks[::2]:
        task.cancel()
    rows = await asyncio.gather(*tasks, return_exceptions=True)
    for i in (1, 21, 39):
        check(rows[i], smollm2, [*prompt, i])


def test_longest_context_is_exact_and_a_longer_one_refused(lm, smollm2):
    context = (lm.tokenizer.encode(TEXT) * 80)[: lm.max_length]
    check(lm.next_token_logprobs_sync(context), smollm2, context)
    with pytest.raises(ValueError, match="1024"):
        lm.next_token_logprobs_sync([*context, 1])


def test_clear_cache_ends_all_sessions_and_changes_no_row(lm, smollm2):
    context = lm.tokenizer.encode(TEXT)
    lm.next_token_logprobs_sync(context)
    lm.clear_cache()
    assert len(lm._evaluator.planner.table) == 0
    check(lm.next_token_logprobs_sync([*context, 5]), smollm2, [*context, 5])


async def test_texts_with_any_part_cached_are_scored_in_few_passes(lm, smollm2):
    """Texts whose prompts, targets or all are cached; and one too long for a pass, and rows."""
    ids = lm.tokenizer.encode(TEXT * 8)
    texts = [(ids[:60], 40), (ids[:60], 1), (ids[:150], 70), (ids[:150], 149), (ids[:90], 60)]
    lm.clear_cache()

    def check_scores(found, text, start):
        expected = naive_scores(smollm2, text, start)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)

    for _ in range(2):  # the second time all of them are cached
        asked = [lm.score(text[:start], text[start:]) for text, start in texts]
        found = await asyncio.gather(*asked, lm.next_token_logprobs(ids[:20]))
        for scores, (text, start) in zip(found, texts, strict=False):
            check_scores(scores, text, start)
        check(found[-1], smollm2, ids[:20])
    for text, start in texts:
        before = lm.statistics()
        check_scores(await lm.score(text[:start], text[start:]), text, start)
        after = lm.statistics()
        assert after.num_forwards - before.num_forwards <= 2
    told = await lm.score_with(ids[:10], ids[10:16], entropy=True, rank=True, top=3)
    check_scores(told.logprobs, ids[:16], 10)
    row = naive_row(smollm2, ids[:10])
    torch.testing.assert_close(told.top_logprobs[0], row.topk(3).values, rtol=0, atol=1e-3)
    longest = (ids * 6)[:1024]
    check_scores(await lm.score(longest[:1020], longest[1020:]), longest, 1020)


async def test_text_with_incomplete_logprobs_is_scored_again(lm, smollm2, monkeypatch):
    """As where vLLM has gone on behind what another request has computed meanwhile."""
    core = lm._evaluator.engine._core
    own, asked = core.logprobs_of, []

    def logprobs_of(output):
        logprobs, ids, *counts = own(output)
        asked.append(output)
        if len(asked) == 1:
            logprobs, ids = logprobs.clone(), ids.clone()
            logprobs[-3], ids[-3] = 7.0, ids[-3] + 1
        return logprobs, ids, *counts

    monkeypatch.setattr(core, "logprobs_of", logprobs_of)
    ids = lm.tokenizer.encode(TEXT)
    found = await lm.score(ids[:4], ids[4:])
    torch.testing.assert_close(found, naive_scores(smollm2, ids, 4), rtol=0, atol=1e-3)
    assert len(asked) == 2


async def test_cancelled_scoring_leaves_other_scores_exact(lm, smollm2):
    ids = lm.tokenizer.encode(TEXT * 4)
    asked = [asyncio.ensure_future(lm.score(ids[:k], ids[k : k + 30])) for k in range(1, 40)]
    await asyncio.sleep(0.05)
    for each in asked[::2]:
        each.cancel()
    for k, each in zip(range(1, 40), asked, strict=True):
        if not each.cancelled() and (k - 1) % 2:
            expected = naive_scores(smollm2, ids[: k + 30], k)
            torch.testing.assert_close(await each, expected, rtol=0, atol=1e-3)


async def test_concurrent_samples_and_rows_do_not_affect_each_other(lm, smollm2):
    prompt = lm.tokenizer.encode(TEXT)

    async def sample():
        return await lm.batch_sample([prompt, prompt[:5]], 12, [], seed=7)

    alone = await sample()
    greedy = await lm.sample(prompt, 8, [], temperature=0)
    beside = asyncio.create_task(sample())
    context = list(prompt)
    for token_id in greedy:
        rows = await asyncio.gather(
            *(lm.next_token_logprobs([*context, i]) for i in range(6)),
            lm.next_token_logprobs(context),
        )
        check(rows[3], smollm2, [*context, 3])
        assert int(rows[-1].argmax()) == token_id
        context.append(token_id)
    assert await beside == alone
    tasks = [asyncio.create_task(lm.sample(prompt, 500, [])) for _ in range(40)]
    await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()
    check(await lm.next_token_logprobs(context), smollm2, context)
    assert lm._evaluator.engine.completions == {}


async def test_sample_reaching_max_length_ends_with_finish_reason_length(lm):
    prompt = (lm.tokenizer.encode(TEXT) * 80)[: lm.max_length - 3]
    whole = await lm.sample(prompt, 4, [], seed=1)
    cut = await lm.sample(prompt, 9, [], seed=1)
    assert whole == cut
    assert [len(whole), whole.finish_reason, cut.finish_reason] == [4, "length", "length"]


@pytest.mark.parametrize(
    "option",
    [
        {"data_parallel_size": 2},
        {"enable_prefix_caching": False},
        {"kv_cache_dtype": "int8_per_token_head"},  # which it takes on the CPU, for wrong rows
        {"kv_cache_dtype": "int4_per_token_head"},
    ],
    ids=str,
)
def test_options_incompatible_with_sessions_are_refused_by_name(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}="):
        load_model_by_name("smollm2", backend="vllm", llm_opts={"engine_opts": option})


def test_unknown_model_name_raises_model_not_found_error():
    with pytest.raises(ModelNotFoundError, match="no model 'smolm2' could be loaded"):
        load_model_by_name("smolm2", backend="vllm")


def test_unknown_engine_option_suggests_a_similar_one():
    with pytest.raises(OptionTypeError, match=r"no option 'max_num_seq'; did you mean max_num_seq"):
        load_model_by_name("smollm2", backend="vllm", llm_opts={"engine_opts": {"max_num_seq": 8}})


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"dtype": "float31"}, "dtype='float31'"),
        ({"max_model_len": 100_000}, "max_model_len"),
        ({"enforce_eager": "perhaps"}, "enforce_eager='perhaps'"),
    ],
    ids=str,
)
def test_invalid_engine_option_value_is_named(option, told):
    with pytest.raises(OptionError, match="vLLM rejects engine_opts") as refused:
        load_model_by_name("smollm2", backend="vllm", llm_opts={"engine_opts": option})
    assert told in str(refused.value)
    assert "pydantic" not in str(refused.value)


def test_option_of_another_backend_is_refused_naming_engine_opts():
    told = "kv_cache_bytes is not an option of AsyncVirtualLM.* engine_opts"
    with pytest.raises(OptionTypeError, match=told):
        load_model_by_name("smollm2", backend="vllm", llm_opts={"kv_cache_bytes": 1 << 20})
