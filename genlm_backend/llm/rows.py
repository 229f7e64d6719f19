"""Rows: log-probabilities, with what the logits were normalised by at their end."""

from __future__ import annotations

import torch


def rows_of_logits(logits: torch.Tensor, known: int = 0) -> torch.Tensor:
    """Return float32 ``[…, vocab + 1]`` from logits ``[…, vocab]``.

    The last number of a row is the logarithm that its logits were normalised by: log-probability
    plus it is the logit.

    Args:
        logits: Of any dtype.
        known: The id of a token whose logit is finite.
    """
    logits = logits.float()
    rows = logits.new_empty((*logits.shape[:-1], logits.shape[-1] + 1))
    torch.log_softmax(logits, -1, out=rows[..., :-1])
    rows[..., -1] = logits[..., known] - rows[..., known]
    return rows
