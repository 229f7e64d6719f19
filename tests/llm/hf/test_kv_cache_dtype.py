"""Keys and values in other number formats, against models whose attention is told the same."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.cache_utils import Cache, DynamicLayer

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf.cascade_attention import CascadeAttention
from genlm_backend.errors import OptionError
from genlm_backend.prefix.codecs import KV_CACHE_DTYPES, codec_for
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row
from tests.tree_integrity import check_integrity


class Rounding(DynamicLayer):
    """A layer of a cache of transformers that rounds keys and values, as an owner might do it."""

    def __init__(self, rounds):
        super().__init__()
        self.rounds = rounds

    def update(self, keys, values, *args, **options):
        return super().update(self.rounds(keys), self.rounds(values), *args, **options)


def int8(states):
    """One scale for each head of a token."""
    scale = states.float().abs().amax(-1, keepdim=True) / 127
    return (torch.round(states.float() / scale) * scale).to(states.dtype)


ROUNDS = {
    "float16": lambda states: states.to(torch.float16).to(states.dtype),
    "bfloat16": lambda states: states.to(torch.bfloat16).to(states.dtype),
    "int8": int8,
}


def rounded_row(model, token_ids, rounds):
    """The row of a model that attends to rounded keys and values, whole and alone."""
    cache = Cache(layers=[Rounding(rounds) for _ in range(model.config.num_hidden_layers)])
    with torch.no_grad():
        ids = torch.tensor([token_ids])
        logits = model(input_ids=ids, **{families.CACHE: cache}).logits[0, -1]
    return logits.double().log_softmax(-1).float()


def assert_rounded(row, expected, exact):
    """A row is the expected one, but for numbers so near a tie that they are rounded otherwise."""
    apart = (row - expected).square().mean().sqrt()
    rounding = (exact - expected).square().mean().sqrt()
    assert float(rounding) > 1e-5
    assert float(apart) < 0.35 * float(rounding)


def tree(generator, lengths=(1, 3, 9, 24)):
    trunk = [generator.randrange(families.VOCAB) for _ in range(24)]
    for length in lengths:
        for extra in (0, 1, 6):
            yield trunk[:length] + [generator.randrange(families.VOCAB) for _ in range(extra)]


@pytest.mark.parametrize("kept", list(ROUNDS))
@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
def test_rows_match_model_with_rounded_keys_and_values(name, kept):
    model = families.make(name).double()
    generator = random.Random(name)
    contexts = list(tree(generator))
    with AsyncTransformer(model, word_tokenizer(), kv_cache_dtype=kept, row_cache_bytes=0) as lm:
        assert lm.kv_reuse
        assert lm.kv_cache_dtype == kept
        for _ in range(4):
            rows = lm.batch_next_token_logprobs_sync(contexts)
            for context, row in zip(contexts, rows, strict=True):
                expected = rounded_row(model, context, ROUNDS[kept])
                assert_rounded(row, expected, naive_row(model, context))
            contexts = [[*c, generator.randrange(families.VOCAB)] for c in contexts]
        assert lm.statistics().tokens_reused > 300


@pytest.mark.parametrize("name", sorted(families.PER_TOKEN))
@pytest.mark.filterwarnings("ignore")
def test_stepwise_rows_match_uncached_rows(name):
    model = families.make(name)
    generator = random.Random(name)
    contexts = list(tree(generator, lengths=(3, 24)))
    options = {"kv_cache_dtype": "uint4", "row_cache_bytes": 0}
    with AsyncTransformer(model, word_tokenizer(), **options) as lm:
        for context in contexts:
            for end in range(max(1, len(context) - 3), len(context) + 1):
                stepped = lm.next_token_logprobs_sync(context[:end])
            whole = lm.next_token_logprobs_uncached(context)
            assert_rounded(stepped, whole, naive_row(model, context))


@pytest.mark.parametrize("kept", KV_CACHE_DTYPES)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=5),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 40),
)
def test_rows_do_not_depend_on_history_of_batches(kept, batches, num_slots):
    """Contexts that come together or after each other, with room for all, for some or for none."""
    model = _DOUBLE
    layers = model.config.num_hidden_layers
    codec = codec_for(kept, 2 * 2 * 8, 8, torch.float64)
    options = {"kv_cache_bytes": (num_slots + 1) * layers * codec.bytes_per_token}
    with AsyncTransformer(
        model, word_tokenizer(), kv_cache_dtype=kept, row_cache_bytes=0, self_check=False, **options
    ) as lm:
        assert lm.kv_capacity == num_slots
        for batch in batches:
            rows = lm.batch_next_token_logprobs_sync(batch)
            for context, row in zip(batch, rows, strict=True):
                whole = lm.next_token_logprobs_uncached(context)
                torch.testing.assert_close(row, whole, rtol=0, atol=1e-6)
                if kept in ROUNDS:
                    expected = rounded_row(model, context, ROUNDS[kept])
                    torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)
        check_integrity(lm._evaluator.scheduler.tree)


_DOUBLE = families.make("llama").double()


def test_context_without_room_is_rounded_like_cached_one():
    context = list(range(30))
    rows = []
    for kv_cache_bytes in (0, 2000, None):
        with AsyncTransformer(
            _DOUBLE, word_tokenizer(), kv_cache_dtype="uint4", kv_cache_bytes=kv_cache_bytes
        ) as lm:
            assert lm.kv_cache_dtype == "uint4"
            rows.append(lm.next_token_logprobs_sync(context))
    for row in rows[:2]:
        torch.testing.assert_close(row, rows[2], rtol=0, atol=1e-6)
    assert float((rows[2] - naive_row(_DOUBLE, context)).abs().max()) > 1e-3


def test_long_shared_prefix_decoded_in_pieces_gives_same_rows(monkeypatch):
    from genlm_backend.attention import cascade_run

    monkeypatch.setattr(cascade_run, "LONG_COPY", 5)
    prompt = [i % families.VOCAB for i in range(3, 60)]
    contexts = [[*prompt, i, i + 1] for i in range(6)]
    options = {"kv_cache_dtype": "int8", "row_cache_bytes": 0}
    with AsyncTransformer(_DOUBLE, word_tokenizer(), **options) as lm:
        lm.cache_kv(prompt)
        assert isinstance(lm._evaluator.scheduler.cache.attention, CascadeAttention)
        for context, row in zip(contexts, lm.batch_next_token_logprobs_sync(contexts), strict=True):
            expected = rounded_row(_DOUBLE, context, int8)
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)


def test_smaller_formats_hold_more_tokens():
    model = families.make("llama")
    options = {"kv_cache_bytes": 1 << 20}
    capacity = {}
    for kept in (None, *KV_CACHE_DTYPES):
        with AsyncTransformer(model, word_tokenizer(), kv_cache_dtype=kept, **options) as lm:
            lm.next_token_logprobs_sync(list(range(50)))
            capacity[kept] = lm.kv_capacity
            assert lm.statistics().kv_bytes_used <= 50 * (1 << 20) / (lm.kv_capacity + 1) + 1
    assert capacity["bfloat16"] >= 2 * capacity[None]
    assert capacity["float16"] == capacity["bfloat16"]
    assert capacity["int8"] > capacity["bfloat16"]
    assert capacity["uint4"] > capacity["int8"]


@pytest.mark.parametrize("kept", ["int4", "INT8", 8, torch.int8, "", True])
def test_unknown_kv_cache_dtype_is_refused(kept):
    with pytest.raises(OptionError, match="kv_cache_dtype must be one of None, 'bfloat16'"):
        AsyncTransformer(families.make("llama"), word_tokenizer(), kv_cache_dtype=kept)


@pytest.mark.parametrize("kept", KV_CACHE_DTYPES)
@pytest.mark.filterwarnings("ignore")
def test_uncached_model_refuses_kv_cache_dtype(kept):
    with pytest.raises(OptionError, match=r"RecurrentGemmaForCausalLM runs every context whole: ."):
        AsyncTransformer(families.make("recurrent-gemma"), word_tokenizer(), kv_cache_dtype=kept)
