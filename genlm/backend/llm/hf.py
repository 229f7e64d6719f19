"""Models of transformers, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.backends.hf.async_transformer import AsyncTransformer
    from genlm_backend.compat.replaced import Query

__all__ = ["AsyncTransformer", "Query"]

__getattr__, __dir__ = lazy_names(globals())
