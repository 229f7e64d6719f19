"""From a model's name to what can be loaded, with errors that say what was looked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from genlm_backend.errors import ModelNotFoundError
from genlm_backend.llm.bars import bars_where_seen
from genlm_backend.llm.bundled import BUNDLED, bundled_directory, is_bundled


def resolve_name(name: str) -> str:
    """Return a local path or a hub's repository id for ``name``.

    A local directory wins over a bundled model of the same name.

    Raises:
        MissingExtraError: If the name is a bundled model's and its package is not installed.
        TypeError: If ``name`` is no string or path.
    """
    if not isinstance(name, (str, Path)):
        raise TypeError(f"a model's name must be a string, got {name!r}")
    if Path(name).is_dir():
        return str(name)
    return str(bundled_directory(str(name))) if is_bundled(str(name)) else str(name)


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn the many errors of an absent model into one that says what was looked for.

    Progress bars of loading appear where somebody sees them: on a terminal, or in a notebook.
    """
    try:
        with bars_where_seen():
            yield
    except OSError as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelNotFoundError(
            f"no model {name!r} could be loaded. Looked for a local directory of that name, a "
            f"bundled model ({', '.join(BUNDLED)}), and a repository on the Hugging Face hub "
            f"({first_line}). A path to a local directory works as a name."
        ) from error


def load_tokenizer(name: str, **options: Any) -> Any:
    """Load the tokenizer of the model of that name."""
    from transformers import AutoTokenizer

    path = resolve_name(name)
    with explained(name):
        return AutoTokenizer.from_pretrained(path, **options)
