"""Tiny random instances of each family with a running state, as sharp as those of `families`."""

from collections.abc import Callable

import torch
import transformers as tf

from tests.llm import families
from tests.llm.families import RUNNING, VOCAB, _bare, _config

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

_LATENT = {
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

_CONFIGS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "mamba": RUNNING["mamba"],
    "mamba2": RUNNING["mamba2"],
    "falcon_mamba": lambda: _bare(
        "FalconMambaConfig", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8
    ),
    "kimi_linear": lambda: _config(
        "KimiLinearConfig",
        **_LATENT,
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
    "lfm2": RUNNING["lfm2"],
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
        time_step_min=0.02,  # a smaller one rarely shows
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
    "qwen3_next": RUNNING["qwen3-next"],
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
            **_LATENT,
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
        time_step_min=0.02,
        layers_block_type=["linear_attention", "linear_attention", "hybrid"],
        use_mem_rope=True,
    ),
    "falcon_h1": lambda: _config("FalconH1Config", **_MAMBA_2, mamba_d_ssm=64),
}

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
            **{k: v for k, v in _LATENT.items() if not k.startswith("linear")},
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

_CONFIGS |= {name: make for name, (of, make) in _NEW_CONFIGS.items() if hasattr(tf, of)}


def config_of(name: str) -> tf.PreTrainedConfig:
    """The config of a family of `NAMES`."""
    return _CONFIGS[name]()


def make(name: str, dtype: torch.dtype = torch.float32) -> tf.PreTrainedModel:
    """A model of a family of `NAMES`, on a fixed seed."""
    kind = tf.AutoModelForImageTextToText if name in ONLY_WITH_PICTURES else tf.AutoModelForCausalLM
    model = families.of(config_of(name), dtype=dtype, kind=kind)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log") and parameter.dim() == 1:
                # As they begin, heads forget in one or two tokens: a wrong state would not show.
                parameter.copy_(torch.linspace(-4, -1, len(parameter)))
            elif parameter_name.endswith(".temp"):
                parameter.fill_(1.0)  # Zaya's attention begins as the same for all keys.
    return model


NAMES = list(_CONFIGS)
"""Families of which a file in transformers keeps a running state, by the names of their folders."""

ONLY_WITH_PICTURES = {"glm5_next"}
"""Families that transformers has no model of text alone for."""
