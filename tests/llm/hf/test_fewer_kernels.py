"""What passes compute by fewer kernels on a CUDA device, here by torch in the kernels' place."""

import functools

import pytest
import torch
from torch.nn import functional

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf import fused_residuals, hf_runner, merged_linear
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row

CONTEXTS = [[1, 2, 3], [1, 2, 4, 5], [6], [1, 2, 3, 7, 8, 9]]


def silu_and_mul(both):
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


def fused_add_rms_norm(given, residual, weight, eps):
    total = given + residual
    return total, functional.rms_norm(total, weight.shape, weight, eps)


@pytest.fixture(autouse=True)
def merging(monkeypatch):
    """Have models on the processor merge and fuse, as those on a CUDA device do."""
    monkeypatch.setitem(merged_linear.GATE_KERNELS, "cpu", lambda: silu_and_mul)
    monkeypatch.setitem(fused_residuals.RESIDUAL_KERNELS, "cpu", lambda: fused_add_rms_norm)
    monkeypatch.setattr(
        hf_runner.HFRunner, "_merges", property(lambda _: True, lambda *_: None), False
    )


def fused_layers(lm):
    """Return the number of decoder layers that add and norm at once."""
    forwards = [vars(own).get("forward") for own in lm._hf._runner.view.copies.values()]
    found = [getattr(forward, "args", [forward])[:1] for forward in forwards if forward]
    return sum(isinstance(one, fused_residuals._Layer) for each in found for one in each)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-sliding", "mixtral"])
def test_usual_decoder_layers_fuse_residual_add_and_norm(name):
    model = families.make(name)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert fused_layers(lm) == model.config.num_hidden_layers
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


def test_scaled_residuals_are_not_fused():
    model = families.make("granite")
    for layer in model.model.layers:
        layer.residual_multiplier = 0.5
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert not fused_layers(lm)
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "gpt2", "phi"])
@pytest.mark.filterwarnings("ignore")
def test_unusual_decoder_layers_are_not_fused(name):
    model = families.make(name)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert not fused_layers(lm)
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


def rows_of(lm):
    return lm.batch_next_token_logprobs_sync(CONTEXTS)


def rows_of_model(model):
    return torch.stack([naive_row(model, context) for context in CONTEXTS])


@pytest.mark.parametrize("name", families.PER_TOKEN)
@pytest.mark.filterwarnings("ignore")
def test_rows_match_bare_model_and_weights_stay_unchanged(name):
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
def test_weights_changed_in_place_or_moved_are_used_after_clear_cache(name):
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


def test_parameters_in_flat_buffer_stay_in_it():
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


def test_rows_match_model_after_rewrapping_and_optimizer_step():
    model = families.make("llama")
    for _ in range(2):
        with AsyncTransformer(model, word_tokenizer()) as lm:
            torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2, 3]])).logits.square().mean().backward()
    optimiser.step()
    with AsyncTransformer(model, word_tokenizer()) as lm:
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


def test_layer_gated_by_gelu_is_not_fused():
    model = families.make("gemma")  # by GELU
    with AsyncTransformer(model, word_tokenizer()) as lm:
        view = lm._hf._runner.view
        assert not any(
            getattr(vars(own).get("forward"), "func", None).__name__ == "gated"
            for own in view.copies.values()
            if hasattr(vars(own).get("forward"), "func")
        )
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


def shift(_, given, found=None):
    (given[0] if found is None else found).add_(0.5)  # a factor would change no norm


IN_PLACE = {
    "the input of a layer": lambda m: m.layers[1].register_forward_pre_hook(shift),
    "the output of a layer": lambda m: m.layers[0].register_forward_hook(shift),
    "k_proj": lambda m: m.layers[1].self_attn.k_proj.register_forward_pre_hook(shift),
    "up_proj": lambda m: m.layers[1].mlp.up_proj.register_forward_pre_hook(shift),
    "a feed-forward layer": lambda m: m.layers[0].mlp.register_forward_pre_hook(shift),
}


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("what", IN_PLACE)
def test_hooks_changing_tensors_in_place_take_effect(what, is_before):
    model = families.make("llama")
    if is_before:
        IN_PLACE[what](model.model)
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        if not is_before:
            rows_of(lm)
            IN_PLACE[what](model.model)
            lm.clear_cache()
        for _ in range(2):
            torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "act_fn", "down_proj"])
def test_hooks_of_gated_layers_run_once_per_pass_and_not_in_trials(name):
    model, seen = families.make("llama"), []
    layer = getattr(model.model.layers[0].mlp, name)
    layer.register_forward_hook(lambda _, given, found: seen.append(found.shape))
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        assert not [shape for shape in seen if len(shape) < 3]
        seen.clear()
        lm.next_token_logprobs_sync([1, 2, 3])
        assert len(seen) == 1


@pytest.mark.parametrize("limit", [2.0, 10.0, 25.0])
def test_clamped_gated_layers_match_model_and_log_nothing(limit, caplog):
    model = families.make("llama")

    class LimitedMLP(type(model.model.layers[0].mlp)):
        def forward(self, x):
            gate = self.act_fn(self.gate_proj(x).clamp(max=limit))
            return self.down_proj(gate * self.up_proj(x).clamp(-limit, limit))

    for layer in model.model.layers:
        layer.mlp.__class__ = LimitedMLP
        layer.post_attention_layernorm.weight.data.mul_(60)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-3)
    assert not caplog.records  # each layer was refused by itself, before the model as a whole


@pytest.mark.parametrize("limit", [10.0, 25.0])
def test_clamped_decoder_layers_are_not_fused(limit):
    model = families.make("llama")

    class LimitedLayer(type(model.model.layers[0])):
        @functools.wraps(type(model.model.layers[0]).forward)
        def forward(self, *given, **options):
            return super().forward(*given, **options).clamp(-limit, limit)

    for layer in model.model.layers:
        layer.__class__ = LimitedLayer
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert not fused_layers(lm)


def test_model_changing_states_between_layers_runs_unfused(caplog):
    model = families.make("llama")
    kind = type(model.model.layers[1])

    class Shifted(kind):
        def __call__(self, hidden_states, *given, **options):
            return super().__call__(hidden_states.add_(3), *given, **options)

    model.model.layers[1].__class__ = Shifted
    with AsyncTransformer(model, word_tokenizer()) as lm:
        torch.testing.assert_close(rows_of(lm), rows_of_model(model), rtol=0, atol=1e-4)
    assert "run unfused" in caplog.text
