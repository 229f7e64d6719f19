"""The bytes of tokens, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.compat.replaced import (
        check_byte_decoder,
        get_byte_tokens_from_byte_decoder,
        get_byte_tokens_from_sp,
        get_byte_vocab,
    )
    from genlm_backend.errors import TokenizerDecodeError as ByteDecoderError
    from genlm_backend.errors import TokenizerDecodeError as ByteVocabError

__all__ = [
    "ByteDecoderError",
    "ByteVocabError",
    "check_byte_decoder",
    "get_byte_tokens_from_byte_decoder",
    "get_byte_tokens_from_sp",
    "get_byte_vocab",
]

__getattr__, __dir__ = lazy_names(globals())
