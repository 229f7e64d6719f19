"""Generation of text from log-probabilities, for every backend alike."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.generation.async_glm import AsyncGLM
    from genlm_backend.generation.config import GenerationConfig, MultiMediaInfo
    from genlm_backend.generation.constraint import Constraint
    from genlm_backend.generation.engine.engine import Engine
    from genlm_backend.generation.engine.installed_model import ModelState
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

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "AsyncGLM": "genlm_backend.generation.async_glm",
        "Constraint": "genlm_backend.generation.constraint",
        "Engine": "genlm_backend.generation.engine.engine",
        "GeneratedElements": "genlm_backend.generation.generated",
        "GeneratedToken": "genlm_backend.generation.generated",
        "Generation": "genlm_backend.generation.generated",
        "GenerationConfig": "genlm_backend.generation.config",
        "GenerationRequest": "genlm_backend.generation.engine.request",
        "GenerationStatus": "genlm_backend.generation.generated",
        "ModelState": "genlm_backend.generation.engine.installed_model",
        "MultiMediaInfo": "genlm_backend.generation.config",
        "Piece": "genlm_backend.generation.generated",
        "RequestStatistics": "genlm_backend.generation.generated",
        "ResultQueue": "genlm_backend.generation.engine.request",
        "RuntimeConfig": "genlm_backend.generation.engine.runtime_config",
        "generate": "genlm_backend.generation.generation",
        "generate_sync": "genlm_backend.generation.generation",
        "stream": "genlm_backend.generation.generation",
    },
)
