"""Vocabularies, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.compat.replaced import bytes_to_strs
    from genlm_backend.tokenization.vocab import decode_vocab

__all__ = ["bytes_to_strs", "decode_vocab"]

__getattr__, __dir__ = lazy_names(globals())
