"""Norms by torch's kernel say what the modules say; what is no such norm is left alone."""

import pytest
import torch
from torch import nn

from genlm_backend.backends.hf.fused_residuals import fuse_norms
from genlm_backend.backends.hf.model_view import ModelView
from tests.llm import families


def fused_of(model):
    view = ModelView(model)
    fuse_norms(view.copies)
    return view, [m for m, own in view.copies.items() if "forward" in vars(own)]


@pytest.mark.parametrize("name", [*families.PER_TOKEN, *families.FEW_RUNNING, *families.WHOLE])
@pytest.mark.filterwarnings("ignore")
def test_logits_with_fused_norms_match_model(name):
    model = families.make(name)
    view, fused = fused_of(model)
    ids = torch.tensor([[5, 6, 7, 8, 9, 3]], dtype=torch.int64)
    with torch.inference_mode():
        found, expected = (m(input_ids=ids).logits for m in (view.module, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    if name in ("llama", "qwen3", "gpt-oss"):
        assert len(fused) == sum("Norm" in type(m).__name__ for m in model.modules())
    if name in ("gpt2", "opt"):
        assert not fused


class Other(nn.Module):
    def __init__(self, function, dim=16, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim, dtype=torch.float32)), eps
        self._function = function

    def forward(self, x):
        return self._function(x, self.weight, self.eps)


def rms(x, weight, eps):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize(
    ("function", "is_one"),
    [
        (rms, True),
        (lambda x, w, e: rms(x, w, 10 * e), False),
        (lambda x, w, e: rms(x, 1 + w, e), False),
        (lambda x, w, e: rms(x - x.mean(-1, keepdim=True), w, e), False),
        (lambda x, w, e: nn.functional.normalize(x, dim=-1, eps=e) * w, False),
        (lambda x, w, e: rms(x, w, e).double(), False),
        (lambda x, w, e: None, False),
        (lambda x, w: None, False),
        (lambda x, w, e: x * 0, False),
    ],
)
def test_only_true_rms_norms_are_fused(function, is_one):
    module = Other(function)
    own = Other(function)
    fuse_norms({module: own})
    assert ("forward" in vars(own)) == is_one
    if is_one:
        own.weight = nn.Parameter(torch.full((16,), 2.0, dtype=torch.float32))  # as it is now
        x = torch.randn(3, 16, dtype=torch.float32)
        torch.testing.assert_close(own(x), 2 * module(x))


class Gated(Other):
    def forward(self, x, gate=None):
        return rms(x if gate is None else x * gate, self.weight, self.eps)


def test_norms_with_extra_inputs_are_not_fused():
    own = Gated(rms)
    fuse_norms({Gated(rms): own})
    assert "forward" not in vars(own)


def test_fused_norm_of_other_dtype_returns_dtype_of_module():
    module, own = Other(rms), Other(rms)
    fuse_norms({module: own})
    x = torch.randn(3, 16, dtype=torch.float32).bfloat16()
    assert own(x).dtype is module(x).dtype is torch.float32
