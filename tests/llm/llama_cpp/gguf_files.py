"""GGUF files of tiny models of transformers, for llama.cpp."""

import copy
import tempfile
from pathlib import Path

import numpy as np
import torch


def write(model, path, words=None, kind="gpt2", window=0, own_head=False, **more):
    """Write a tiny Llama, Gemma 3, Mamba or LFM2 of transformers into a GGUF file, in float32.

    Its tokens are ``words``, and what else there is of them, for one kind of tokenizer. An LFM2 may
    have a window in llama.cpp, and any a head of its own beside the embeddings.
    """
    import gguf

    architecture = model.config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(str(path), architecture)
    hyperparameters, tensors = _ARCHITECTURES[architecture]
    hyperparameters(writer, model.config)
    if window:
        writer.add_sliding_window(window)
    words = words or [f"<{i}>" for i in range(model.config.vocab_size)]
    _vocabulary(writer, words, kind, **more)
    named = dict(tensors(model))
    if own_head:
        named["output.weight"] = model.lm_head.weight
    for name, tensor in named.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.detach().float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def write_adapter(model, path, seed=0, alpha=4.0, rank=2):
    """Write a random LoRA of a tiny Llama; return the model with it merged."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    merged, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for i, layer in enumerate(merged.model.layers):
        weight = layer.self_attn.v_proj.weight
        a = torch.randn(rank, weight.shape[1], generator=generator)
        b = torch.randn(weight.shape[0], rank, generator=generator) / 4
        with torch.no_grad():
            weight += alpha / rank * (b @ a)
        writer.add_tensor(f"blk.{i}.attn_v.weight.lora_a", a.numpy())
        writer.add_tensor(f"blk.{i}.attn_v.weight.lora_b", b.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return merged


def _sizes(writer, config, epsilon):
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_layer_norm_rms_eps(epsilon)


def _sizes_of_llama(writer, config, theta=None, num_key_value_heads=None, epsilon=None):
    _sizes(writer, config, config.rms_norm_eps if epsilon is None else epsilon)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(num_key_value_heads or config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(theta or config.rope_parameters["rope_theta"])


def _sizes_of_gemma3(writer, config):
    thetas = config.rope_parameters
    _sizes_of_llama(writer, config, thetas["full_attention"]["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind != "full_attention" for kind in config.layer_types])
    writer.add_rope_freq_base_swa(thetas["sliding_attention"]["rope_theta"])


def _sizes_of_mamba(writer, config):
    _sizes(writer, config, config.layer_norm_epsilon)
    writer.add_context_length(256)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(int(config.time_step_rank))


def _sizes_of_lfm2(writer, config):
    heads = [0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types]
    config = copy.copy(config)
    config.intermediate_size = config.block_multiple_of  # to which it has been rounded
    _sizes_of_llama(writer, config, num_key_value_heads=heads, epsilon=config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def _vocabulary(
    writer, words, kind, types=None, scores=None, merges=("< 0",), adds_bos=False, adds_space=None
):
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types(types or [1] * len(words))
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(adds_bos)
    if adds_space is not None:
        writer.add_add_space_prefix(adds_space)


def _halves_apart(weight, num_heads):
    """As llama.cpp rotates pairs of neighbours, and transformers halves."""
    apart = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return apart.swapaxes(1, 2).reshape(weight.shape)


def _gemma3(model):
    body, config = model.model, model.config
    yield "token_embd.weight", body.embed_tokens.weight
    yield "output_norm.weight", 1 + body.norm.weight
    # llama.cpp divides by the root of the size of a head.
    scale = (config.head_dim / config.query_pre_attn_scalar) ** 0.5
    for i, layer in enumerate(body.layers):
        attention, mlp = layer.self_attn, layer.mlp
        yield f"blk.{i}.attn_norm.weight", 1 + layer.input_layernorm.weight
        yield f"blk.{i}.attn_q.weight", attention.q_proj.weight
        yield f"blk.{i}.attn_k.weight", attention.k_proj.weight
        yield f"blk.{i}.attn_v.weight", attention.v_proj.weight
        yield f"blk.{i}.attn_output.weight", attention.o_proj.weight
        yield f"blk.{i}.attn_q_norm.weight", (1 + attention.q_norm.weight) * scale
        yield f"blk.{i}.attn_k_norm.weight", 1 + attention.k_norm.weight
        yield f"blk.{i}.post_attention_norm.weight", 1 + layer.post_attention_layernorm.weight
        yield f"blk.{i}.ffn_norm.weight", 1 + layer.pre_feedforward_layernorm.weight
        yield f"blk.{i}.post_ffw_norm.weight", 1 + layer.post_feedforward_layernorm.weight
        yield f"blk.{i}.ffn_gate.weight", mlp.gate_proj.weight
        yield f"blk.{i}.ffn_up.weight", mlp.up_proj.weight
        yield f"blk.{i}.ffn_down.weight", mlp.down_proj.weight


def _lfm2(model):
    body = model.model
    yield "token_embd.weight", body.embed_tokens.weight
    yield "token_embd_norm.weight", body.embedding_norm.weight
    for i, layer in enumerate(body.layers):
        yield f"blk.{i}.attn_norm.weight", layer.operator_norm.weight
        yield f"blk.{i}.ffn_norm.weight", layer.ffn_norm.weight
        yield f"blk.{i}.ffn_gate.weight", layer.feed_forward.w1.weight
        yield f"blk.{i}.ffn_down.weight", layer.feed_forward.w2.weight
        yield f"blk.{i}.ffn_up.weight", layer.feed_forward.w3.weight
        if layer.is_attention_layer:
            attention = layer.self_attn
            yield f"blk.{i}.attn_q.weight", attention.q_proj.weight
            yield f"blk.{i}.attn_k.weight", attention.k_proj.weight
            yield f"blk.{i}.attn_v.weight", attention.v_proj.weight
            yield f"blk.{i}.attn_output.weight", attention.out_proj.weight
            yield f"blk.{i}.attn_q_norm.weight", attention.q_layernorm.weight
            yield f"blk.{i}.attn_k_norm.weight", attention.k_layernorm.weight
        else:
            yield f"blk.{i}.shortconv.conv.weight", layer.conv.conv.weight.squeeze(1)
            yield f"blk.{i}.shortconv.in_proj.weight", layer.conv.in_proj.weight
            yield f"blk.{i}.shortconv.out_proj.weight", layer.conv.out_proj.weight


def _llama(model):
    config, body = model.config, model.model
    yield "token_embd.weight", body.embed_tokens.weight
    yield "output_norm.weight", body.norm.weight
    yield "output.weight", model.lm_head.weight
    for i, layer in enumerate(body.layers):
        attention, mlp = layer.self_attn, layer.mlp
        yield f"blk.{i}.attn_norm.weight", layer.input_layernorm.weight
        yield (
            f"blk.{i}.attn_q.weight",
            _halves_apart(attention.q_proj.weight, config.num_attention_heads),
        )
        yield (
            f"blk.{i}.attn_k.weight",
            _halves_apart(attention.k_proj.weight, config.num_key_value_heads),
        )
        yield f"blk.{i}.attn_v.weight", attention.v_proj.weight
        yield f"blk.{i}.attn_output.weight", attention.o_proj.weight
        yield f"blk.{i}.ffn_norm.weight", layer.post_attention_layernorm.weight
        yield f"blk.{i}.ffn_gate.weight", mlp.gate_proj.weight
        yield f"blk.{i}.ffn_up.weight", mlp.up_proj.weight
        yield f"blk.{i}.ffn_down.weight", mlp.down_proj.weight


def _mamba(model):
    body = model.backbone
    yield "token_embd.weight", body.embeddings.weight
    yield "output_norm.weight", body.norm_f.weight
    yield "output.weight", model.lm_head.weight
    for i, layer in enumerate(body.layers):
        mixer = layer.mixer
        yield f"blk.{i}.attn_norm.weight", layer.norm.weight
        yield f"blk.{i}.ssm_in.weight", mixer.in_proj.weight
        yield f"blk.{i}.ssm_conv1d.weight", mixer.conv1d.weight.squeeze(1)
        yield f"blk.{i}.ssm_conv1d.bias", mixer.conv1d.bias
        yield f"blk.{i}.ssm_x.weight", mixer.x_proj.weight
        yield f"blk.{i}.ssm_dt.weight", mixer.dt_proj.weight
        yield f"blk.{i}.ssm_dt.bias", mixer.dt_proj.bias
        yield f"blk.{i}.ssm_a", -mixer.A_log.exp()
        yield f"blk.{i}.ssm_d", mixer.D
        yield f"blk.{i}.ssm_out.weight", mixer.out_proj.weight


_ARCHITECTURES = {
    "llama": (_sizes_of_llama, _llama),
    "gemma3": (_sizes_of_gemma3, _gemma3),
    "mamba": (_sizes_of_mamba, _mamba),
    "lfm2": (_sizes_of_lfm2, _lfm2),
}

_FOLDER = tempfile.TemporaryDirectory(prefix="gguf-")
_FILES = {}


def of(model, window=0):
    """The file of a tiny model, written once."""
    if (id(model), window) not in _FILES:
        path = write(model, Path(_FOLDER.name) / f"{len(_FILES)}.gguf", window=window)
        _FILES[id(model), window] = model, path
    return _FILES[id(model), window][1]
