"""Selector: which elements of a model's rows are the weights of a trie's entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from genlm_backend.errors import VocabularyError
from genlm_backend.tokenization import Token

if TYPE_CHECKING:
    from torch import Tensor


@final
class Selection:
    """The token ids of a trie's entries, on every device where they have been needed."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = np.array(ids)
        self._tensors: dict[Any, Tensor] = {}

    def apply(self, row: Any) -> Any:
        """Return the entries' elements of ``row``, in the trie's order."""
        if isinstance(row, np.ndarray):
            return row[self._ids]
        index = self._tensors.get(row.device)
        if index is None:
            import torch

            index = self._tensors[row.device] = torch.from_numpy(self._ids).to(row.device)
        return row.index_select(0, index)


@final
class Selector:
    """Compares the entries of a trie with a model's vocabulary, once for each change of model.

    A copy, as by ``pickle``, compares anew.
    """

    def __init__(self, decode: Sequence[Any]) -> None:
        self._decode = decode
        self._latest: tuple[list[Token], Selection | None] | None = None

    def selection(self, byte_vocab: list[Token]) -> Selection | None:
        """Return the indices to select; ``None`` if the trie has all tokens in order."""
        latest = self._latest
        if latest is not None and latest[0] is byte_vocab:
            return latest[1]
        ids = _token_ids(self._decode, byte_vocab)
        selection = None if ids == list(range(len(byte_vocab))) else Selection(ids)
        self._latest = byte_vocab, selection
        return selection

    def __reduce__(self) -> tuple[type[Selector], tuple[Sequence[Any]]]:
        return type(self), (self._decode,)


def _token_ids(decode: Sequence[Any], byte_vocab: list[Token]) -> list[int]:
    ids = []
    for position, item in enumerate(decode):
        token_id = item.token_id if isinstance(item, Token) else None
        if token_id is None or not 0 <= token_id < len(byte_vocab):
            raise VocabularyError(
                f"decode[{position}] of the trie is {item!r}, which is not a token of the model; "
                f"build the trie over tokens of lm.byte_vocab"
            )
        if bytes(byte_vocab[token_id]) != bytes(item):
            raise VocabularyError(
                f"decode[{position}] of the trie is {item!r}, but the model's token "
                f"{token_id} is {byte_vocab[token_id]!r}"
            )
        ids.append(token_id)
    return ids
