"""The same answers on a CUDA device."""

import numpy as np
import pytest
import torch
from transformers.models.llama import modeling_llama as llama

from genlm_backend import AsyncTransformer
from genlm_backend.attention import cascade_plan as sharing
from genlm_backend.attention.torch.torch_ops import fused_operator
from genlm_backend.backends.hf.fused_rotary import fuse_rotary
from genlm_backend.backends.hf.model_view import ModelView
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", families.PER_TOKEN)
@pytest.mark.filterwarnings("ignore")
async def test_rows_match_cpu_model(name):
    model = families.make(name)
    contexts = [list(range(n)) for n in (1, 3, 9, 24)] + [[5, 6, n] for n in range(4)]
    expected = torch.stack([naive_row(model, context) for context in contexts])
    with AsyncTransformer(model.cuda(), word_tokenizer(), kv_cache_bytes=1 << 22) as lm:
        assert lm.kv_reuse
        for _ in range(2):
            rows = await lm.batch_next_token_logprobs(contexts)
            assert rows.device.type == "cpu"
            torch.testing.assert_close(rows, expected, rtol=0, atol=2e-3)
            lm.clear_cache()


def test_rows_stay_on_device_with_output_device_cuda():
    model = families.make("llama").cuda()
    with AsyncTransformer(model, word_tokenizer(), output_device="cuda") as lm:
        row = lm.next_token_logprobs_sync([1, 2, 3])
        assert row.device == lm.device == torch.device("cuda:0")
        row.zero_()
        assert lm.next_token_logprobs_sync([1, 2, 3]).exp().sum().item() == pytest.approx(1)


def test_kv_budget_is_share_of_free_memory_and_freed_on_close():
    import gc

    free = torch.cuda.mem_get_info()[0]
    lm = AsyncTransformer(families.make("llama").cuda(), word_tokenizer())
    budget = lm.statistics().kv_bytes_budget
    assert 0.3 * free < budget < 0.6 * free
    lm.close()
    del lm
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > 0.9 * free


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128])
def test_fused_operator_with_masks_exists_on_cuda(dtype, dim):
    operator = fused_operator(torch.device("cuda:0"), dtype, dim)
    assert operator is not None
    assert operator.attend_with is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256])
@torch.inference_mode()
def test_rotary_kernel_equals_transformers(dtype, dim):
    rotary_kernel = pytest.importorskip("genlm_backend.backends.hf.layer_kernels")
    for num_rows, num_tokens, cos_rows in ((64, 1, 64), (3, 7, 1), (1, 70_000 // dim, 1)):
        made = [
            torch.randn(num_rows, num_tokens, heads, dim, device="cuda").to(dtype).transpose(1, 2)
            for heads in (32, 8)
        ]
        made += [torch.randn(cos_rows, num_tokens, dim, device="cuda").to(dtype) for _ in "cs"]
        found, expected = rotary_kernel.rotate(*made), llama.apply_rotary_pos_emb(*made)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral"])
def test_attention_modules_use_rotary_kernel(name, dtype):
    pytest.importorskip("triton")
    view = ModelView(families.make(name).to("cuda", dtype))
    fuse_rotary(view.copies)
    fused = [m for m, own in view.copies.items() if "forward" in vars(own)]
    assert len(fused) == sum(type(m).__name__.endswith("Attention") for m in view.copies)


async def test_many_rows_with_shared_prefix_match_cpu_model(monkeypatch):
    monkeypatch.setattr(sharing, "FEW_TOKENS", 64)
    model = families.make("llama")
    prefix = [(7 * i) % 23 for i in range(100)]
    contexts = [[*prefix, *[n % 23] * (1 + n % 3), n // 23] for n in range(40)]
    expected = torch.stack([naive_row(model, context) for context in contexts])
    with AsyncTransformer(model.cuda(), word_tokenizer(), kv_cache_bytes=1 << 22) as lm:
        for _ in range(2):
            rows = await lm.batch_next_token_logprobs(contexts)
            torch.testing.assert_close(rows, expected, rtol=0, atol=2e-3)


RECORDED = ["llama", "qwen3", "mixtral", "gpt2", "gemma3", "gpt-oss"]
WITH_EXPERTS = ["mixtral", "gpt-oss"]
"""Whose products of groups of tokens wait for the processor, but in bfloat16."""


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore")
async def test_captured_steps_match_float32_model_within_rounding(name, dtype, monkeypatch):
    """Steps of particles are those of the model in float32, as near as the type is."""
    monkeypatch.setattr(sharing, "FEW_TOKENS", 64)
    model = families.make(name)
    random = np.random.default_rng(0)
    contexts = [random.integers(0, 23, 90).tolist()] * 12
    steps = []
    for number in range(8):
        if number % 4 == 3:
            contexts = [contexts[i] for i in random.integers(0, 12, 12)]
        contexts = [[*context, int(random.integers(23))] for context in contexts]
        steps.append(contexts)
    expected = [torch.stack([naive_row(model, context) for context in one]) for one in steps]
    model = model.to(dtype)
    rounded = torch.stack([naive_row(model, context) for context in steps[-1]]).float()
    noise = (rounded - expected[-1]).pow(2).mean().sqrt()
    with AsyncTransformer(model.cuda(), word_tokenizer(), kv_cache_bytes=1 << 22) as lm:
        await lm.next_token_logprobs(contexts[0][:90])
        for one, rows in zip(steps, expected, strict=True):
            found = await lm.batch_next_token_logprobs(one)
            # Of a mixture of experts, rounding sends some tokens to other ones.
            assert (found - rows).pow(2).mean(-1).median().sqrt() < 3 * noise
        graphs = lm._hf._runner.graphs
        captured = [own for own in graphs._views.values() if own is not None and own.by_shape]
        assert bool(captured) == (dtype is torch.bfloat16 or name not in WITH_EXPERTS)
        assert not any(own.failed for own in captured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [96, 2048, 5120])
@torch.inference_mode()
def test_fused_norm_and_silu_kernels_match_torch(dtype, width):
    layernorm_kernel = pytest.importorskip("genlm_backend.backends.hf.layer_kernels")
    from genlm_backend.backends.hf.layer_kernels import silu_and_mul

    one, other, weight, both = (
        torch.randn(*shape, device="cuda").to(dtype)
        for shape in ((7, 3, width), (3, 7, width), (width,), (7, 3, 2 * width))
    )
    other, gates = other.transpose(0, 1), both.chunk(2, -1)
    total, normed = layernorm_kernel.fused_add_rms_norm(one, other, weight, 1e-5)
    rounding = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    assert torch.equal(total, one + other)
    expected = torch.nn.functional.rms_norm(total, (width,), weight, 1e-5)
    torch.testing.assert_close(normed, expected, **rounding)
    expected = torch.nn.functional.silu(gates[0]) * gates[1]
    torch.testing.assert_close(silu_and_mul(both), expected, **rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("undefined", [(), (3, 700)])
def test_rows_and_scores_of_device_logits_match_cpu(dtype, undefined):
    from genlm_backend.queries.row import rows_of_logits, scores_of_logits

    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(9, 1000, generator=generator, dtype=torch.float32)
    logits[:, 3] = torch.inf if undefined else 0
    logits[4, 17] = -torch.inf
    logits[5, 9] = torch.nan
    logits = logits.to(dtype)
    places, targets = [0, 4, 8], [1, 17, 999]
    own = rows_of_logits(logits, None, undefined)
    scores = scores_of_logits(logits.cuda(), places, targets, undefined)
    for device in (None, torch.device("cpu")):
        for in_place in (False, True):
            given = logits.cuda()
            found = rows_of_logits(given, device, undefined, in_place=in_place)
            assert in_place or torch.equal(given.cpu().nan_to_num(), logits.nan_to_num())
            for row, expected in zip(found, own, strict=True):
                assert row.logprobs.device.type == ("cuda" if device is None else "cpu")
                torch.testing.assert_close(
                    row.logprobs.cpu(), expected.logprobs, rtol=0, atol=1e-5, equal_nan=True
                )
                assert row.logsumexp == pytest.approx(expected.logsumexp, abs=1e-5, nan_ok=True)
            read = [
                found[i].logprobs[target].item() for i, target in zip(places, targets, strict=True)
            ]
            assert scores.tolist() == read
