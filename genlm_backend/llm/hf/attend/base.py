"""Attend: from a packed batch to what the model attends to."""

from __future__ import annotations

import abc
from typing import Any

from genlm_backend.llm.hf.packing import PackedBatch


class Attend(abc.ABC):
    """A way for the new tokens of a forward pass to attend to those before them."""

    @abc.abstractmethod
    def inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return what a model of transformers takes beside token ids and positions.

        With the pass, the keys and values of the batch's new tokens go to the slots that it names.
        """
