"""Decode steps as they are recorded on a device: here, replays run the same functions again."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.attention import reading as sharing
from genlm_backend.attention.torch import step_operators, step_tables
from genlm_backend.backends.hf import step_graphs
from genlm_backend.backends.hf.hf_evaluator import HFEvaluator
from genlm_backend.model.query import Query
from tests.llm import families
from tests.llm.conftest import fresh_row


def in_stretches(query, keys, values, bounds, starts, sizes, most_queries, scale):
    """Attend as an operator of stretches does; what nobody is to read is NaN."""
    found, sums = torch.full_like(query, torch.nan), query.new_full(query.shape[:2], torch.nan)
    for number, size in enumerate(sizes.tolist()):
        first, stop, start = int(bounds[number]), int(bounds[number + 1]), int(starts[number])
        assert stop - first <= most_queries
        if first == stop:
            continue
        assert size
        scores = torch.einsum("mhd,nhd->mhn", query[first:stop], keys[start : start + size]) * scale
        sums[first:stop] = scores.logsumexp(-1)
        means = torch.einsum("mhn,nhd->mhd", scores.softmax(-1), values[start : start + size])
        found[first:stop] = means
    return found, sums.T


def in_slots(query, codes, slots, starts, counts, of_parts, pieces, sinks, scale, num_key_heads):
    """Attend as an operator of slots does."""
    found, group_size = torch.empty_like(query), query.shape[1] // num_key_heads
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        assert count
        own = codes[slots[start : start + count]]
        keys, values = (part.unflatten(1, (num_key_heads, -1)) for part in own.chunk(2, 1))
        queries = query[row].unflatten(0, (num_key_heads, group_size))
        scores = torch.einsum("hgd,nhd->hgn", queries, keys) * scale
        sums, means = (
            [scores.logsumexp(-1)],
            [torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values)],
        )
        for piece in pieces[row].tolist() if of_parts is not None else ():
            if piece >= 0:
                where = slice(piece * group_size, (piece + 1) * group_size)
                sums.append(of_parts[1][:, where])
                means.append(of_parts[0][where].transpose(0, 1))
        if sinks is not None:
            sums.append(sinks.to(query.dtype).view(num_key_heads, group_size))
            means.append(torch.zeros_like(means[0]))
        shares = torch.stack(sums).softmax(0)
        found[row] = (shares[..., None] * torch.stack(means)).sum(0).flatten(0, 1)
    return found


def run_again(run):
    """Record a function: what replays it calls it again, and leaves its result where it was."""
    found = run().clone()
    return lambda: found.copy_(run()), found


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Have the processor record decode steps."""
    replayed = []

    def counted(run):
        again, found = run_again(run)
        return lambda: (replayed.append(1), again()), found

    operators = step_operators.StepOperators(in_stretches, in_slots)
    monkeypatch.setitem(step_operators.OPERATORS, "cpu", lambda: operators)
    monkeypatch.setattr(step_graphs, "CudaRecorder", lambda device: counted)
    step_operators.step_operators.cache_clear()
    yield replayed
    step_operators.step_operators.cache_clear()


def rows_of(evaluator, contexts):
    found = evaluator.evaluate([Query(context) for context in contexts])
    return torch.stack([row.logprobs for row in found])


def check_history(model, histories, **options):
    """Compare the rows of a history of batches with the model's own."""
    evaluator = HFEvaluator(model, kv_cache_bytes=1 << 22, **options)
    evaluator.open()
    for contexts in histories:
        expected = torch.stack([fresh_row(model, context) for context in contexts])
        torch.testing.assert_close(rows_of(evaluator, contexts), expected, rtol=0, atol=2e-4)
    return evaluator


def particles(count, length, num_steps, seed=0, num_words=23):
    """Return batches of contexts that go on by a token each, resampled now and then."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, num_words, length).tolist()
    contexts, history = [prompt] * count, [[prompt]]
    for step in range(num_steps):
        if step % 3 == 2:
            contexts = [contexts[i] for i in random.integers(0, count, count)]
        contexts = [[*context, int(random.integers(num_words))] for context in contexts]
        history.append([list(one) for one in {tuple(context) for context in contexts}])
    return history


@pytest.mark.parametrize("name", families.PER_TOKEN)
@pytest.mark.parametrize("few_tokens", [8, 384])
def test_rows_are_the_models(name, few_tokens, monkeypatch, recorded):
    monkeypatch.setattr(sharing, "FEW_TOKENS", few_tokens)
    monkeypatch.setattr(step_tables, "SHORTEST_STRETCH", 4)
    check_history(families.make(name), particles(7, 40, 14))
    if name in ("llama", "qwen2"):
        assert len(recorded) > 5


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 30),
    st.integers(1, 12),
    st.integers(0, 5),
    st.sampled_from([4, 30, 384]),
    st.sampled_from([1, 3, 16]),
)
def test_any_particles(count, length, num_steps, seed, few_tokens, max_runs):
    model = families.make("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "FEW_TOKENS", few_tokens)
        patch.setattr(step_tables, "SHORTEST_STRETCH", 4)
        patch.setattr(step_tables, "MAX_RUNS", max_runs)
        check_history(model, particles(count, length + 1, num_steps, seed))
