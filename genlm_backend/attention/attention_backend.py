"""AttentionBackend: what the new tokens of a forward batch attend to, and makers of one."""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.attention.cascade_plan import CachedPrefixes, CascadePlan
from genlm_backend.attention.forward_batch import ForwardBatch

Given = TypeVar("Given")


class AttentionBackend(abc.ABC, Generic[Given]):
    """A way for the new tokens of a forward pass to attend to those before them."""

    def plan(self, past: CachedPrefixes, num_new: NDArray[np.int64]) -> CascadePlan | None:
        """Return a new plan for a batch to carry; a pass without one makes it when it begins."""
        return None

    @abc.abstractmethod
    def forward_context(self, batch: ForwardBatch, model: Any) -> AbstractContextManager[Given]:
        """Prepare one forward pass, which is made within the context.

        With the pass, or after it, the keys and values of the batch's new tokens go to the slots
        that it names.

        Returns:
            A context of what the model takes beside token ids and positions: of transformers a
            dictionary, of mlx-lm a list of caches or ``None`` for its own.
        """


@final
@dataclass(frozen=True, slots=True)
class AttentionFactory:
    """A maker of an ``AttentionBackend`` over a pool of keys and values."""

    over: Callable[[Any], AttentionBackend[Any]]
    probing: Callable[[Any], AttentionBackend[Any]]
    uses_interface: bool = False
