"""Parameter names of a model's ``forward``, and the cache's name in its inputs and outputs.

Transformers names a cache ``cache`` from release 5.24 on. Before that, most models named it
``past_key_values``, and some with only recurrent states named it ``cache_params``. Code that comes
with a checkpoint may keep an old name.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, Final

_CACHES: Final = ("cache", "past_key_values", "cache_params")


def parameters_of(model: Any) -> frozenset[str]:
    """Return the parameter names of ``model.forward``, with those of a model in PEFT's wrapper."""
    names = {*inspect.signature(model.forward).parameters}
    if "kwargs" in names and hasattr(model, "get_base_model"):  # PEFT's wrapper passes them on
        names.update(inspect.signature(model.get_base_model().forward).parameters)
    return frozenset(names)


def cache_argument(parameters: Collection[str]) -> str | None:
    """Return the name of the cache among a forward's parameters; ``None`` if it takes none."""
    return next((name for name in _CACHES if name in parameters), None)


def given_cache(model: Any, cache: Any) -> dict[str, Any]:
    return {cache_argument(parameters_of(model)) or "cache": cache}


def returned_cache(output: Any) -> Any:
    return next((getattr(output, name) for name in _CACHES if hasattr(output, name)), None)
