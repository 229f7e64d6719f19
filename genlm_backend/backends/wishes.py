"""What any model may be wished to have, in the words of each backend's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from genlm_backend.errors import OptionError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """Options of loading that backends have in common; ``None`` leaves one to the backend.

    Attributes:
        batch_size: Number of distinct contexts that are evaluated at once, at most.
        row_cache_bytes: Bytes of rows to keep.
        device: Where the model runs: "cpu", "cuda:0", …
        threads: Threads of a forward pass on the CPU.
        kv_cache_bytes: Bytes of keys and values, at most.
        kv_cache_dtype: Number format of these: "int8", "uint4".
    """

    batch_size: int | None = None
    row_cache_bytes: int | None = None
    device: str | None = None
    threads: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_dtype: str | None = None


_OF_EVERY: Final = {"batch_size": ("batch_size",), "row_cache_bytes": ("row_cache_bytes",)}

_OF_BACKEND: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "hf": {
        "device": ("hf_opts", "device_map"),
        "threads": ("num_threads",),
        "kv_cache_bytes": ("kv_cache_bytes",),
        "kv_cache_dtype": ("kv_cache_dtype",),
    },
    "mlx": {"kv_cache_bytes": ("kv_cache_bytes",)},
    "vllm": {
        "kv_cache_bytes": ("engine_opts", "kv_cache_memory_bytes"),
        "kv_cache_dtype": ("engine_opts", "kv_cache_dtype"),
    },
}
"""Backend → wish → the option of ``from_name``, or the mapping and the name in it."""

VLLM_KV_CACHE_DTYPES: Final[Mapping[str, str]] = {
    "int8": "int8_per_token_head",
    "uint4": "int4_per_token_head",
}
"""Number format of keys and values → what vLLM calls the one that is like it."""


def wished_options(
    backend: str, wishes: Wishes, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the ``llm_opts`` of ``load_model_by_name`` that fulfil some wishes.

    Args:
        backend: The backend's name.
        wishes: What the model is to have.
        more: Options in the backend's own words, which go before; what is in one of their
            mappings goes beside what the wishes have there.

    Raises:
        OptionError: (``ValueError``) If the backend has no option for a wish.
    """
    known = {**_OF_EVERY, **_OF_BACKEND.get(backend, {})}
    options: dict[str, Any] = {}
    for name in Wishes.__dataclass_fields__:
        value = getattr(wishes, name)
        if value is None:
            continue
        if name not in known:
            raise OptionError(f"{name} cannot be chosen for backend {backend!r}")
        if name == "kv_cache_dtype" and backend == "vllm":
            value = VLLM_KV_CACHE_DTYPES[value]
        option, *inner = known[name]
        options[option] = {inner[0]: value} if inner else value
    for name, value in (more or {}).items():
        is_both = isinstance(value, Mapping) and isinstance(options.get(name), Mapping)
        options[name] = {**options[name], **value} if is_both else value
    return options
