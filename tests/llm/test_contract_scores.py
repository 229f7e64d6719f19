"""Scores of texts: on every backend, each is what the fresh row of the tokens before says."""

import asyncio
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genlm_backend.errors import (
    BatcherClosedError,
    OptionError,
    OptionTypeError,
    QueryDroppedError,
    UnknownAdapterError,
)
from tests.llm.conftest import random_contexts
from tests.llm.families import VOCAB
from tests.llm.test_contract_refusals import BAD
from tests.tree_integrity import check_integrity


def expected(backend, prompt, continuation):
    """The scores from a row for each token, each computed afresh."""
    text, rows = [*prompt, *continuation], []
    for end in range(len(prompt), len(text)):
        rows.append(backend.expected(text[:end])[text[end]])
    return torch.stack(rows) if rows else torch.empty(0)


def random_texts(count, seed=0, max_length=12):
    """Prompts, some of them equal, and continuations, some of them empty."""
    generator = random.Random(seed)
    prompts = random_contexts(max(1, count // 3), seed, max_length)
    continuations = [
        [generator.randrange(VOCAB) for _ in range(generator.randint(0, max_length))]
        for _ in range(count)
    ]
    return [generator.choice(prompts) for _ in range(count)], continuations


def test_single_batched_async_and_sync_scores_match_fresh_rows(lm, backend, close):
    prompts, continuations = random_texts(9)
    texts = list(zip(prompts, continuations, strict=True))
    want = [expected(backend, *text) for text in texts]

    def check(found):
        assert len(found) == len(texts)
        for scores, right in zip(found, want, strict=True):
            assert (scores.dtype, scores.device.type) == (torch.float32, "cpu")
            assert not scores.requires_grad
            close(scores, right)

    async def main():
        check(await asyncio.gather(*(lm.score(*text) for text in texts)))
        check(await lm.batch_score(prompts, continuations))
        check([lm.score_sync(*text) for text in texts])  # inside a running loop
        prompt = prompts[0]
        for one in (prompt, tuple(prompt), torch.tensor(prompt), lm.context(prompt)):
            for_all = await lm.batch_score(one, continuations)
            told = lm.batch_score_with_sync(one, continuations, beginnings=True)
            for scores, more, right in zip(for_all, told, continuations, strict=True):
                close(scores, expected(backend, prompt, right))
                close(more.logprobs, expected(backend, prompt, right))
        assert await lm.batch_score([], []) == []

    asyncio.run(main())
    lm.clear_cache()
    check(lm.batch_score_sync(prompts, continuations))
    assert lm.batch_score_sync([], []) == []


GROUPS = [[1, 4, 9], [7]]


def check_told(found, rows, continuation, close, k):
    """Compare what is told of tokens with their rows, in float64 from there on."""
    close(found.logprobs, rows.gather(1, torch.tensor(continuation)[:, None])[:, 0])
    assert found.entropies.dtype is found.log_rest.dtype is torch.float64
    assert found.ranks.dtype is found.top_token_ids.dtype is torch.int64
    for i, row in enumerate(rows):
        weights = row.double().exp()
        terms = torch.where(weights > 0, weights * row.double(), 0.0)
        assert float(found.entropies[i]) == pytest.approx(-float(terms.sum()), abs=1e-3)
        # Rows of another batch are rounded in another way: a rank is one of nearly equal ones.
        own = row[continuation[i]]
        assert (row > own + 1e-3).sum() <= found.ranks[i] <= (row >= own - 1e-3).sum()
        ids = found.top_token_ids[i]
        assert len(set(ids.tolist())) == k
        close(row[ids], found.top_logprobs[i])
        close(row[ids], row.sort(descending=True).values[:k])
        rest = float(found.top_logprobs[i].double().exp().sum() + found.log_rest[i].exp())
        assert rest == pytest.approx(1, abs=1e-5)
        masses = [float(row[own].double().logsumexp(0)) for own in GROUPS]
        assert found.log_masses[i].tolist() == pytest.approx(masses, abs=1e-3)


def test_entropy_rank_top_and_masses_of_tokens_match_their_rows(lm, backend, close):
    texts = [([5, 3], [4, 4, 9, 7]), ([5, 3, 4], [1]), ([5, 3], [8, 0])]
    told = {"entropy": True, "rank": True, "top": 3, "groups": GROUPS}
    prompts, continuations = zip(*texts, strict=True)
    rows = [
        torch.stack([backend.expected([*prompt, *own[:i]]) for i in range(len(own))])
        for prompt, own in texts
    ]

    def check(found):
        for one, table, own in zip(found, rows, continuations, strict=True):
            check_told(one, table, own, close, 3)

    async def main():
        asked = [lm.score_with(*text, **told) for text in texts]
        plain = [lm.score(*text) for text in texts]
        found = await asyncio.gather(*asked, *plain, lm.next_token_entropy([5, 3]))
        check(found[:3])
        for one, scores in zip(found[:3], found[3:6], strict=True):
            close(one.logprobs, scores)
        assert float(found[0].entropies[0]) == pytest.approx(found[6], abs=1e-3)
        check(await lm.batch_score_with(prompts, continuations, **told))

    asyncio.run(main())
    check([lm.score_with_sync(*text, **told) for text in texts])
    one = lm.score_with_sync([5, 3], [4, 4], rank=True)
    assert one.ranks is not None
    assert [*one[1:2], *one[3:]] == [None] * 6
    close(lm.score_with_sync([5, 3], [4, 4]).logprobs, lm.score_sync([5, 3], [4, 4]))
    nothing = lm.score_with_sync([5, 3], [], **told)
    shapes = [(0,), (0,), (0,), (0, 3), (0, 3), (0,), (0, 2)]
    assert [tuple(each.shape) for each in nothing if each is not None] == shapes
    for wrong, error in (
        ({"top": -1}, OptionError),
        ({"top": 10**9}, OptionError),
        ({"top": 1.0}, OptionTypeError),
        ({"rank": 1}, OptionTypeError),
        ({"groups": 5}, OptionTypeError),
        ({"groups": [[10**9]]}, OptionError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            lm.score_with_sync([5, 3], [4], **wrong)


def test_log_beginnings_match_the_mass_of_tokens_with_each_byte_prefix(lm, backend, close):
    prompt, own = [5, 3], [4, 4, 9, 7, 1]
    vocab = [bytes(token) for token in lm.byte_vocab]
    left_out = {*lm.special_ids, *lm.eos_token_ids, *lm.undefined_ids}
    (found, _), blocking = (
        asyncio.run(lm.batch_score_with([prompt, [5]], [own, [4]], beginnings=True, rank=True)),
        lm.score_with_sync(prompt, own, beginnings=True),
    )
    assert found.ranks is not None
    for told in (found.log_beginnings, blocking.log_beginnings):
        assert told.shape == (5, max(len(vocab[i]) for i in own) - 1)
        for i, token_id in enumerate(own):
            row, data = backend.expected([*prompt, *own[:i]]), vocab[token_id]
            for k, value in enumerate(told[i]):
                size = k + 1
                if size >= len(data):
                    assert value == -torch.inf
                    continue
                alike = [k for k, other in enumerate(vocab) if other[:size] == data[:size]]
                alike = [k for k in alike if k not in left_out]
                alike = [token_id] if token_id in left_out else alike
                close(value, row.double()[alike].logsumexp(0))


async def test_changing_returned_scores_affects_no_other(lm, backend, close):
    want = expected(backend, [1, 2], [3, 4, 5])
    found = await asyncio.gather(*(lm.score([1, 2], [3, 4, 5]) for _ in range(3)))
    found[0].fill_(7.0)
    found[1].requires_grad_().sum().backward()
    close(found[2], want)
    close(await lm.score([1, 2], [3, 4, 5]), want)


async def test_scores_and_rows_share_batches(lm, backend, close):
    scores, row, other = await asyncio.gather(
        lm.score([1, 2, 3], [4, 5]), lm.next_token_logprobs([1, 2, 3]), lm.score([1], [2, 3, 9])
    )
    close(scores, expected(backend, [1, 2, 3], [4, 5]))
    close(row, backend.expected([1, 2, 3]))
    close(other, expected(backend, [1], [2, 3, 9]))
    assert lm.statistics().num_batches <= backend.count


async def test_empty_continuation_has_no_scores_and_sends_no_query(lm):
    for found in (await lm.score([1, 2], []), lm.score_sync([1, 2], range(0))):
        assert (found.shape, found.dtype) == ((0,), torch.float32)
    assert lm.statistics().num_awaits == 0
    for prompt, continuation in (([], []), ([VOCAB], []), ("text", [])):
        with pytest.raises((ValueError, TypeError)):
            await lm.score(prompt, continuation)
    with pytest.raises(UnknownAdapterError):
        lm.score_sync([1], [], lora_name="polite")


@pytest.mark.parametrize(("wrong", "kind", "message"), BAD, ids=lambda x: repr(x)[:20])
async def test_bad_texts_are_refused_before_anything_is_queued(lm, wrong, kind, message):
    texts = [(wrong, [1])]
    if "empty" not in message:
        texts.append(([1], wrong))
    before = lm.statistics().num_awaits
    for text in texts:
        with pytest.raises(kind, match=message):
            await lm.score(*text)
        with pytest.raises(kind, match=message):
            lm.score_sync(*text)
        prompts, continuations = zip(([1], [2]), text, strict=True)
        with pytest.raises(kind, match=message):
            await lm.batch_score(prompts, continuations)
        with pytest.raises(kind, match=message):
            lm.batch_score_sync(prompts, continuations)
    assert lm.statistics().num_awaits == before


async def test_prompts_and_continuations_of_unequal_number_are_refused(lm):
    with pytest.raises(ValueError, match="2 prompts and 1 continuations"):
        await lm.batch_score([[1], [2]], [[3]])
    with pytest.raises(ValueError, match="0 prompts and 1 continuations"):
        lm.batch_score_sync([], [[3]])
    with pytest.raises(TypeError, match="continuations must be a list"):
        lm.batch_score_sync([[1]], "a")
    with pytest.raises(UnknownAdapterError, match="'polite'"):
        await lm.score([1], [2], lora_name="polite")


def test_scored_text_may_be_one_token_longer_than_max_length(backend, close):
    text = random_contexts(1, seed=4)[0][:1] * 7
    with backend.make(max_length=6) as lm:
        for start in (1, 4, 6):
            found = lm.score_sync(text[:start], text[start:])
            close(found, expected(backend, text[:start], text[start:]))
        for start in (1, 4, 6, 7):
            with pytest.raises(ValueError, match=r"7 tokens.*maximum of 6"):
                lm.score_sync([*text, 1][:start], [*text, 1][start:])


async def test_scoring_after_close_raises_batcher_closed_error(backend):
    with backend.make() as lm:
        lm.score_sync([1], [2])
    for continuation in ([2], []):
        with pytest.raises(BatcherClosedError, match="closed"):
            await lm.score([1], continuation)
        with pytest.raises(BatcherClosedError, match="closed"):
            lm.batch_score_sync([[1]], [continuation])


async def test_cancelled_scoring_leaves_other_scores_intact(lm, backend, close):
    texts = [([i, 5], [i, 7, 8]) for i in range(6)]
    tasks = [asyncio.ensure_future(lm.score(*text)) for text in texts]
    await asyncio.sleep(0)
    tasks[1].cancel()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lm.score([50], [51]), 0)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    for index, (text, scores) in enumerate(zip(texts, found, strict=True)):
        if index == 1:
            assert isinstance(scores, asyncio.CancelledError)
        else:
            close(scores, expected(backend, *text))
    tasks = [asyncio.ensure_future(lm.score([60 + i], [7])) for i in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    lm.reset_async_queries()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, QueryDroppedError)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("score"), st.integers(0, 2**30)),
        st.tuples(st.just("branch"), st.integers(0, 2**30)),
        st.tuples(st.just("cancel"), st.integers(0, 2**30)),
        st.tuples(st.just("clear"), st.integers(0, 2**30)),
    ),
    min_size=2,
    max_size=8,
)


@pytest.mark.timeout(800)
@settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps)
def test_scores_are_fresh_after_any_history_of_texts_and_rows(backend, close, steps):
    """Texts of a tree, split anywhere, beside rows of its contexts."""

    async def main(lm):
        texts = [[1, 2, 3, 4]]
        for action, number in steps:
            generator = random.Random(number)
            if action == "branch":
                texts = [
                    [*t[: generator.randint(1, len(t))], *generator.choices(range(3), k=3)]
                    for t in generator.choices(texts, k=4)
                ]
            elif action == "clear":
                lm.clear_cache()
            asked = [(t, generator.randint(1, len(t))) for t in generator.choices(texts, k=4)]
            tasks = [asyncio.ensure_future(lm.score(t[:n], t[n:])) for t, n in asked]
            rows = [asyncio.ensure_future(lm.next_token_logprobs(t[:n])) for t, n in asked]
            if action == "cancel":
                await asyncio.sleep(0)
                generator.choice(tasks).cancel()
                generator.choice(rows).cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            for (t, n), scores in zip(asked, found, strict=True):
                if not isinstance(scores, asyncio.CancelledError):
                    close(scores, expected(backend, t[:n], t[n:]))
            found = await asyncio.gather(*rows, return_exceptions=True)
            for (t, n), row in zip(asked, found, strict=True):
                if not isinstance(row, asyncio.CancelledError):
                    close(row, backend.expected(t[:n]))
        statistics = lm.statistics()
        assert statistics.kv_bytes_used <= statistics.kv_bytes_budget

    with backend.make(batch_size=4) as lm:
        asyncio.run(main(lm))
        if hasattr(lm._evaluator, "scheduler"):
            check_integrity(lm._evaluator.scheduler.tree)
        lm.clear_cache()
