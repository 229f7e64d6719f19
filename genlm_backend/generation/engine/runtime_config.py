"""RuntimeConfig: an engine's options for running a model, checked at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch

from genlm_backend.backends.registry import VLLM_KV_CACHE_DTYPES, shared_options
from genlm_backend.checks import (
    MAX_BYTES,
    integer,
    known_device,
    mapping,
    one_of,
    optional,
    switch,
    text,
    thread_count,
)
from genlm_backend.errors import OptionError, RuntimeConfigError
from genlm_backend.generation.config import CheckedConfig, checked_field
from genlm_backend.model.async_lm import AsyncLM

_MODES: Final[Mapping[str | None, str]] = {
    "int8": "int8",
    "uint4": "uint4",
    **{named: mode for mode, named in VLLM_KV_CACHE_DTYPES.items()},
}
"""``AsyncLM.kv_cache_dtype`` → ``kv_cache_mode``; ``"default"`` for all other dtypes."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(CheckedConfig):
    """An engine's options for a model, checked at construction; ``None`` is the model's default.

    Attributes:
        device: Device of the model: "cpu", "cuda:0", …
        threads: Threads of a forward pass on the CPU.
        max_batch: Texts and beams generated at once, at most; other texts wait in order.
        max_length: Tokens of a prompt and its text together, at most.
        max_queue_size: Submissions in the queue, at most; requests that are started together are
            one submission. ``None`` for no bound.
        kv_cache_mode: Storage of keys and values: ``"default"`` for the model's own dtype,
            ``"int8"`` or ``"uint4"`` for eight or four bits per element.
        kv_cache_bytes: Bytes of the KV cache, at most.
        warm_up: Whether starting the model evaluates a context of the maximum length and a batch
            of the maximum size, so that ``start_model`` raises if memory is lacking.
        backend: Name of the backend for ``load_model_by_name``, if the model is given by name.
        llm_opts: More options for loading the model by name; they override the fields above.

    Raises:
        RuntimeConfigError: (``ValueError``) If a value is invalid; the message names the field.
    """

    device: str | None = checked_field(None, optional(known_device))
    threads: int | None = checked_field(None, optional(thread_count))
    max_batch: int | None = checked_field(None, optional(integer(1)))
    max_length: int | None = checked_field(None, optional(integer(2)))
    max_queue_size: int | None = checked_field(None, optional(integer(0)))
    kv_cache_mode: str = checked_field("default", one_of("default", "int8", "uint4"))
    kv_cache_bytes: int | None = checked_field(None, optional(integer(1, MAX_BYTES)))
    warm_up: bool = checked_field(True, switch)
    backend: str | None = checked_field(None, optional(text))
    llm_opts: Mapping[str, Any] = field(default_factory=dict, metadata={"check": mapping})

    _error = RuntimeConfigError

    @classmethod
    def from_model(cls, lm: AsyncLM) -> Self:
        """Return the configuration that describes a loaded model."""
        return cls(
            device=None if lm.model_device is None else str(lm.model_device),
            max_batch=lm.batch_size,
            max_length=lm.max_length,
            kv_cache_bytes=lm.statistics().kv_bytes_budget or None,
            kv_cache_mode=_MODES.get(lm.kv_cache_dtype, "default"),
        )

    # ---------------------------------------------------------------- loading and checking a model

    def loading_options(self, backend: str) -> dict[str, Any]:
        """Convert the fields to the ``llm_opts`` of ``load_model_by_name``."""
        shared = {
            "batch_size": self.max_batch,
            "device": self.device,
            "threads": self.threads,
            "kv_cache_bytes": self.kv_cache_bytes,
            "kv_cache_dtype": None if self.kv_cache_mode == "default" else self.kv_cache_mode,
        }
        try:
            return shared_options(backend, shared, self.llm_opts)
        except OptionError as error:
            raise RuntimeConfigError(str(error)) from error

    def check_model(self, lm: AsyncLM) -> None:
        own = type(self).from_model(lm)
        is_there = self.device is None or _is_on(lm.model_device, self.device)
        is_budget = self.kv_cache_bytes in (None, own.kv_cache_bytes)
        is_mode = self.kv_cache_mode in ("default", own.kv_cache_mode)
        found = {"device": is_there, "kv_cache_bytes": is_budget, "kv_cache_mode": is_mode}
        for name, is_right in found.items():
            if not is_right:
                raise RuntimeConfigError(
                    f"{name}={getattr(self, name)!r} does not fit the loaded model, which has "
                    f"{getattr(own, name)!r}: {name} is chosen when a model is loaded"
                )
        for name in ("threads", "backend"):
            if getattr(self, name) is not None:
                raise RuntimeConfigError(f"{name} applies only to a model that is loaded by name")
        if self.llm_opts:
            raise RuntimeConfigError("llm_opts apply only to a model that is loaded by name")

    def check_loaded(self, lm: AsyncLM) -> None:
        """Raise a ``RuntimeConfigError`` if ``max_length`` exceeds the loaded model's limit."""
        longest = None if lm.max_length is None else lm.max_length + 1
        if self.max_length is not None and longest is not None and self.max_length > longest:
            raise RuntimeConfigError(
                f"max_length={self.max_length} exceeds the model's limit of {longest}"
            )


def _is_on(device: torch.device | None, asked: str) -> bool:
    if device is None:
        return False
    wanted = torch.device(asked)
    return device.type == wanted.type and wanted.index in (None, device.index or 0)
