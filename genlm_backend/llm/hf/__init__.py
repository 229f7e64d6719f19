"""AsyncTransformer: a Hugging Face model behind ``AsyncLM``."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.llm.hf.model import AsyncTransformer

__all__ = ["AsyncTransformer"]

__getattr__, __dir__ = lazy_names(globals(), {"AsyncTransformer": "genlm_backend.llm.hf.model"})
