"""Who reads what together: every cached token of every row once, and nothing else."""

import copy
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend import AsyncTransformer
from genlm_backend.attention.cascade_plan import CascadePlan
from genlm_backend.attention.softmax_attention import SoftmaxAttention
from genlm_backend.attention.torch import torch_ops
from genlm_backend.attention.torch.torch_ops import TORCH
from genlm_backend.backends.hf import attention_interface
from genlm_backend.backends.hf.cascade_attention import CascadeAttention
from genlm_backend.backends.hf.trial import paths_of
from genlm_backend.errors import ModelStateError
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row


def plan_of(slots, few_tokens):
    return CascadePlan.of(paths_of(slots), np.ones(len(slots), np.int64), few_tokens)


def test_shared_prompt_is_prefix_and_remainder_is_suffix():
    plan = plan_of([[*range(1, 513), 600 + 7 * i] for i in range(20)], 384)
    (part,) = plan.prefixes
    assert part.rows.tolist() == [*range(20)]
    assert part.slots.tolist() == [*range(1, 513)]
    assert plan.suffix.tolist() == [[[600 + 7 * i] for i in range(20)], [[512]] * 20]


def test_long_contiguous_slot_runs_become_separate_prefixes():
    parts = plan_of([[*range(1, 501), *range(700, 710), *range(1000, 1600)]] * 2, 384).prefixes
    assert [len(part) for part in parts] == [500, 600]
    assert all((np.diff(part.slots) == 1).all() for part in parts)


# -------------------------------------------------------------------- the model's own attention


@pytest.mark.parametrize("name", ["llama", "llama-eager", "gemma2"])
def test_own_attention_of_model_works_on_other_threads_during_pass(name):
    model = families.make(name)
    before = model.config._attn_implementation
    ids = [1, 2, 3, 4, 5, 6, 7]
    found, names = [], []

    @torch.inference_mode()
    def run_plainly():
        found.append(model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1))

    def meanwhile(*_):
        if not names:
            names.append(model.config._attn_implementation)
            other = threading.Thread(target=run_plainly)
            other.start()
            other.join()

    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert isinstance(lm._evaluator.scheduler.cache.attention, CascadeAttention)
        assert model.config._attn_implementation == before
        lm.next_token_logprobs_sync(ids[:-1])
        hook = model.get_input_embeddings().register_forward_pre_hook(meanwhile)
        row = lm.next_token_logprobs_sync(ids)
        hook.remove()
    assert names == [before]
    assert model.config._attn_implementation == before
    torch.testing.assert_close(row, naive_row(model, ids), rtol=0, atol=3e-5)
    torch.testing.assert_close(found[0], naive_row(model, ids), rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["llama", "llama-eager"])
def test_model_copied_during_pass_gives_same_rows(name):
    model = families.make(name)
    copies = []
    with AsyncTransformer(model, word_tokenizer()) as lm:
        layer = model.model.layers[1]
        hook = layer.register_forward_pre_hook(lambda *_: copies.append(copy.deepcopy(model)))
        lm.next_token_logprobs_sync([1, 2, 3])
        hook.remove()
    made = copies[0]
    made.model.layers[1]._forward_pre_hooks.clear()
    torch.testing.assert_close(naive_row(made, [1, 2, 3]), naive_row(model, [1, 2, 3]))
    with AsyncTransformer(made, word_tokenizer()) as lm:
        row = lm.next_token_logprobs_sync([1, 2, 3])
        torch.testing.assert_close(row, naive_row(model, [1, 2, 3]), rtol=0, atol=3e-5)
    assert made.config._attn_implementation == model.config._attn_implementation


def test_attention_chosen_by_owner_during_pass_is_kept():
    model = families.make("llama")
    with AsyncTransformer(model, word_tokenizer()) as lm:

        def changed(*_):
            model.set_attn_implementation("eager")

        hook = model.model.layers[1].register_forward_hook(changed)
        lm.next_token_logprobs_sync([1, 2, 3])
        hook.remove()
        assert model.config._attn_implementation == "eager"
        row = lm.next_token_logprobs_sync([1, 2, 3, 4])
        torch.testing.assert_close(row, naive_row(model, [1, 2, 3, 4]), rtol=0, atol=3e-5)


@given(
    st.integers(1, 70),
    st.integers(1, 20),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 9),
)
@settings(deadline=None, max_examples=60)
def test_attention_over_split_keys_matches_softmax(num_keys, num_queries, dtype, shortest):
    generator = torch.Generator().manual_seed(num_keys)
    query, keys, values = (
        torch.randn(1, 2, n, 8, generator=generator).to(dtype)
        for n in (num_queries, num_keys, num_keys)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "SHORTEST_STRETCH", shortest)
        found = SoftmaxAttention(TORCH, 0.7).attend(query, keys, values, None)
    scores = query.double() @ keys.double().transpose(2, 3) * 0.7
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 3e-2}
    torch.testing.assert_close(found.logsumexp.double(), scores.logsumexp(-1), **tolerance)
    expected = scores.softmax(-1) @ values.double()
    torch.testing.assert_close(found.values.double(), expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_large_values_of_many_tokens_do_not_overflow(dtype):
    generator = torch.Generator().manual_seed(0)
    query, keys = (
        torch.randn(1, 1, n, 8, generator=generator).mul(0.01).to(dtype) for n in (2, 6000)
    )
    values = (torch.randn(1, 1, 6000, 8, generator=generator) + 14).to(dtype)
    found = SoftmaxAttention(TORCH, 0.1, softcap=50.0).attend(query, keys, values, None).values
    assert float((found.float() - 14).abs().max()) < 0.1


def test_model_failing_during_pass_regains_its_own_attention():
    model = families.make("llama")
    before = model.config._attn_implementation
    with AsyncTransformer(model, word_tokenizer()) as lm:

        def broken(*_):
            raise ValueError("broken")

        hook = model.model.layers[1].register_forward_pre_hook(broken)
        with pytest.raises(ValueError, match="broken"):
            lm.next_token_logprobs_sync([1, 2, 3])
        assert model.config._attn_implementation == before
        hook.remove()
        row = lm.next_token_logprobs_sync([1, 2, 3])
        torch.testing.assert_close(row, naive_row(model, [1, 2, 3]), rtol=0, atol=3e-5)


def test_attention_changed_in_one_layer_during_pass_is_detected():
    model, called = families.make("llama"), []
    with AsyncTransformer(model, word_tokenizer()) as lm:

        def changed(module, *_):
            called.append(module.self_attn.config)
            called[0]._attn_implementation = "sdpa"

        hook = model.model.layers[1].register_forward_pre_hook(changed)
        with pytest.raises(ModelStateError, match="1 of 2 layers"):
            lm.next_token_logprobs_sync([1, 2, 3])
        hook.remove()
        called[0]._attn_implementation = {"": attention_interface.PREFIX + "sdpa"}
        row = lm.next_token_logprobs_sync([1, 2, 3])
        torch.testing.assert_close(row, naive_row(model, [1, 2, 3]), rtol=0, atol=3e-5)
