"""Names of GGUF models: the files that they lead to."""

from __future__ import annotations

from pathlib import Path

from genlm_backend.backends.bundled import BUNDLED, bundled_file, is_bundled
from genlm_backend.backends.loading import check_name
from genlm_backend.checks import near_names, shown
from genlm_backend.errors import ModelNotFoundError


def resolve_file(name: str | Path) -> str:
    named = check_name(name)
    path = Path(named)
    if path.is_file():
        return named
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        first = [file for file in files if "-00001-of-" in file.name]
        if len(found := first or files) == 1:
            return str(found[0])
        names = shown([file.name for file in files])
        raise ModelNotFoundError(
            f"the directory {named!r} holds {len(files)} GGUF files: {names}; name one of them"
            if files
            else f"the directory {named!r} holds no GGUF file"
        )
    if is_bundled(named):
        return str(bundled_file(named))
    others = [str(file) for file in path.parent.glob("*.gguf")] if path.parent.is_dir() else []
    raise ModelNotFoundError(
        f"there is no file {named!r} (what is on the Hugging Face hub is fetched by "
        "huggingface_hub.hf_hub_download(repository, file))"
        f"{near_names(named, [*others, *BUNDLED], quoted=True)}"
    )
