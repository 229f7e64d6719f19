"""Rows against the definition in float64."""

import numpy as np
import pytest
import torch

from genlm_backend.llm.rows import rows_of_logits, separate_rows


@pytest.mark.parametrize("size", [1, 96, 49_152, 262_144])
@pytest.mark.parametrize("scale", [1e-3, 3.0, 40.0])
def test_a_row_sums_to_one_and_tells_its_normaliser(size, scale):
    generator = torch.Generator().manual_seed(size)
    logits = scale * torch.randn(3, size, generator=generator) + 17
    logits[1, : size // 2] = -torch.inf
    exact = logits.double().log_softmax(-1)
    for rows in (rows_of_logits(logits), torch.stack(separate_rows(logits))):
        assert rows.dtype == torch.float32
        assert rows.shape == (3, size + 1)
        tolerance = 4e-6 * max(1.0, scale)
        torch.testing.assert_close(rows[:, :-1].double(), exact, rtol=0, atol=tolerance)
        normaliser = logits.double().logsumexp(-1)
        torch.testing.assert_close(rows[:, -1].double(), normaliser, rtol=0, atol=tolerance)
        sums = rows[:, :-1].double().exp().sum(-1).numpy()
        np.testing.assert_allclose(sums, 1, atol=tolerance)


def test_a_token_that_is_certain_and_a_row_that_is_nothing():
    certain = torch.tensor([[-torch.inf, 2.0, -torch.inf]])
    assert rows_of_logits(certain).tolist() == [[-torch.inf, 0.0, -torch.inf, 2.0]]
    assert rows_of_logits(torch.full((1, 3), -torch.inf)).isnan()[0, :3].all()
    for wrong in (torch.nan, torch.inf):
        assert rows_of_logits(torch.tensor([[0.0, wrong]])).isnan().all()
    assert rows_of_logits(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)).dtype == torch.float32


def test_separate_rows_own_their_memory():
    first, second = separate_rows(torch.randn(2, 96, dtype=torch.float16))
    for row in (first, second):
        assert row.untyped_storage().nbytes() == row.nbytes == 4 * 97
    assert separate_rows(torch.empty(0, 5)) == []
