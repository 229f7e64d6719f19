"""Models of transformers, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.llm.hf.model import AsyncTransformer
    from genlm_backend.replaced import Query

__all__ = ["AsyncTransformer", "Query"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {"AsyncTransformer": "genlm_backend.llm.hf.model", "Query": "genlm_backend.replaced"},
)
