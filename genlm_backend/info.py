"""Installed packages and chosen backends, for bug reports: ``python -m genlm_backend info``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

from genlm_backend.errors import GenlmBackendError

_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "numba", "accelerate", "safetensors")
_DISTRIBUTION = "genlm-backend"


def info() -> str:
    """Return a report of versions, devices, extras and the backend that would be chosen."""
    return "\n".join(f"{name:<22}{value}" for name, value in _rows())


def _rows() -> Iterator[tuple[str, str]]:
    import torch

    from genlm_backend.backends.registry import default_backend

    yield "genlm-backend", _version(_DISTRIBUTION) or "not installed: imported from a folder"
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", f"{platform.platform()}, {os.cpu_count()} cores"
    for library in _LIBRARIES:
        yield library, _version(library) or "not installed"
    yield "threads of torch", str(torch.get_num_threads())
    yield from _devices()
    yield from _extras()
    try:
        yield "backend by default", default_backend()
    except GenlmBackendError as error:
        yield "backend by default", f"none: {error}"


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    if not torch.cuda.is_available():
        yield "CUDA", "no device" if torch.version.cuda else "not in this build of torch"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield f"cuda:{index}", f"{name}, {free >> 20:,} of {total >> 20:,} MiB free"


def _extras() -> Iterator[tuple[str, str]]:
    """Each extra of the distribution, and which of its packages are missing."""
    try:
        metadata = importlib.metadata.metadata(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return
    requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    for extra in metadata.get_all("Provides-Extra") or []:
        wanted = [_name(line) for line in requirements if _is_of(line, extra)]
        missing = [name for name in wanted if _version(name) is None]
        yield f"extra {extra}", "there" if not missing else f"without {', '.join(missing)}"


def _is_of(requirement: str, extra: str) -> bool:
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is not None and "extra" in str(marker) and marker.evaluate({"extra": extra})


def _name(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
