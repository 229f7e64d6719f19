"""lm_trie_weights: the weight of each prefix of a model's next token."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, get_args

import numpy as np

from genlm_backend.checks import instance, one_of, shown
from genlm_backend.errors import OptionTypeError, VocabularyError
from genlm_backend.tokenization import Token
from genlm_backend.trie.async_trie import AsyncTokenCharacterTrie
from genlm_backend.trie.base import VocabularyTrie
from genlm_backend.trie.weights import Operation

if TYPE_CHECKING:
    from torch import Tensor


class NextTokenModel(Protocol):
    """The protocol of models that ``lm_trie_weights`` takes; every ``AsyncLM`` implements it."""

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
    """Return each node's weight under the model's next-token distribution: ``[trie.num_nodes]``.

    Concurrent calls share the model's forward passes and an asynchronous trie's batches. The
    weights stay on a GPU if the model returns its rows there (``output_device``) and the trie is or
    wraps a ``ParallelTokenCharacterTrie(…, device=…, as_tensor=True)`` on the same GPU.

    Args:
        lm: The model that computes the log-probabilities.
        trie: A trie over tokens of ``lm.byte_vocab``, all or some of them, in any order. A trie
            that is not asynchronous is evaluated in the calling thread.
        token_ids: Token ids of the context.
        operation: How the tokens below a node are combined. "sum": the probability that the next
            token begins with the node's prefix.
            "log_sum": its logarithm, accurate even if the probability underflows.
            "max": the largest log-probability of a token below the node.
        lora_name: Name of the adapter to evaluate the context with, if any.

    Raises:
        VocabularyError: If the trie has entries that are not tokens of ``lm``.
        OptionError: (``ValueError``) If there is no such ``operation``.
        OptionTypeError: (``TypeError``) If ``lm`` is no model or ``trie`` no trie.
        Exception: Any error of the model for the context, or of the trie for the weights.
    """
    one_of(*get_args(Operation))("operation", operation)
    _TRIE("trie", trie)
    if not (hasattr(lm, "byte_vocab") and hasattr(lm, "next_token_logprobs")):
        raise OptionTypeError(f"lm must be a model such as an AsyncLM, got {shown(lm)}")
    plain = trie.trie if isinstance(trie, AsyncTokenCharacterTrie) else trie
    indices = _indices(plain, lm.byte_vocab)
    row = await lm.next_token_logprobs(token_ids, lora_name=lora_name)
    # Use NumPy on the CPU: torch would start a thread team for the caller's thread, which would
    # compete with the threads of the model.
    weights = row.numpy() if row.device.type == "cpu" else row
    if indices is not None:
        weights = weights[_on_device(indices, row.device)]
    if operation == "sum":
        is_array = isinstance(weights, np.ndarray)
        weights = np.exp(weights, out=weights) if is_array else weights.exp_()
    found = getattr(trie, _VERBS[operation])(weights)
    return await found if hasattr(found, "__await__") else found


_VERBS: Final = {"sum": "weight_sum", "max": "weight_max", "log_sum": "log_weight_sum"}

_TRIE = instance((AsyncTokenCharacterTrie, VocabularyTrie), "a trie")


_LATEST: Final[weakref.WeakKeyDictionary[VocabularyTrie, tuple[list[Token], Any]]] = (
    weakref.WeakKeyDictionary()
)


def _indices(trie: VocabularyTrie, byte_vocab: list[Token]) -> dict[str, Any] | None:
    """Return the token ids of the entries, by device; ``None`` if they are all ids in order."""
    vocab, indices = _LATEST.get(trie, (None, None))
    if vocab is not byte_vocab:
        ids = _token_ids(trie.decode, byte_vocab)
        indices = None if ids == list(range(len(byte_vocab))) else {"cpu": np.array(ids)}
        _LATEST[trie] = byte_vocab, indices
    return indices


def _on_device(indices: dict[str, Any], device: Any) -> Any:
    if str(device) not in indices:
        import torch

        indices[str(device)] = torch.from_numpy(indices["cpu"]).to(device)
    return indices[str(device)]


def _token_ids(decode: Sequence[Any], byte_vocab: list[Token]) -> list[int]:
    ids = []
    for position, item in enumerate(decode):
        token_id = item.token_id if isinstance(item, Token) else None
        if token_id is None or not 0 <= token_id < len(byte_vocab):
            raise VocabularyError(
                f"decode[{position}] of the trie is {item!r}, which is not a token of the model: "
                f"build the trie over tokens of lm.byte_vocab"
            )
        if bytes(byte_vocab[token_id]) != bytes(item):
            raise VocabularyError(
                f"decode[{position}] of the trie is {item!r}, but the model's token "
                f"{token_id} is {byte_vocab[token_id]!r}"
            )
        ids.append(token_id)
    return ids
