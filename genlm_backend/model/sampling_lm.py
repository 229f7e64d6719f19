"""SamplingLM: tokens drawn from what a model says comes next."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.model.context import Contexts, listed_contexts
from genlm_backend.model.draw import (
    TEMPERATURE,
    AnyRow,
    Draw,
    RandomGenerator,
    as_scores,
    draw,
    uniform_of,
)
from genlm_backend.model.drawing import Drawing, packed_mask
from genlm_backend.model.query import Query, TokenIds
from genlm_backend.model.sampling import Sampled, Sampler, check_no_others, check_sampling
from genlm_backend.runtime.progress import progress_bar
from genlm_backend.runtime.together import together
from genlm_backend.tokenization import Token

Allowed: TypeAlias = torch.Tensor | NDArray[np.bool_] | Iterable[int]
"""Tokens that may be drawn: bools ``[vocab]``, or token ids."""


class SamplingLM(abc.ABC):
    """Draws and samples of a model, over its rows.

    Attributes:
        byte_vocab: The tokens by id, as bytes.
        contexts: What checks token ids and makes a ``Context`` of them.
        max_length: Longest context that the model takes, in tokens; ``None`` where nothing bounds
            it.
    """

    byte_vocab: list[Token]
    contexts: Contexts
    max_length: int | None

    @property
    @abc.abstractmethod
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text, wherever a caller names none."""

    @abc.abstractmethod
    async def next_token_logprobs(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities of the token after ``token_ids``: float32 ``[vocab]``."""

    def draw(
        self, row: AnyRow, *, generator: RandomGenerator | None = None, temperature: float = 1.0
    ) -> int:
        """Draw a token id from the softmax of ``row / temperature``, float ``[vocab]``.

        The row need not be normalised and is not modified; masked tokens are ``-inf``. At
        temperature 0, the first of the most probable. A draw takes one number of ``generator``, or
        a fresh one. Computed by NumPy on the calling thread: no threads are woken.

        Raises:
            OptionTypeError: (``TypeError``) If an argument is of another type, such as a seed.
            OptionError: (``ValueError``) If ``row`` has another shape, a NaN or no possible token,
                or ``temperature`` is negative.
        """
        return draw(row, len(self.byte_vocab), generator, temperature)

    async def draw_next_token(
        self,
        token_ids: TokenIds,
        *,
        allowed: Allowed | None = None,
        generator: RandomGenerator | None = None,
        temperature: float = 1.0,
        lora_name: str | None = None,
    ) -> Draw:
        """Draw the token after a context from its row, or from the allowed tokens of it.

        The same token as ``draw`` of the row, where what is not allowed is ``-inf``, draws with the
        same generator. Of a model in another process, or of replicas, no row comes here for it.

        Args:
            token_ids: The context.
            allowed: The tokens that may be drawn: bools ``[vocab]``, an array or a tensor, or a
                collection of token ids. By default, all.
            generator: Random stream that one number is taken from, before anything is awaited, and
                none at temperature 0. By default, a fresh one.
            temperature: Divisor of the log-probabilities; 0 takes the first of the most probable.
            lora_name: The adapter to read the context with.

        Raises:
            OptionTypeError: (``TypeError``) If an argument is of another type, such as a seed.
            OptionError: (``ValueError``) If ``temperature`` is negative, or ``allowed`` has another
                shape, an id outside the vocabulary, or no token.
            EvaluationError: (``RuntimeError``) If the model gives no allowed token a probability.
            Exception: What ``next_token_logprobs`` raises.
        """
        context = self.contexts.check(token_ids)
        divisor = TEMPERATURE("temperature", temperature)
        mask, uniform = packed_mask(allowed, len(self.byte_vocab)), uniform_of(generator)
        point = uniform() if divisor else 0.0
        drawing = partial(Drawing, temperature=divisor, uniform=point, allowed=mask)
        return await self._drawn(context, drawing, lora_name)

    async def sample(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: Collection[int] | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
        **others: Any,
    ) -> Sampled:
        """Sample a continuation of up to ``max_tokens`` ids, token by token.

        Equal seeds give equal continuations, whatever else the model is asked meanwhile.

        Args:
            prompt_token_ids: What is continued.
            max_tokens: Ids to sample, at most; fewer where the model takes no longer context.
            eos_token_ids: Ids that end it. The first that comes is not returned. By default, those
                that end a text of this model; none for ``[]``.
            temperature: Divisor of the log-probabilities; 0 takes the most probable token.
            seed: Seed of the draws; ``None`` draws afresh.
            lora_name: The adapter to read the contexts with.
            **others: No options: a name that other libraries have is told what it is here.

        Returns:
            The ids, in a list whose ``finish_reason`` says why there are no more: ``"eos"``, or
            ``"length"`` after ``max_tokens`` and where the model takes no longer context.

        Raises:
            OptionTypeError: (``TypeError``) If an option is of a wrong type.
            OptionError: (``ValueError``) If ``temperature`` or ``max_tokens`` is negative, or one
                of ``eos_token_ids`` is outside the vocabulary.
            Exception: What ``next_token_logprobs`` raises.
        """
        check_no_others("sample", others)
        given = self._check_sampling(max_tokens, eos_token_ids)
        sampler = Sampler(temperature, seed)
        return await self._sample(prompt_token_ids, **given, sampler=sampler, lora_name=lora_name)

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[TokenIds],
        max_tokens: int,
        eos_token_ids: Collection[int] | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
        progress: bool = False,
        **others: Any,
    ) -> list[Sampled]:
        """Sample a continuation of each prompt, all at the same time; see ``sample``.

        Each prompt has a random stream of its own, derived from ``seed`` and its place in the
        list, so that its continuation does not depend on the prompts behind it. ``progress``
        shows a bar of the continuations that are complete, on a terminal or in a notebook.
        """
        check_no_others("batch_sample", others)
        contexts = listed_contexts("prompt_token_ids_list", prompt_token_ids_list)
        prompts = [self.contexts.check(context) for context in contexts]
        given = self._check_sampling(max_tokens, eos_token_ids, progress=progress)
        del given["progress"]
        samplers = [Sampler(temperature, seed, stream) for stream in range(len(prompts))]
        with progress_bar(len(samplers), progress) as bar:

            async def sample(prompt: TokenIds, sampler: Sampler) -> Sampled:
                found = await self._sample(prompt, **given, sampler=sampler, lora_name=lora_name)
                bar.update()
                return found

            return await together(map(sample, prompts, samplers))

    async def _sample(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: Collection[int],
        sampler: Sampler,
        lora_name: str | None,
    ) -> Sampled:
        prompt = context = self.contexts.check(prompt_token_ids)
        reason: Literal["eos", "length"] = "length"
        while len(context) < len(prompt) + max_tokens:
            is_full = self.max_length is not None and len(context) > self.max_length
            if is_full and len(context) > len(prompt):  # of a prompt that is, the model tells
                break
            drawn = await self._drawn(context, sampler.drawing, lora_name)
            if drawn.token_id in eos_token_ids:
                reason = "eos"
                break
            context = context.extend(drawn.token_id)
        return Sampled(context.packed(len(prompt)), reason)

    def _check_sampling(
        self, max_tokens: Any, eos_token_ids: Any, **options: Any
    ) -> dict[str, Any]:
        """Return options of ``sample`` as they are meant, the ends of this model by default."""
        ends = self.eos_token_ids if eos_token_ids is None else eos_token_ids
        given = {"max_tokens": max_tokens, "eos_token_ids": ends, **options}
        return check_sampling(len(self.byte_vocab), **given)

    async def _drawn(
        self, token_ids: TokenIds, drawing: Callable[[Query], Drawing], lora_name: str | None
    ) -> Draw:
        row = await self.next_token_logprobs(token_ids, lora_name=lora_name)
        return drawing(_ANY).of_scores(as_scores(row))


_ANY: Final = Query([0])
"""In place of the query of a row that is there."""
