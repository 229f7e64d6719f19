"""What turns log-probabilities into text, for every backend alike."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.generation.config import GenerationConfig
    from genlm_backend.generation.constraint import Constraint
    from genlm_backend.generation.generate import GeneratedToken, Generation, generate, stream

__all__ = [
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
        "Constraint": "genlm_backend.generation.constraint",
        "GeneratedToken": "genlm_backend.generation.generate",
        "Generation": "genlm_backend.generation.generate",
        "GenerationConfig": "genlm_backend.generation.config",
        "generate": "genlm_backend.generation.generate",
        "stream": "genlm_backend.generation.generate",
    },
)
