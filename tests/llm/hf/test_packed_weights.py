"""Packed weights: the same rows, whatever becomes of the layers, and only where they are faster."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf import packed_weights
from genlm_backend.backends.hf.model_view import ModelView
from genlm_backend.backends.hf.packed_weights import PackedLinear, PackedWeights
from tests.llm import families
from tests.llm.conftest import random_contexts, word_tokenizer
from tests.naive import naive_row

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch packs nothing"
)


@pytest.fixture
def faster(monkeypatch):
    """Every shape is packed, whatever the clock says."""
    monkeypatch.setattr(packed_weights, "_found", {})
    monkeypatch.setattr(packed_weights, "MIN_BYTES", 0)
    monkeypatch.setattr(packed_weights, "_time_ratio", lambda packed, layers: 0.5)


@pytest.fixture
def used(monkeypatch):
    """The layers that have computed with packed weights."""
    layers = []
    forward = PackedLinear.forward

    def counted(self, input):
        layers.append(self)
        return forward(self, input)

    monkeypatch.setattr(PackedLinear, "forward", counted)
    return layers


def is_plain(model):
    return not any(
        isinstance(layer, PackedLinear) or "packed" in vars(layer) for layer in model.modules()
    )


def check_rows(lm, model, contexts=([1, 2, 3], [4, 5], [1, 2, 7, 8])):
    for context in contexts:
        row = lm.next_token_logprobs_sync(context)
        torch.testing.assert_close(row, naive_row(model, context), rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt-oss"])
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("holds", ["float32", "bfloat16"])
async def test_rows_with_packed_weights_match_bare_model(name, holds, used):
    model = families.make(name).to(getattr(torch, holds)).float()
    expected = {
        tuple(context): naive_row(model, context) for context in random_contexts(20, max_length=30)
    }
    with AsyncTransformer(model, word_tokenizer(), packs_weights=True) as lm:
        assert lm.packed_weight_bytes > 0
        used.clear()
        found = await lm.batch_next_token_logprobs([list(context) for context in expected])
        assert used
        assert is_plain(model)
        num_bytes = sum(layer.weight.nbytes for layer in set(used))
        assert lm.packed_weight_bytes == num_bytes // (2 if holds == "bfloat16" else 1)
        for own, row in zip(found, expected.values(), strict=True):
            torch.testing.assert_close(own, row, rtol=0, atol=3e-5)
    assert lm.packed_weight_bytes == 0


@pytest.mark.usefixtures("faster")
def test_models_are_packed_unless_opted_out_or_in_training(tmp_path):
    model = families.make("llama")
    model.train()
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert lm.packed_weight_bytes == 0
    model.train().requires_grad_(False)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert lm.packed_weight_bytes > 0
    model.eval().requires_grad_(True)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert lm.packed_weight_bytes > 0
    with AsyncTransformer(model, word_tokenizer(), packs_weights=False) as lm:
        assert lm.packed_weight_bytes == 0
    model.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()).save_pretrained(tmp_path)
    with AsyncTransformer.from_name(str(tmp_path)) as lm:
        assert lm.packed_weight_bytes > 0
        check_rows(lm, model)
    with AsyncTransformer.from_name(str(tmp_path), packs_weights=False) as lm:
        assert lm.packed_weight_bytes == 0


def layer_and_rows(bias=True, holds=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40, bias=bias)).to(holds).float()
    return model, torch.randn(3, 5, 24)


def packed_of(model):
    packed = PackedWeights()
    packed.pack(model)
    return packed


def view_with(packed, model):
    view = ModelView(model)
    packed.place(view.copies)
    return view


def check_layer(model, packed, view, rows, is_packed):
    """The view of a layer computes what the weight says, with or without a packed one."""
    packed.check_weights()
    layer = model[0]
    assert type(layer) is nn.Linear
    assert view.module[0].packed.is_used == is_packed
    with torch.inference_mode():
        expected = nn.functional.linear(rows, layer.weight, layer.bias)
        torch.testing.assert_close(view.module(rows), expected)


def _through_data(model):
    model[0].weight.data.mul_(3)


def _permuted(model):
    weight = model[0].weight
    weight.data.copy_(weight.data.flip(0))
    weight.data.copy_(weight.data.roll(1, 1))


def _fused(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    model(torch.ones(1, 24)).square().sum().backward()
    optimizer.step()


def _at_an_odd_place(model):
    memory = torch.arange(40 * 24 + 1, dtype=torch.float32)
    model[0].weight.data = memory[1:].view(40, 24)


@pytest.mark.parametrize("change", [_through_data, _permuted, _fused, _at_an_odd_place])
@pytest.mark.usefixtures("faster")
def test_untracked_weight_changes_are_found_by_pack_again(change):
    model, rows = layer_and_rows()
    packed = packed_of(model)
    view = view_with(packed, model)
    change(model)
    packed.pack_again()
    check_layer(model, packed, view, rows, is_packed=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (1, 1, 24), (3, 5, 24), (0, 24)])
@pytest.mark.parametrize("holds", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("faster")
def test_packed_products_of_any_shape_match_plain_ones(shape, holds, bias):
    model, _ = layer_and_rows(bias, holds)
    packed = packed_of(model)
    assert packed.nbytes == 24 * 40 * (4 if holds == torch.float32 else 2)
    rows = torch.randn(shape)
    before = rows.clone()
    check_layer(model, packed, view_with(packed, model), rows, is_packed=True)
    assert torch.equal(rows, before)


@pytest.mark.usefixtures("faster")
def test_weights_that_16_bits_cannot_hold_are_packed_in_32():
    for value in (1e5, 1 + 2**-12, float("inf")):
        model, _ = layer_and_rows(holds=torch.bfloat16)
        assert packed_of(model).nbytes == 24 * 40 * 2
        with torch.no_grad():
            model[0].weight[3, 4] = value
        assert packed_of(model).nbytes == 24 * 40 * 4
    model, rows = layer_and_rows(holds=torch.bfloat16)
    packed = packed_of(model)
    view = view_with(packed, model)
    model[0].weight.data.add_(1e-4)
    packed.pack_again()
    assert packed.nbytes == 24 * 40 * 4
    check_layer(model, packed, view, rows, is_packed=True)


def _small_rows(weight):
    weight[:24] *= 2.0**-16


def _small_columns(weight):
    weight[:, 3] *= 2.0**-16


def _one_large_number(weight):
    weight.mul_(2.0**-10)[0, 0] = 1


@pytest.mark.parametrize("change", [_small_rows, _small_columns, _one_large_number])
@pytest.mark.usefixtures("faster")
def test_weights_that_lose_digits_in_16_bits_are_packed_in_32(change):
    model, _ = layer_and_rows(holds=torch.bfloat16)
    with torch.no_grad():
        change(model[0].weight)
    assert torch.equal(model[0].weight, model[0].weight.bfloat16().float())
    assert packed_of(model).nbytes == 24 * 40 * 4


@pytest.mark.usefixtures("faster")
def test_weights_that_no_longer_fit_into_16_bits_keep_to_the_budget(monkeypatch):
    model, rows = layer_and_rows(holds=torch.bfloat16)
    packed = packed_of(model)
    view = view_with(packed, model)
    model[0].weight.data.mul_(1.0001)
    monkeypatch.setattr(packed_weights, "cpu_budget", lambda: 24 * 40 * 4 - 1)
    packed.pack_again()
    assert packed.nbytes == 0
    check_layer(model, packed, view, rows, is_packed=False)


@pytest.mark.usefixtures("faster")
def test_write_during_packing_is_noticed(monkeypatch):
    model, rows = layer_and_rows()
    packed = packed_of(model)
    view = view_with(packed, model)
    pack = packed_weights._BLOCKS.pack

    def pack_while_written(weight):
        found = pack(weight)
        with torch.no_grad():
            model[0].weight.mul_(2)
        return found

    layout = packed_weights._BLOCKS._replace(pack=pack_while_written)
    monkeypatch.setattr(packed._packed[0], "layout", layout)
    packed.pack_again()
    check_layer(model, packed, view, rows, is_packed=False)


@pytest.mark.usefixtures("faster")
def test_packing_leaves_other_users_of_the_model_intact():
    model = families.make("llama")
    expected = naive_row(model, [1, 2, 3])
    plain = {"row_cache_bytes": 0, "packs_weights": False}
    with AsyncTransformer(model, word_tokenizer(), **plain) as beside:
        options = {"row_cache_bytes": 0, "packs_weights": True}
        with (
            AsyncTransformer(model, word_tokenizer(), **options) as lm,
            AsyncTransformer(model, word_tokenizer(), **options) as other,
        ):
            assert lm.packed_weight_bytes == other.packed_weight_bytes > 0
            assert beside.packed_weight_bytes == 0
            for one in (lm, beside, other, lm):
                check_rows(one, model)
            assert torch.equal(naive_row(model, [1, 2, 3]), expected)
        check_rows(beside, model)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    with AsyncTransformer(model, word_tokenizer(), packs_weights=True) as lm:
        adapted.merge_adapter()
        lm.clear_cache()  # whatever its owner has done to the model
        adapted.unmerge_adapter()
    changed = adapted.merge_and_unload()
    with AsyncTransformer(changed, word_tokenizer(), packs_weights=True) as lm:
        check_rows(lm, changed)
        assert (naive_row(changed, [1, 2, 3]) - expected).abs().max() > 0.01


@pytest.mark.usefixtures("faster")
def test_weights_are_packed_only_if_faster_and_within_budget(monkeypatch):
    model, _ = layer_and_rows()
    monkeypatch.setattr(packed_weights, "_found", {})
    monkeypatch.setattr(packed_weights, "_time_ratio", lambda packed, layers: 1.0)
    assert packed_of(model).nbytes == 0
    monkeypatch.setattr(packed_weights, "_time_ratio", lambda packed, layers: 0.5)
    assert packed_of(model).nbytes == 0  # what has been found out holds for the process
    monkeypatch.setattr(packed_weights, "_found", {})
    monkeypatch.setattr(packed_weights, "cpu_budget", lambda: 24 * 40 * 4 - 1)
    assert packed_of(model).nbytes == 0


@pytest.mark.usefixtures("faster")
def test_layers_other_than_plain_linear_are_not_packed():
    class Own(nn.Linear):
        pass

    with torch.inference_mode():
        of_inference = nn.Linear(8, 8)
    for layer in (
        Own(8, 8),
        nn.Linear(8, 8, dtype=torch.float64),
        nn.Linear(8, 8, device="meta"),
        nn.Embedding(8, 8),
        of_inference,
    ):
        assert packed_of(nn.Sequential(layer)).nbytes == 0


@pytest.mark.usefixtures("faster")
def test_nothing_is_packed_if_operator_is_wrong_or_missing(monkeypatch):
    model, _ = layer_and_rows()
    with monkeypatch.context() as patch:
        patch.setattr(PackedLinear, "forward", lambda self, input: input.new_zeros(20, 40))
        assert packed_of(model).nbytes == 0

    def refuse(self):
        raise RuntimeError("mkldnn is not there")

    monkeypatch.setattr(packed_weights, "_found", {})
    monkeypatch.setattr(packed_weights._Packed, "pack", refuse)
    assert packed_of(model).nbytes == 0
