"""Tokens and their bytes, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.tokenization.token import Token
    from genlm_backend.tokenization.vocab import decode_vocab

__all__ = ["Token", "decode_vocab"]

__getattr__, __dir__ = lazy_names(globals(), submodules=("bytes", "token", "vocab"))
