"""Decode steps as they are recorded on a device: here, replays run the same functions again."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.attention import reading as sharing
from genlm_backend.attention.torch import step_tables, varlen
from genlm_backend.backends.hf import step_graphs
from genlm_backend.backends.hf.hf_evaluator import HFEvaluator
from genlm_backend.model.query import Query
from tests.llm import families
from tests.llm.conftest import fresh_row


def by_formula(query, keys, values, bounds, starts, counts, most_queries, most_keys, scale):
    """Attend as an operator of sequences does; what nobody is to read is NaN."""
    group_size = query.shape[1] // keys.shape[1]
    found, sums = torch.full_like(query, torch.nan), query.new_full(query.shape[:2], torch.nan)
    for number, count in enumerate(counts.tolist()):
        first, stop, start = int(bounds[number]), int(bounds[number + 1]), int(starts[number])
        assert stop - first <= most_queries
        assert count <= most_keys
        if first == stop:
            continue
        own, theirs = query[first:stop], slice(start, start + count)
        assert count
        for head in range(query.shape[1]):
            scores = own[:, head] @ keys[theirs, head // group_size].T * scale
            sums[first:stop, head] = scores.logsumexp(-1)
            found[first:stop, head] = scores.softmax(-1) @ values[theirs, head // group_size]
    return found, sums.T


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

    monkeypatch.setitem(varlen.OPERATORS, "cpu", by_formula)
    monkeypatch.setattr(step_graphs, "CudaRecorder", lambda device: counted)
    varlen.varlen_operator.cache_clear()
    yield replayed
    varlen.varlen_operator.cache_clear()


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
