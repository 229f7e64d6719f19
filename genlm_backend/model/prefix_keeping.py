"""PrefixKeepingLM: keys and values of a prompt that outlive the process."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from genlm_backend.checks import absolute_path
from genlm_backend.errors import PictureError
from genlm_backend.model.context import Context
from genlm_backend.model.kv_caching import KVCachingLM
from genlm_backend.model.query import Query, TokenIds


class PrefixKeepingLM(KVCachingLM):
    """A model over an evaluator that writes keys and values into files, and reads them.

    Its arguments, and the errors that making one may raise, are those of ``BatchedLM``.
    """

    def save_prefix(
        self, token_ids: TokenIds, path: str | Path, lora_name: str | None = None
    ) -> None:
        """Compute a prompt and write its keys and values into a file, for ``load_prefix``.

        The file is in the format of safetensors; it holds the token ids, the keys and values as
        they are kept, and digests of what they depend on. It appears whole or not at all, and
        takes the place of another one. Blocks the thread.

        Raises:
            CacheError: If the prompt does not fit into ``kv_cache_bytes``, or the model keeps no
                keys and values.
            PictureError: (``ValueError``) If the prompt begins with pictures.
            OSError: If the file cannot be written. Where that can be seen before, nothing is
                computed.
        """
        where = absolute_path("path", path)
        _check_writable(Path(where))
        query = self._query(token_ids, lora_name)
        if query.context.pictures is not None:
            raise PictureError("a prompt that begins with pictures is not written into files")
        self._before_wait()

        def save() -> None:
            self._adapters.check(query)
            self._evaluator.save_prefix(query, where)

        self._call(save)

    def load_prefix(self, path: str | Path, lora_name: str | None = None) -> Context:
        """Keep the keys and values of a file of ``save_prefix``, and return its tokens.

        No token is computed. What is loaded is a cached prefix like any other, which goes when
        others need the room; ``cache_kv`` keeps it. Blocks the thread.

        Args:
            path: The file.
            lora_name: The adapter that it was saved with.

        Raises:
            PrefixFileError: (``ValueError``) If the file is of a model with another config, other
                weights or another adapter, or of another ``kv_cache_dtype``, cut short or changed.
            CacheError: If the prompt does not fit into ``kv_cache_bytes``, or the model keeps no
                keys and values.
            OSError: If the file cannot be read.
        """
        where = absolute_path("path", path)
        self._batcher.check_open()
        adapter = self._adapter(lora_name)

        def load() -> Sequence[int]:
            self._adapters.check(Query((), adapter))
            return self._evaluator.load_prefix(where, adapter)

        context = self.contexts.check(self._call(load), self.max_length)
        self._is_kept(Query(context, adapter))
        return context


def _check_writable(path: Path) -> None:
    """Raise the error of a file that cannot be written, as far as it can be told before."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(path.parent))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is a device or a pipe, and no file", str(path))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "files cannot be made in", str(path.parent))
