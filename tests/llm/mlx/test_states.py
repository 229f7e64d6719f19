"""Recurrent states of models of mlx-lm: rows are those of the model's own forward."""

import asyncio
import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend import AsyncMlxLM
from genlm_backend.backends.mlx import present
from genlm_backend.errors import CacheError, OptionError
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.mlx import converted, state_models
from tests.tree_integrity import check_integrity

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not present.is_present(), reason="needs MLX"),
]

WHOLE = {"longcat_flash_ngram"}
"""Families whose layers have several caches of keys and values."""

PURE = ("mamba", "mamba2", "rwkv7")
"""Families of which no layer keeps keys and values."""

CLOSE = 2e-4
"""The largest difference of log-probabilities that is rounding."""

kept_families = pytest.mark.parametrize("name", sorted({*state_models.NAMES} - WHOLE))


def over(name, **options):
    model = state_models.make(name) if isinstance(name, str) else name
    return AsyncMlxLM(model, word_tokenizer(), row_cache_bytes=0, **options)


@functools.cache
def own_model(name):
    return state_models.make(name)


def whole_row(name, context):
    """Return the row of a context that a model of the family computes without any cache."""
    import mlx.core as mx

    mx.disable_compile()
    model = own_model(name) if isinstance(name, str) else name
    logits = np.array(model(mx.array([list(context)]))[0, -1].astype(mx.float32))
    return torch.from_numpy(logits).log_softmax(-1)


def check(name, rows, contexts):
    for row, context in zip(rows, contexts, strict=True):
        torch.testing.assert_close(row, whole_row(name, context), atol=CLOSE, rtol=0)


def states_of(lm):
    return lm._mlx.scheduler.cache.state_pool


def size_of(name):
    """Return the bytes of a state, and of a token's keys and values, of a family."""
    with over(name, kv_cache_bytes=1 << 20) as lm:
        passes = lm._mlx.scheduler
        return passes.cache.state_pool.layout.bytes_per_state, passes.cache.pool.bytes_per_slot


def test_every_recurrent_family_of_mlx_lm_is_tested():
    import mlx_lm.models

    folder = Path(mlx_lm.models.__path__[0])
    found = {path.stem for path in folder.glob("*.py") if "ArraysCache(" in path.read_text()}
    assert found - {"cache"} == {*state_models.NAMES}


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_families_with_several_caches_per_layer_run_contexts_whole(name):
    with over(name) as lm:
        assert not lm.kv_reuse
        contexts = [[5], [5, 6], [*range(3, 20)]]
        check(name, lm.batch_next_token_logprobs_sync(contexts), contexts)


@kept_families
def test_rows_of_forked_contexts_match_contexts_run_whole(name):
    generator = random.Random(name)
    with over(name, kv_cache_bytes=1 << 20) as lm:
        assert lm.kv_reuse
        root = generator.choices(range(families.VOCAB), k=20)
        contexts = [list(root) for _ in range(5)]
        for _ in range(5):  # one grows by some tokens, the others by one
            new = [generator.choices(range(families.VOCAB), k=generator.randint(1, 4))]
            new += [[generator.randrange(families.VOCAB)] for _ in contexts[1:]]
            contexts = [[*c, *n] for c, n in zip(contexts, new, strict=True)]
            asked = [*contexts, contexts[0][:9], contexts[1][:2]]
            check(name, lm.batch_next_token_logprobs_sync(asked), asked)
            contexts = [list(generator.choice(contexts)) for _ in contexts]
        assert lm.statistics().num_evicted_states == 0
        check_integrity(lm._mlx.scheduler.tree)


@kept_families
def test_step_computes_only_its_new_tokens(name):
    prompt = [*range(3, 33)]
    with over(name, kv_cache_bytes=1 << 20) as lm:
        lm.next_token_logprobs_sync(prompt)
        contexts = [[*prompt, i] for i in range(6)]
        lm.batch_next_token_logprobs_sync(contexts)
        longer = [[*c, 7, 8] for c in contexts]
        lm.batch_next_token_logprobs_sync(longer)
        counts = lm.statistics()
        assert counts.tokens_computed == 30 + 6 + 12
        assert counts.state_bytes_used == 13 * states_of(lm).layout.bytes_per_state
        check(name, lm.batch_next_token_logprobs_sync([longer[2]]), [longer[2]])


@kept_families
def test_zeroing_a_cached_state_changes_the_row(name):
    """What is compared in other tests would show a state that is another."""
    with over(name, kv_cache_bytes=1 << 20) as lm:
        context = [*range(3, 33)]
        lm.next_token_logprobs_sync(context)
        pool = states_of(lm)
        (number,) = np.flatnonzero(lm._mlx.scheduler.tree.states._is_used())
        pool.write(np.array([number]), [0 * state for state in pool.read(np.array([number]))])
        row = lm.next_token_logprobs_sync([*context, 5])
        assert (row - whole_row(name, [*context, 5])).abs().max() > 10 * CLOSE


_OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.lists(st.integers(0, 30), min_size=1, max_size=6)),
        st.tuples(st.just("pin"), st.integers(0, 30)),
        st.tuples(st.just("clear"), st.just(0)),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "recurrent_gemma", "kimi_linear"])
@settings(deadline=None, max_examples=12)
@given(operations=_OPERATIONS, num_states=st.integers(1, 6), seed=st.integers(0, 99))
def test_asking_pinning_and_clearing_in_any_order_change_no_row(name, operations, num_states, seed):
    generator = random.Random(seed)
    per_state, per_slot = _size_of(name)
    num_bytes = num_states * per_state
    with over(
        name, kv_cache_bytes=num_bytes + 60 * per_slot + 1, state_cache_bytes=num_bytes
    ) as lm:
        known = [[3, 4, 5]]
        for operation, places in operations:
            if operation == "ask":
                asked = []
                for place in places:
                    base = known[place % len(known)]
                    cut = base[: generator.randint(1, len(base))] if place % 3 == 0 else base
                    new = generator.choices(range(5), k=generator.randint(0 if cut else 1, 4))
                    asked.append([*cut, *new][:25])
                check(name, lm.batch_next_token_logprobs_sync(asked), asked)
                known += asked
            elif operation == "pin":
                try:
                    lm.cache_kv(known[places % len(known)])
                except CacheError:
                    lm.clear_kv_cache()
            else:
                lm.clear_kv_cache()
            check_integrity(lm._mlx.scheduler.tree)


_size_of = functools.cache(size_of)


def test_pinned_state_is_not_evicted():
    per_state, per_slot = size_of("falcon_h1")
    options = {"kv_cache_bytes": 3 * per_state + 100 * per_slot, "state_cache_bytes": 3 * per_state}
    with over("falcon_h1", **options) as lm:
        prompt = [*range(3, 23)]
        lm.cache_kv(prompt)
        for start in range(40, 50):
            lm.next_token_logprobs_sync([start, 1, 2, 3, 4])
        assert asyncio.run(lm.num_cached_tokens([*prompt, 1])) == 19
        before = lm.statistics().tokens_computed
        check("falcon_h1", [lm.next_token_logprobs_sync([*prompt, 1])], [[*prompt, 1]])
        assert lm.statistics().tokens_computed == before + 2
        lm.clear_kv_cache()
        assert asyncio.run(lm.num_cached_tokens([*prompt, 1])) == 0


def test_rows_of_recurrent_models_match_transformers():
    from tests.naive import naive_row

    for name in ("mamba", "falcon_mamba", "lfm2_moe"):
        model = families.make(name)
        with over(converted(model), kv_cache_bytes=1 << 20) as lm:
            contexts = [[5, 6, 7, 8]]
            for _ in range(3):
                rows = lm.batch_next_token_logprobs_sync(contexts)
                for row, context in zip(rows, contexts, strict=True):
                    expected = naive_row(model, context)
                    torch.testing.assert_close(row, expected, atol=CLOSE, rtol=0)
                contexts = [[*c, i] for c in contexts for i in (3, 40)]


@pytest.mark.parametrize("name", ["mamba", "falcon_h1", "qwen3_5"])
def test_half_precision_models_reuse_cached_states(name):
    import mlx.core as mx

    model = state_models.make(name)
    model.set_dtype(mx.bfloat16)
    with over(model, kv_cache_bytes=1 << 20) as lm:
        assert lm.kv_reuse
        assert {tensor.dtype for tensor in states_of(lm).layout.tensors} >= {mx.bfloat16}
        prompt = [*range(3, 20)]
        lm.next_token_logprobs_sync(prompt)
        rows = lm.batch_next_token_logprobs_sync([[*prompt, i] for i in range(5)])
        for i, row in enumerate(rows):
            whole = lm.next_token_logprobs_uncached([*prompt, i])
            assert (row - whole).square().mean().sqrt() < 0.1


# -------------------------------------------------------------------- how many go on at once


def test_tokens_run_singly_if_passes_of_several_ignore_the_state(monkeypatch):
    from mlx_lm.models.mamba import MambaBlock

    process = MambaBlock._process_sequence

    def forgetting(block, x, conv, state):
        return process(block, x, None, None) if x.shape[1] > 1 else process(block, x, conv, state)

    monkeypatch.setattr(MambaBlock, "_process_sequence", forgetting)
    with over("mamba", kv_cache_bytes=1 << 20) as lm:
        assert not lm._mlx.scheduler.can.takes_several_tokens
        contexts = [[*range(3, 33)]]
        lm.batch_next_token_logprobs_sync(contexts)
        contexts = [[*contexts[0], *new] for new in ([1], [2, 3], [2, 4, 5])]
        rows = lm.batch_next_token_logprobs_sync(contexts)
        assert lm.statistics().tokens_computed == 30 + 6
    check("mamba", rows, contexts)


@pytest.mark.parametrize("most", [1, 99])
def test_model_whose_single_token_pass_ignores_the_state_runs_whole(monkeypatch, most):
    from mlx_lm.models.mamba import MambaBlock

    process = MambaBlock._process_sequence

    def forgetting(block, x, *before):
        return process(block, x, None, None) if x.shape[1] <= most else process(block, x, *before)

    monkeypatch.setattr(MambaBlock, "_process_sequence", forgetting)
    with over("mamba") as lm:
        assert not lm.kv_reuse
        contexts = [[*range(3, 9)], [*range(3, 13)]]
        check("mamba", lm.batch_next_token_logprobs_sync(contexts), contexts)


def test_states_of_variable_shape_are_not_cached(monkeypatch):
    from mlx_lm.models.mamba import MambaBlock

    process = MambaBlock._process_sequence

    def growing(block, x, conv, state):
        rows, (conv, state) = process(block, x, conv, state)
        return rows, (conv[:, -x.shape[1] :], state)

    monkeypatch.setattr(MambaBlock, "_process_sequence", growing)
    with pytest.raises(OptionError, match="shapes depend on the number of tokens"):
        over("mamba", state_cache_bytes=6000)
    with over("mamba") as lm:
        assert not lm.kv_reuse
        contexts = [[*range(3, 9)], [*range(3, 13)]]
        check("mamba", lm.batch_next_token_logprobs_sync(contexts), contexts)


# -------------------------------------------------------------------- options


def test_impossible_cache_budgets_are_refused_with_the_reason():
    per_state, _ = size_of("falcon_h1")
    with pytest.raises(OptionError, match=rf"takes {per_state} bytes, but only 1000 .*: raise"):
        over("falcon_h1", kv_cache_bytes=1 << 20, state_cache_bytes=1000)
    with pytest.raises(OptionError, match="raise kv_cache_bytes"):
        over("falcon_h1", kv_cache_bytes=2 * per_state - 2)
    with pytest.raises(OptionError, match="is more than kv_cache_bytes=5000"):
        over("falcon_h1", kv_cache_bytes=5000, state_cache_bytes=6000)
    with pytest.raises(OptionError, match="is more than kv_cache_bytes=0"):
        over("falcon_h1", kv_cache_bytes=0, state_cache_bytes=6000)
    with pytest.raises(OptionError, match="has only keys and values"):
        over(converted(families.make("llama")), state_cache_bytes=6000)
    with pytest.raises(OptionError, match="runs every context whole: some layers keep more"):
        over("longcat_flash_ngram", state_cache_bytes=6000)
    with pytest.raises(OptionError, match="state_cache_bytes"):
        over("falcon_h1", state_cache_bytes=-1)


@pytest.mark.parametrize("name", ["falcon_h1", *PURE])
def test_states_get_half_the_budget_or_all_if_no_layer_keeps_kv(name):
    with over(name, kv_cache_bytes=1 << 16) as lm:
        share = 1 << 16 if name in PURE else 1 << 15
        counts = lm.statistics()
        assert (counts.kv_bytes_budget, counts.state_bytes_budget) == (1 << 16, share)
        assert states_of(lm).num_states == share // states_of(lm).layout.bytes_per_state
    with over(name, kv_cache_bytes=0) as lm:
        assert not lm.kv_reuse
        check(name, [lm.next_token_logprobs_sync([1, 2])], [[1, 2]])
