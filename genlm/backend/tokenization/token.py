"""Tokens, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.tokenization.token import Token

__all__ = ["Token"]

__getattr__, __dir__ = lazy_names(globals())
