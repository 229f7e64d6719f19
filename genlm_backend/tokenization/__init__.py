"""The exact bytes of every token id, read from the tokenizer object alone."""

from genlm_backend.tokenization.alphabet import Alphabet
from genlm_backend.tokenization.token import Token
from genlm_backend.tokenization.vocab import Vocabulary, decode_vocab

__all__ = ["Alphabet", "Token", "Vocabulary", "decode_vocab"]
