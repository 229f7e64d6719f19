"""PrefixFiles: prefixes of a model that go into files and come out of them."""

from __future__ import annotations

from pathlib import Path
from typing import final

from genlm_backend.errors import PrefixFileError
from genlm_backend.llm.hf import prefix_file
from genlm_backend.llm.hf.fingerprint import Fingerprint, weights_digest, weights_state
from genlm_backend.llm.hf.lora import Adapters
from genlm_backend.llm.hf.passes import Passes
from genlm_backend.llm.hf.prefix_file import Prefix
from genlm_backend.llm.hf.support import vocab_width
from genlm_backend.llm.query import Adapter, Query


@final
class PrefixFiles:
    """Files with the keys and values of a model, whose fingerprints it keeps.

    Args:
        passes: What has the model, its tree and its store.
        adapters: Its adapters.
    """

    def __init__(self, passes: Passes, adapters: Adapters) -> None:
        self._passes, self._adapters = passes, adapters
        # What a digest was made of, and the digest.
        self._digests: dict[Adapter | None, tuple[object, str]] = {}

    def save(self, node: int, query: Query, path: Path) -> None:
        """Write what is kept up to the node of a context.

        Raises:
            OSError: If the file cannot be written; nothing of it stays then.
        """
        passes = self._passes
        states = [state.cpu() for state in passes.states.read(passes.tree.nodes.state[[node]])]
        prefix = Prefix(tuple(query.context), passes.codes_of(node), states)
        prefix_file.save(path, prefix, self._fingerprint(query.adapter), passes.store.layout)

    def load(self, path: Path, adapter: Adapter | None) -> Prefix:
        """Return what is in a file of this model.

        Raises:
            PrefixFileError: (``ValueError``) If it is of another model or none at all.
            OSError: If it cannot be read.
        """
        layout = self._passes.store.layout
        prefix = prefix_file.load(path, self._fingerprint(adapter), layout)
        ids, width = prefix.token_ids, vocab_width(self._passes.runner.model)
        if not ids or not 0 <= min(ids) <= max(ids) < width:
            raise PrefixFileError(f"{path} has no tokens, or such as the model has not")
        return prefix

    def look_again(self) -> None:
        """Read the weights again for the next file: they may have been changed past torch."""
        self._digests.clear()

    def _fingerprint(self, adapter: Adapter | None) -> Fingerprint:
        """Return what keys and values depend on; weights are read again if they have changed."""
        model = self._passes.runner.model

        def digest(wanted: Adapter | None) -> str:
            twin = self._adapters.twin(wanted).module
            state, known = weights_state(twin), self._digests.get(wanted)
            if known is None or known[0] != state:
                known = self._digests[wanted] = state, weights_digest(twin)
            return known[1]

        return Fingerprint.of(model, digest(None), digest(adapter), self._passes.store.layout)
