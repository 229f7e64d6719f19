"""Packed weights: the same rows, whatever becomes of the layers, and only where they are faster."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from genlm_backend import AsyncTransformer
from genlm_backend.llm.hf import packed_weights
from genlm_backend.llm.hf.packed_weights import PackedLinear, pack_weights
from tests.llm import families
from tests.llm.conftest import fresh_row, random_contexts, word_tokenizer

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch packs nothing"
)


@pytest.fixture
def faster(monkeypatch):
    """Every shape is packed, whatever the clock says."""
    monkeypatch.setattr(packed_weights, "_is_faster", lambda packed, layers: True)


def packed_layers(model):
    return [layer for layer in model.modules() if isinstance(layer, PackedLinear)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt-oss"])
@pytest.mark.usefixtures("faster")
async def test_rows_are_the_bare_models(name):
    model = families.make(name)
    expected = {
        tuple(context): fresh_row(model, context) for context in random_contexts(20, max_length=30)
    }
    with AsyncTransformer(model, word_tokenizer(), packs_weights=True) as lm:
        layers = packed_layers(lm.model)
        assert layers
        assert lm.packed_weight_bytes == sum(layer.weight.nbytes for layer in layers)
        found = await lm.batch_next_token_logprobs([list(context) for context in expected])
        for own, row in zip(found, expected.values(), strict=True):
            torch.testing.assert_close(own, row, rtol=0, atol=3e-5)


def test_a_model_of_ones_own_is_left_alone_and_one_that_is_loaded_may_opt_out(tmp_path, faster):
    model = families.make("llama")
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert (packed_layers(lm.model), lm.packed_weight_bytes) == ([], 0)
    model.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()).save_pretrained(tmp_path)
    with AsyncTransformer.from_name(str(tmp_path)) as lm:
        assert packed_layers(lm.model)
    with AsyncTransformer.from_name(str(tmp_path), packs_weights=False) as lm:
        assert (packed_layers(lm.model), lm.packed_weight_bytes) == ([], 0)


def layer_and_rows(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40, bias=bias, dtype=dtype))
    return model, torch.randn(3, 5, 24, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("faster")
def test_a_layer_computes_what_it_did(bias):
    model, rows = layer_and_rows(bias)
    expected = model(rows)
    assert pack_weights(model) == 24 * 40 * 4
    with torch.inference_mode():
        for few in (rows, rows[0], rows[0, 0], rows[:0], rows.transpose(0, 1), rows[1:, ::2]):
            own = nn.functional.linear(few, model[0].weight, model[0].bias)
            torch.testing.assert_close(model(few), own)
        torch.testing.assert_close(model(rows), expected)
    rows.requires_grad_()
    model(rows).sum().backward()  # as any layer's, where somebody trains
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad[0, 0], model[0].weight.sum(0))


def step(model, rows):
    with torch.enable_grad():
        loss = model(rows).square().sum()
        loss.backward()
    return loss


@pytest.mark.usefixtures("faster")
def test_what_becomes_of_a_layer():
    model, rows = layer_and_rows()
    pack_weights(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.inference_mode():
            torch.testing.assert_close(copied(rows), model(rows))
        with torch.no_grad():
            copied[0].weight.zero_()
            torch.testing.assert_close(copied(rows), copied[0].bias.expand(3, 5, 40))
    assert model.state_dict().keys() == {"0.weight", "0.bias"}
    torch.optim.SGD(model.parameters(), lr=0.5).step(lambda: step(model, rows))
    with torch.inference_mode():
        own = nn.functional.linear(rows, model[0].weight, model[0].bias)
        torch.testing.assert_close(model(rows), own)
    model[0].weight = nn.Parameter(torch.zeros(40, 24))
    with torch.inference_mode():
        torch.testing.assert_close(model(rows), model[0].bias.expand(3, 5, 40))
    assert model.double()(rows.double()).dtype is torch.float64


def test_only_what_is_faster_is_packed_and_what_fits(monkeypatch):
    model, _ = layer_and_rows()
    monkeypatch.setattr(packed_weights, "_is_faster", lambda packed, layers: False)
    assert (pack_weights(model), packed_layers(model)) == (0, [])
    monkeypatch.setattr(packed_weights, "_is_faster", lambda packed, layers: True)
    monkeypatch.setattr(packed_weights, "_SHARE_OF_MEMORY", 0.0)
    assert (pack_weights(model), packed_layers(model)) == (0, [])


@pytest.mark.usefixtures("faster")
def test_what_is_no_plain_weight_is_left_alone():
    class Own(nn.Linear):
        pass

    for layer in (
        Own(8, 8),
        nn.Linear(8, 8, dtype=torch.float64),
        nn.Linear(8, 8, device="meta"),
        nn.Embedding(8, 8),
    ):
        assert (pack_weights(layer), pack_weights(nn.Sequential(layer))) == (0, 0)


@pytest.mark.usefixtures("faster")
def test_a_build_that_packs_otherwise_or_not_at_all(monkeypatch):
    model, rows = layer_and_rows()
    expected = model(rows)

    def refuse(self):
        raise RuntimeError("mkldnn is not there")

    monkeypatch.setattr(PackedLinear, "pack", refuse)
    assert pack_weights(model) == 0
    monkeypatch.setattr(PackedLinear, "pack", lambda self: None)
    monkeypatch.setattr(PackedLinear, "forward", lambda self, input: input.new_zeros(20, 40))
    assert pack_weights(model) == 0
    torch.testing.assert_close(model(rows), expected)


def test_the_clock_decides():
    model, _ = layer_and_rows()
    layers = [model[0]] * 2
    slow = packed_weights._is_faster

    class Waiting(nn.Linear):
        def forward(self, input):
            torch.mm(torch.ones(400, 400), torch.ones(400, 400))
            return super().forward(input)

    waiting = [Waiting(24, 40), Waiting(24, 40)]
    assert slow(layers, waiting)
    assert not slow(waiting, layers)
