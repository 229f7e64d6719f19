"""Generation of text from log-probabilities, for every backend alike."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.generation.async_glm import AsyncGLM as AsyncGLM
    from genlm_backend.generation.config import GenerationConfig as GenerationConfig
    from genlm_backend.generation.config import MultiMediaInfo as MultiMediaInfo
    from genlm_backend.generation.constraint import Constraint as Constraint
    from genlm_backend.generation.engine.engine import Engine as Engine
    from genlm_backend.generation.engine.installed_model import ModelState as ModelState
    from genlm_backend.generation.engine.request import GenerationRequest as GenerationRequest
    from genlm_backend.generation.engine.request import ResultQueue as ResultQueue
    from genlm_backend.generation.engine.runtime_config import RuntimeConfig as RuntimeConfig
    from genlm_backend.generation.generated import GeneratedElements as GeneratedElements
    from genlm_backend.generation.generated import GeneratedToken as GeneratedToken
    from genlm_backend.generation.generated import Generation as Generation
    from genlm_backend.generation.generated import GenerationStatus as GenerationStatus
    from genlm_backend.generation.generated import Piece as Piece
    from genlm_backend.generation.generated import RequestStatistics as RequestStatistics
    from genlm_backend.generation.generation import generate as generate
    from genlm_backend.generation.generation import generate_sync as generate_sync
    from genlm_backend.generation.generation import stream as stream

_NAMES = {
    "async_glm": "AsyncGLM",
    "config": "GenerationConfig MultiMediaInfo",
    "constraint": "Constraint",
    "engine.engine": "Engine",
    "engine.installed_model": "ModelState",
    "engine.request": "GenerationRequest ResultQueue",
    "engine.runtime_config": "RuntimeConfig",
    "generated": "GeneratedElements GeneratedToken Generation GenerationStatus Piece "
    "RequestStatistics",
    "generation": "generate generate_sync stream",
}
"""Modules, each with its public names."""

_places = {name: f"{__name__}.{module}" for module in _NAMES for name in _NAMES[module].split()}

# Type checkers take the names that are imported as themselves to be public.
__all__ = sorted(_places)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = lazy_names(globals(), _places)
