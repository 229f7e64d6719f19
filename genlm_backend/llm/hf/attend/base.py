"""Attend: from a packed batch to what the model attends to."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager
from typing import Any

from genlm_backend.llm.hf.packing import PackedBatch


class Attend(abc.ABC):
    """A way for the new tokens of a forward pass to attend to those before them."""

    @abc.abstractmethod
    def attending(self, batch: PackedBatch, model: Any) -> AbstractContextManager[dict[str, Any]]:
        """Prepare one forward pass of a model of transformers, which is made within the context.

        With the pass, the keys and values of the batch's new tokens go to the slots that it names.

        Returns:
            A context of what the model takes beside token ids and positions.
        """
