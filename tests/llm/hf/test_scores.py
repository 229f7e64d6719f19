"""Scores of texts from one pass over them, against the bare model's logits over the whole text."""

import asyncio
import copy
import dataclasses
import random

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf.hf_evaluator import HFEvaluator
from genlm_backend.errors import CacheError, ContextError
from genlm_backend.llm import BatchedLM
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row, naive_rows, naive_scores
from tests.tree_integrity import check_integrity

LOOK_AHEAD = {"cpmant"}
SLOT = 2 * 2 * 2 * 8 * 4


def fresh_scores(model, text, start):
    """What one forward pass of the bare model over all of a text says.

    A model that looks ahead says what it says of each beginning alone.
    """
    if model.config.model_type in LOOK_AHEAD:
        return torch.stack([naive_row(model, text[:n])[text[n]] for n in range(start, len(text))])
    return naive_scores(model, text, start)


def check(found, expected, tolerance=3e-5):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def random_text(length, seed=0):
    return random.Random(seed).choices(range(families.VOCAB), k=length)


def projected(model):
    """Numbers of positions that are projected onto the vocabulary from now on, pass by pass."""
    sizes = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _, args, output: sizes.append(output[..., 0].numel()))
    return sizes


@pytest.mark.parametrize("name", [*families.PER_TOKEN, *families.FEW_RUNNING, *families.WHOLE])
@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
async def test_scores_match_bare_model(name):
    model, generator = families.make(name), random.Random(name)
    trunk = random_text(24)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        for _ in range(3):
            texts = [
                trunk[: generator.randint(1, 24)] + generator.choices(range(96), k=9)
                for _ in range(6)
            ]
            asked = [(text, generator.randint(1, len(text) - 1)) for text in texts]
            rows = asyncio.gather(*(lm.next_token_logprobs(t[:n]) for t, n in asked))
            scores = await asyncio.gather(*(lm.score(t[:n], t[n:]) for t, n in asked))
            for (text, start), found, row in zip(asked, scores, await rows, strict=True):
                check(found, fresh_scores(model, text, start))
                check(found[0], row[text[start]], 3e-5)
        if lm.kv_reuse:
            assert lm.statistics().tokens_reused > 0
        else:
            assert lm.statistics().tokens_reused == 0


async def test_scoring_text_takes_one_pass_and_caches_its_tokens(tiny_llama):
    text = random_text(60)
    with AsyncTransformer(tiny_llama, word_tokenizer()) as lm:
        check(await lm.score(text[:5], text[5:]), fresh_scores(tiny_llama, text, 5))
        statistics = lm.statistics()
        assert (statistics.num_forwards, statistics.tokens_computed) == (1, 59)
        assert (statistics.num_awaits, statistics.num_batches) == (1, 1)
        assert statistics.row_bytes_used == 0
        assert await lm.num_cached_tokens([*text, 1]) == 59
        check(await lm.next_token_logprobs(text), naive_row(tiny_llama, text))
        assert lm.statistics().tokens_computed == 60
        # What is cached before the first score is reused, and nothing behind it.
        check(await lm.score(text[:50], text[50:]), fresh_scores(tiny_llama, text, 50))
        assert lm.statistics().tokens_computed == 60 + 10
        check_integrity(lm._evaluator.scheduler.tree)
        assert lm.statistics().kv_bytes_used == 60 * SLOT


async def test_prompt_shared_by_many_continuations_is_computed_once(tiny_llama):
    prompt = random_text(80)
    continuations = [[i, 7 * i % 96, 5][: 1 + i % 3] for i in range(96)]
    with AsyncTransformer(tiny_llama, word_tokenizer(), batch_size=100) as lm:
        found = await lm.batch_score([prompt] * 96, continuations)
        for continuation, scores in zip(continuations, found, strict=True):
            check(scores, fresh_scores(tiny_llama, prompt + continuation, 80))
        assert lm.statistics().num_batches == 1
        distinct = {tuple(c[:n]) for c in continuations for n in range(1, len(c))}
        assert lm.statistics().tokens_computed == 80 + len(distinct)


LONG = {"max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def long_model():
    torch.manual_seed(0)
    config = LlamaConfig(**{**families.COMMON, **LONG, "initializer_range": 0.3})
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("num_slots", [None, 700, 0])
async def test_scoring_long_texts_projects_at_most_512_positions_per_pass(long_model, num_slots):
    model, text = copy.deepcopy(long_model), random_text(1600)
    options = {} if num_slots is None else {"kv_cache_bytes": num_slots * SLOT}
    with AsyncTransformer(model, word_tokenizer(), **options) as lm:
        sizes = projected(model)
        texts = [(text, 30), (text[:900], 30), (text[:700] + [5] * 60, 1), ([7, *text], 1100)]
        found = await asyncio.gather(*(lm.score(t[:n], t[n:]) for t, n in texts))
        assert max(sizes) <= 512
        del sizes[:]
        rows = await lm.batch_next_token_logprobs([text[:900], [*text[:20], 4]])
        assert max(sizes) <= 2
    for (one, start), scores in zip(texts, found, strict=True):
        check(scores, fresh_scores(long_model, one, start), 1e-4)
    check(rows[0], naive_row(long_model, text[:900]), 1e-4)


def test_many_texts_fill_passes_up_to_max_outputs(tiny_llama):
    model = copy.deepcopy(tiny_llama)
    texts = [random_text(30, seed) for seed in range(64)]
    with AsyncTransformer(model, word_tokenizer(), batch_size=64) as lm:
        sizes = projected(model)
        found = lm.batch_score_sync([t[:1] for t in texts], [t[1:] for t in texts])
        assert sum(sizes) == len({tuple(t[:n]) for t in texts for n in range(1, 30)})
        assert max(sizes) <= 512
        assert len(sizes) == 4
    for text, scores in zip(texts, found, strict=True):
        check(scores, fresh_scores(tiny_llama, text, 1))


def test_undefined_ids_score_minus_inf_and_get_no_probability(tiny_llama):
    text = [1, 2, 91, 3, 4]
    with AsyncTransformer(tiny_llama, word_tokenizer(90)) as lm:
        assert lm.undefined_ids == set(range(90, 96))
        scores = lm.score_sync(text[:1], text[1:])
        rows = lm.batch_next_token_logprobs_sync([text[:n] for n in range(1, 5)])
    assert scores[1] == -torch.inf
    check(scores, rows[range(4), text[1:]])
    assert float((scores[[0, 2, 3]] - fresh_scores(tiny_llama, text, 1)[[0, 2, 3]]).min()) > 0


@pytest.mark.parametrize("options", [{}, {"kv_cache_bytes": 0}])
def test_nan_affects_only_scores_of_texts_with_its_token(tiny_llama, options):
    model = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = torch.nan
    texts = [[1, 2, 3, 13, 4, 5], [1, 2, 3, 7], [9, 9, 13], [13, 1]]
    with AsyncTransformer(model, word_tokenizer(), **options) as lm:
        found = lm.batch_score_sync([t[:1] for t in texts], [t[1:] for t in texts])
        for text, scores in zip(texts, found, strict=True):
            clean = text.index(13) if 13 in text else len(text)
            before, expected = scores[:clean], fresh_scores(tiny_llama, text[: clean + 1], 1)
            is_known = ~before.isnan()  # before a token that overflows, some may be NaN
            check(before[is_known], expected[: len(before)][is_known])
            assert 13 in text or is_known.all()
            assert scores[clean:].isnan().all()
        check(lm.score_sync([1, 2], [3, 4]), fresh_scores(tiny_llama, [1, 2, 3, 4], 2))


def long_rotary():
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    config = Phi3Config(
        **{**families.COMMON, "max_position_embeddings": 128},
        original_max_position_embeddings=32,
        rope_parameters={**rope, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
        initializer_range=0.5,
    )
    return Phi3ForCausalLM(config).eval(), 32


def dynamic_rotary():
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**families.COMMON, "max_position_embeddings": 12},
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval(), 11


@pytest.mark.parametrize("options", [{}, {"kv_cache_bytes": 0}])
@pytest.mark.parametrize("make", [long_rotary, dynamic_rotary])
async def test_text_reaching_length_dependent_positions_is_refused(make, options):
    """A score is of the context before it, which a longer one is not read like: it is refused."""
    model, limit = make()
    text = random_text(limit + 9)
    rows = [naive_row(copy.deepcopy(model), text[:n]) for n in range(1, limit + 1)]
    expected = torch.stack([row[token] for row, token in zip(rows, text[1:], strict=False)])
    options = {"row_cache_bytes": 0, "max_length": 60, **options}
    with AsyncTransformer(model, word_tokenizer(), **options) as lm:
        for _ in range(2):
            asked = [lm.next_token_logprobs(text[:n]) for n in (4, limit + 5)]
            scored = [lm.score(text[:2], text[2:end]) for end in (limit + 1, limit + 2)]
            short, long, scores, refused = await asyncio.gather(
                *asked, *scored, return_exceptions=True
            )
            check(short, naive_row(copy.deepcopy(model), text[:4]))
            check(long, naive_row(copy.deepcopy(model), text[: limit + 5]))
            check(scores, expected[1:])
            assert type(refused) is ContextError
            assert f"max_length={limit}, the model scores longer texts in windows" in str(refused)
        lm.cache_kv(text[:limit])  # does nothing if nothing is kept
        if lm.kv_reuse:
            with pytest.raises(CacheError, match=f"caches no context of more than {limit} tokens"):
                lm.cache_kv(text[: limit + 1])
    with AsyncTransformer(model, word_tokenizer(), max_length=limit) as lm:
        check((await lm.score(text[:1], text[1 : limit + 1])), expected)


TOLD = {"entropy": True, "rank": True, "top": 4}


def check_told(found, model, text, start):
    """Compare with the bare model's rows over the whole text, in float64."""
    rows, targets = naive_rows(model, text)[start - 1 : -1], torch.tensor(text[start:])
    check(found.logprobs, rows[range(len(targets)), targets].float(), 1e-4)
    terms = torch.where(rows > -torch.inf, rows.exp() * rows, 0.0)
    check(found.entropies, -terms.sum(-1), 1e-3)
    own = rows.gather(1, targets[:, None])
    assert ((rows > own + 1e-3).sum(-1) <= found.ranks).all()
    assert (found.ranks <= (rows >= own - 1e-3).sum(-1)).all()
    check(found.top_logprobs, rows.topk(4).values.float(), 1e-4)
    check(found.top_logprobs, rows.gather(1, found.top_token_ids).float(), 1e-4)
    rest = rows.scatter(1, found.top_token_ids, -torch.inf).logsumexp(-1)
    check(found.log_rest, rest, 1e-3)


@pytest.mark.parametrize("num_slots", [None, 700, 0])
async def test_score_readouts_of_long_texts_match_bare_model(long_model, num_slots):
    model, text = copy.deepcopy(long_model), random_text(1600)
    options = {} if num_slots is None else {"kv_cache_bytes": num_slots * SLOT}
    with AsyncTransformer(model, word_tokenizer(), **options) as lm:
        sizes = projected(model)
        texts = [(text, 30), (text[:900], 30), (text[:700] + [5] * 60, 1)]
        asked = [lm.score_with(t[:n], t[n:], **TOLD) for t, n in texts]
        beside = [lm.score(t[:n], t[n:]) for t, n in texts]
        found = await asyncio.gather(*asked, *beside)
        assert max(sizes) <= 512
    for (one, start), told, scores in zip(texts, found, found[3:], strict=False):
        check_told(told, long_model, one, start)
        check(told.logprobs, scores)


@pytest.mark.parametrize("options", [{}, {"kv_cache_bytes": 0}])
def test_score_readouts_of_nan_rows_are_nan_or_minus_one(tiny_llama, options):
    model = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = torch.nan
    text = [1, 2, 3, 13, 4, 5]
    with AsyncTransformer(model, word_tokenizer(), **options) as lm:
        found = lm.score_with_sync(text[:1], text[1:], **TOLD)
    for each in (found.logprobs, found.entropies, found.top_logprobs, found.log_rest):
        assert each[3:].isnan().all()
    assert (found.ranks[3:] == -1).all()
    assert (found.top_token_ids[3:] == -1).all()


def test_score_readouts_exclude_undefined_ids(tiny_llama):
    text = [1, 2, 91, 3, 4]
    with AsyncTransformer(tiny_llama, word_tokenizer(90)) as lm:
        found = lm.score_with_sync(text[:1], text[1:], entropy=True, rank=True, top=96)
        top = lm.next_token_top_sync(text[:2], 96)
        entropy = lm.next_token_entropy_sync(text[:2])
    assert found.ranks[1] == 91
    assert found.logprobs[1] == found.log_rest[1] == -torch.inf
    assert found.top_token_ids[1].tolist()[:90] == top.token_ids.tolist()[:90]
    assert float(found.entropies[1]) == pytest.approx(entropy, abs=1e-5)


async def test_bidirectional_model_is_scored_row_by_row():
    config = transformers.Gemma3TextConfig(
        **{**families.COMMON, "head_dim": 8, "use_bidirectional_attention": True}
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval()
    with pytest.warns(UserWarning, match="runs every context whole"):
        lm = AsyncTransformer(model, word_tokenizer())
    with lm:
        assert not lm.kv_reuse
        found = await lm.score([5, 6, 7], [8, 9, 10])
    expected = [naive_row(model, [5, 6, 7, 8, 9, 10][:n])[n + 5] for n in (3, 4, 5)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=3e-5)


class Bounded(HFEvaluator):
    """Takes two questions at a time, whatever they are."""

    def open(self):
        return dataclasses.replace(super().open(), max_batch_size=2)

    def evaluate(self, queries):
        assert len(queries) <= 2
        return super().evaluate(queries)


@pytest.mark.parametrize("kind", [HFEvaluator, Bounded])
async def test_short_texts_share_batches_up_to_limit_of_evaluator(kind):
    model = families.make("llama")
    texts = [random_text(n, n) for n in range(2, 40)]
    with BatchedLM(word_tokenizer(), kind(model), batch_size=4) as lm:
        scores = await asyncio.gather(*(lm.score(text[:1], text[1:]) for text in texts))
        for text, found in zip(texts, scores, strict=True):
            check(found, fresh_scores(model, text, 1))
        largest = max(lm.statistics().batch_sizes)
        assert largest > 8 if kind is HFEvaluator else largest == 2
