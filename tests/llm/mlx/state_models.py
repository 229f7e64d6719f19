"""Tiny random models of mlx-lm whose layers keep recurrent states, a function for each family."""

import importlib
import inspect

from tests.llm.families import VOCAB

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_chunk_size": 8,
}
_SSM = {
    "state_size": 8,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "layer_norm_epsilon": 1e-5,
    "time_step_limit": (0.0, 1e4),
}
_GROUPS = {"num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2}
_DELTA_ATTENTION = {
    "short_conv_kernel_size": 4,
    "num_heads": 4,
    "head_dim": 8,
    "kda_layers": [1],
    "full_attn_layers": [2],
}
_LFM2 = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "num_dense_layers": 1,
    "use_expert_bias": True,
}

_LINEAR, _FULL, _MAMBA = "linear_attention", "full_attention", "mamba"

_ARGUMENTS = {
    "mamba": {**_SSM, "expand": 2},
    "mamba2": {**_SSM, "num_heads": 8, "head_dim": 8, "intermediate_size": 64, "n_groups": 2},
    "falcon_h1": {**_MAMBA_2},
    "jamba": {
        **{"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1},
        **{"expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
        **{"mamba_expand": 2, "num_experts": 4, "num_experts_per_tok": 2},
    },
    "lfm2": {**_LFM2, "layer_types": ["conv", _FULL]},
    "lfm2_moe": {**_LFM2, **_EXPERTS, "layer_types": ["conv", _FULL]},
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5": {**_DELTA, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "nemotron_h": {
        **{"hybrid_override_pattern": ["M", "*", "-", "M"], "num_hidden_layers": 4},
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2},
        **{"conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "mlp_bias": False},
        **{"mamba_proj_bias": False, "layer_norm_epsilon": 1e-5, "attention_bias": False},
    },
    "granitemoehybrid": {
        **_MAMBA_2,
        **{"attention_bias": False, "embedding_multiplier": 1.0, "attention_multiplier": 0.35},
        **{"logits_scaling": 1.0, "residual_multiplier": 1.0, "layer_types": [_MAMBA, "attention"]},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    },
    "kimi_linear": {
        **_EXPERTS,
        **_LATENT,
        **{"linear_attn_config": _DELTA_ATTENTION, "model_max_length": 256},
        **{"num_key_value_heads": 4, "mla_use_nope": True},
    },
    "kimi_k3": {
        **_EXPERTS,
        **_LATENT,
        **{"linear_attn_config": _DELTA_ATTENTION, "num_key_value_heads": 4},
        **{"activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0},
    },
    "plamo2": {
        **{"hidden_size_per_head": 8, "mamba_num_heads": 4, "mamba_d_state": 8, "mamba_step": 2},
    },
    "recurrent_gemma": {
        **{"attention_bias": False, "conv1d_width": 4, "logits_soft_cap": 30.0, "lru_width": 32},
        **{"embeddings_scale_by_sqrt_dim": True, "attention_window_size": 5},
        **{"num_hidden_layers": 3, "num_key_value_heads": 1},
        **{"block_types": ["recurrent", "recurrent", "attention"]},
    },
    "rwkv7": {
        **{"norm_eps": 1e-5, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8},
        **{"decay_low_rank_dim": 8},
    },
    "olmo_hybrid": {
        **_DELTA,
        **{"num_hidden_layers": 2, "layer_types": [_LINEAR, _FULL], "attention_bias": False},
        **{"linear_allow_neg_eigval": True, "linear_num_key_heads": 4},
    },
    "baichuan_m1": {"sliding_window": 5, "sliding_window_layers": [1], "conv_window": 2},
    "bailing_moe_linear": {**_EXPERTS, **_GROUPS},
    "bailing_hybrid": {**_EXPERTS, **_LATENT, **_GROUPS, "num_key_value_heads": 4},
    "bailing_moe_v3": {**_EXPERTS, **_LATENT, "layer_group_size": 2},
    "gear": {
        **{"layer_types": ["conv_mixer", "sliding_attention", _FULL], "num_hidden_layers": 3},
        **{"sliding_window": 5},
    },
    "longcat_flash_ngram": {
        **_LATENT,
        **{"ffn_hidden_size": 48, "moe_topk": 2, "expert_ffn_hidden_size": 16, "num_layers": 2},
        **{"n_routed_experts": 4, "zero_expert_num": 2, "routed_scaling_factor": 1.0},
        **{"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA"},
        **{"ngram_vocab_size_ratio": 3},
    },
}


def make(name):
    """Return a model of a family, the same one each time."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    from tests.llm.mlx import sharpened

    module = importlib.import_module(f"mlx_lm.models.{name}")
    names = ("TextModelArgs", "TextModel"), ("TextArgs", "LanguageModel"), ("ModelArgs", "Model")
    kind, of_kind = next(
        (getattr(module, a), getattr(module, b)) for a, b in names if hasattr(module, a)
    )
    known = inspect.signature(kind).parameters
    given = {**_COMMON, **_ARGUMENTS[name], "model_type": name}
    arguments = kind(**{key: value for key, value in given.items() if key in known})
    mx.random.seed(0)
    model = sharpened(of_kind(arguments))
    flat = dict(tree_flatten(model.parameters()))
    for key, value in flat.items():
        if key.endswith("A_log") and value.ndim == 1:
            # As they begin, heads forget in one or two tokens: a wrong state would not show.
            flat[key] = mx.linspace(-4, -1, value.size)
    model.update(tree_unflatten([*flat.items()]))
    return model


NAMES = [*_ARGUMENTS]
