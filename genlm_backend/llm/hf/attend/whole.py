"""WholeAttend: contexts that are run whole."""

from __future__ import annotations

from typing import Any, final

import torch

from genlm_backend.llm.hf.attend.base import Attend
from genlm_backend.llm.hf.packing import PackedBatch


@final
class WholeAttend(Attend):
    """Attends to the new tokens alone: there are none before them, and nothing is kept."""

    def inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return a mask of the right padding, int64 ``[B, Q]``."""
        mask = torch.ones_like(batch.input_ids)
        for row, span in zip(mask, batch.spans, strict=True):
            row[span.num_new :] = 0
        return {"attention_mask": mask, "use_cache": False}
