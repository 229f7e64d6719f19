"""What turns log-probabilities into text, for every backend alike."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.generation.async_glm import AsyncGLM
    from genlm_backend.generation.config import GenerationConfig
    from genlm_backend.generation.constraint import Constraint
    from genlm_backend.generation.generated import GeneratedToken, Generation
    from genlm_backend.generation.generation import generate, stream

__all__ = [
    "AsyncGLM",
    "Constraint",
    "GeneratedToken",
    "Generation",
    "GenerationConfig",
    "generate",
    "stream",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AsyncGLM": "genlm_backend.generation.async_glm",
        "Constraint": "genlm_backend.generation.constraint",
        "GeneratedToken": "genlm_backend.generation.generated",
        "Generation": "genlm_backend.generation.generated",
        "GenerationConfig": "genlm_backend.generation.config",
        "generate": "genlm_backend.generation.generation",
        "stream": "genlm_backend.generation.generation",
    },
)
