"""Dispatch: lets a model of mlx-lm attend in a way of ours for one forward pass.

The modules of mlx-lm that models are written in have imported one attention function by its name.
While a pass of ours runs, that name means ours, which hands on to theirs whatever is asked with
another cache than those of the pass.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final, final

import mlx.core as mx
from mlx_lm.models import base

from genlm_backend.errors import ModelStateError

_NAME: Final = "scaled_dot_product_attention"


def attends_otherwise(how: str) -> ModelStateError:
    """Return the error of a model that attends in a way that ours cannot stand for.

    A model that always does is found out before it is asked anything.
    """
    return ModelStateError(
        f"the model attends otherwise than it did when it was wrapped: {how}; has it been changed?"
    )


@final
class Dispatch:
    """The modules that a model is written in."""

    def __init__(self, model: Any) -> None:
        names = {
            kind.__module__ for _, part in model.named_modules() for kind in type(part).__mro__
        }
        found = [sys.modules.get(name) for name in sorted(names)]
        self._modules: list[Any] = [m for m in found if hasattr(m, _NAME) and m is not base]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the model's layers ask a cache that attends by itself."""
        theirs = [getattr(module, _NAME) for module in self._modules]
        try:
            for module, function in zip(self._modules, theirs, strict=True):
                setattr(module, _NAME, _asking(function))
            yield
        finally:
            for module, function in zip(self._modules, theirs, strict=True):
                setattr(module, _NAME, function)


def _asking(theirs: Any) -> Any:
    """Return an attention function that asks a cache first whether it attends by itself."""

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: Any = None,
    ) -> mx.array:
        attended = getattr(cache, "attended", None)
        if attended is not None:
            return attended(queries, keys, values, scale, mask, sinks)
        return theirs(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)

    return scaled_dot_product_attention
