"""Ends of texts: the token ids that a model's generation config names, or else its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np


def listed_ids(value: Any) -> tuple[int, ...] | None:
    """Return the ``eos_token_id`` of a generation config or a tokenizer, as several ids.

    Args:
        value: A token id, or several in a list, an array or a tensor; ``None`` for none named.
    """
    if value is None:
        return None
    values = value.tolist() if hasattr(value, "tolist") else value
    several: Iterable[Any] = values if isinstance(values, Iterable) else [values]
    return tuple(int(one) for one in several if isinstance(one, (int, np.integer)))


def ends_of_model(model: Any) -> tuple[int, ...] | None:
    """Return the ids that the generation config of a model of transformers names, as it is now."""
    return listed_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))


def default_ends(
    own: Collection[int] | None, tokenizer: Any, is_token: Callable[[int], bool]
) -> frozenset[int]:
    """Return the ids that end a text where a caller names none.

    Args:
        own: Ids that the model's generation config names; ``None`` where it names none.
        tokenizer: Tokenizer of the model, which tells where the model names no token of its own.
        is_token: Whether an id is a token's. What is not comes nowhere, and ends nothing.
    """
    of_tokenizer = listed_ids(getattr(tokenizer, "eos_token_id", None))
    found = (frozenset(filter(is_token, ids)) for ids in (own, of_tokenizer) if ids is not None)
    return next(filter(None, found), frozenset())
