"""WholeAttend: contexts that are run whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import torch

from genlm_backend.llm.hf.attend.base import Attend
from genlm_backend.llm.hf.packing import PackedBatch


@final
class WholeAttend(Attend):
    """Attends to the new tokens alone: there are none before them, and nothing is kept."""

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Yield a mask of the right padding, int64 ``[B, Q]``."""
        mask = torch.ones_like(batch.input_ids)
        for row, span in zip(mask, batch.spans, strict=True):
            row[span.num_new :] = 0
        yield {"attention_mask": mask, "use_cache": False}
