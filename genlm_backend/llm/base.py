"""AsyncLM: what every backend offers."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from genlm_backend.closing import Closing
from genlm_backend.errors import UnknownAdapterError
from genlm_backend.llm.sampling import Sampler
from genlm_backend.llm.statistics import LMStatistics
from genlm_backend.llm.together import together
from genlm_backend.llm.watching import is_watched
from genlm_backend.tokenization import Token, decode_vocab

TokenIds = Iterable[int]
"""A context: token ids, as Python or NumPy integers, or a 1-D integer array or tensor."""


class AsyncLM(Closing):
    """A language model whose next-token log-probabilities can be awaited.

    Concurrent awaits are answered together. A row is a ``torch.Tensor`` of shape
    ``[len(byte_vocab)]`` and dtype float32: natural logarithms that sum to one in probability,
    computed in float32 whatever the model's own dtype, the caller's to modify. Ids that no token
    has are ``-inf``. The answer to a context depends on nothing else: not on the other contexts
    of its batch, nor on what is cached, beyond rounding.

    Every log-probability method takes ``lora_name``, the adapter to read the context with.

    Args:
        tokenizer: Anything that ``decode_vocab`` takes.
        vocab_size: Width of the model's rows, where it may differ from the tokenizer's. Where
            the model is wider, the ids beyond are undefined; where it is narrower, the
            tokenizer's are cut, with a warning.
        self_check: Compare probe texts with the bytes of their tokens.

    Attributes:
        tokenizer: As given.
        byte_vocab: The tokens by id, as bytes.
        str_vocab: The tokens by id, as text that is never empty: ``<|undefined_151643|>`` for an
            id that no token has, ``<|empty_7|>`` for a token without bytes.
        special_ids: Ids of special tokens.
        undefined_ids: Ids that no token has.
    """

    def __init__(
        self, tokenizer: Any, *, vocab_size: int | None = None, self_check: bool = True
    ) -> None:
        vocabulary = decode_vocab(tokenizer, self_check=self_check)
        size = len(vocabulary.byte_vocab)
        if vocab_size is not None and vocab_size != size:
            if vocab_size < size:
                cut = ", ".join(map(repr, vocabulary.byte_vocab[vocab_size : vocab_size + 8]))
                warnings.warn(
                    f"the tokenizer has {size} ids and the model {vocab_size}: ids {vocab_size} "
                    f"to {size - 1} are left out ({cut}{', …' if size - vocab_size > 8 else ''})",
                    stacklevel=3,
                )
            vocabulary = vocabulary.resized(vocab_size)
        self.tokenizer = tokenizer
        self.byte_vocab: list[Token] = vocabulary.byte_vocab
        self.str_vocab: list[str] = vocabulary.str_vocab
        self.special_ids = vocabulary.special_ids
        self.undefined_ids = vocabulary.undefined_ids

    # ---------------------------------------------------------------- rows

    @abc.abstractmethod
    async def next_token_logprobs(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities of the token after ``token_ids``: float32 ``[vocab]``.

        Awaited together with whatever else is being asked; at most ``batch_size`` distinct
        contexts go through the model at once. Equal contexts are computed once, and the keys and
        values of every prefix seen are reused, so that one more token costs one token.

        Raises:
            ContextTypeError: (``TypeError``) If the ids are not integers.
            ContextError: (``ValueError``) If the context is empty, longer than the model's
                maximum, or holds an id outside the vocabulary. As with the ``TypeError``,
                nothing is queued then.
            UnknownAdapterError: (``ValueError``) If ``lora_name`` is not loaded.
            BatcherClosedError: (``RuntimeError``) After ``close()``.
            QueryDroppedError: (``RuntimeError``) If the query was dropped while it waited.
            Exception: What the model raised for this batch; the next call starts afresh.
        """

    async def next_token_logits(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the row before it is normalised, where the backend knows it: float32 ``[vocab]``.

        Some processors of transformers, such as the repetition penalty, are defined on these.
        A backend that does not know them returns the log-probabilities, which differ from them
        by one number.
        """
        return await self.next_token_logprobs(token_ids, lora_name)

    @abc.abstractmethod
    def next_token_logprobs_sync(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the same row as ``next_token_logprobs``, blocking the calling thread.

        Works from any thread, inside a running event loop too (a notebook), which stands still
        meanwhile.
        """

    @abc.abstractmethod
    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[TokenIds], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the rows of many contexts, in order: float32 ``[len(token_ids_list), vocab]``.

        All contexts are checked before any is queued.
        """

    @abc.abstractmethod
    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[TokenIds], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the same rows as ``batch_next_token_logprobs``, blocking the calling thread."""

    # ---------------------------------------------------------------- sampling

    async def sample(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: Collection[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Sample a continuation of up to ``max_tokens`` ids, token by token.

        Ends before the first of ``eos_token_ids``, which is not returned. ``temperature``
        divides the log-probabilities; 0 takes the most probable token. Equal seeds give equal
        continuations, whatever else the model is asked meanwhile.

        Raises:
            ValueError: If ``temperature`` or ``max_tokens`` is negative.
        """
        return await self._sample(
            prompt_token_ids, max_tokens, eos_token_ids, Sampler(temperature, seed), lora_name
        )

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[TokenIds],
        max_tokens: int,
        eos_token_ids: Collection[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
        progress: bool = False,
    ) -> list[list[int]]:
        """Sample a continuation of each prompt, all at the same time; see ``sample``.

        Each prompt has a random stream of its own, derived from ``seed`` and its place in the
        list, so that its continuation does not depend on the prompts behind it. ``progress``
        shows a bar of the continuations that are complete, on a terminal or in a notebook.
        """
        samplers = [
            Sampler(temperature, seed, stream) for stream in range(len(prompt_token_ids_list))
        ]
        with progress_bar(len(samplers), progress) as bar:

            async def sample(prompt: TokenIds, sampler: Sampler) -> list[int]:
                found = await self._sample(prompt, max_tokens, eos_token_ids, sampler, lora_name)
                bar.update()
                return found

            return await together(map(sample, prompt_token_ids_list, samplers))

    async def _sample(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: Collection[int],
        sampler: Sampler,
        lora_name: str | None,
    ) -> list[int]:
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be zero or more, got {max_tokens}")
        prompt, generated = list(prompt_token_ids), []
        while len(generated) < max_tokens:
            row = await self.next_token_logprobs(prompt + generated, lora_name=lora_name)
            token_id = sampler.draw(row)
            if token_id in eos_token_ids:
                break
            generated.append(token_id)
        return generated

    # ---------------------------------------------------------------- keys and values

    @property
    def kv_capacity(self) -> int | None:
        """Tokens whose keys and values fit at once; ``None`` where no such memory bounds them.

        A context beyond it is still answered, at the cost of computing it again and again.
        """
        return None

    async def num_cached_tokens(self, token_ids: TokenIds, lora_name: str | None = None) -> int:
        """Return how many of a context's tokens need not be computed if it is asked now."""
        return 0

    can_forget: bool = False
    """Whether ``forget`` has any effect."""

    async def forget(
        self, token_ids: TokenIds, lora_name: str | None = None, keep: int = 0
    ) -> None:
        """Free the keys and values of a context beyond its first ``keep`` tokens.

        What another cached context shares with it stays, and so do rows. No answer changes by it.
        The context may be longer than the model takes: its beginning may be cached.
        Comes after the batches that have been sent, so that a cancelled query leaves nothing.
        """

    # ---------------------------------------------------------------- keeping house

    def check_adapter(self, lora_name: str | None) -> None:
        """Raise an ``UnknownAdapterError`` unless ``lora_name`` is loaded or ``None``."""
        if lora_name is not None:
            raise UnknownAdapterError(
                f"no LoRA adapter named {lora_name!r} is loaded; {type(self).__name__} has none"
            )

    def clear_cache(self) -> None:
        """Forget every cached row, key and value. No answer changes by it."""

    def statistics(self) -> LMStatistics:
        """Return what batching and caching have done so far."""
        return LMStatistics()

    @abc.abstractmethod
    def close(self) -> None:
        """Settle every waiter with an error and free what the model holds; again has no effect."""


def progress_bar(total: int, is_shown: bool) -> Any:
    """Return a bar for ``total`` continuations, which shows nothing unless it is to."""
    from tqdm.auto import tqdm

    is_hidden = not (is_shown and is_watched())
    return tqdm(total=total, desc="sampling", unit="text", disable=is_hidden)
