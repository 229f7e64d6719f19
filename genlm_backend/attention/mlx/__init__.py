"""Ways for the new tokens of a forward pass of MLX to attend to those before them."""

from genlm_backend.attention.mlx.mlx_attend import MlxAttend, MlxWay
from genlm_backend.attention.mlx.mlx_gathered import MlxGatherAttend
from genlm_backend.attention.mlx.mlx_row_states import (
    MlxRowStates,
    caches_of,
    leaves,
    state_caches,
)
from genlm_backend.attention.mlx.mlx_shared import MlxSharedAttend
from genlm_backend.attention.mlx.mlx_whole import MlxWholeAttend, ShapeLayer

WAYS = (
    MlxWay(MlxSharedAttend, lambda store: MlxSharedAttend(store, few_tokens=0, makes_arrays=True)),
    MlxWay(MlxGatherAttend, MlxGatherAttend),
    MlxWay(*2 * [lambda store: MlxGatherAttend(store, by_group=True)]),
)
"""Ways to attend to keys and values in slots; the first is taken that suits a model."""

__all__ = [
    "WAYS",
    "MlxAttend",
    "MlxGatherAttend",
    "MlxRowStates",
    "MlxSharedAttend",
    "MlxWay",
    "MlxWholeAttend",
    "ShapeLayer",
    "caches_of",
    "leaves",
    "state_caches",
]
