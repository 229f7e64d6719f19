"""Tiny random models that read pictures, with their processors, sharp enough to tell them apart."""

import warnings
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import tokenizers
import transformers as tf
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers.models.paligemma import processing_paligemma
from transformers.processing_utils import ProcessorMixin

from tests.llm import families

TEXT = {**families.COMMON, "num_hidden_layers": 3, "max_position_embeddings": 1024}

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 7,
}

MARKERS = {
    "Qwen2VLProcessor": "<|vision_start|><|image_pad|><|vision_end|>",
    "Qwen2_5_VLProcessor": "<|vision_start|><|image_pad|><|vision_end|>",
    "Gemma3Processor": "<start_of_image>",
    "Idefics3Processor": "<image>",
    "LlavaNextProcessor": "<image>",
    "PaliGemmaProcessor": "<image>",
}
"""What stands for one picture in a prompt, by class of processor."""


def tokenizer(specials, begins=False, **named):
    """A tokenizer with a token for each ASCII character, and special ones.

    Args:
        specials: Special tokens behind those for padding, beginning and end.
        begins: Whether what is encoded begins with the token for that.
        named: Special tokens that the processor finds by name.
    """
    ends = ["<pad>", "<bos>", "<eos>"]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [level.pre_tokenize_str(chr(byte))[0][0] for byte in range(128)]
    vocab = {token: i for i, token in enumerate(ends + characters)}
    made = tokenizers.Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = level
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in [*ends, *specials]]
    )
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
        )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_input_names=["input_ids", "attention_mask"],
        extra_special_tokens=named or specials,
    )


def _qwen(version, **vision):
    specials = [
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ]
    words = tokenizer(specials)
    # Videos need torchvision; what has the place of their processor is asked for names alone.
    videos = SimpleNamespace(
        model_input_names=["pixel_values_videos", "video_grid_thw"], merge_size=2
    )
    images = tf.Qwen2VLImageProcessorPil(
        patch_size=7,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56},
    )
    with patch.object(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None):
        processor = getattr(tf, f"{version}Processor")(images, words, videos)
    ids = dict(zip(specials, words.convert_tokens_to_ids(specials), strict=True))
    config = getattr(tf, f"{version}Config")(
        text_config={
            **TEXT,
            "vocab_size": len(words),
            # A small base: positions in every direction show.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10.0,
                "mrope_section": [2, 1, 1],
            },
        },
        vision_config={
            "depth": 2,
            "num_heads": 4,
            "patch_size": 7,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            **vision,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return config, processor


def _qwen2_vl():
    return _qwen("Qwen2VL", embed_dim=32, hidden_size=32, mlp_ratio=2)


def _qwen2_5_vl():
    return _qwen(
        "Qwen2_5_VL",
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=32,
        window_size=28,
        fullatt_block_indexes=[1],
    )


def _gemma3():
    named = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    turns = ["<start_of_turn>", "<end_of_turn>"]
    words = tokenizer([*named.values(), *turns], begins=True, **named)
    images = tf.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    config = tf.Gemma3Config(
        text_config={
            **TEXT,
            "vocab_size": len(words),
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config={**VISION, "image_size": 56, "vision_use_head": False},
        mm_tokens_per_image=16,
        image_token_index=words.image_token_id,
        boi_token_index=words.boi_token_id,
        eoi_token_index=words.eoi_token_id,
    )
    return config, tf.Gemma3Processor(images, words, image_seq_length=16)


def _smolvlm(**text):
    rows = [f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)]
    words = tokenizer(
        ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *rows]
    )
    images = tf.Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    processor = tf.Idefics3Processor(images, words, image_seq_len=4)
    config = tf.Idefics3Config(
        text_config={**TEXT, "vocab_size": len(words), "model_type": "llama", **text},
        vision_config={**VISION, "image_size": 28},
        scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )
    return config, processor


def _llava_next():
    words = tokenizer(["<image>"], begins=True)
    grids = [[14, 28], [28, 14], [28, 28]]
    images = tf.LlavaNextImageProcessorPil(
        size={"shortest_edge": 14},
        crop_size={"height": 14, "width": 14},
        image_grid_pinpoints=grids,
    )
    processor = tf.LlavaNextProcessor(
        images,
        words,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    config = tf.LlavaNextConfig(
        text_config={**TEXT, "vocab_size": len(words), "model_type": "llama"},
        vision_config={**VISION, "image_size": 14, "model_type": "clip_vision_model"},
        vision_feature_layer=-1,
        image_grid_pinpoints=grids,
        image_token_index=words.convert_tokens_to_ids("<image>"),
    )
    return config, processor


def _paligemma():
    words = tokenizer(["<image>"])
    images = tf.SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 16
    # Two of the thousand tokens for places and shapes.
    with patch.object(processing_paligemma, "EXTRA_TOKENS", ["<loc0000>", "<seg000>"]):
        processor = tf.PaliGemmaProcessor(images, words)
    config = tf.PaliGemmaConfig(
        text_config={
            **TEXT,
            "vocab_size": len(words),
            "model_type": "gemma",
            "head_dim": 8,
        },
        vision_config={
            **VISION,
            "image_size": 28,
            "vision_use_head": False,
            "model_type": "siglip_vision_model",
        },
        projection_dim=32,
        hidden_size=32,
        image_token_index=processor.image_token_id,
    )
    return config, processor


def _made(build):
    def family(seed):
        config, processor = build()
        return families.of(config, seed, kind=tf.AutoModelForImageTextToText), processor

    return family


FAMILIES = {
    "qwen2-vl": _made(_qwen2_vl),
    "qwen2.5-vl": _made(_qwen2_5_vl),
    "gemma3": _made(_gemma3),
    "smolvlm": _made(_smolvlm),  # the first SmolVLMs are Idefics3's architecture
    "llava-next": _made(_llava_next),
    "paligemma": _made(_paligemma),
}
"""Makers of a model in float32 and its processor, by name."""


WIDE = _made(lambda: _smolvlm(hidden_size=128, head_dim=32))
"""A maker of a SmolVLM with heads as wide as vLLM's kernels want them."""


def make(name, seed=0):
    """A model whose next token hangs on every token and picture of its context; its processor."""
    return (WIDE if name == "wide" else FAMILIES[name])(seed)


def marker(family):
    """What a prompt of a family has in the place of one picture, given its name or processor."""
    if isinstance(family, str):
        family = make(family)[1]
    return MARKERS[type(family).__name__]


def picture(seed, size=(40, 30)):
    """A picture of random patches of colour, ``size`` being its width and height."""
    width, height = size
    colours = np.random.default_rng(seed).integers(
        0, 256, (-(-height // 5), -(-width // 5), 3), dtype=np.uint8
    )
    return Image.fromarray(colours.repeat(5, 0).repeat(5, 1)[:height, :width])


def inputs(model, processor, text, images):
    """What the processor makes of one prompt: what ``model`` is called with."""
    images = [list(images)] if images else None
    with warnings.catch_warnings():  # PaliGemma's makes an array of a tensor
        warnings.filterwarnings("ignore", "__array__", DeprecationWarning)
        made = processor(text=[text], images=images, return_tensors="pt")
    return dict(made.to(model.device))
