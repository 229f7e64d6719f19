"""Tokens and their bytes, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.tokenization.token import Token
    from genlm_backend.tokenization.vocab import decode_vocab

__all__ = ["Token", "decode_vocab"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "Token": "genlm_backend.tokenization.token",
        "decode_vocab": "genlm_backend.tokenization.vocab",
    },
    submodules=("bytes", "token", "vocab"),
)
