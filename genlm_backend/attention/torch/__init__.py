"""Ways for the new tokens of a forward pass of torch to attend to those before them."""

from genlm_backend.attention.attend import Way
from genlm_backend.attention.torch.torch_attend import GatherAttend, SharedAttend, WholeAttend
from genlm_backend.attention.torch.torch_row_states import TorchRowStates

WAYS = (
    Way(SharedAttend, lambda store: SharedAttend(store, 4), is_called=True),
    Way(GatherAttend, GatherAttend),
)
"""Ways to attend to keys and values in slots; the first is taken that suits a model."""

__all__ = [
    "WAYS",
    "GatherAttend",
    "SharedAttend",
    "TorchRowStates",
    "WholeAttend",
]
