"""Every kind of attention and state, against the bare model run whole and alone."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as tf
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from genlm_backend import AsyncTransformer
from genlm_backend.attention import cascade_plan as sharing
from genlm_backend.backends.hf.cascade_attention import CascadeAttention
from genlm_backend.backends.hf.hf_evaluator import CACHED_TYPES
from genlm_backend.errors import UnsupportedModelError
from genlm_backend.scheduling.prefill_plan import CostModel
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.hf.test_states import KEPT
from tests.naive import naive_row


def tree_of_contexts(generator):
    """Contexts that share prefixes of several lengths, mixed long and short."""
    trunk = [generator.randrange(families.VOCAB) for _ in range(24)]
    for length in (1, 3, 9, 24):
        for extra in (0, 1, 6):
            yield trunk[:length] + [generator.randrange(families.VOCAB) for _ in range(extra)]


GATHERED = {
    "bloom",
    "deepseek-v3",
    "falcon-alibi",
    "falcon-rotary",
    "gemma4-shared",
    *([] if families.looks_up_its_attention("gptj") else ["gptj"]),
}
"""Families whose attention does not go through the interface of transformers, or is cut short."""

UNTOLD = {
    "roberta": lambda: tf.RobertaConfig(**families.COMMON, is_decoder=True),  # from 1 on
    "reformer": lambda: tf.ReformerConfig(  # pads contexts, and fails if it is told positions
        vocab_size=families.VOCAB,
        hidden_size=32,
        num_attention_heads=4,
        attention_head_size=8,
        attn_layers=["local", "local"],
        axial_pos_embds=False,
        local_attn_chunk_length=4,
        feed_forward_size=48,
        max_position_embeddings=256,
        is_decoder=True,
    ),
    "prophetnet": lambda: tf.ProphetNetConfig(  # its head takes [B, ngram, Q, H]
        vocab_size=families.VOCAB,
        hidden_size=32,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        decoder_ffn_dim=48,
        encoder_ffn_dim=48,
        ngram=2,
        max_position_embeddings=256,
    ),
}
"""Uncached models that take no positions, or whose head takes states of another shape."""


@pytest.mark.parametrize("few_tokens", [2, 40])
@pytest.mark.parametrize("name", [*families.PER_TOKEN, *families.FEW_RUNNING, *families.WHOLE])
@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
def test_rows_match_bare_model(name, few_tokens, monkeypatch):
    monkeypatch.setattr(sharing, "FEW_TOKENS", few_tokens)
    model = families.make(name)
    generator = random.Random(name)
    contexts = list(tree_of_contexts(generator))
    # A scan of several tokens adds up in another order than one of each.
    atol = 2e-4 if name in families.RUNNING else 3e-5
    with AsyncTransformer(model, word_tokenizer()) as lm:
        assert lm.kv_reuse == (name not in families.WHOLE)
        for _ in range(4):
            rows = lm.batch_next_token_logprobs_sync(contexts)
            for context, row in zip(contexts, rows, strict=True):
                torch.testing.assert_close(row, naive_row(model, context), rtol=0, atol=atol)
            contexts = [[*c, generator.randrange(families.VOCAB)] for c in contexts]
        if name in families.RUNNING:
            assert lm.statistics().tokens_reused > 0
        elif lm.kv_reuse:
            is_shared = isinstance(lm._evaluator.scheduler.cache.attention, CascadeAttention)
            assert is_shared == (name not in GATHERED)
            assert lm._evaluator.scheduler.can.needs_equal_lengths == (name == "llama4-tuned")
            assert lm.statistics().tokens_reused > 300
        # The test means something: one wrong token, even early on, shows in the row.
        wrong = list(contexts[-1])
        wrong[-4] = (wrong[-4] + 1) % families.VOCAB
        difference = (naive_row(model, wrong) - naive_row(model, contexts[-1])).abs().max()
        assert float(difference) > 1e-2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("num_threads", [None, 3])
def test_probe_takes_seven_passes_on_one_thread(name, num_threads):
    model, before = families.make(name), torch.get_num_threads()
    during = []
    hook = model.register_forward_pre_hook(lambda *_: during.append(torch.get_num_threads()))
    with AsyncTransformer(model, word_tokenizer(), num_threads=num_threads) as lm:
        hook.remove()
        assert lm.kv_reuse
        assert during == [1] * 7  # one of the model itself
        assert lm._batcher.call(torch.get_num_threads) == (num_threads or before)
    assert torch.get_num_threads() == before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == before


def test_models_opened_concurrently_keep_thread_counts():
    before = torch.get_num_threads()

    def make(_):
        with AsyncTransformer(families.make("llama"), word_tokenizer()) as lm:
            return lm._batcher.call(torch.get_num_threads)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(make, range(8))) == {before}


@pytest.mark.parametrize("name", ["gpt-neo-local", "mpt"])
def test_models_slicing_masks_from_table_run_uncached_and_log_why(name, caplog):
    with caplog.at_level("INFO"), AsyncTransformer(families.make(name), word_tokenizer()) as lm:
        assert not lm.kv_reuse
    assert "slices its masks from a table" in caplog.text


def test_attention_scaling_of_long_contexts_follows_each_rows_length():
    """Scaling begins far behind the contexts of the trial."""
    config = families.PER_TOKEN["llama4-tuned"]()
    config.floor_scale = 100
    model, generator = families.of(config), random.Random(0)
    long, other = (generator.choices(range(families.VOCAB), k=256) for _ in range(2))
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        lm._evaluator.scheduler.cost = CostModel.on("cuda")  # few passes are worth much padding
        for prefix_len in (90, 130, 230):
            lm.next_token_logprobs_sync(long[:prefix_len])
            contexts = [long[: prefix_len + 10], other[:95], long[: prefix_len + 1], other[:60]]
            for row, context in zip(
                lm.batch_next_token_logprobs_sync(contexts), contexts, strict=True
            ):
                torch.testing.assert_close(row, naive_row(model, context), rtol=0, atol=3e-5)
            lm.clear_cache()
        steps = [[*long[:200], i] for i in range(12)]
        lm.next_token_logprobs_sync(long[:200])
        before = lm.statistics().num_forwards
        lm.batch_next_token_logprobs_sync(steps)
        assert lm.statistics().num_forwards == before + 1  # of one length, in one pass


def test_a_model_in_training_mode_is_put_into_evaluation_mode():
    model = families.make("gpt2").train()
    with AsyncTransformer(model, word_tokenizer()) as lm:
        row = lm.next_token_logprobs_sync([1, 2, 3])
        assert not model.training
        torch.testing.assert_close(row, lm.next_token_logprobs_uncached([1, 2, 3]))


def test_an_encoder_decoder_model_is_refused():
    import transformers

    config = transformers.T5Config(
        vocab_size=96, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        AsyncTransformer(model, word_tokenizer())


def check_whole(model, contexts):
    with pytest.warns(UserWarning, match="runs every context whole"):
        lm = AsyncTransformer(model, word_tokenizer())
    with lm:
        assert not lm.kv_reuse
        for context in contexts:
            torch.testing.assert_close(
                lm.next_token_logprobs_sync(context),
                naive_row(families.make("llama"), context),
                rtol=0,
                atol=3e-5,
            )


CONTEXTS = [[1, 2, 3], [1, 2, 3, 4], [9, 9, 9, 9, 9]]


def test_model_with_wrong_cached_rows_runs_uncached():
    model = families.make("llama")
    forward = model.forward

    # Without positions it counts them from the cache's length, which padding makes too long.
    def positionless(input_ids=None, attention_mask=None, past_key_values=None, use_cache=None):
        kept = {families.CACHE: past_key_values, "use_cache": use_cache}
        return forward(input_ids=input_ids, attention_mask=attention_mask, **kept)

    model.forward = positionless
    check_whole(model, CONTEXTS)


def test_model_failing_on_foreign_cache_runs_uncached(caplog):
    model = families.make("llama")
    forward = model.forward

    def suspicious(input_ids=None, past_key_values=None, use_cache=None, **kwargs):
        if past_key_values is not None and type(past_key_values).__name__ != "DynamicCache":
            raise TypeError("what is this cache?")
        kept = {families.CACHE: past_key_values, "use_cache": use_cache}
        return forward(input_ids=input_ids, **kept, **kwargs)

    model.forward = suspicious
    check_whole(model, CONTEXTS)
    assert "runs without key-value reuse" in caplog.text


def check_whole_batches(model):
    """Compare the rows of an uncached model in batches of many sizes with its own."""
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        assert not lm.kv_reuse
        for contexts in (
            [[5, 6]],
            [[5, 6], [7, 8]],  # as many as they are long
            [[5, 6, 7], [8, 9, 10], [11, 12, 13]],
            [[5, 6, 0, 7, 8], [9]],
            [list(range(20)), [3, 4, 5], [6]],
        ):
            rows = lm.batch_next_token_logprobs_sync(contexts)
            for context, row in zip(contexts, rows, strict=True):
                torch.testing.assert_close(row, naive_row(model, context), rtol=0, atol=3e-5)


@pytest.mark.parametrize("config", UNTOLD.values(), ids=UNTOLD.keys())
@pytest.mark.filterwarnings("ignore:.*position")
def test_uncached_models_with_own_positions_or_heads_match_bare_model(config):
    check_whole_batches(families.of(config()))


class TimeFirst(LlamaForCausalLM):
    """A Llama whose head takes states as ``[Q, B, H]``; it takes no cache."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **_):
        told = {"attention_mask": attention_mask, "position_ids": position_ids}
        states = self.model(input_ids, **told, use_cache=False).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(states.transpose(0, 1)).transpose(0, 1))


def test_uncached_model_of_cached_family_warns():
    model = TimeFirst(families.PER_TOKEN["llama"]()).eval()
    with pytest.warns(UserWarning, match="TimeFirst runs every context whole, .* kv_cache_bytes=0"):
        check_whole_batches(model)
    AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=0).close()
    model.config.model_type = "mine"
    check_whole_batches(model)


def test_cached_families_are_listed_in_cached_types():
    tokens = [make() for make in families.PER_TOKEN.values()]
    configs = [*tokens, *(families.RUNNING[name]() for name in KEPT)]
    assert {config.get_text_config(decoder=True).model_type for config in configs} <= CACHED_TYPES


def test_model_with_prefix_lm_attention_is_refused():
    if not hasattr(tf, "HrmTextConfig"):
        pytest.skip("this release of transformers has none")
    config = {**families.COMMON, "num_hidden_layers": 1, "head_dim": 8}
    del config["num_key_value_heads"]
    with pytest.raises(UnsupportedModelError, match=r"has prefix_lm=True .* token_type_ids"):
        AsyncTransformer(families.of(tf.HrmTextConfig(**config)), word_tokenizer())
    model = families.of(tf.HrmTextConfig(**config, prefix_lm=False))
    with AsyncTransformer(model, word_tokenizer()) as lm:
        for context in ([1, 2, 3], [1, 2, 3, 4]):
            row = lm.next_token_logprobs_sync(context)
            torch.testing.assert_close(row, naive_row(model, context), rtol=0, atol=3e-5)


class OtherwiseAlone(torch.nn.Linear):
    """A layer whose kernel for a single row computes with 16 bits, as some of quantised ones do."""

    def forward(self, rows):
        if rows[..., 0].numel() > 1:
            return super().forward(rows)
        half = rows.bfloat16() @ self.weight.bfloat16().T
        return half.to(rows.dtype)


def test_quantized_kernels_with_batch_dependent_rows_warn():
    model = families.make("llama")
    model.is_quantized = True
    AsyncTransformer(model, word_tokenizer()).close()  # where there are none, nothing is said
    for name in ("gate_proj", "up_proj", "down_proj"):
        for layer in model.model.layers:
            getattr(layer.mlp, name).__class__ = OtherwiseAlone
    with pytest.warns(UserWarning, match="depend on the other rows of their batch"):
        AsyncTransformer(model, word_tokenizer()).close()
