"""Tiny random instances of many architectures, sharp enough that a wrong context shows."""

import inspect
import sys
from collections.abc import Callable

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
    "gpt2": lambda: _bare(
        "GPT2Config", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256
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

IN_FLOAT64 = {"gemma4-shared"}
"""Families whose float32 rows are 3e-5 from their float64 ones, the plain model's too."""

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

_DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
"""Layers of the gated delta rule, and attention."""

_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

_LINEAR_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse"],
}

RUNNING: dict[str, Callable[[], tf.PreTrainedConfig]] = {
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
    "falcon_mamba": lambda: _bare(
        "FalconMambaConfig", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8
    ),
    "kimi_linear": lambda: _config(
        "KimiLinearConfig",
        **_LINEAR_LATENT,
        qk_rope_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "olmo_hybrid": lambda: _config(
        "OlmoHybridConfig", **{k: v for k, v in _DELTA.items() if k != "head_dim"}
    ),
    "jamba": lambda: _config(
        "JambaConfig",
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
    ),
    "lfm2": lambda: _config("Lfm2Config", layer_types=["conv", "full_attention"]),
    "lfm2_moe": lambda: _config(
        "Lfm2MoeConfig", **_EXPERTS, num_dense_layers=1, layer_types=["conv", "full_attention"]
    ),
    "nemotron_h": lambda: _config(
        "NemotronHConfig",
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        head_dim=8,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=8,
        time_step_min=1e-9,  # a step of one token is not clamped to it
        time_step_floor=0.02,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "inkling": lambda: _config(  # no layer has a recurrent state, each has four convolutions
        "InklingTextConfig",
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=5,
        d_rel=8,
        rel_extent=16,
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "sparse"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=16,
        logits_mup_width_multiplier=1.0,
    ),
    "qwen3_next": lambda: _config(
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
    "qwen3_5": lambda: _config("Qwen3_5TextConfig", **_DELTA),
    "qwen3_5_moe": lambda: _config(
        "Qwen3_5MoeTextConfig", **_DELTA, **_EXPERTS, shared_expert_intermediate_size=16
    ),
    "qwen4_exp": lambda: _config(  # the second layer keeps the last tokens' ids, too
        "Qwen4ExpTextConfig",
        **{**_DELTA, "layer_types": ["linear_attention", "linear_attention", "indexed_attention"]},
        **_EXPERTS,
        num_hidden_layers=3,
        shared_expert_intermediate_size=16,
        hc_count=2,
        hc_lowrank=8,
        ple_layer_ids=[2],
        ple_embed_dim=32,
        heads_per_ngram=2,
        ngram_vocab_size_base=100,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=1,
        indexer_n_heads=8,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=4,
    ),
    "zaya": lambda: _config(
        "ZayaConfig",
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        router_hidden_size=16,
        sliding_window=5,
        layer_types=["hybrid_sliding", "hybrid"],
    ),
    "bamba": lambda: _config("BambaConfig", **_MAMBA_2, attn_layer_indices=[1]),
    "granitemoehybrid": lambda: _config(
        "GraniteMoeHybridConfig",
        **_MAMBA_2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        position_embedding_type="rope",
        attention_multiplier=0.35,
    ),
    "glm5_next": lambda: tf.Glm5NextConfig(
        text_config=_config(
            "Glm5NextTextConfig",
            **_LINEAR_LATENT,
            q_lora_rank=16,
            layer_types=["linear_attention", "indexed_attention"],
            hc_mult=2,
            index_topk=8,
            index_head_dim=16,
            index_n_heads=32,
            index_kpool=4,
        ).to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "projection_intermediate_size": 32,
        },
    ),
    "zamba": lambda: _config(
        "ZambaConfig",
        num_hidden_layers=4,  # there are two layers at least that share their attention
        num_key_value_heads=4,
        mamba_d_state=8,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
    ),
    "zamba2": lambda: _config(
        "Zamba2Config",
        num_hidden_layers=3,
        num_key_value_heads=4,
        mamba_d_state=8,
        mamba_ngroups=2,
        n_mamba_heads=8,
        chunk_size=8,
        time_step_min=1e-9,
        time_step_floor=0.02,
        layers_block_type=["linear_attention", "linear_attention", "hybrid"],
        use_mem_rope=True,
    ),
    "falcon_h1": lambda: _config("FalconH1Config", **_MAMBA_2, mamba_d_ssm=64),
}
"""Families of which a file in transformers keeps a recurrent state, by their folders' names."""

FEW_RUNNING = ("mamba", "mamba2", "qwen3_next", "lfm2")

ONLY_WITH_PICTURES = {"glm5_next"}
"""Families that transformers has no model of text alone for."""

_INKLING_2 = {
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 5,
    "d_rel": 8,
    "rel_extent": 16,
    "unpadded_vocab_size": VOCAB,
    "n_layers_per_attn_res_block": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

_NEW_CONFIGS: dict[str, tuple[str, Callable[[], tf.PreTrainedConfig]]] = {
    "bailing_hybrid": (
        "BailingHybridConfig",
        lambda: _config(
            "BailingHybridConfig",
            **{k: v for k, v in _LINEAR_LATENT.items() if not k.startswith("linear")},
            head_dim=8,
            qk_rope_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "lfm3": (
        "Lfm3Config",
        lambda: _config(
            "Lfm3Config",
            head_dim=8,
            sliding_window=5,
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "sliding_attention"],
        ),
    ),
    "lara_mini": (
        "LaraMiniConfig",
        lambda: _config(
            "LaraMiniConfig",
            **{**_DELTA, "layer_types": ["linear_attention", "sliding_attention"]},
            **_EXPERTS,
            sliding_window=5,
            shared_expert_intermediate_size=16,
        ),
    ),
    "inkling2": (
        "Inkling2TextConfig",
        lambda: _config(
            "Inkling2TextConfig", **_INKLING_2, layer_types=["hybrid_sliding", "hybrid"]
        ),
    ),
    "inkling2_loop": (
        "Inkling2LoopTextConfig",
        lambda: _config(
            "Inkling2LoopTextConfig",
            **_INKLING_2,
            num_hidden_layers=4,
            layer_types=["hybrid_sliding", "hybrid"] * 2,
            loop_layer_index_start=1,
            loop_layer_index_end=3,
            loop_num_passes=2,
            loop_gate_rank=8,
        ),
    ),
}
"""Those that not every release of transformers that is taken has, with the name of their config."""

RUNNING |= {name: make for name, (of, make) in _NEW_CONFIGS.items() if hasattr(tf, of)}

WHOLE = {
    # These two cut masks out of a table by the number of columns.
    "mpt": lambda: _bare(
        "MptConfig", vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2, max_seq_len=256
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


def make(name, seed=0, dtype=torch.float32):
    """A model whose next token hangs on every token of its context."""
    kind = tf.AutoModelForImageTextToText if name in ONLY_WITH_PICTURES else tf.AutoModelForCausalLM
    return of({**PER_TOKEN, **RUNNING, **WHOLE}[name](), seed, dtype, kind)


def of(config, seed=0, dtype=torch.float32, kind=tf.AutoModelForCausalLM):
    """Such a model of a config."""
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                size = parameter[0].numel() if parameter.dim() > 3 else parameter.shape[-1]
                parameter.normal_(0, 1.5 / size**0.5)
            elif name.endswith("A_log"):
                # As they begin, heads forget in one or two tokens: a wrong state would not show.
                parameter.copy_(torch.linspace(-4, -1, len(parameter)))
            elif name.endswith(".temp"):
                parameter.fill_(1.0)  # Zaya's attention begins as the same for all keys.
    return model


def looks_up_its_attention(name):
    """Whether a family calls a function of attention that its config names, in this release."""
    module = sys.modules[type(make(name)).__module__]
    return hasattr(module, "ALL_ATTENTION_FUNCTIONS")
