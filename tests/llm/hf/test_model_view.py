"""The view of a model: the same bits and memory, and nothing that is done to it is done to both."""

import copy
import functools
import gc
import random
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf.model_view import view_of
from genlm_backend.errors import AdapterError, ModelStateError
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.hf.test_families import GATHERED
from tests.naive import naive_row

FAMILIES = [*families.PER_TOKEN, *families.FEW_RUNNING, *families.WHOLE]
IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 3]])


@torch.inference_mode()
def logits(model, ids=IDS):
    return model(input_ids=ids).logits


def check_row(lm, model, context=(1, 2, 3)):
    row = lm.next_token_logprobs_sync(list(context))
    torch.testing.assert_close(row, naive_row(model, list(context)), rtol=0, atol=3e-5)


def attributes(model):
    """What all modules of a model have, as it is now."""
    return [
        {name: {**value} if isinstance(value, dict) else value for name, value in vars(m).items()}
        for m in model.modules()
    ]


def assert_untouched(model, before):
    """Every attribute of every module is the object that it was."""
    for now, was in zip(attributes(model), before, strict=True):
        assert now.keys() == was.keys()
        for name, value in was.items():
            if isinstance(value, dict):
                assert now[name].keys() == value.keys()
                assert all(now[name][key] is one for key, one in value.items())
            else:
                assert now[name] is value


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
def test_view_gives_same_logits_and_shares_parameters(name):
    model = families.make(name)
    config, expected = model.config.to_dict(), logits(model)
    view = view_of(model, IDS)
    assert view.copies
    assert {*view.module.modules()}.isdisjoint(model.modules())
    before = attributes(model)  # some keep what they have read
    assert torch.equal(logits(view.module), expected)
    if name in families.PER_TOKEN and name not in GATHERED:
        view.name_attention(True)
        assert torch.equal(logits(view.module), expected)
    own = dict(view.module.named_parameters(remove_duplicate=False))
    shared = dict(model.named_parameters(remove_duplicate=False))
    assert own.keys() == shared.keys()
    assert all(own[name] is parameter for name, parameter in shared.items())
    assert view.module.config is not model.config
    linear = next(n for n, m in view.module.named_modules() if isinstance(m, nn.Linear))
    parent, _, child = linear.rpartition(".")
    setattr(view.module.get_submodule(parent), child, nn.Identity())
    assert_untouched(model, before)
    assert torch.equal(logits(model), expected)
    assert model.config.to_dict() == config


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mamba", "falcon-rotary", "mixtral"])
@pytest.mark.filterwarnings("ignore")
def test_wrapped_model_is_untouched_before_during_and_after_pass(name):
    model = families.make(name)
    during = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda *_: during.append((attributes(model), model.config._attn_implementation))
    )
    before, named = attributes(model), model.config._attn_implementation
    with AsyncTransformer(model, word_tokenizer(), packs_weights=True) as lm:
        check_row(lm, model, [1, 2, 3])
        check_row(lm, model, [1, 2, 3, 4])
        assert_untouched(model, before)
    assert_untouched(model, before)
    hook.remove()
    assert len(during) > 8
    for modules, name in during:
        assert name == named
        assert all(m.keys() == b.keys() for m, b in zip(modules, before, strict=True))


# -------------------------------------------------------------------- references of all kinds


class Part(nn.Module):
    """A layer that is referred to from elsewhere."""

    def __init__(self, model):
        super().__init__()
        self.inner = nn.Linear(32, 32)
        vars(self).update(owner=model, siblings=[self.inner], by_name={"inner": self.inner})
        self.bound = self.scaled
        self.partial = functools.partial(Part.scaled, self)

    def scaled(self, states):
        return self.inner(states)

    def forward(self, states):
        assert self.owner.model.norm is self
        found = [self.bound(states), self.partial(states), self.siblings[0](states)]
        return sum(found) + self.by_name["inner"](states)


def test_references_to_modules_become_references_to_views():
    model = families.make("llama")
    model.model.norm = Part(model)
    view = view_of(model, IDS)
    assert view.copies
    part = view.module.model.norm
    assert part.owner is view.module
    assert part.bound.__self__ is part
    assert part.partial.args == (part,)
    assert part.siblings == [part.inner]
    assert torch.equal(logits(view.module), logits(model))
    part.inner = None  # which the model has still
    assert torch.equal(logits(model), logits(view_of(model, IDS).module))


def test_replaced_forward_is_bound_to_view():
    model = families.make("llama")
    forward = type(model.model.norm).forward
    model.model.norm.forward = types.MethodType(
        lambda self, x: 2 * forward(self, x), model.model.norm
    )
    view = view_of(model, IDS)
    assert view.module.model.norm.forward.__self__ is view.module.model.norm
    with AsyncTransformer(model, word_tokenizer(), packs_weights=True) as lm:
        check_row(lm, model)


def test_accelerate_hooks_work_in_view(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = families.make("llama")
    expected = naive_row(model, [1, 2, 3])
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "cpu")
    places |= {"model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    assert any(parameter.is_meta for parameter in model.parameters())
    view = view_of(model, IDS)
    assert view.copies
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert lm.kv_reuse
        row = lm.next_token_logprobs_sync([1, 2, 3])
        torch.testing.assert_close(row, expected, rtol=0, atol=3e-5)


def _closed_over(model):
    forward = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **options: forward(*args, **options)


def test_model_with_closure_over_forward_runs_without_view(tmp_path):
    peft = pytest.importorskip("peft")
    model = families.make("llama")
    expected = [naive_row(model, context) for context in ([1, 2, 3], [1, 2, 3, 4])]
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(families.make("llama"), config).save_pretrained(str(tmp_path))
    _closed_over(model)
    assert not view_of(model, IDS).copies
    before = attributes(model)
    with AsyncTransformer(model, word_tokenizer(), packs_weights=True) as lm:
        for context, row in zip(([1, 2, 3], [1, 2, 3, 4]), expected, strict=True):
            found = lm.next_token_logprobs_sync(context)
            torch.testing.assert_close(found, row, rtol=0, atol=3e-5)
        with pytest.raises(AdapterError, match="does not run on copies of its modules"):
            lm.add_new_lora(str(tmp_path), "mine")
        model.train()
        with pytest.raises(RuntimeError, match="training mode"):
            lm.next_token_logprobs_sync([5])
        model.eval()
        assert_untouched(model, before)


def test_closed_model_frees_parameters_without_garbage_collection():
    model = families.make("llama")
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        with AsyncTransformer(model, word_tokenizer()) as lm:
            lm.next_token_logprobs_sync([1, 2, 3])
        del model, lm
        assert [weight for weight in weights if weight() is not None] == []
    finally:
        gc.enable()


def test_hooks_registered_later_run_in_view():
    model, called = families.make("llama"), []
    layer = model.model.layers[0]
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        lm.next_token_logprobs_sync([1, 2, 3])
        handle = layer.register_forward_pre_hook(lambda module, _: called.append(module))
        lm.next_token_logprobs_sync([4])
        logits(model)
        assert called == [lm._evaluator._runner.view.module.model.layers[0], layer]
        handle.remove()
        lm.next_token_logprobs_sync([5])
        assert len(called) == 2


@pytest.mark.parametrize("is_first", [False, True])
def test_hidden_states_are_captured_once_in_model_and_view(is_first):
    model = families.make("llama")
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        view = lm._evaluator._runner.view.module
        for one in [view, model, view] if is_first else [model, view, model]:
            lm.clear_cache()
            lm.next_token_logprobs_sync([1, 2, 3])
            with torch.no_grad():
                found = one(input_ids=IDS, output_hidden_states=True).hidden_states
            assert len(found) == 1 + len(model.model.layers)


# -------------------------------------------------------------------- what its owner does


def _replace_a_layer(model, choose):
    layer = nn.Linear(32, 48, bias=False)
    nn.init.normal_(layer.weight, 0, 0.3)
    model.model.layers[choose.randrange(2)].mlp.up_proj = layer


def _replace_a_parameter(model, choose):
    size = model.lm_head.weight.shape
    model.lm_head.weight = nn.Parameter(torch.randn(size) / 4, requires_grad=False)


def _assign_data(model, choose):
    parameter = choose.choice([*model.parameters()])
    parameter.data = parameter.data * 1.1


def _step(model, choose):
    with torch.enable_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model.train()
        model(input_ids=IDS).logits.square().mean().backward()
        optimizer.step()
        model.eval()


def _load(model, choose):
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def _assign(model, choose):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def _convert(model, choose):
    model.double().float()


def _replace_a_forward(model, choose):
    norm = model.model.norm
    norm.forward = types.MethodType(lambda self, x: -type(self).forward(self, x), norm)


def _replace_a_class(model, choose):
    class Halved(nn.Linear):
        def forward(self, rows):
            return super().forward(rows) / 2

    model.model.layers[1].mlp.down_proj.__class__ = Halved


def _add_a_hook(model, choose):
    model.model.layers[0].register_forward_hook(lambda module, args, out: out * 1.3)


CHANGES = [_assign_data, _step, _load, _convert, _add_a_hook]
REFUSED = {
    _replace_a_layer: "layers of model.layers.*mlp",
    _replace_a_parameter: "tensor lm_head.weight",
    _assign: "tensor model.",
    _replace_a_forward: "forward of model.norm",
    _replace_a_class: "class of model.layers.1.mlp.down_proj",
}


@pytest.mark.parametrize("change", REFUSED)
def test_unsupported_change_of_model_raises_model_state_error(change):
    model = families.make("llama")
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        check_row(lm, model)
        change(model, random.Random(0))
        with pytest.raises(ModelStateError, match=f"{REFUSED[change]}.* wrap the model again"):
            lm.next_token_logprobs_sync([1, 2, 3])
    with AsyncTransformer(model, word_tokenizer()) as lm:
        check_row(lm, model)


@pytest.mark.parametrize("seed", range(6))
def test_changed_weights_and_hooks_are_used_in_next_batch(seed, monkeypatch):
    """Rows after a change are those of the model as it is now, hooks included."""
    from genlm_backend.backends.hf import packed_weights

    monkeypatch.setattr(packed_weights, "_found", {})
    monkeypatch.setattr(packed_weights, "MIN_BYTES", 0)
    monkeypatch.setattr(packed_weights, "_time_ratio", lambda packed, layers: 0.5)
    choose, model = random.Random(seed), families.make("llama", seed)
    torch.manual_seed(seed)
    if seed % 2:  # weights that are packed in 16 bits
        model = model.bfloat16().float()
    with (
        AsyncTransformer(model, word_tokenizer(), packs_weights=True, row_cache_bytes=0) as lm,
        AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as other,
    ):
        for change in choose.choices(CHANGES, k=12):
            change(model, choose)
            for one in choose.sample([lm, other], choose.randint(1, 2)):
                one._evaluator.scheduler.tree.clear()  # and no more than what has been computed
                context = [choose.randrange(96) for _ in range(3)]
                check_row(one, model, context)
                check_row(one, model, [*context, 7])


def test_wrappers_and_owner_run_one_model_concurrently():
    """Each is held within a pass until the others have made theirs."""
    import threading

    model = families.make("gemma2")
    barrier, held = threading.Barrier(3), set()
    expected = [naive_row(model, [i, 5, 6]) for i in range(3)]
    with (
        AsyncTransformer(model, word_tokenizer()) as one,
        AsyncTransformer(model, word_tokenizer(), packs_weights=True) as two,
        ThreadPoolExecutor(3) as pool,
    ):

        def meet(*_):
            if threading.get_ident() not in held:
                held.add(threading.get_ident())
                barrier.wait(60)

        hook = model.model.layers[1].register_forward_pre_hook(meet)
        found = [
            pool.submit(one.next_token_logprobs_sync, [0, 5, 6]),
            pool.submit(two.next_token_logprobs_sync, [1, 5, 6]),
            pool.submit(naive_row, model, [2, 5, 6]),
        ]
        for future, row in zip(found, expected, strict=True):
            torch.testing.assert_close(future.result(60), row, rtol=0, atol=3e-5)
        hook.remove()
    assert len(held) == 3


def test_change_during_pass_is_detected_by_next_pass():
    model = families.make("llama")
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        expected = naive_row(model, [1, 2, 3])
        layer = model.model.layers[1].mlp

        def change(*_):
            hook.remove()
            model.train()
            layer.up_proj = nn.Identity()

        hook = model.get_input_embeddings().register_forward_pre_hook(change)
        up = layer.up_proj
        row = lm.next_token_logprobs_sync([1, 2, 3])
        torch.testing.assert_close(row, expected, rtol=0, atol=3e-5)
        layer.up_proj = up
        with pytest.raises(RuntimeError, match="training mode"):
            lm.next_token_logprobs_sync([1, 2, 3])
        model.eval()
        check_row(lm, model)
