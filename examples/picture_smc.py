"""Sequential Monte Carlo after a picture: the text about it has only capital letters and spaces.

No weights that read pictures come with this package: the model is a tiny Gemma 3 with random ones,
and says nothing sensible. ``load_model_by_name`` loads a real one, and the rest stays as it is.
"""

import argparse

import numpy as np
import tokenizers
import torch
import transformers as tf

from genlm_backend import AsyncTransformer, smc_sync


def tiny_model() -> AsyncTransformer:
    """A Gemma 3 of two layers, over single characters."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    named = {"boi_token": "<image>", "image_token": "<part>", "eoi_token": "</image>"}
    words = ["<pad>", "<bos>", "<eos>", *(level.pre_tokenize_str(chr(i))[0][0] for i in range(128))]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [])
    )
    made.pre_tokenizer, made.decoder = level, tokenizers.decoders.ByteLevel()
    ends = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    given = {"extra_special_tokens": named, **ends}
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=made, **given)
    images = tf.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    processor = tf.Gemma3Processor(images, tokenizer, image_seq_length=16)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = tf.Gemma3Config(
        text_config={**sizes, **heads, "vocab_size": len(tokenizer)},
        vision_config={**sizes, "num_attention_heads": 4, "patch_size": 7, "image_size": 56},
        mm_tokens_per_image=16,
        image_token_index=len(words) + 1,
    )
    torch.manual_seed(0)
    model = tf.Gemma3ForConditionalGeneration(config).eval()
    return AsyncTransformer(model, tokenizer, processor=processor, kv_cache_bytes=1 << 24)


def main(count: int, num_characters: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    with tiny_model() as lm:
        prompt = lm.context("What is this? <image>\nA ", images=[picture])
        allowed = np.array([(t.isalpha() and t.isupper()) or t == b" " for t in lm.byte_vocab])
        given = {"allowed": allowed, "max_tokens": num_characters, "threshold": 1, "seed": 0}
        found = smc_sync(lm, prompt, count, **given)
        for text in found.texts[:5]:
            print(repr(text))
        counts = lm.statistics()
        print(f"log-probability of capital letters: {found.log_z:.2f}")
        print(f"{len(prompt)} tokens of the prompt; {counts.tokens_computed} computed in all")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--particles", type=int, default=20)
    parser.add_argument("--characters", type=int, default=12)
    options = parser.parse_args()
    main(options.particles, options.characters)
