"""Ways for the new tokens of a forward pass of MLX to attend to those before them."""

from genlm_backend.llm.mlx.attend.base import MlxAttend, Way
from genlm_backend.llm.mlx.attend.gathered import GatherAttend
from genlm_backend.llm.mlx.attend.running import (
    MlxRunningStates,
    caches_of,
    leaves,
    state_caches,
)
from genlm_backend.llm.mlx.attend.shared import SharedAttend
from genlm_backend.llm.mlx.attend.whole import ShapeLayer, WholeAttend

WAYS = (
    Way(SharedAttend, lambda store: SharedAttend(store, few_tokens=0, makes_arrays=True)),
    Way(GatherAttend, GatherAttend),
    Way(*2 * [lambda store: GatherAttend(store, by_group=True)]),
)
"""Ways to attend to keys and values in slots; the first is taken that suits a model."""

__all__ = [
    "WAYS",
    "GatherAttend",
    "MlxAttend",
    "MlxRunningStates",
    "ShapeLayer",
    "SharedAttend",
    "Way",
    "WholeAttend",
    "caches_of",
    "leaves",
    "state_caches",
]
