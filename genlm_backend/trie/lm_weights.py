"""lm_trie_weights: from a context to the weight of every prefix of its next token."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np

from genlm_backend.checks import instance, one_of, shown
from genlm_backend.errors import OptionTypeError, VocabularyError
from genlm_backend.tokenization import Token
from genlm_backend.trie.async_trie import AsyncTokenCharacterTrie
from genlm_backend.trie.base import VocabularyTrie
from genlm_backend.trie.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


class NextTokenModel(Protocol):
    """What is needed of a model; every ``AsyncLM`` has it."""

    byte_vocab: list[Token]

    async def next_token_logprobs(
        self, token_ids: Iterable[int], lora_name: str | None = None
    ) -> Tensor:
        """Return the log-probabilities of the next token: ``[len(byte_vocab)]``."""
        ...


async def lm_trie_weights(
    lm: NextTokenModel,
    trie: AsyncTokenCharacterTrie | VocabularyTrie,
    token_ids: Iterable[int],
    operation: Operation = "sum",
    *,
    lora_name: str | None = None,
) -> Any:
    """Return how much of the model's next token lies below each node: ``[trie.num_nodes]``.

    Concurrent calls share the model's forward passes and the trie's batches. Where the model
    returns its rows on a GPU (``output_device``) and the trie is a
    ``ParallelTokenCharacterTrie(…, device=…, as_tensor=True)`` there, nothing leaves it.

    Args:
        lm: The model.
        trie: A trie over the tokens of ``lm.byte_vocab``, all or some of them, in any order. One
            that is not asynchronous is evaluated at once, on the calling thread.
        token_ids: The context.
        operation: "sum": the probability that the next token begins with the node's prefix.
            "log_sum": the logarithm of it, exact also where the probability underflows.
            "max": the largest log-probability of a token below the node.
        lora_name: The adapter to read the context with.

    Raises:
        VocabularyError: If the trie has entries that are not tokens of ``lm``.
        OptionError: (``ValueError``) If ``operation`` is none of the three.
        OptionTypeError: (``TypeError``) If ``lm`` is no model or ``trie`` no trie.
        Exception: What the model raises for the context.
    """
    one_of(*get_args(Operation))("operation", operation)
    _TRIE("trie", trie)
    if not (hasattr(lm, "byte_vocab") and hasattr(lm, "next_token_logprobs")):
        raise OptionTypeError(f"lm must be a model such as an AsyncLM, got {shown(lm)}")
    plain = trie.trie if isinstance(trie, AsyncTokenCharacterTrie) else trie
    selection = _selection(lm, plain)
    row = await lm.next_token_logprobs(token_ids, lora_name=lora_name)
    # NumPy on the CPU: torch would wake a team of threads here, on the caller's thread, which
    # then competes with the one that the model computes with.
    weights = row.numpy() if row.device.type == "cpu" else row
    if selection is not None:
        weights = selection.apply(weights)
    if operation == "sum":
        is_array = isinstance(weights, np.ndarray)
        weights = np.exp(weights, out=weights) if is_array else weights.exp_()
        return await _maybe_awaited(trie.weight_sum(weights))
    if operation == "max":
        return await _maybe_awaited(trie.weight_max(weights))
    return await _maybe_awaited(trie.log_weight_sum(weights))


_TRIE = instance((AsyncTokenCharacterTrie, VocabularyTrie), "a trie")


async def _maybe_awaited(result: Any) -> Any:
    return await result if hasattr(result, "__await__") else result


class _Selection:
    """The ids of a trie's entries, on every device where they have been needed."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = np.array(ids)
        self._tensors: dict[Any, Tensor] = {}

    def apply(self, row: Any) -> Any:
        """Return the entries' weights, in the trie's order."""
        if isinstance(row, np.ndarray):
            return row[self._ids]
        index = self._tensors.get(row.device)
        if index is None:
            import torch

            index = self._tensors[row.device] = torch.from_numpy(self._ids).to(row.device)
        return row.index_select(0, index)


_SELECTIONS: weakref.WeakKeyDictionary[VocabularyTrie, tuple[list[Token], _Selection | None]] = (
    weakref.WeakKeyDictionary()
)
"""For each trie the vocabulary it was last compared with, and what to select of its rows."""


def _selection(lm: NextTokenModel, trie: VocabularyTrie) -> _Selection | None:
    """Return what to select of a row, or ``None`` where the trie has all tokens in order."""
    known = _SELECTIONS.get(trie)
    if known is not None and known[0] is lm.byte_vocab:
        return known[1]
    ids = []
    for position, item in enumerate(trie.decode):
        token_id = item.token_id if isinstance(item, Token) else None
        if token_id is None or not 0 <= token_id < len(lm.byte_vocab):
            raise VocabularyError(
                f"decode[{position}] of the trie is {item!r}, which is not a token of the model; "
                f"build the trie over tokens of lm.byte_vocab"
            )
        if bytes(lm.byte_vocab[token_id]) != bytes(item):
            raise VocabularyError(
                f"decode[{position}] of the trie is {item!r}, but the model's token "
                f"{token_id} is {lm.byte_vocab[token_id]!r}"
            )
        ids.append(token_id)
    selection = None if ids == list(range(len(lm.byte_vocab))) else _Selection(ids)
    _SELECTIONS[trie] = (lm.byte_vocab, selection)
    return selection
