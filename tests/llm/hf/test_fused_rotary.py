"""Rotary positions by a kernel are those of the model's code; other code is left alone."""

import functools
import importlib
import inspect
import re

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf import fused_rotary
from genlm_backend.backends.hf.fused_rotary import fuse_rotary
from genlm_backend.backends.hf.model_view import ModelView
from tests.llm import families
from tests.llm.conftest import random_contexts, word_tokenizer
from tests.naive import naive_row

NAME = "apply_rotary_pos_emb"
ALL = [*families.PER_TOKEN, *families.FEW_RUNNING, *families.WHOLE]
ROTATED = {
    *("llama", "llama-eager", "qwen2", "qwen3", "mistral-sliding", "gemma", "gemma2", "gemma3"),
    *("mixtral", "qwen3-moe", "granite", "stablelm", "phi", "starcoder2-sliding", "falcon-rotary"),
    *("lfm2", "minimax-m3-sparse"),
}
"""Families whose heads, or parts of them, go through the kernel."""

LEFT_ALONE = {
    *("gpt-oss", "cohere"),  # with cosines of half a head, and of pairs
    *("llama4-tuned", "opt", "bloom", "mpt", "gpt2", "gpt-neo-local", "gptj", "mamba", "mamba2"),
    *("cpm-ant", "glm-moe-dsa"),
}
"""Families that have no such function, or another one."""


def rotate(q, k, cos, sin):
    """Rotate as the kernel does."""
    assert q.device == k.device == cos.device == sin.device
    assert q.dtype is k.dtype is cos.dtype is sin.dtype
    (num_rows, _, num_tokens, dim), half = q.shape, q.shape[3] // 2
    assert dim == 2 * half
    assert k.shape == (num_rows, k.shape[1], num_tokens, dim)
    assert cos.shape == sin.shape
    assert cos.shape in ((1, num_tokens, dim), (num_rows, num_tokens, dim))
    assert {one.stride(-1) for one in (q, k, cos, sin)} == {1}
    found = []
    for given in (q, k):
        own = given.new_empty((num_rows, num_tokens, given.shape[1], dim)).transpose(1, 2)
        (first, second), (a, b), (c, d) = (x.split(half, -1) for x in (given, cos, sin))
        own[..., :half] = first * a[:, None] - second * c[:, None]
        own[..., half:] = second * b[:, None] + first * d[:, None]
        found.append(own)
    return tuple(found)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Have the processor have a kernel; what is returned has an element for each call of it."""
    made = []

    def counted(*given):
        made.append(given[0].shape)
        return rotate(*given)

    monkeypatch.setitem(fused_rotary.ROTARY_KERNELS, "cpu", lambda: counted)
    return made


def rows_of(model, monkeypatch, is_fused):
    with monkeypatch.context() as patched:
        if not is_fused:
            patched.delitem(fused_rotary.ROTARY_KERNELS, "cpu")
        with AsyncTransformer(model, word_tokenizer()) as lm:
            steps = [[5, 6, 7][:n] for n in (1, 2, 3)]
            asked = [random_contexts(8), steps, [[*one, 4] for one in steps]]
            return torch.cat([lm.batch_next_token_logprobs_sync(one) for one in asked])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore")
def test_rows_with_kernel_equal_rows_without(name, calls, monkeypatch):
    model = families.make(name)
    expected = rows_of(model, monkeypatch, False)
    assert not calls
    assert torch.equal(rows_of(model, monkeypatch, True), expected)
    num_asked = len(fused_rotary._SHAPES)
    assert (len(calls) > num_asked) == (name in ROTATED)  # and not partly, within the function
    view = ModelView(model)
    fuse_rotary(view.copies)
    rotating = [m for m, own in view.copies.items() if "forward" in vars(own)]
    if name in ROTATED:
        forward_context, fused = (
            [m for m in modules if type(m).__name__.endswith("Attention")]
            for modules in (model.modules(), rotating)
        )
        assert fused == forward_context
    assert not (rotating and name in LEFT_ALONE)
    assert not any("forward" in vars(m) for m in model.modules())
    for module in rotating:
        of_owner = inspect.unwrap(type(module).forward)
        assert of_owner.__globals__ is vars(importlib.import_module(type(module).__module__))
        assert of_owner.__globals__[NAME].__module__.startswith("transformers.")


# -------------------------------------------------------------------- functions


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def formula(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def with_one_rounding(q, k, cos, sin):
    found = formula(q.float(), k.float(), cos.float(), sin.float())
    return tuple(one.to(q.dtype) for one in found)


def of_pairs(q, k, cos, sin):
    def turned(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def of_repeated_halves(q, k, cos, sin):
    halves = [torch.cat([one.chunk(2, -1)[0]] * 2, -1) for one in (cos, sin)]
    return formula(q, k, *halves)


def of_narrow_angles(q, k, cos, sin, unsqueeze_dim=1):
    dim = cos.shape[-1]
    own = formula(q[..., :dim], k[..., :dim], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((one, x[..., dim:]), -1) for one, x in zip(own, (q, k), strict=True))


def the_other_way_round(q, k, sin, cos):
    return formula(q, k, cos, sin)


def keys_alone(q, k, cos, sin):
    return q, formula(q, k, cos, sin)[1]


SOURCE = """
class Attention(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def extra_repr(self):
        return "x"

    def forward(self, q, k, cos, sin=None, *, times=2, **options):
        from . import modeling
        assert super().extra_repr() == "" and modeling
        found = apply_rotary_pos_emb(q, k, cos, sin, **options)
        return scaled(found[0], times), found[1]
"""


def module_around(function, dtype=torch.float32):
    """A module of code of somebody's own, which rotates by a function, and its view."""
    space = {"nn": nn, "torch": torch, NAME: function, "scaled": lambda x, times: times * x}
    space |= {"__name__": "transformers.modeling", "__package__": "transformers"}
    exec(SOURCE.replace("import modeling", "import utils as modeling"), space)
    module = space["Attention"](dtype)
    view = ModelView(module)
    fuse_rotary(view.copies)
    return module, view.module, space


def numbers(dtype=torch.float32, dim=16):
    torch.manual_seed(0)
    q, k = torch.randn(3, 5, 4, dim), torch.randn(3, 5, 2, dim)
    angles = torch.randn(2, 3, 5, dim).to(dtype)
    return [*(x.to(dtype).transpose(1, 2) for x in (q, k)), *angles]


@pytest.mark.parametrize(
    ("function", "dtype", "is_one"),
    [
        (formula, torch.float32, True),
        (formula, torch.bfloat16, True),
        (formula, torch.float64, False),
        (with_one_rounding, torch.float32, True),
        (with_one_rounding, torch.bfloat16, False),
        (of_narrow_angles, torch.float32, True),
        (of_pairs, torch.float32, False),
        (of_repeated_halves, torch.float32, False),
        (the_other_way_round, torch.float32, False),
        (keys_alone, torch.float32, False),
        (None, torch.float32, False),
        (max, torch.float32, False),
    ],
)
def test_only_functions_equal_to_kernel_are_fused(function, dtype, is_one):
    _, own, _ = module_around(function, dtype)
    assert ("forward" in vars(own)) == is_one


@torch.no_grad()
def test_fused_module_runs_its_own_forward_code(calls):
    module, own, _ = module_around(formula)
    calls.clear()
    for options in ({}, {"times": 3}, {"unsqueeze_dim": 1}):
        found, expected = own(*numbers(), **options), module(*numbers(), **options)
        assert all(map(torch.equal, found, expected))
    assert len(calls) == 3


@torch.no_grad()
def test_patched_module_globals_take_effect(calls):
    module, own, space = module_around(formula)
    calls.clear()
    space[NAME] = lambda q, k, cos, sin: (q + 1, k)
    assert torch.equal(own(*numbers())[0], 2 * (numbers()[0] + 1))
    assert not calls
    space[NAME], space["scaled"] = formula, lambda x, times: -x
    assert torch.equal(own(*numbers())[0], module(*numbers())[0])
    assert len(calls) == 1
    del space[NAME]
    with pytest.raises(NameError, match=NAME):
        own(*numbers())


def given_otherwise():
    q, k, cos, sin = numbers()
    yield "another type", [x.double() for x in (q, k, cos, sin)], {}
    yield "cosines of another type", [q, k, cos.double(), sin.double()], {}
    yield "strides", [q.transpose(2, 3).contiguous().transpose(2, 3), k, cos, sin], {}
    yield "an odd dimension", numbers(dim=15), {}
    yield "one rotated part", [q, k, cos[..., :8], sin[..., :8]], {}
    by_token = [x.transpose(1, 2) for x in (q, k)]
    yield "another dimension", [*by_token, cos, sin], {"unsqueeze_dim": 2}
    yield "no token", [x[:, :, :0] for x in (q, k)] + [x[:, :0] for x in (cos, sin)], {}
    yield "angles of all heads", [q, k, cos[0, :1], sin[0, :1]], {"unsqueeze_dim": 0}
    yield "one row of keys", [q, k[:1], cos[:1], sin[:1]], {}


@pytest.mark.parametrize(
    ("given", "options"),
    [pytest.param(given, options, id=name) for name, given, options in given_otherwise()],
)
@torch.no_grad()
def test_inputs_unfit_for_kernel_go_through_own_function(given, options, calls):
    module, own, _ = module_around(of_narrow_angles)
    calls.clear()
    try:
        expected = module(*given, **options)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            own(*given, **options)
    else:
        assert all(map(torch.equal, own(*given, **options), expected))
    assert not calls


def test_gradients_go_through_the_modules_own_function(calls):
    _, own, _ = module_around(formula)
    calls.clear()
    q, *others = numbers()
    own(q.requires_grad_(), *others)[0].sum().backward()
    assert q.grad is not None
    assert not calls


def test_module_is_not_fused_without_kernel(monkeypatch):
    def missing():
        raise ImportError("no module named triton")

    monkeypatch.setitem(fused_rotary.ROTARY_KERNELS, "cpu", missing)
    _, own, _ = module_around(formula)
    assert "forward" not in vars(own)


def test_wrong_kernel_is_not_used(monkeypatch):
    def wrong(q, k, cos, sin):
        found = rotate(q, k, cos, sin)
        found[1][-1, -1, -1, -1] *= 1 + 1e-6
        return found

    monkeypatch.setitem(fused_rotary.ROTARY_KERNELS, "cpu", lambda: wrong)
    _, own, _ = module_around(formula)
    assert "forward" not in vars(own)


def patched_class(monkeypatch):
    own = llama.LlamaAttention.forward

    def forward(self, hidden_states, *args, **kwargs):
        found, weights = own(self, hidden_states, *args, **kwargs)
        return 0.5 * found, weights

    monkeypatch.setattr(llama.LlamaAttention, "forward", forward)


def patched_inside(monkeypatch):
    monkeypatch.setattr(llama, "rotate_half", lambda x: torch.zeros_like(x))


@pytest.mark.parametrize("patch", [patched_class, patched_inside])
def test_patched_attention_code_takes_effect_after_clear_cache(patch, monkeypatch, calls):
    model = families.make("llama")
    with AsyncTransformer(model, word_tokenizer()) as lm:
        lm.next_token_logprobs_sync([1, 2, 3])
        assert calls
        patch(monkeypatch)
        lm.clear_cache()
        row = lm.next_token_logprobs_sync([1, 2, 3])
        torch.testing.assert_close(row, naive_row(model, [1, 2, 3]), rtol=0, atol=2e-5)


def halved(forward):
    """Decorate as ``functools.wraps`` does."""

    @functools.wraps(forward)
    def around(self, *args, **kwargs):
        found, weights = forward(self, *args, **kwargs)
        return 0.5 * found, weights

    return around


def of_a_table(forward):
    """Decorate by what is in no closure."""
    table = {"forward": forward}

    @functools.wraps(forward)
    def around(self, *args, **kwargs):
        return table["forward"](self, *args, **kwargs)

    return around


@pytest.mark.parametrize(
    ("decorators", "is_fused"),
    [
        ([halved], True),
        ([halved, halved], True),
        ([of_a_table], False),
        ([halved, of_a_table], False),
    ],
)
def test_decorators_of_attention_forward_still_apply(decorators, is_fused, monkeypatch, calls):
    for decorator in decorators:
        forward = decorator(llama.LlamaAttention.forward)
        monkeypatch.setattr(llama.LlamaAttention, "forward", forward)
    model = families.make("llama")
    with AsyncTransformer(model, word_tokenizer()) as lm:
        num_asked = len(calls)
        row = lm.next_token_logprobs_sync([1, 2, 3])
        assert (len(calls) > num_asked) == is_fused
    torch.testing.assert_close(row, naive_row(model, [1, 2, 3]), rtol=0, atol=2e-5)
