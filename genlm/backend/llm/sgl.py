"""Models of SGLang, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.compat.replaced import HAS_SGL, AsyncSGLTransformer

__all__ = ["HAS_SGL", "AsyncSGLTransformer"]

__getattr__, __dir__ = lazy_names(globals())
