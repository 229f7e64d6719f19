"""What turns log-probabilities into text, for every backend alike."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.generation.constraint import Constraint

__all__ = ["Constraint"]

__getattr__, __dir__ = lazy_names(__name__, {"Constraint": "genlm_backend.generation.constraint"})
