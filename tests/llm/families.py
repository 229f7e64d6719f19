"""Tiny random instances of many architectures, sharp enough that a wrong context shows."""

import inspect
import sys

import torch
import transformers as tf

VOCAB = 96

_CACHES = ("cache", "past_key_values")  # from 5.24 on, and before
CACHE = next(n for n in _CACHES if n in inspect.signature(tf.LlamaForCausalLM.forward).parameters)
"""What the installed release of transformers calls a cache, as an argument and in outputs."""

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(name, **changes):
    return getattr(tf, name)(**{**COMMON, **changes})


def _bare(name, **settings):
    return getattr(tf, name)(pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings)


_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}

PER_TOKEN = {
    "llama": lambda: _config("LlamaConfig"),
    "llama-eager": lambda: _config("LlamaConfig", attn_implementation="eager"),
    "qwen2": lambda: _config("Qwen2Config"),
    "qwen3": lambda: _config("Qwen3Config", head_dim=8),
    "mistral-sliding": lambda: _config("MistralConfig", sliding_window=5),
    "gemma": lambda: _config("GemmaConfig", head_dim=8),
    "gemma2": lambda: _config("Gemma2Config", head_dim=8, sliding_window=5),
    "gemma3": lambda: _config(
        "Gemma3TextConfig",
        head_dim=8,
        sliding_window=5,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt-oss": lambda: _config(
        "GptOssConfig",
        head_dim=8,
        sliding_window=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek-v3": lambda: _config("DeepseekV3Config", **_LATENT),
    "llama4-tuned": lambda: _config(  # attention is scaled by the number of columns
        "Llama4TextConfig",
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        no_rope_layers=[1, 0],
        attention_chunk_size=7,
        attn_temperature_tuning=True,
        floor_scale=4,
        attn_scale=0.5,
    ),
    "mixtral": lambda: _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: _config(
        "Qwen3MoeConfig", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "cohere": lambda: _config("CohereConfig", logit_scale=0.3),
    "granite": lambda: _config("GraniteConfig", logits_scaling=2.0),
    "stablelm": lambda: _config("StableLmConfig"),
    "phi": lambda: _config("PhiConfig", num_key_value_heads=4),
    "starcoder2-sliding": lambda: _config("Starcoder2Config", sliding_window=5),
    "opt": lambda: _bare(
        "OPTConfig",
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
    ),
    "bloom": lambda: _bare("BloomConfig", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "falcon-alibi": lambda: _bare(
        "FalconConfig",
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
    ),
    "falcon-rotary": lambda: _bare(
        "FalconConfig",
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=False,
    ),
    "mpt": lambda: _bare(
        "MptConfig", vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2, max_seq_len=256
    ),
    "gpt2": lambda: _bare(
        "GPT2Config", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256
    ),
    "gpt-neo-local": lambda: _bare(
        "GPTNeoConfig",
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=5,
        max_position_embeddings=256,
    ),
    "gpt-neox": lambda: _config("GPTNeoXConfig"),
    "gptj": lambda: _bare(
        "GPTJConfig",
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        n_positions=256,
    ),
}
"""Families whose keys and values are kept token by token."""

if hasattr(tf, "Gemma4TextConfig"):
    PER_TOKEN["gemma4-shared"] = lambda: _config(  # two layers read the keys of two others
        "Gemma4TextConfig",
        head_dim=8,
        sliding_window=5,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
    )

RUNNING = {
    "mamba": lambda: _bare(
        "MambaConfig", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8
    ),
    "mamba2": lambda: _bare(
        "Mamba2Config",
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=8,
    ),
    "qwen3-next": lambda: _config(
        "Qwen3NextConfig",
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2": lambda: _config("Lfm2Config", layer_types=["conv", "full_attention"]),
}
"""Some families with running states, which are kept; all are in `state_families`."""

WHOLE = {
    "cpm-ant": lambda: _config(  # takes no mask: what is padded is another context
        "CpmAntConfig",
        dim_head=16,
        dim_ff=64,
        prompt_length=4,
        segment_types=4,
    ),
    # Each token attends to the few that an indexer finds. It has so many heads that no two tokens
    # have the same score, between which the number of columns would decide.
    "deepseek-v32": lambda: _config(
        "DeepseekV32Config",
        **{**_LATENT, "index_topk": 6, "index_n_heads": 32, "index_head_dim": 16},
    ),
    "glm-moe-dsa": lambda: _config(
        "GlmMoeDsaConfig",
        **{**_LATENT, "index_topk": 12, "index_n_heads": 32, "index_head_dim": 16},
    ),
    "minimax-m3-sparse": lambda: _config(  # to two blocks of four
        "MiniMaxM3VLTextConfig",
        head_dim=8,
        rotary_dim=4,
        dense_intermediate_size=48,
        shared_intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["minimax_m3_sparse", "full_attention"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=4,
        index_topk_blocks=2,
    ),
    "recurrent-gemma": lambda: _config(
        "RecurrentGemmaConfig",
        num_hidden_layers=3,
        lru_width=32,
        attention_window_size=8,
        num_key_value_heads=1,
    ),
}
"""Families that are run whole."""

if hasattr(tf, "DeepseekV4Config"):
    WHOLE["deepseek-v4"] = lambda: _config(  # keeps keys of several tokens in one
        "DeepseekV4Config",
        head_dim=8,
        q_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        index_topk=8,
        index_n_heads=32,
        index_head_dim=16,
        sliding_window=5,
    )


def make(name, seed=0):
    """A model in float32 whose next token hangs on every token of its context."""
    return of({**PER_TOKEN, **RUNNING, **WHOLE}[name](), seed)


def of(config, seed=0, dtype=torch.float32, kind=tf.AutoModelForCausalLM):
    """Such a model of a config."""
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    return model


def looks_up_its_attention(name):
    """Whether a family calls a function of attention that its config names, in this release."""
    module = sys.modules[type(make(name)).__module__]
    return hasattr(module, "ALL_ATTENTION_FUNCTIONS")
