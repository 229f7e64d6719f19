"""Ways for the new tokens of a forward pass of MLX to attend to those before them."""

from functools import partial

from genlm_backend.attention.attend import Way
from genlm_backend.attention.mlx.mlx_attend import MlxAttend, MlxGatherAttend, MlxWholeAttend
from genlm_backend.attention.mlx.mlx_row_states import (
    MlxRowStates,
    caches_of,
    leaves,
    state_caches,
)
from genlm_backend.attention.mlx.mlx_shared import MlxSharedAttend

_BY_GROUP = partial(MlxGatherAttend, by_group=True)
GATHERED = Way(MlxGatherAttend, MlxGatherAttend)
WAYS = (
    Way(MlxSharedAttend, lambda store: MlxSharedAttend(store, 0, True), is_called=True),
    GATHERED,
    Way(_BY_GROUP, _BY_GROUP),
)
"""Ways to attend to keys and values in slots; the first is taken that suits a model."""

__all__ = [
    "GATHERED",
    "WAYS",
    "MlxAttend",
    "MlxGatherAttend",
    "MlxRowStates",
    "MlxSharedAttend",
    "MlxWholeAttend",
    "caches_of",
    "leaves",
    "state_caches",
]
