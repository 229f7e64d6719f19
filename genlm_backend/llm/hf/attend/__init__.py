"""Ways for the new tokens of a forward pass to attend to those before them."""

from genlm_backend.llm.hf.attend.base import Attend, Way
from genlm_backend.llm.hf.attend.gathered import GatherAttend
from genlm_backend.llm.hf.attend.running import RunningStates
from genlm_backend.llm.hf.attend.shared import SharedAttend
from genlm_backend.llm.hf.attend.whole import WholeAttend

WAYS = (
    Way(
        SharedAttend,
        lambda store, wider: SharedAttend(store, 4, wider),
        copies=False,
        is_called=True,
    ),
    Way(GatherAttend, GatherAttend, copies=True, is_called=False),
)
"""Ways to attend to keys and values in slots; the first is taken that suits a model."""

__all__ = [
    "WAYS",
    "Attend",
    "GatherAttend",
    "RunningStates",
    "SharedAttend",
    "Way",
    "WholeAttend",
]
