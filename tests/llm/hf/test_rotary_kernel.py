"""The kernel of rotary positions, in Triton's interpreter, against the formula of transformers."""

import importlib.util
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [
    pytest.mark.vllm,  # in whose environment Triton is
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.filterwarnings("ignore"),
]

NAME = "genlm_backend.backends.hf.layer_kernels"


@pytest.fixture(scope="module")
def rotate():
    """The function, with kernels that are interpreted; whatever else uses Triton compiles."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        from triton.runtime import interpreter

        patched.setattr(interpreter, "_convert_float", rounding(interpreter._convert_float))
        spec = importlib.util.find_spec(NAME)
        module = importlib.util.module_from_spec(spec)
        patched.setitem(sys.modules, NAME, module)
        spec.loader.exec_module(module)
        yield module.rotate


def rounding(converted):
    """Round to bfloat16 as a device does: the interpreter cuts off."""

    def convert(given, dtype, to, mode):
        if (str(dtype), str(to)) != ("fp32", "bf16"):
            return converted(given, dtype, to, mode)
        values = torch.from_numpy(given.copy()).bfloat16()
        return values.view(torch.int16).numpy().view("uint16")

    return convert


def states(draw, shape, dtype):
    """Draw random states ``[B, heads, Q, dim]``, in some strides, the last of which is 1."""
    num_rows, num_heads, num_tokens, dim = shape
    layout = draw(st.sampled_from(["by token", "by head", "beside others", "a part of a head"]))
    if layout == "by head":
        return torch.randn(shape).to(dtype)
    heads, width = num_heads + 3 * (layout == "beside others"), dim + 3 * ("part" in layout)
    wide = torch.randn(num_rows, num_tokens, heads, width).to(dtype)
    return wide.transpose(1, 2)[:, heads - num_heads :, :, width - dim :]


def angles(draw, shape, dtype):
    """Draw cosines or sines ``[B or 1, Q, dim]``."""
    num_rows, num_tokens, dim = shape
    if draw(st.booleans()):
        return torch.randn(1, num_tokens, dim).to(dtype).expand(shape)
    return torch.randn(num_rows, num_tokens, dim + 2).to(dtype)[..., 1:-1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rotary_kernel_equals_transformers_formula(rotate, data):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    draw = data.draw
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    num_rows, num_tokens, dim = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 5)),
        2 * draw(st.integers(1, 24)),
    )
    torch.manual_seed(draw(st.integers(0, 1000)))
    q, k = (
        states(draw, (num_rows, draw(st.integers(1, 19)), num_tokens, dim), dtype) for _ in range(2)
    )
    cos_rows = draw(st.sampled_from([1, num_rows]))
    cos, sin = (angles(draw, (cos_rows, num_tokens, dim), dtype) for _ in range(2))
    scale = draw(st.sampled_from([1.0, 1e-3, 300.0]))
    q = q.mul_(scale)
    before = [x.clone() for x in (q, k, cos, sin)]
    found = rotate(q, k, cos, sin)
    for own, expected in zip(found, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert own.dtype is dtype
        assert torch.equal(own, expected)
        assert torch.equal(own.signbit(), expected.signbit())
        assert own.transpose(1, 2).is_contiguous()
    assert all(map(torch.equal, before, (q, k, cos, sin)))
