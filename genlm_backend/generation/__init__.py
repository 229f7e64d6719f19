"""Text generation from next-token log-probabilities, the same for every backend."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.generation.async_glm import AsyncGLM
    from genlm_backend.generation.config import GenerationConfig, MultiMediaInfo
    from genlm_backend.generation.constraint import Constraint
    from genlm_backend.generation.engine.engine import Engine
    from genlm_backend.generation.engine.model_entry import ModelState
    from genlm_backend.generation.engine.request import GenerationRequest, ResultQueue
    from genlm_backend.generation.engine.runtime_config import RuntimeConfig
    from genlm_backend.generation.generated import (
        GeneratedElements,
        GeneratedToken,
        Generation,
        GenerationStatus,
        Piece,
        RequestStatistics,
    )
    from genlm_backend.generation.generation import generate, generate_sync, stream

__all__ = [
    "AsyncGLM",
    "Constraint",
    "Engine",
    "GeneratedElements",
    "GeneratedToken",
    "Generation",
    "GenerationConfig",
    "GenerationRequest",
    "GenerationStatus",
    "ModelState",
    "MultiMediaInfo",
    "Piece",
    "RequestStatistics",
    "ResultQueue",
    "RuntimeConfig",
    "generate",
    "generate_sync",
    "stream",
]

__getattr__, __dir__ = lazy_names(globals())
