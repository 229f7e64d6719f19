"""What passes compute by fewer kernels on a CUDA device, here by torch in the kernels' place."""

import pytest
import torch
from torch.nn import functional

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf import fused_norms, fused_residuals, hf_runner, merged_products
from tests.llm import families
from tests.llm.conftest import fresh_row, word_tokenizer

CONTEXTS = [[1, 2, 3], [1, 2, 4, 5], [6], [1, 2, 3, 7, 8, 9]]


def silu_product(both):
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


def add_norm(given, residual, weight, eps):
    total = given + residual
    return total, functional.rms_norm(total, weight.shape, weight, eps)


@pytest.fixture(autouse=True)
def merging(monkeypatch):
    """Have models on the processor merge and fuse, as those on a CUDA device do."""
    monkeypatch.setitem(merged_products.KERNELS, "cpu", lambda: silu_product)
    monkeypatch.setitem(fused_residuals.KERNELS, "cpu", lambda: add_norm)
    dress = hf_runner.HFRunner._dress

    def dress_and_merge(runner, twin, adapter):
        fused_norms.fuse_norms(twin.copies)
        merged_products.merge_products(twin.copies)
        fused_residuals.fuse_residuals(twin.copies)
        dress(runner, twin, adapter)

    monkeypatch.setattr(hf_runner.HFRunner, "_dress", dress_and_merge)


def fused_layers(lm):
    """Return the number of decoder layers that add and norm at once."""
    forwards = [vars(own).get("forward") for own in lm._hf._runner.twin.copies.values()]
    found = [getattr(forward, "args", [forward])[:1] for forward in forwards if forward]
    return sum(isinstance(one, fused_residuals._Layer) for each in found for one in each)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-sliding", "mixtral"])
def test_usual_decoder_layers_add_and_norm_at_once(name):
    model = families.make(name)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert fused_layers(lm) == model.config.num_hidden_layers
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


def test_residuals_of_another_size_are_added_as_it_is_written():
    model = families.make("granite")
    for layer in model.model.layers:
        layer.residual_multiplier = 0.5
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert not fused_layers(lm)
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "gpt2", "phi"])
@pytest.mark.filterwarnings("ignore")
def test_others_compute_as_they_are_written(name):
    model = families.make(name)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert not fused_layers(lm)
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


def rows_of(lm):
    return lm.batch_next_token_logprobs_sync(CONTEXTS)


def rows_of_model(model):
    return torch.stack([fresh_row(model, context) for context in CONTEXTS])


@pytest.mark.parametrize("name", families.PER_TOKEN)
@pytest.mark.filterwarnings("ignore")
def test_rows_are_the_models_whose_weights_stay(name):
    model = families.make(name)
    expected, parameters = rows_of_model(model), dict(model.named_parameters())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with AsyncTransformer(model, word_tokenizer()) as lm:
        torch.testing.assert_close(rows_of(lm), expected, rtol=0, atol=1e-4)
    assert all(own is parameters[key] for key, own in model.named_parameters())
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert torch.equal(rows_of_model(model), expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma"])
def test_weights_changed_in_place_count_and_so_do_moved_ones(name):
    model = families.make(name)
    layer = model.model.layers[0]
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        rows_of(lm)
        assert layer.self_attn.k_proj.weight.data_ptr() == (
            layer.self_attn.q_proj.weight.data_ptr() + layer.self_attn.q_proj.weight.nbytes
        )
        for change in (
            lambda weight: weight.mul_(-1.5),
            lambda weight: setattr(weight, "data", weight.data + 0.5),
        ):
            for changed in (layer.self_attn.k_proj.weight, layer.mlp.up_proj.weight):
                with torch.no_grad():
                    change(changed)
                lm.clear_cache()
                torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


def test_parameters_in_a_flat_buffer_stay_there():
    model = families.make("qwen2")
    parameters = [*model.parameters()]
    buffer = torch.cat([parameter.detach().flatten() for parameter in parameters])
    parts = buffer.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view(parameter.shape)
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)
        buffer.mul_(1.1)  # as an optimizer does that knows no parameters
        lm.clear_cache()
        assert all(
            parameter.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            for parameter in parameters
        )
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


def test_layers_with_two_models_one_after_another_and_gradients():
    model = families.make("llama")
    for _ in range(2):
        with AsyncTransformer(model, word_tokenizer()) as lm:
            torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2, 3]])).logits.square().mean().backward()
    optimiser.step()
    with AsyncTransformer(model, word_tokenizer()) as lm:
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


def test_a_layer_that_is_gated_otherwise_computes_as_it_is_written():
    model = families.make("gemma")  # by GELU
    with AsyncTransformer(model, word_tokenizer()) as lm:
        twin = lm._hf._runner.twin
        assert not any(
            getattr(vars(own).get("forward"), "func", None).__name__ == "gated"
            for own in twin.copies.values()
            if hasattr(vars(own).get("forward"), "func")
        )
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)
