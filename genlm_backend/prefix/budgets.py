"""Budgets: how many bytes the cache may take, by default and by options, which are checked."""

from __future__ import annotations

from collections import defaultdict
from typing import Final, Literal, NamedTuple, TypeAlias, final, get_args

import torch

from genlm_backend.checks import Check, one_of
from genlm_backend.errors import OptionError
from genlm_backend.prefix.kv_pool import KVLayout
from genlm_backend.runtime.memory import cpu_budget

TierName: TypeAlias = Literal["device", "host"]
"""Name of a cache tier: the memory of the model's device, or of the host."""

check_tier: Final[Check[TierName | None]] = one_of(None, *get_args(TierName))
"""Check of an argument that names a tier or is ``None``."""

CUDA_FRACTION: Final = 0.5

_FEWEST_ROWS: Final = 8
"""The least number that ``most_rows`` returns, however few states there are."""


@final
class Budgets(NamedTuple):
    """Byte limits of the cache on the device (``kv``) and the host; ``kv`` includes ``states``."""

    kv: int = 0
    host: int = 0
    states: int = 0


def default_kv_budget(layout: KVLayout) -> int:
    """Return the default ``kv_cache_bytes``, for as many slots or states as fit on every device."""
    by_device: dict[torch.device, int] = defaultdict(int)
    for layer in layout.layers:
        by_device[layer.device] += layer.bytes_per_slot
    size = layout.bytes_per_slot
    if not layout.layers:  # recurrent states alone
        for tensor in layout.states.tensors:
            by_device[tensor.device] += tensor.nbytes
        size = layout.states.bytes_per_state
    slots = []
    for device, bytes_per_slot in by_device.items():
        if device.type == "cuda":
            free = int(torch.cuda.mem_get_info(device)[0] * CUDA_FRACTION)
        else:
            free = cpu_budget()
        slots.append(free // max(1, bytes_per_slot))
    return min(slots) * size


def check_budgets(
    kv_cache_bytes: int | None, host_cache_bytes: int, state_cache_bytes: int | None = None
) -> None:
    """Raise if ``kv_cache_bytes`` is 0, which turns all caching off, and another is not."""
    if state_cache_bytes and kv_cache_bytes == 0:
        raise OptionError(
            f"state_cache_bytes={state_cache_bytes} is a part of kv_cache_bytes, "
            "which is 0: raise kv_cache_bytes, or leave state_cache_bytes out"
        )
    if host_cache_bytes and kv_cache_bytes == 0:
        raise OptionError(
            f"host_cache_bytes={host_cache_bytes} needs a cache on the device too, "
            "but kv_cache_bytes=0 allows none: raise kv_cache_bytes, or leave host_cache_bytes out"
        )


def state_budget(wanted: int | None, budget: int, size: int, name: str, *, attends: bool) -> int:
    """Check ``wanted``, the option ``state_cache_bytes``; return bytes for states, 0 if none."""
    if not size:
        if wanted is not None:
            raise OptionError(
                f"state_cache_bytes={wanted} needs a model with recurrent states, and {name} has "
                "only keys and values: leave it out, and they get all of kv_cache_bytes"
            )
        return 0
    share = budget // 2 if attends else budget
    num_bytes = share if wanted is None else wanted
    if num_bytes > budget:
        raise OptionError(
            f"state_cache_bytes={num_bytes} is more than kv_cache_bytes={budget}, which includes it"
        )
    if num_bytes < size:
        raise OptionError(
            f"the recurrent state of {name} after one token takes {size} bytes, but only "
            f"{num_bytes} are available: raise {'kv' if wanted is None else 'state'}_cache_bytes, "
            "or set kv_cache_bytes=0 to cache nothing"
        )
    return num_bytes


def most_rows(num_states: int) -> int:
    """Return the most rows of a pass. A pass copies a state per row, so this bounds the copies."""
    return max(_FEWEST_ROWS, num_states // 2)
