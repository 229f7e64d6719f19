"""A model over the bytes, and texts that a constraint lets through."""

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from genlm_backend import MockAsyncLM
from genlm_backend.errors import ConstraintError

END = "<|end|>"
CLOSING = (b'"', b"]", b"}", b",", b"n", b"0")


def make():
    """Make a model whose vocabulary is the bytes, and a token that ends a text."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return MockAsyncLM(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END))


def allows(lm, constraint, text):
    """Whether a constraint lets a text through, and lets it end."""
    ids = {token.byte_string: token.token_id for token in lm.byte_vocab}
    constraint = constraint.fork()
    try:
        for byte in text.encode():
            constraint.advance(ids[bytes([byte])])
    except ConstraintError:
        return False
    return constraint.can_end


def write(lm, constraint, seed):
    """Return a random text, in which the longer it is, the more often something closes.

    Returns ``None`` where there is no end in sight.
    """
    randomness, constraint, text = random.Random(seed), constraint.fork(), b""
    while len(text) < 500:
        allowed = constraint.mask().nonzero().flatten().tolist()
        spelled = {lm.byte_vocab[i].byte_string: i for i in allowed if i not in lm.special_ids}
        if constraint.can_end and (not spelled or randomness.random() < 0.6 or len(text) > 60):
            return text.decode()
        assert spelled, text
        closing = [spelled[byte] for byte in CLOSING if byte in spelled]
        is_long = randomness.random() < min(0.8, len(text) / 40)
        chosen = closing[0] if closing and is_long else randomness.choice([*spelled.values()])
        constraint.advance(chosen)
        text += lm.byte_vocab[chosen].byte_string
    return None
