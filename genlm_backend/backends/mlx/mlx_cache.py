"""Room for what a model of mlx-lm keeps of contexts, within budgets."""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx

from genlm_backend.backends.mlx.mlx_runner import MlxRunner
from genlm_backend.backends.mlx.mlx_support import MlxSupport
from genlm_backend.errors import OptionError
from genlm_backend.passes.prefix_cache import PrefixCache
from genlm_backend.prefix.budgets import Budgets, state_budget
from genlm_backend.prefix.kv_store import FREE_SLOTS
from genlm_backend.prefix.mlx_states import MlxStateStore
from genlm_backend.prefix.mlx_store import MlxStore
from genlm_backend.runtime.memory import cpu_budget

_METAL_FRACTION: Final = 0.5


def cache_of(
    runner: MlxRunner, support: MlxSupport, kv_bytes: int | None, state_bytes: int | None
) -> PrefixCache | None:
    """Return room for contexts; ``None`` if every context is run whole."""
    kept, name = support.kept, type(runner.model).__name__
    if support.reason:
        if state_bytes is not None:
            raise OptionError(
                f"state_cache_bytes={state_bytes} is for models whose running states are kept, and "
                f"{name} runs every context whole: {support.reason}"
            )
        return None
    budget = _default_budget() if kv_bytes is None else kv_bytes
    if budget == 0 and state_bytes is None:
        return None
    size = kept.states.bytes_per_state
    per_slot = sum(shape.bytes_per_slot for shape in kept.shapes)
    of_states = state_budget(state_bytes, budget, size, name, attends=per_slot > 0)
    num_slots = max(0, (budget - of_states) // per_slot - 1) if per_slot else FREE_SLOTS
    store: Any = MlxStore(kept.shapes, num_slots)
    states: Any = MlxStateStore(kept.states, of_states // size) if kept.states else None
    attend: Any = support.way.over(store)
    budgets = Budgets(budget, states=of_states)
    return PrefixCache(runner, attend, store, num_slots, states=states, budgets=budgets)


def _default_budget() -> int:
    """Return the default bytes of keys and values: on Metal, a share of its unused memory."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return cpu_budget()
    recommended = mx.device_info().get("max_recommended_working_set_size", 0)
    return int(max(0, int(recommended) - mx.get_active_memory()) * _METAL_FRACTION)
