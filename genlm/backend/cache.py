"""Caches under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.compat.output_cache import OutputCache
    from genlm_backend.compat.replaced import TokenTrie

__all__ = ["OutputCache", "TokenTrie"]

__getattr__, __dir__ = lazy_names(globals())
