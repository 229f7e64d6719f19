"""Weights of 8 bits: products are those of the rounded weights, whatever else is in the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from genlm_backend import AsyncReplicas, AsyncTransformer
from genlm_backend.backends.hf import int8_weights
from genlm_backend.backends.hf.int8_weights import Int8Linear, quantize
from genlm_backend.errors import (
    AdapterError,
    DeviceError,
    ModelStateError,
    OptionError,
    PrefixFileError,
    UnsupportedModelError,
)
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row
from tests.processor import has_int8_products

pytestmark = pytest.mark.skipif(
    not has_int8_products(), reason="the processor has no exact products of 8 bits"
)

CONTEXTS = [[(7 * i + 3 * j) % families.VOCAB for j in range(12)] for i in range(4)]


def rounded(weight):
    """Return a weight as multiples of each output's scale."""
    scale = weight.double().abs().amax(1, keepdim=True) / 127
    return torch.where(scale > 0, (weight / scale).round() * scale, 0.0)


@settings(deadline=None, max_examples=150)
@given(
    num_rows=st.integers(0, 9),
    width=st.integers(1, 70),
    height=st.integers(1, 40),
    magnitude=st.sampled_from([1e-30, 1e-6, 1.0, 1e4, 1e20]),
    outlier=st.sampled_from([1.0, 30.0, 1000.0]),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_int8_products_match_rounded_weights(
    num_rows, width, height, magnitude, outlier, has_bias, seed
):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(height, width, generator=generator)
    weight[0] = 0
    bias = torch.randn(height, generator=generator) if has_bias else None
    rows = torch.randn(num_rows, width, generator=generator) * magnitude
    rows[:, 0] *= outlier
    layer = Int8Linear(weight, bias)
    found = layer(rows)
    exact = rows.double() @ rounded(weight).t() + (0 if bias is None else bias.double())
    largest = rows.double().abs().amax(1, keepdim=True)
    bound = largest / 16256 * 0.51 * rounded(weight).abs().sum(1) + 1e-5 * exact.abs() + 1e-27
    assert found.shape == (num_rows, height)
    assert found.dtype is torch.float32
    assert bool(((found - exact).abs() <= bound).all())
    for index in range(num_rows):  # to the bit
        assert torch.equal(layer(rows[index]), found[index])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_nan_or_infinity_affects_its_own_row_only(wrong):
    layer = Int8Linear(torch.randn(5, 64), None)
    rows = torch.randn(3, 64)
    expected = layer(rows)
    rows[1, 17] = wrong
    found = layer(rows)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_int8_layer_refuses_other_dtypes_and_saving():
    layer = Int8Linear(torch.randn(5, 64), None)
    for wrong in (torch.float64, torch.bfloat16, torch.int64):
        with pytest.raises(TypeError, match="float32 activations"):
            layer(torch.ones(2, 64).to(wrong))
    with pytest.raises(ModelStateError, match="cannot be saved"):
        layer.state_dict()
    spoilt = torch.randn(3, 64)
    spoilt[1, 2] = torch.nan
    assert Int8Linear(spoilt, None)(torch.ones(1, 64)).isnan().tolist() == [[False, True, False]]


@pytest.mark.parametrize("width", [512, 4096, 20_000])
def test_rows_of_large_sums_match_single_rows_within_rounding(width):
    generator = torch.Generator().manual_seed(0)
    layer = Int8Linear(torch.rand(16, width, generator=generator), None)
    rows = torch.rand(24, width, generator=generator)
    alone = torch.stack([layer(row) for row in rows])
    torch.testing.assert_close(layer(rows), alone, rtol=1e-6, atol=0)


def with_rounded_weights(model):
    """Return a model in float32 whose linear layers have the rounded weights."""
    for layer in model.modules():
        if type(layer) in (nn.Linear, Conv1D):
            transposed = type(layer) is Conv1D
            weight = layer.weight.detach().t() if transposed else layer.weight.detach()
            new = rounded(weight).float()  # a copy: it may be that of the embeddings too
            layer.weight = nn.Parameter((new.t() if transposed else new).contiguous())
    return model


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", "gemma2", "gemma3", "mistral-sliding", "gpt2", "bloom", "opt", "phi", "mpt"],
)
@pytest.mark.filterwarnings("ignore:weights='int8' converts only linear layers")
def test_rows_match_model_with_rounded_weights(name):
    model, exact = families.make(name), with_rounded_weights(families.make(name))
    plain = families.make(name)
    quantize(model)
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        assert lm.kv_reuse == (name != "mpt")
        for context in CONTEXTS:
            for length in (3, 8, 12):
                row = lm.next_token_logprobs_sync(context[:length])
                expected = naive_row(exact, context[:length])
                apart = float((expected - naive_row(plain, context[:length])).abs().max())
                assert float((row - expected).abs().max()) < 0.05 * apart
        lm.clear_cache()
        together = lm.batch_next_token_logprobs_sync(CONTEXTS)
        lm.clear_cache()
        alone = [lm.next_token_logprobs_sync(context) for context in CONTEXTS]
        torch.testing.assert_close(together, torch.stack(alone), atol=1e-3, rtol=0)


@pytest.fixture
def directory(tmp_path):
    families.make("llama").save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()).save_pretrained(tmp_path)
    return str(tmp_path)


OPTIONS = {"weights": "int8", "row_cache_bytes": 0, "self_check": False}


def test_int8_model_in_process_or_replicas_gives_same_rows(directory, tmp_path):
    with AsyncTransformer.from_name(directory, **OPTIONS) as lm:
        expected = lm.batch_next_token_logprobs_sync(CONTEXTS)
        assert isinstance(lm.model.lm_head, Int8Linear)
        lm.save_prefix(CONTEXTS[0], tmp_path / "prefix")
    exact = with_rounded_weights(families.make("llama"))
    torch.testing.assert_close(expected[0], naive_row(exact, CONTEXTS[0]), atol=1e-2, rtol=0)
    for load in (
        lambda: AsyncTransformer.from_name(directory, process=True, **OPTIONS),
        lambda: AsyncReplicas.from_name(directory, 2, num_threads=1, **OPTIONS),
    ):
        with load() as lm:
            rows = lm.batch_next_token_logprobs_sync(CONTEXTS)
            torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)
            assert list(lm.load_prefix(tmp_path / "prefix")) == CONTEXTS[0]
    with AsyncTransformer.from_name(directory) as lm, pytest.raises(PrefixFileError):
        lm.load_prefix(tmp_path / "prefix")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights": "int4"}, "weights must be one of None, 'int8', got 'int4'"),
        ({"weights": "int8", "hf_opts": {"dtype": torch.bfloat16}}, "leave out dtype=torch.bfl"),
        ({"weights": "int8", "hf_opts": {"torch_dtype": "float16"}}, "leave out dtype='float16'"),
        ({"weights": "int8", "hf_opts": {"device_map": "cuda:0"}}, "device_map"),
        ({"weights": "int8", "hf_opts": {"device_map": {"": 0}}}, "leave out device_map={'': 0}"),
    ],
)
def test_options_incompatible_with_int8_are_refused_before_loading(options, reason):
    for cls in (AsyncTransformer, AsyncReplicas):
        with pytest.raises((OptionError, DeviceError), match=reason):
            cls.from_name("/no/such/model", **options)


def test_int8_weights_exclude_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    with pytest.raises(OptionError, match="cannot be combined with another quantization"):
        AsyncTransformer.from_name(
            "/no/such/model", bitsandbytes_opts={"load_in_8bit": True}, weights="int8"
        )


@pytest.mark.parametrize("asked", ["auto", torch.float32, "float32"])
def test_options_equal_to_int8_defaults_are_accepted(directory, asked):
    options = {"hf_opts": {"dtype": asked, "device_map": "cpu"}, **OPTIONS}
    with AsyncTransformer.from_name(directory, **options) as lm:
        assert lm.next_token_logprobs_sync([1]).isfinite().all()


@pytest.mark.filterwarnings("ignore")
def test_models_unfit_for_int8_weights_are_refused():
    with pytest.raises(UnsupportedModelError, match="for more than products"):
        quantize(families.make("mamba"))
    with pytest.raises(OptionError, match="has none"):
        quantize(families.make("llama").double())


def test_partly_linear_model_warns():
    with pytest.warns(UserWarning, match="with .*% of the weights of MixtralForCausalLM"):
        quantize(families.make("mixtral"))


def test_cpu_with_saturating_or_missing_products_is_refused(monkeypatch):
    products = int8_weights._products
    monkeypatch.setattr(int8_weights, "_products", lambda *args: products(*args).clamp(max=32767))
    with pytest.raises(OptionError, match="int8 matrix products, which this processor"):
        quantize(families.make("llama"))

    def absent(*args):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(int8_weights, "_products", absent)
    with pytest.raises(OptionError, match="int8 matrix products, which this processor"):
        quantize(families.make("llama"))


def test_adapters_are_refused(tmp_path):
    pytest.importorskip("peft")
    from tests.llm.hf import adapter_kinds

    adapter_kinds.save("lora", families.make("llama"), tmp_path, seed=1)
    model = families.make("llama")
    quantize(model)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        expected = lm.next_token_logprobs_sync([1, 2])
        with pytest.raises(AdapterError, match="Int8Linear"):
            lm.add_new_lora(tmp_path, "a")
        lm.clear_cache()
        assert torch.equal(lm.next_token_logprobs_sync([1, 2]), expected)
