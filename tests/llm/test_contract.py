"""What every backend owes its callers."""

import asyncio

import numpy as np
import pytest
import torch

from tests.llm.conftest import random_contexts
from tests.llm.families import VOCAB


async def test_a_row_is_a_distribution_over_the_whole_vocabulary(lm):
    row = await lm.next_token_logprobs([1, 2, 3])
    assert (row.shape, row.dtype, row.device.type) == ((VOCAB,), torch.float32, "cpu")
    assert row.device == lm.device
    assert len(lm.byte_vocab) == len(lm.str_vocab) == VOCAB
    assert float(row.exp().sum()) == pytest.approx(1, abs=1e-5)
    assert not row.requires_grad


def test_single_batched_async_and_sync_rows_match_fresh_rows(lm, backend, close):
    contexts = random_contexts(7)
    expected = torch.stack([backend.expected(context) for context in contexts])

    async def main():
        single = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
        close(torch.stack(single), expected)
        close(await lm.batch_next_token_logprobs(contexts), expected)
        close(lm.next_token_logprobs_sync(contexts[3]), expected[3])  # inside a running loop
        close(lm.batch_next_token_logprobs_sync(contexts), expected)

    asyncio.run(main())
    lm.clear_cache()
    close(lm.next_token_logprobs_sync(contexts[2]), expected[2])
    close(lm.batch_next_token_logprobs_sync(contexts), expected)


async def test_logits_normalise_to_the_row_and_match_the_model(lm, backend, close):
    for context in ([1, 2, 3], [1, 2, 3], [4]):
        logits = await lm.next_token_logits(context)
        assert logits.shape == (VOCAB,)
        close(logits.log_softmax(-1), backend.expected(context))
        if (model := backend.bare_model()) is not None:
            with torch.no_grad():
                expected = model(input_ids=torch.tensor([context])).logits[0, -1]
            # What rounding adds to all logits alike, rows do not have.
            within = 2 * backend.tolerance
            torch.testing.assert_close(logits, expected.float(), rtol=0, atol=within)
        logits.zero_()


def test_different_contexts_have_different_rows(lm):
    rows = lm.batch_next_token_logprobs_sync([[1, 2, 3], [1, 2, 4], [4, 2, 3], [3, 2, 1], [1, 2]])
    for i in range(5):
        for j in range(i):
            assert float((rows[i] - rows[j]).abs().max()) > 1e-2


async def test_a_batch_keeps_order_and_repetitions_and_may_be_empty(lm, close):
    contexts = [[5], [6], [5], [7], [6]]
    rows = lm.batch_next_token_logprobs_sync(contexts)
    for context, row in zip(contexts, rows, strict=True):
        close(row, lm.next_token_logprobs_sync(context))
    assert lm.batch_next_token_logprobs_sync([]).shape == (0, VOCAB)
    assert (await lm.batch_next_token_logprobs([])).shape == (0, VOCAB)


async def test_changing_a_returned_row_affects_no_other(lm, backend, close):
    rows = await asyncio.gather(*(lm.next_token_logprobs([1, 2]) for _ in range(3)))
    rows[0].fill_(7.0)
    rows[1].mul_(0.0)
    close(rows[2], backend.expected([1, 2]))
    close(await lm.next_token_logprobs([1, 2]), backend.expected([1, 2]))
    row = lm.next_token_logprobs_sync([1, 2])
    row.requires_grad_().sum().backward()  # an ordinary tensor, not an inference one
    close(lm.next_token_logprobs_sync([1, 2]), backend.expected([1, 2]))


async def test_contexts_beyond_batch_size_are_split_into_batches(backend, close):
    contexts = random_contexts(23)
    with backend.make(batch_size=4) as lm:
        rows = await lm.batch_next_token_logprobs(contexts)
        assert max(lm.statistics().batch_sizes) <= 4
        assert lm.batch_size == 4
    close(rows, torch.stack([backend.expected(context) for context in contexts]))


async def test_equal_contexts_are_computed_once(lm):
    await asyncio.gather(*(lm.next_token_logprobs([1, 2, 3]) for _ in range(20)))
    statistics = lm.statistics()
    assert dict(statistics.batch_sizes) == {1: 1}
    assert (statistics.num_awaits, statistics.num_joined) == (20, 19)
    rows = await lm.batch_next_token_logprobs([[5, 6], [7, 8], [5, 6]])
    assert torch.equal(rows[0], rows[2])
    assert (lm.statistics().num_awaits, lm.statistics().num_joined) == (23, 20)
    assert statistics.tokens_computed in (0, 3)  # a mock computes none


@pytest.mark.parametrize(
    "context",
    [
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint8),
        [np.int64(1), np.int32(2), 3],
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int16),
    ],
    ids=lambda context: type(context).__name__,
)
def test_integer_sequences_of_every_type_are_contexts(context, backend, close):
    with backend.make() as lm:
        close(lm.next_token_logprobs_sync(context), backend.expected([1, 2, 3]))


async def test_num_cached_tokens_is_the_length_of_the_cached_prefix(lm):
    assert await lm.num_cached_tokens([1, 2, 3, 4, 5]) == 0
    await lm.next_token_logprobs([1, 2, 3, 4])
    found = [await lm.num_cached_tokens(c) for c in ([1, 2, 3, 4, 5], [1, 2, 9, 9], [7])]
    has_memory = lm.kv_capacity is not None
    by_token = has_memory and not lm.statistics().state_bytes_budget  # not behind some tokens
    assert found == ([4, 2 if by_token else 0, 0] if has_memory else [0, 0, 0])
    lm.clear_cache()
    assert await lm.num_cached_tokens([1, 2, 3, 4, 5]) == 0


async def test_batch_evaluate_queries_flushes_waiting_queries(backend, close):
    with backend.make(timeout=1000.0) as lm:
        task = asyncio.ensure_future(lm.next_token_logprobs([1, 2]))
        await asyncio.sleep(0)
        lm.batch_evaluate_queries()
        close(await task, backend.expected([1, 2]))


def test_batch_size_and_timeout_can_be_set(backend, close):
    with backend.make(batch_size=20, timeout=1000.0) as lm:
        lm.batch_size = np.int64(2)
        assert (lm.batch_size, lm.timeout) == (2, 1000.0)
        contexts = [[i] for i in range(1, 6)]
        rows = lm.batch_next_token_logprobs_sync(contexts)
        sizes = lm.statistics().batch_sizes
        assert sizes == {1: 1, 2: 2} or (backend.count > 1 and max(sizes) <= 2)
        lm.batch_size = 4
        lm.timeout = 0.5
        assert (lm.batch_size, lm.timeout) == (4, 0.5)
        lm.batch_next_token_logprobs_sync([[7, i] for i in range(1, 5)])
        sizes = lm.statistics().batch_sizes
        assert sizes == {1: 1, 2: 2, 4: 1} or (backend.count > 1 and max(sizes) <= 4)
        for name, value, error in (
            ("batch_size", 0, ValueError),
            ("batch_size", "2", TypeError),
            ("batch_size", True, TypeError),
            ("timeout", -1, ValueError),
            ("timeout", "0.1", TypeError),
            ("timeout", None, TypeError),
        ):
            with pytest.raises(error, match=name):
                setattr(lm, name, value)
        assert (lm.batch_size, lm.timeout) == (4, 0.5)
    for context, row in zip(contexts, rows, strict=True):
        close(row, backend.expected(context))
