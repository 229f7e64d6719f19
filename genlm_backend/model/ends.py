"""Ends of texts: the token ids that a generation config or a tokenizer names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def listed_ids(value: Any) -> tuple[int, ...] | None:
    """Return the ``eos_token_id`` of a generation config or a tokenizer, as several ids."""
    if value is None:
        return None
    values = value.tolist() if hasattr(value, "tolist") else value
    several: Iterable[Any] = values if isinstance(values, Iterable) else [values]
    return tuple(int(one) for one in several if isinstance(one, (int, np.integer)))


def ends_of_model(model: Any) -> tuple[int, ...] | None:
    """Return the ids that the generation config of a model of transformers names, as it is now."""
    return listed_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
