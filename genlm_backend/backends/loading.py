"""Resolves model names, and turns ``OSError``s of loading into a ``ModelNotFoundError``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from genlm_backend.backends.bundled import BUNDLED, bundled_directory
from genlm_backend.checks import (
    byte_count,
    check_names,
    checked,
    mapping,
    near_names,
    optional,
    shown,
    switch,
    text,
)
from genlm_backend.errors import ModelNotFoundError
from genlm_backend.queries.row import RowCache
from genlm_backend.readouts.sampling import listed_ids
from genlm_backend.runtime.progress import bars_where_seen

logger = logging.getLogger(__name__)

_SECONDS: Final = 5.0
"""Timeout in seconds of the request that checks whether the hub answers."""


def resolve_name(name: str) -> str:
    """Return a name's path or repository id; a directory has priority over a bundled model."""
    name = check_name(name)
    if Path(name).is_dir():
        return name
    return str(bundled_directory(name)) if name in BUNDLED else name


def check_name(name: Any) -> str:
    return text("name", str(name) if isinstance(name, Path) else name)


def is_gguf(name: str) -> bool:
    """Return whether a name ends in ".gguf" or is a directory of GGUF files without config.json."""
    path = Path(name)
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("*.gguf"))
    return name.lower().endswith(".gguf")


def hub_options(path: str) -> dict[str, Any]:
    """Return loader options: ``local_files_only`` for a repository if the hub does not answer."""
    # Without this option, a loader retries the hub for each file.
    return {} if Path(path).is_dir() or hub_answers() else {"local_files_only": True}


def check_holds(path: str, *files: str) -> None:
    """Raise an ``OSError`` if a local directory has none of these files."""
    directory = Path(path)
    if directory.is_dir() and not any((directory / name).exists() for name in files):
        there = shown(sorted(entry.name for entry in directory.iterdir()))
        raise OSError(f"the directory has no {' or '.join(files)}, only {there}")


def check_has_tokenizer(path: str) -> None:
    """Raise an ``OSError`` if a local directory has no tokenizer file."""
    names = [entry.name for entry in Path(path).iterdir()] if Path(path).is_dir() else ["tokenizer"]
    if not any(part in name for name in names for part in _PARTS_OF_TOKENIZER_FILES):
        raise OSError(
            f"the directory has no tokenizer files, only {shown(sorted(names))}: save the "
            "tokenizer there with tokenizer.save_pretrained(…)"
        )


_PARTS_OF_TOKENIZER_FILES = ("token", "vocab", "merges", "spiece", "bpe", "tekken", "spm", ".py")
"""Parts of the names of tokenizer files, and of code files, which may define a tokenizer."""


def check_reachable(path: str) -> None:
    """Refuse an absolute path that is missing, or an uncached name if the hub does not answer."""
    if Path(path).is_absolute() and not Path(path).exists():
        raise OSError("no such file or directory")
    if hub_options(path) and path not in cached_models():
        why = "the hub does not answer or HF_HUB_OFFLINE is set"
        raise OSError(f"the local cache has no such repository, and {why}")


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn an ``OSError`` of loading into a ``ModelNotFoundError`` that explains it."""
    try:
        with bars_where_seen():
            yield
    except OSError as error:
        first_line = str(error).strip().split("\n")[0]
        if Path(name).is_dir():
            raise ModelNotFoundError(
                f"the directory {str(name)!r} contains no model that can be loaded: {first_line}"
            ) from error
        others = {*BUNDLED, *cached_models()} - {str(name)}
        near = near_names(name, sorted(others), quoted=True)
        raise ModelNotFoundError(
            f"no model {name!r} could be loaded{near or '.'} The reason: "
            f"{first_line.removesuffix('.')}. A name is that of a bundled model "
            f"({', '.join(BUNDLED)}) or of a repository on the Hugging Face hub, or the path of a "
            "local directory."
        ) from error


def named_ends(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[int, ...] | None:
    """Return a model's EOS ids, if any: from its generation config or, without one, its config."""
    from transformers import AutoConfig, GenerationConfig

    path = resolve_name(name)
    options = hub_options(path) if revision is None else {**hub_options(path), "revision": revision}
    try:
        return listed_ids(GenerationConfig.from_pretrained(path, **options).eos_token_id)
    except OSError:  # no generation config; the config may have the ids
        pass
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError):  # a tokenizer alone, or a model that transformers does not know
        return None
    return listed_ids(GenerationConfig.from_model_config(config).eos_token_id)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "config.json")
"""``load_tokenizer`` refuses a local directory that has none of these files."""


def load_tokenizer(name: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    path = resolve_name(name)
    with explained(name):
        check_holds(path, *_TOKENIZER_FILES)
        return AutoTokenizer.from_pretrained(path, **{**hub_options(path), **options})


def hub_answers() -> bool:
    """Return whether the hub answers within 5 s; ``False`` if ``HF_HUB_OFFLINE`` is set."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    unanswered: Any = HfHubHTTPError.__bases__  # the HTTP client's errors
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except unanswered as error:
        logger.info("the hub does not answer: %s", error)
        return False
    return True


def cached_models() -> list[str]:
    """Return the ids of the model repositories in the hub's local cache."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return sorted(f.name.removeprefix("models--").replace("--", "/") for f in folders)


_CHECKS = {"max_bytes": optional(byte_count), "move_to_cpu": switch}


def cache_opts(name: str, value: Any) -> dict[str, Any]:
    options = mapping(name, value)
    check_names(options, _CHECKS, f"option of {name}")
    return checked(_CHECKS, options)


def row_cache(
    cache_size: int, row_cache_bytes: int, max_bytes: int | None = None, move_to_cpu: bool = False
) -> RowCache:
    return RowCache(
        row_cache_bytes if max_bytes is None else max_bytes,
        cache_size or None,
        torch.device("cpu") if move_to_cpu else None,
    )
