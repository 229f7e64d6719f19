"""Models that are none of causal language: refused by name and as objects, and why."""

import re

import pytest
import torch
import transformers as tf

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf.architecture import check_architecture
from genlm_backend.errors import GenlmBackendError, ModelNotFoundError, UnsupportedModelError
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row

SMALL = {
    "vocab_size": families.VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
SEQ2SEQ = {
    "vocab_size": families.VOCAB,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
llama, gpt2 = families.PER_TOKEN["llama"], families.PER_TOKEN["gpt2"]
bert = lambda **more: tf.BertConfig(**SMALL, **more)  # noqa: E731
t5 = lambda: tf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)  # noqa: E731


def unpadded(config):
    """A config that names no token for padding, as those of most models."""
    config.pad_token_id = None
    return config


WRONG = {
    "classifier": (lambda: tf.LlamaForSequenceClassification(llama()), "is no causal", "is no"),
    "classifier without padding": (
        lambda: tf.LlamaForSequenceClassification(unpadded(llama())),
        "is no causal",
        "is no",
    ),
    "tied classifier": (lambda: tf.GPT2ForSequenceClassification(gpt2()), "is no", "is no"),
    "tagger": (lambda: tf.LlamaForTokenClassification(llama()), "is no causal", r"\(2, 4, 2\)"),
    "headless": (lambda: tf.LlamaModel(llama()), r"lacks them: \['lm_head", "has no head"),
    "BERT": (lambda: tf.BertForMaskedLM(bert()), "is no causal", "is an encoder"),
    "BERT with the head": (lambda: tf.BertLMHeadModel(bert()), "is an enc", "is_decoder=True"),
    "headless BERT": (lambda: tf.BertModel(bert()), "checkpoint .* lacks them", "has no head"),
    "T5": (lambda: tf.T5ForConditionalGeneration(t5()), "is no causal", "encoder-decoder"),
    "BART": (
        lambda: tf.BartForConditionalGeneration(tf.BartConfig(**SEQ2SEQ)),
        "is no causal",
        "encoder-decoder",
    ),
    "no text": (
        lambda: tf.ViTModel(tf.ViTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"})),
        "type 'vit'",
        "is not a language model over tokens",
    ),
}


def saved(model, path):
    model.save_pretrained(path)
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer())
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.filterwarnings("ignore:.*BertLMHeadModel")
@pytest.mark.parametrize("kind", WRONG)
def test_models_that_are_not_causal_are_refused(kind, tmp_path):
    make, by_name, as_object = WRONG[kind]
    model = make().eval()
    with pytest.raises(UnsupportedModelError, match=by_name) as raised:
        AsyncTransformer.from_name(saved(model, tmp_path))
    assert len(str(raised.value)) < 700
    with pytest.raises(UnsupportedModelError, match=as_object):
        AsyncTransformer(model, word_tokenizer())


RIGHT = {
    "a head that is the embeddings": lambda: tf.GPT2Model(gpt2()),
    "a decoder of BERT": lambda: tf.BertLMHeadModel(bert(is_decoder=True)),
    "a decoder of BART": lambda: tf.BartForCausalLM(tf.BartConfig(**SEQ2SEQ)),
    "prefixes read both ways": lambda: families.make("cpm-ant"),
    "nothing but linear attention": lambda: families.of(
        tf.Qwen3NextConfig(
            **{
                **families.COMMON,
                "head_dim": 8,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "layer_types": ["linear_attention", "linear_attention"],
            }
        )
    ),
}


@pytest.mark.filterwarnings("ignore:Qwen3NextForCausalLM runs every context whole")
@pytest.mark.parametrize("kind", RIGHT)
def test_causal_models_of_unusual_kinds_are_accepted(kind, tmp_path):
    model = RIGHT[kind]().eval()
    path = saved(model, tmp_path)
    whole = tf.AutoModelForCausalLM.from_pretrained(path).eval()
    whole.config.use_cache = False  # transformers has no cache of linear attention alone
    with AsyncTransformer.from_name(path) as lm:
        row = lm.next_token_logprobs_sync([5, 6, 7])
        torch.testing.assert_close(row, naive_row(whole, [5, 6, 7]), rtol=0, atol=2e-5)


def test_every_causal_architecture_of_transformers_is_accepted():
    """And none that it has for something else, but those without a head, which may be tied."""
    from transformers.models.auto import modeling_auto as auto

    for model_type, names in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in (names,) if isinstance(names, str) else names:
            check_architecture("x", {"architectures": [name], "model_type": model_type})
    check_architecture(
        "x",
        {
            "architectures": ["MyForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "x"},
            "model_type": "mine",
        },
    )
    for task in ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING"):
        for model_type, name in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            with pytest.raises(UnsupportedModelError, match=re.escape(name)):
                check_architecture("x", {"architectures": [name], "model_type": model_type})


def test_weight_missing_from_the_checkpoint_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    path = saved(families.make("llama"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"model.layers.1.mlp.up_proj.weight"):
        AsyncTransformer.from_name(path)


def test_a_misspelt_option_of_loading_is_named(tmp_path):
    path = saved(families.make("llama"), tmp_path)
    for options, message in [
        ({"hf_opts": {"devcie_map": "cpu"}}, "devcie_map is not an option of hf_opts.*device_map"),
        ({"device": "cpu"}, r"^device is not an option .*device_map.* go into hf_opts$"),
    ]:
        with pytest.raises(GenlmBackendError, match=message) as raised:
            AsyncTransformer.from_name(path, **options)
        assert isinstance(raised.value, TypeError)
    with AsyncTransformer.from_name(path, hf_opts={"rms_norm_eps": 0.5}) as lm:  # of the config
        assert lm.model.config.rms_norm_eps == 0.5


def test_directory_without_a_tokenizer_raises_model_not_found_error(tmp_path):
    families.make("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer files, only .*\.save_pretrained"):
        AsyncTransformer.from_name(str(tmp_path))
