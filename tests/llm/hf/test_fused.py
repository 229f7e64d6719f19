"""An operator of attention is used where it has shown that it is right."""

import math

import pytest
import torch

from genlm_backend.attention import softmax_attention
from genlm_backend.attention.softmax_attention import SoftmaxAttention
from genlm_backend.attention.torch import torch_ops
from genlm_backend.attention.torch.torch_ops import (
    FUSED_OPERATORS,
    TORCH,
    FusedOperator,
    fused_operator,
)

RIGHT = FUSED_OPERATORS["cpu"][0].attend
DEVICE = torch.device("cpu")


@pytest.mark.parametrize("dim", [8, 20, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_cpu_attention_operator_passes_check(dtype, dim):
    blocks = *torch_ops._BLOCKS, *torch_ops._MASKED
    assert torch_ops._is_right(FUSED_OPERATORS["cpu"][0], blocks, DEVICE, dtype, dim)


def raising(query, keys, values, scale, is_causal):
    raise RuntimeError("CUDA error: no kernel image is available")


def in_base_2(query, keys, values, scale, is_causal):
    found, sums = RIGHT(query, keys, values, scale, is_causal)
    return found, sums / math.log(2)


def not_causal(query, keys, values, scale, is_causal):
    return RIGHT(query, keys, values, scale, False)


def unscaled(query, keys, values, scale, is_causal):
    return RIGHT(query, keys, values, 1.0, is_causal)


def of_its_own_scale(query, keys, values, scale, is_causal):
    return RIGHT(query, keys, values, query.shape[-1] ** -0.5, is_causal)


def of_1024_keys(query, keys, values, scale, is_causal):
    return RIGHT(query, keys[:, :, :1024], values[:, :, :1024], scale, is_causal)


def spoilt(query, keys, values, scale, is_causal):
    found, sums = RIGHT(query, keys, values, scale, is_causal)
    return found.index_fill(2, torch.tensor([3]), torch.nan), sums


def causal_from_the_end(query, keys, values, scale, is_causal):
    size = keys.shape[2] - query.shape[2]
    return RIGHT(query, keys[:, :, size:], values[:, :, size:], scale, is_causal)


WRONG = (
    raising,
    in_base_2,
    not_causal,
    unscaled,
    of_its_own_scale,
    of_1024_keys,
    spoilt,
    causal_from_the_end,
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_operator_fails_check(wrong, dtype):
    assert not torch_ops._is_right(FusedOperator(wrong), torch_ops._BLOCKS, DEVICE, dtype, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_with_missing_or_wrong_masks_fails_mask_check(dtype, monkeypatch):
    def ignoring(query, keys, values, scale, mask):
        return RIGHT(query, keys, values, scale, False)

    for attend_with in (None, ignoring):
        operator = FusedOperator(RIGHT, attend_with)
        assert not torch_ops._is_right(operator, torch_ops._MASKED, DEVICE, dtype, 64)


def test_first_right_operator_is_chosen_and_none_if_all_are_wrong(monkeypatch):
    elsewhere = torch.device("meta")

    def is_right(operator, blocks, *_):
        return operator.attend is RIGHT and (blocks is torch_ops._BLOCKS or operator.attend_with)

    monkeypatch.setattr(torch_ops, "_is_right", is_right)
    right = FusedOperator(RIGHT, FUSED_OPERATORS["cpu"][0].attend_with)
    for ops, expected in (
        ((FusedOperator(raising), right, FusedOperator(RIGHT, is_parted=True)), right),
        ((FusedOperator(raising),), None),
        ((FusedOperator(RIGHT),), FusedOperator(RIGHT)),
        ((), None),
    ):
        monkeypatch.setitem(FUSED_OPERATORS, "meta", ops)
        fused_operator.cache_clear()
        assert fused_operator(elsewhere, torch.float32, 8) == expected
    fused_operator.cache_clear()


def test_masked_and_unmasked_blocks_match_formula(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 3, 5, 8, generator=generator)
    keys, values = torch.randn(2, 2, 3, 40, 8, generator=generator)
    mask = torch.zeros(2, 1, 5, 40).masked_fill_(torch.rand(2, 1, 5, 40) < 0.3, -torch.inf)
    softmax_attention = SoftmaxAttention(TORCH, 0.3)
    without_masks = FusedOperator(RIGHT)
    monkeypatch.setattr(torch_ops, "fused_operator", lambda *_: without_masks)
    for added in (None, mask):
        found = softmax_attention.attend(query, keys, values, added)
        expected = softmax_attention.attend_if_any(query, keys, values, added)
        torch.testing.assert_close(found.values, expected.values, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.logsumexp, expected.logsumexp, rtol=0, atol=1e-5)


def test_query_with_two_empty_blocks_merges_with_third():
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 2, 3, 8, generator=generator)
    keys, values = torch.randn(2, 1, 2, 30, 8, generator=generator)
    mask = torch.zeros(1, 1, 3, 30)
    mask[:, :, 0, :20] = -torch.inf
    softmax_attention = SoftmaxAttention(TORCH, 0.3)
    parts = [
        softmax_attention.attend_if_any(query, keys[:, :, i:j], values[:, :, i:j], mask[..., i:j])
        for i, j in ((0, 10), (10, 20), (20, 30))
    ]
    total = parts[0]
    for part in parts[1:]:
        total.merge_state(part, None)
    expected = softmax_attention.attend_if_any(query, keys, values, mask)
    torch.testing.assert_close(total.values, expected.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(total.logsumexp, expected.logsumexp, rtol=0, atol=1e-5)
    total.logsumexp[0, 0, 0] = torch.nan  # of a model that overflows, which has to be seen
    total.merge_state(parts[2], None)
    assert total.values[0, 0, 0].isnan().all()


@pytest.mark.parametrize("most", [1, 6 * 11 * 3, 10**6])
def test_attention_in_parts_of_queries_matches_softmax(monkeypatch, most):
    monkeypatch.setattr(softmax_attention, "MAX_SCORES", most)
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, 3, n, dim, generator=generator) for n, dim in ((7, 8), (11, 8), (11, 5))
    )
    seen = torch.rand(2, 1, 7, 11, generator=generator) < 0.5
    seen[..., 0] = True
    found = SoftmaxAttention(TORCH, 0.3).attend_if_any(
        query, keys, values, torch.where(seen, 0, -torch.inf)
    )
    scores = (query @ keys.mT * 0.3).where(seen, -torch.inf)
    torch.testing.assert_close(found.values, scores.softmax(-1) @ values)
    torch.testing.assert_close(found.logsumexp, scores.logsumexp(-1))
