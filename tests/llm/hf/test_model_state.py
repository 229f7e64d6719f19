"""What a model's owner may change between two batches, and what is told."""

import copy

import pytest
import torch

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf.cascade_attention import CascadeAttention
from genlm_backend.errors import ModelStateError, UnsupportedModelError
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row


@pytest.fixture
def model(tiny_llama):
    return copy.deepcopy(tiny_llama)


@pytest.fixture
def lm(model):
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        yield lm


def put(config, name, value):
    return lambda: setattr(config, name, value)


CHANGES = {
    "train": lambda m: (m.train, m.eval, "training mode"),
    "a layer": lambda m: (m.model.layers[1].mlp.train, m.eval, "training mode"),
    "return_dict": lambda m: (
        put(m.config, "return_dict", False),
        put(m.config, "return_dict", True),
        "config.return_dict from True to False",
    ),
    "rms_norm_eps": lambda m: (
        put(m.config, "rms_norm_eps", 0.5),
        put(m.config, "rms_norm_eps", m.config.rms_norm_eps),
        "rms_norm_eps",
    ),
    "in place": lambda m: (
        lambda: m.config.rope_parameters.update(rope_theta=3.0),
        lambda r=dict(m.config.rope_parameters): m.config.rope_parameters.update(r),
        "rope_parameters",
    ),
    "dtype": lambda m: (m.double, m.float, "float64"),
    "the head on meta": lambda m: (
        lambda: m.lm_head.to("meta"),
        put(m.lm_head, "weight", m.lm_head.weight),
        "lm_head.weight from 'torch.float32 on cpu' to 'torch.float32 on meta'",
    ),
    "the head in float64": lambda m: (m.lm_head.double, m.lm_head.float, "lm_head.weight from"),
    "a buffer": lambda m: (m.model.rotary_emb.double, m.model.rotary_emb.float, "inv_freq from"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_model_is_refused_until_change_is_undone(lm, model, change):
    do, undo, said = change(model)
    expected = naive_row(model, [1, 2, 3])
    do()
    for ask in (lm.next_token_logprobs_sync, lm.next_token_logprobs_uncached):
        with pytest.raises(ModelStateError, match=said):
            ask([1, 2, 3])
    with pytest.raises(ModelStateError, match=said):
        lm.batch_score_sync([[1, 2]], [[3]])
    undo()
    row = lm.next_token_logprobs_sync([1, 2, 3])
    torch.testing.assert_close(row, expected, rtol=0, atol=2e-5)


def checkpoint_gradients(model):
    """Have a model compute activations again for gradients; transformers 5.24 renamed it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def test_config_changes_without_effect_on_rows_are_accepted(lm, model):
    checkpoint_gradients(model)
    model.config.use_cache = False
    model.config.pad_token_id = model.config.eos_token_id
    model.config.attention_dropout = 0.3
    model.config.initializer_range = 1.0
    model.config.id2label = {0: "a"}
    row = lm.next_token_logprobs_sync([1, 2, 3])
    torch.testing.assert_close(row, naive_row(model, [1, 2, 3]), rtol=0, atol=2e-5)


def test_dropout_of_training_model_affects_no_row(model):
    """Its default configuration drops a tenth of what passes through each layer."""
    gpt2 = families.make("gpt2")
    assert gpt2.config.resid_pdrop == 0.1
    gpt2.train()
    checkpoint_gradients(gpt2)
    with AsyncTransformer(gpt2, word_tokenizer()) as lm:
        row = lm.next_token_logprobs_sync([1, 2, 3])
        torch.testing.assert_close(row, naive_row(gpt2, [1, 2, 3]), rtol=0, atol=2e-5)
        gpt2.train()
        with pytest.raises(ModelStateError, match=r"eval\(\)"):
            lm.next_token_logprobs_sync([1, 2, 4])


def test_model_with_return_dict_false_is_refused(model):
    model.config.return_dict = False
    with pytest.raises(ModelStateError, match="return_dict=False"):
        AsyncTransformer(model, word_tokenizer())


def test_result_of_torch_compile_is_refused(model):
    with pytest.raises(UnsupportedModelError, match=r"model.compile\(\)"):
        AsyncTransformer(torch.compile(model, backend="eager"), word_tokenizer())


class Counting:
    """A compiler that leaves a graph as it is, and counts how often one is run."""

    def __init__(self):
        self.num_runs = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.num_runs += 1
            return graph.forward(*args)

        return run


def compile_layers(model, backend):
    for layer in model.model.layers:
        layer.compile(backend=backend)


def compile_forward(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)


COMPILED = {
    "model": lambda model, backend: model.compile(backend=backend),
    "layers": compile_layers,
    "forward": compile_forward,
}


@pytest.mark.parametrize("compiles", COMPILED.values(), ids=COMPILED.keys())
@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_compiled_model_gives_rows_of_uncompiled_code(model, compiles, is_wrapped_first):
    backend, plain = Counting(), copy.deepcopy(model)
    if not is_wrapped_first:
        compiles(model, backend)
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        if is_wrapped_first:
            lm.next_token_logprobs_sync([1, 2])
            compiles(model, backend)
        assert isinstance(lm._evaluator.scheduler.cache.attention, CascadeAttention)
        contexts = [[1, 2, 3], [1, 2, 4, 5], [6], [1, 2, 3, 7]]
        rows = [*lm.batch_next_token_logprobs_sync(contexts[:3])]
        rows.append(lm.next_token_logprobs_sync(contexts[3]))
        rows.append(lm.next_token_logprobs_uncached(contexts[3]))
        for context, row in zip([*contexts, contexts[3]], rows, strict=True):
            torch.testing.assert_close(row, naive_row(plain, context), rtol=0, atol=2e-5)
        assert lm.score_sync([1, 2], [3, 7])[1] == pytest.approx(
            float(naive_row(plain, [1, 2, 3])[7]), abs=2e-5
        )
        assert not backend.num_runs
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]))  # its owner's calls are compiled as before
        assert backend.num_runs


def test_peft_model_reuses_keys_and_values(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    with AsyncTransformer(adapted, word_tokenizer(), row_cache_bytes=0) as lm:
        assert lm.kv_reuse
        for context in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 5]):
            row = lm.next_token_logprobs_sync(context)
            torch.testing.assert_close(row, naive_row(adapted, context), rtol=0, atol=2e-5)
        assert lm.statistics().tokens_reused > 0


def _delete(model):
    model.delete_adapter("default")


def _add_again(model):
    config = model.peft_config["default"]
    model.delete_adapter("default")
    model.add_adapter("default", config)
    model.set_adapter("default")


def _replace_a_part(model):
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    layer.lora_B["default"] = torch.nn.Linear(8, 32, bias=False)


@pytest.mark.parametrize("change", [_delete, _add_again, _replace_a_part])
def test_adapter_replaced_by_owner_raises_model_state_error(model, change):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    with AsyncTransformer(adapted, word_tokenizer(), row_cache_bytes=0) as lm:
        lm.next_token_logprobs_sync([1, 2, 3])
        change(adapted)
        for _ in range(2):
            with pytest.raises(ModelStateError, match=r"adapter default.*wrap the model again"):
                lm.next_token_logprobs_sync([1, 2, 3])
        lm._batcher.call(lambda: None)  # the worker lives


def test_rotary_frequencies_replaced_by_generate_are_accepted():
    config = families._config(
        "LlamaConfig",
        max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    )
    model = families.of(config).to(torch.bfloat16)
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0, max_length=200) as lm:
        before = lm.next_token_logprobs_sync([1, 2, 3])
        model.generate(torch.ones(1, 10, dtype=torch.int64), max_new_tokens=60, do_sample=False)
        assert model.model.rotary_emb.inv_freq.dtype is torch.float32
        torch.testing.assert_close(lm.next_token_logprobs_sync([1, 2, 3]), before, rtol=0, atol=0.1)
