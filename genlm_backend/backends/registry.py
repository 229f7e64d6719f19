"""Names of backends, the options that they share, and ``load_model_by_name``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from genlm_backend.backends.loading import check_name, is_gguf
from genlm_backend.checks import mapping, near_names, optional, shown, text
from genlm_backend.errors import OptionError, OptionTypeError, UnknownBackendError

if TYPE_CHECKING:
    from genlm_backend.backends.hf.async_transformer import AsyncTransformer
    from genlm_backend.backends.llama_cpp.async_llama_cpp_lm import AsyncLlamaCppLM
    from genlm_backend.backends.mlx.async_mlx_lm import AsyncMlxLM
    from genlm_backend.backends.mock import MockAsyncLM
    from genlm_backend.backends.vllm.async_virtual_lm import AsyncVirtualLM
    from genlm_backend.model.batched_lm import BatchedLM

BACKENDS: Final = {
    "hf": ("genlm_backend.backends.hf.async_transformer", "AsyncTransformer"),
    "vllm": ("genlm_backend.backends.vllm.async_virtual_lm", "AsyncVirtualLM"),
    "mlx": ("genlm_backend.backends.mlx.async_mlx_lm", "AsyncMlxLM"),
    "llama-cpp": ("genlm_backend.backends.llama_cpp.async_llama_cpp_lm", "AsyncLlamaCppLM"),
    "mock": ("genlm_backend.backends.mock", "MockAsyncLM"),
}
"""Backend name → (module, class); the module is imported when a model is loaded."""

_LIBRARIES: Final = {"transformers": "hf", "huggingface": "hf", "mlx-lm": "mlx"}
"""A wrong backend name, taken from a library → the backend that the error message suggests."""

REPLICAS: Final = ("genlm_backend.remote.replicas.async_replicas", "AsyncReplicas")
"""The (module, class) used instead of that of ``"hf"`` if the options contain ``replicas``."""

ABSENT: Final = {"sgl": ("genlm_backend.compat.replaced", "AsyncSGLTransformer")}
"""Unsupported backend → (module, class); loading this class raises an error that says so."""


@overload
def load_model_by_name(
    name: str, backend: Literal["hf"], llm_opts: dict[str, Any] | None = None
) -> AsyncTransformer: ...


@overload
def load_model_by_name(
    name: str, backend: Literal["vllm"], llm_opts: dict[str, Any] | None = None
) -> AsyncVirtualLM: ...


@overload
def load_model_by_name(
    name: str, backend: Literal["mlx"], llm_opts: dict[str, Any] | None = None
) -> AsyncMlxLM: ...


@overload
def load_model_by_name(
    name: str, backend: Literal["llama-cpp"], llm_opts: dict[str, Any] | None = None
) -> AsyncLlamaCppLM: ...


@overload
def load_model_by_name(
    name: str, backend: Literal["mock"], llm_opts: dict[str, Any] | None = None
) -> MockAsyncLM: ...


@overload
def load_model_by_name(
    name: str, backend: str | None = None, llm_opts: dict[str, Any] | None = None
) -> BatchedLM: ...


def load_model_by_name(
    name: str, backend: str | None = None, llm_opts: dict[str, Any] | None = None, **others: Any
) -> BatchedLM:
    """Load a language model.

    Args:
        name: A model on the Hugging Face hub, a local directory or GGUF file, or ``"smollm2"``, the
            small model that ships with the extra ``demo``.
        backend: ``"hf"`` (transformers), ``"vllm"`` (vLLM), ``"mlx"`` (mlx-lm), ``"llama-cpp"``
            (llama.cpp, for GGUF files), or ``"mock"`` (the tokenizer and pseudo-random rows).
            ``None`` means ``"llama-cpp"`` for GGUF files, ``"vllm"`` with a CUDA device and a
            supported release of vLLM, ``"mlx"`` on macOS with MLX installed, otherwise ``"hf"``.
        llm_opts: Keyword arguments for the backend's ``from_name``. The option ``"replicas"``, a
            number, makes the model an ``AsyncReplicas``; the annotated types do not show that.
        **others: Not accepted: the error shows how to pass such an option in ``llm_opts``.

    Returns:
        The backend's model: an ``AsyncTransformer``, ``AsyncVirtualLM``, ``AsyncMlxLM``,
        ``AsyncLlamaCppLM``, ``MockAsyncLM`` or ``AsyncReplicas``.

    Raises:
        OptionTypeError: (``TypeError``) If an option is unknown or of a wrong type. Options of
            ``from_name`` are checked before loading; vLLM checks ``engine_opts`` later.
        OptionError: (``ValueError``) If an option is out of bounds, or does not fit the backend.
        UnknownBackendError: (``ValueError``) If there is no such backend.
        ModelNotFoundError: (``OSError``) If there is no such model.
        MissingExtraError: (``ImportError``) If the model or backend needs an extra that is missing.
    """
    for option, value in others.items():
        raise OptionTypeError(
            f"{option} belongs in llm_opts: load_model_by_name({name!r}, llm_opts={{{option!r}: "
            f"{shown(value)}}})"
        )
    backend_class, options = check_loading(name, backend, llm_opts)
    return backend_class.from_name(check_name(name), **options)


def check_loading(
    name: Any, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> tuple[Any, Mapping[str, Any]]:
    """Check the arguments without loading a model; return the model's class and its options."""
    file = check_name(name)
    options = optional(mapping)("llm_opts", llm_opts) or {}
    optional(text)("backend", backend)
    if backend is None and is_gguf(file):
        backend = "llama-cpp"
    chosen = default_backend() if backend is None else backend
    found = BACKENDS.get(chosen) or ABSENT.get(chosen)
    if found is None:
        meant = _LIBRARIES.get(chosen)
        near = near_names(chosen, BACKENDS, quoted=True)
        raise UnknownBackendError(
            f"unknown backend {backend!r}; the backends are "
            f"{', '.join(map(repr, BACKENDS))}{f'; did you mean {meant!r}?' if meant else near}"
        )
    if chosen in ("hf", "mlx", "mock") and is_gguf(file):
        raise OptionError(
            f"{file!r} holds GGUF weights: backend {chosen!r} cannot read them, 'llama-cpp' can"
        )
    if "replicas" in options:
        if "process" in options:
            raise OptionError("replicas always run in separate processes: leave process out")
        if backend not in (None, "hf"):
            raise OptionError(
                f"replicas=… needs backend 'hf', not {backend!r}; AsyncReplicas itself accepts "
                "vLLM evaluators, as the guide to scaling shows"
            )
        chosen, found = "hf", REPLICAS
    elif meant := [name for name in options if "replica" in str(name)]:
        raise OptionTypeError(f"{meant[0]} is not an option; did you mean replicas?")
    module, class_name = found
    backend_class = getattr(importlib.import_module(module), class_name)
    if chosen in BACKENDS:
        of_name = next(iter(inspect.signature(backend_class.from_name).parameters))
        if of_name in options:
            raise OptionTypeError(
                f"llm_opts must not contain {of_name!r}: the first argument names the model"
            )
        backend_class.check_options(options)
    return backend_class, options


def default_backend() -> str:
    """Return the default backend: "vllm" if usable, else "mlx" on macOS if installed, else "hf"."""
    import torch

    release = importlib.import_module("genlm_backend.backends.vllm.release")
    is_there = release.is_supported(release.installed_release()) and torch.cuda.is_available()
    if is_there:
        return "vllm"
    present = importlib.import_module("genlm_backend.backends.mlx.present")
    return "mlx" if present.is_default() else "hf"


_OF_SEVERAL: Final = {
    "threads": ("num_threads",),
    "kv_cache_bytes": ("kv_cache_bytes",),
    "kv_cache_dtype": ("kv_cache_dtype",),
}

_SHARED: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "hf": {"device": ("hf_opts", "device_map"), **_OF_SEVERAL},
    "mlx": {"kv_cache_bytes": ("kv_cache_bytes",)},
    "llama-cpp": _OF_SEVERAL,
    "vllm": {
        "kv_cache_bytes": ("engine_opts", "kv_cache_memory_bytes"),
        "kv_cache_dtype": ("engine_opts", "kv_cache_dtype"),
    },
}
"""Backend → shared option → ``from_name`` argument, with a key if the argument is a mapping."""

_OF_EVERY: Final = {"batch_size": ("batch_size",), "row_cache_bytes": ("row_cache_bytes",)}

VLLM_KV_CACHE_DTYPES: Final[Mapping[str, str]] = {
    "int8": "int8_per_token_head",
    "uint4": "int4_per_token_head",
}
"""Value of the shared option ``kv_cache_dtype`` → vLLM's name for the nearest number format."""


def shared_options(
    backend: str, shared: Mapping[str, Any], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return ``llm_opts``: ``shared`` under the backend's option names, updated with ``more``."""
    known = {**_OF_EVERY, **_SHARED.get(backend, {})}
    options: dict[str, Any] = {}
    for name, value in shared.items():
        if value is None:
            continue
        if name not in known:
            raise OptionError(f"{name} cannot be set for backend {backend!r}")
        if name == "kv_cache_dtype" and backend == "vllm":
            value = VLLM_KV_CACHE_DTYPES[value]
        option, *inner = known[name]
        options[option] = {inner[0]: value} if inner else value
    for name, value in (more or {}).items():
        is_both = isinstance(value, Mapping) and isinstance(options.get(name), Mapping)
        options[name] = {**options[name], **value} if is_both else value
    return options
