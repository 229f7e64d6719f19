"""AsyncLM: the interface of every model."""

from __future__ import annotations

import abc
import asyncio
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, Unpack

import numpy as np
import torch

from genlm_backend.checks import (
    MAX_VOCAB,
    Check,
    check_option_names,
    checked,
    checked_options,
    integer,
    listed,
    optional,
    shows_options,
    switch,
)
from genlm_backend.errors import AdapterError, PictureError, UnknownAdapterError
from genlm_backend.model.lm_statistics import LMStatistics
from genlm_backend.particles.particle_group import ParticleGroup, group_of, is_one_prompt
from genlm_backend.prefix.budgets import TierName
from genlm_backend.queries.context import Context, ContextFactory, listed_contexts
from genlm_backend.queries.query import NO_QUERY, UNKNOWN_ADAPTER, Adapter, RowQuery, TokenIds
from genlm_backend.readouts.draw import Allowed, AnyRow, Draw, Mask, RandomGenerator, draw
from genlm_backend.readouts.particle_step import (
    ParticleStep,
    StepResult,
    drawn_from_rows,
    numbers_of_draws,
)
from genlm_backend.readouts.sample_readout import (
    DrawOptions,
    drawing_of,
    drawings_of,
)
from genlm_backend.readouts.sampling import (
    Sampled,
    Sampler,
    check_no_others,
    check_sampling,
    default_ends,
)
from genlm_backend.readouts.score_query import (
    NO_EXTRAS,
    ScoreExtras,
    ScoreOptions,
    ScoreQuery,
    TokenScores,
    beginnings_of,
    beside_of,
    check_scorings,
    distinct,
    own_scores,
    scores_of_rows,
)
from genlm_backend.readouts.token_readouts import (
    Entropy,
    ReadoutOf,
    TopTokens,
    chosen_of,
    masses_of,
    own_top,
    readout_of,
    top_of,
)
from genlm_backend.runtime.blocking import blocking
from genlm_backend.runtime.closing import Closing
from genlm_backend.runtime.progress import progress_bar
from genlm_backend.runtime.together import together
from genlm_backend.tokenization import Alphabet, Token, decode_vocab
from genlm_backend.tokenization.bos import encode_text


class AsyncLM(Closing):
    """A language model whose next-token log-probabilities can be awaited.

    Concurrent awaits share batches. A *row* has the log-probability of each token after a context:
    a ``torch.Tensor`` of shape ``[len(byte_vocab)]`` and dtype float32. The logarithms are natural,
    normalised, and computed in float32 whatever the model's dtype. Ids that no token has get
    ``-inf``. The caller may modify a row. Up to rounding, it depends only on context and adapter,
    not on the other contexts of its batch or on the contents of the cache.

    Every log-probability method takes ``lora_name``, the adapter to read the context with. A
    subclass has to define ``next_token_logprobs`` and ``next_token_logprobs_sync``. By default, the
    other log-probability methods call one of these two per context; overrides can be faster.

    Args:
        tokenizer: Anything that ``decode_vocab`` takes.
        vocab_size: Width of the model's rows, if it may differ from the size of the tokenizer's
            vocabulary. Ids that only the model has are undefined. Ids that only the tokenizer has
            are cut off, with a warning.
        self_check: Whether to compare probe texts with the bytes of their tokens.

    Attributes:
        tokenizer: The ``tokenizer`` argument, unchanged.
        byte_vocab: The tokens by id, as ``Token`` objects, which are ``bytes``.
        str_vocab: The tokens by id, as text that is never empty: ``<|undefined_151643|>`` for an
            id that no token has, ``<|empty_7|>`` for a token without bytes.
        special_ids: Ids of special tokens.
        undefined_ids: Ids that no token has.
        contexts: Factory that checks token ids and makes ``Context`` objects from them.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        "vocab_size": optional(integer(1, MAX_VOCAB)),
        "self_check": switch,
    }
    """Checks of the constructor's options, by name."""

    library_opts: ClassVar[str] = ""
    """Name of the ``from_name`` option with arguments for the backend's library; empty if none."""

    def __init__(
        self, tokenizer: Any, *, vocab_size: int | None = None, self_check: bool = True
    ) -> None:
        given = {"vocab_size": vocab_size, "self_check": self_check}
        vocab_size = checked(AsyncLM.option_checks, given)["vocab_size"]
        vocabulary = decode_vocab(tokenizer, self_check=self_check).of_model(vocab_size)
        self.tokenizer = tokenizer
        self.byte_vocab: list[Token] = vocabulary.byte_vocab
        self.str_vocab: list[str] = vocabulary.str_vocab
        self.special_ids = vocabulary.special_ids
        self.undefined_ids = vocabulary.undefined_ids
        self.contexts = ContextFactory(len(self.byte_vocab))

    max_length: int | None = None
    """Longest context that the model takes, in tokens; ``None`` for no bound."""

    kv_cache_dtype: str | None = None
    """Format of the cached keys and values; ``None`` for the model's own dtype."""

    _own_eos: Collection[int] | None = None
    """EOS ids of the model's generation config; ``None`` if it names none."""

    _alphabet: tuple[frozenset[int], Alphabet] | None = None

    has_host_tier: bool = False
    """Whether keys and values that are evicted from the device move to host memory."""

    batch_size: int = 20
    """Upper bound on the number of distinct contexts in one batch."""

    device: torch.device | None = None
    """Device on which rows are returned; ``None`` if a subclass does not set it."""

    model_device: torch.device | None = None
    """Device on which the model takes its token ids; ``None`` if unknown."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text, unless a call passes its own.

        They come from the model's generation config, which may name several. If the config names
        no token of the vocabulary, the tokenizer's EOS is used; without one, the set is empty.
        """
        return default_ends(self._own_eos, self.tokenizer, self._is_token)

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < len(self.byte_vocab) and token_id not in self.undefined_ids

    @property
    def alphabet(self) -> Alphabet:
        """The tokens sorted by bytes; EOS, special tokens and tokens without bytes come last."""
        ends = self.special_ids | self.eos_token_ids
        if self._alphabet is None or self._alphabet[0] != ends:
            self._alphabet = ends, Alphabet(self.byte_vocab, ends, self.undefined_ids)
        return self._alphabet[1]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check options of the constructor and of ``from_name``, before a model is loaded.

        Raises:
            OptionTypeError: (``TypeError``) If a name is unknown or a value has a wrong type.
            OptionError: (``ValueError``) If a value is out of its bounds.
        """
        check_option_names(cls, options, cls.library_opts, is_loading=True)
        checked(cls.option_checks, options)

    def context(
        self,
        token_ids: TokenIds | str = (),
        images: Sequence[Any] | Mapping[str, Any] | None = None,
    ) -> Context:
        """Return token ids as a ``Context``, which the model's methods take in place of token ids.

        ``context + [token]`` makes a longer one. Making it, and looking up its cached prefix, costs
        about the same at any length.

        Args:
            token_ids: Token ids. With ``images`` it may be a text.
            images: Pictures for a multimodal model (transformers and vLLM), one per image token in
                the prompt: PIL images, uint8 arrays ``[height, width, 3]``, paths or the bytes of
                files. Or the outputs of the model's processor by name (``pixel_values``, …), with
                its ``input_ids`` as ``token_ids``.

        Raises:
            ContextTypeError: (``TypeError``) If the ids are not integers.
            ContextError: (``ValueError``) If an id is outside the vocabulary, or the ``Context``
                is another model's.
            PictureError: (``ValueError``) If the model takes no pictures, the context already has
                some, a picture cannot be read, or their number differs from that of image tokens.
        """
        if images is not None:
            if isinstance(token_ids, Context) and token_ids.pictures is not None:
                raise PictureError("omit images: the context already begins with pictures")
            return self._pictured(token_ids, images)
        return self.contexts.of(token_ids)

    def _pictured(
        self, prompt: TokenIds | str, images: Sequence[Any] | Mapping[str, Any]
    ) -> Context:
        raise PictureError(f"{type(self).__name__} accepts no pictures: this model reads only text")

    # ---------------------------------------------------------------- rows

    @abc.abstractmethod
    async def next_token_logprobs(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the next-token log-probabilities after ``token_ids``: float32 ``[vocab]``.

        Concurrent calls are batched, up to ``batch_size`` distinct contexts at a time. Calls with
        equal contexts share one computation. A backend with a KV cache reuses cached prefixes, so
        that extending a cached context by one token computes one token.

        Raises:
            ContextTypeError: (``TypeError``) If the ids are not integers.
            ContextError: (``ValueError``) If the context is empty, longer than the model's
                maximum, or has an id outside the vocabulary. This error and the
                ``TypeError`` are raised before the query is queued.
            UnknownAdapterError: (``ValueError``) If ``lora_name`` is not loaded.
            BatcherClosedError: (``RuntimeError``) After ``close()``.
            QueryDroppedError: (``RuntimeError``) If the query was dropped while it waited.
            Exception: Any error that the model raised for this batch. Later calls still work,
                unless the model's process has died.
        """

    async def next_token_logits(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return next-token logits (if unknown, log-probabilities): float32 ``[vocab]``.

        Some logits processors of transformers, such as the repetition penalty, need logits.
        Log-probabilities differ from logits by one constant per row.
        """
        return await self.next_token_logprobs(token_ids, lora_name)

    @abc.abstractmethod
    def next_token_logprobs_sync(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the same row as ``next_token_logprobs``, blocking the calling thread.

        Works from any thread. Inside a running event loop (a notebook), it blocks the loop.
        """

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[TokenIds], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the rows of many contexts, in order: float32 ``[len(token_ids_list), vocab]``.

        The library's own models check all contexts before any is queued.
        """
        contexts = listed_contexts("token_ids_list", token_ids_list)
        asked = (self.next_token_logprobs(ids, lora_name=lora_name) for ids in contexts)
        rows = await self._together(asked)
        if not rows:
            return torch.empty(0, len(self.byte_vocab), dtype=torch.float32)
        return torch.stack(rows)

    batch_next_token_logprobs_sync = blocking(batch_next_token_logprobs, "rows")

    _together = staticmethod(together)

    # ---------------------------------------------------------------- readouts

    async def read(
        self, token_ids: TokenIds, readout: ReadoutOf, lora_name: str | None = None
    ) -> Any:
        """Return what a readout, perhaps of a class of your own, computes from a context's row.

        Methods that return less than a row, such as ``next_token_top``, call this one. Several
        callers may get the same object as their answer: copy it before you modify it.

        Args:
            token_ids: The context.
            readout: A function from a ``RowQuery`` to its ``Readout``: a ``Readout`` class whose
                constructor takes only the query, or ``lambda query: Margin(query, 3)``.
            lora_name: The adapter to read the context with.

        Raises:
            OptionTypeError: (``TypeError``) If ``readout`` returns no ``Readout`` of the query.
            EvaluationError: (``RuntimeError``) If the row is NaN, or the answer has a wrong form.
            Exception: Any error of the readout, or of ``next_token_logprobs``.
        """
        asked = readout_of(readout, NO_QUERY)
        row = await self.next_token_logprobs(_listed(token_ids), lora_name=lora_name)
        return asked.of_logprobs(row)

    read_sync = blocking(read, "answer")

    async def batch_read(
        self, token_ids_list: Sequence[TokenIds], readout: ReadoutOf, lora_name: str | None = None
    ) -> list[Any]:
        """Return the answers to a readout of each context, in order; see ``read``.

        ``readout`` is called once for each context, in order. The first error is raised.
        """
        contexts = listed_contexts("token_ids_list", token_ids_list)
        return await self._together(self.read(ids, readout, lora_name) for ids in contexts)

    batch_read_sync = blocking(batch_read, "answers")

    async def next_token_top(
        self, token_ids: TokenIds, k: int, lora_name: str | None = None
    ) -> TopTokens:
        """Return the ``k`` most probable next tokens, and the log-mass of all others.

        The library's backends compute them on the model's device, in a batch with other awaits: no
        row is copied for the caller, sent by another process, or cached. If the row is cached
        already, the result is computed from the cached row.

        Args:
            token_ids: The context.
            k: Number of tokens, from 1 to the size of the vocabulary.
            lora_name: The adapter to read the context with.

        Returns:
            The ids of these tokens, int64 ``[k]``, and their log-probabilities, float32 ``[k]``,
            the most probable first; and the log-mass of all other tokens, summed from the others'
            probabilities. The attribute ``texts`` has the tokens as text, for the ``repr``.

        Raises:
            OptionTypeError: (``TypeError``) If ``k`` is no integer.
            OptionError: (``ValueError``) If ``k`` is below 1 or above the size of the vocabulary.
            EvaluationError: (``RuntimeError``) If the row is NaN.
            Exception: Any error of ``next_token_logprobs``.
        """
        readout = top_of(k, len(self.byte_vocab))
        return own_top(await self.read(token_ids, readout, lora_name), self.str_vocab)

    next_token_top_sync = blocking(next_token_top, "tokens")

    async def next_token_logprobs_of(
        self, token_ids: TokenIds, chosen: Iterable[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities of chosen tokens after a context: float32 ``[len(chosen)]``.

        They equal a row's entries bit for bit. No row is copied or cached; see ``next_token_top``.

        Args:
            token_ids: The context.
            chosen: Ids of the tokens, in any order; duplicates are allowed.
            lora_name: The adapter to read the context with.

        Raises:
            OptionTypeError: (``TypeError``) If ``chosen`` is a set, or no collection of integers.
            OptionError: (``ValueError``) If an id is outside the vocabulary.
            EvaluationError: (``RuntimeError``) If the row is NaN.
            Exception: Any error of ``next_token_logprobs``.
        """
        readout = chosen_of(chosen, len(self.byte_vocab))
        return (await self.read(token_ids, readout, lora_name)).clone()

    next_token_logprobs_of_sync = blocking(next_token_logprobs_of, "numbers")

    async def next_token_entropy(self, token_ids: TokenIds, lora_name: str | None = None) -> float:
        """Return the entropy of the next-token distribution in nats, summed in float64.

        No row is copied or cached; see ``next_token_top``.

        Raises:
            EvaluationError: (``RuntimeError``) If the row is NaN.
            Exception: Any error of ``next_token_logprobs``.
        """
        return await self.read(token_ids, Entropy, lora_name)

    next_token_entropy_sync = blocking(next_token_entropy, "number")

    async def next_token_log_masses(
        self, token_ids: TokenIds, groups: Sequence[Allowed], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-masses of groups of tokens after a context: float64 ``[len(groups)]``.

        A log-mass is the logarithm of the probability that the next token is in the group, or
        ``-inf`` if no token of the group is possible. The tokens below a node of a trie over the
        vocabulary are ``trie.tokens_below(node)``; ``lm_trie_weights`` computes the masses of all
        nodes at once. No row is copied or cached; see ``next_token_top``.

        Args:
            token_ids: The context.
            groups: Groups of tokens, which may overlap: each bools ``[vocab]``, the
                ``PackedMask`` of a constraint, or a collection of token ids.
            lora_name: The adapter to read the context with.

        Raises:
            OptionTypeError: (``TypeError``) If a group has another type.
            OptionError: (``ValueError``) If a group has another shape, or an id outside the
                vocabulary.
            EvaluationError: (``RuntimeError``) If the row is NaN.
            Exception: Any error of ``next_token_logprobs``.
        """
        readout = masses_of(groups, len(self.byte_vocab))
        return (await self.read(token_ids, readout, lora_name)).clone()

    next_token_log_masses_sync = blocking(next_token_log_masses, "numbers")

    # ---------------------------------------------------------------- scores

    async def score(
        self, prompt: TokenIds, continuation: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return each continuation token's log-probability: float32 ``[len(continuation)]``.

        Up to rounding, each equals that token's entry in the row of all tokens before it. If the
        backend can score whole texts (``AsyncTransformer`` for most models, vLLM for most texts),
        it computes each token once, in batches with other awaits, and makes no rows. Otherwise the
        rows of all prefixes are computed, ``batch_size`` at a time.

        Raises:
            ContextError: (``ValueError``) If the prompt is empty, an id is outside the vocabulary,
                or the text without its last token is longer than the model's maximum.
            Exception: Any error of ``next_token_logprobs``.
        """
        prompts = [self.contexts.of(prompt, "prompt")]
        return (await self.batch_score(prompts, [continuation], lora_name))[0]

    score_sync = blocking(score, "scores")

    async def batch_score(
        self,
        prompts: Sequence[TokenIds] | TokenIds,
        continuations: Sequence[TokenIds],
        lora_name: str | None = None,
    ) -> list[torch.Tensor]:
        """Return the scores of many continuations; see ``score``.

        ``prompts`` has one prompt for each continuation, or is a single prompt for all of them.
        """
        return await self._scores(prompts, continuations, lora_name, NO_EXTRAS)

    batch_score_sync = blocking(batch_score, "scores")

    @shows_options(ScoreOptions)
    async def score_with(
        self,
        prompt: TokenIds,
        continuation: TokenIds,
        *,
        lora_name: str | None = None,
        **options: Unpack[ScoreOptions],
    ) -> TokenScores:
        """Return each token's log-probability and more numbers about its row; see ``score``.

        Entropies, top tokens and log-masses are those that ``next_token_entropy``,
        ``next_token_top`` and ``next_token_log_masses`` return for the context before each token.
        A backend that can do so computes them in the scoring pass, on the model's device.

        Args:
            prompt: The tokens before the continuation, at least one.
            continuation: The tokens to score.
            lora_name: The adapter to read the text with.
            **options: ``entropy``: also return the entropy of each next-token distribution, in
                nats. ``rank``: also return each token's rank, 0 for the most probable. ``top``:
                number of most probable tokens to return. ``groups``: groups whose log-masses to
                return, in the types of ``next_token_log_masses``. ``beginnings``: for each scored
                token, also return the log-masses of all tokens that begin with its first byte, with
                its first two bytes, and so on; see ``alphabet``.

        Raises:
            OptionTypeError: (``TypeError``) If an option has a wrong type.
            OptionError: (``ValueError``) If ``top`` is below 0 or above the size of the vocabulary,
                or a group does not fit the vocabulary.
            Exception: Any error of ``score``.
        """
        prompts = [self.contexts.of(prompt, "prompt")]
        return (await self.batch_score_with(prompts, [continuation], lora_name, **options))[0]

    score_with_sync = blocking(score_with, "scores")

    @shows_options(ScoreOptions)
    async def batch_score_with(
        self,
        prompts: Sequence[TokenIds] | TokenIds,
        continuations: Sequence[TokenIds],
        lora_name: str | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[TokenScores]:
        """Return the scores of many continuations; see ``score_with`` and ``batch_score``."""
        given = checked_options(ScoreOptions, options, "option of scores", also=("lora_name",))
        beside = beside_of(given, len(self.byte_vocab))
        if given["beginnings"]:
            texts = listed("continuations", continuations)
            ids = [array("i", self.contexts.packed(own, name="continuation")) for own in texts]
            own_beginnings = beginnings_of(self.alphabet, (i for own in ids for i in own))
            beside, continuations = beside._replace(beginnings=own_beginnings), ids
        found = await self._scores(prompts, continuations, lora_name, beside)
        return [beside.scores_of(own) for own in found]

    batch_score_with_sync = blocking(batch_score_with, "scores")

    async def _scores(
        self, prompts: Any, continuations: Any, lora_name: str | None, beside: ScoreExtras
    ) -> list[torch.Tensor]:
        adapter = self._adapter(lora_name)
        scorings = check_scorings(
            self.contexts, prompts, continuations, self.max_length, adapter, beside
        )
        asked = distinct(scorings)
        found = await self._scored(asked, lora_name)
        return own_scores(scorings, dict(zip(asked, found, strict=True)), self.device)

    _scores_sync = blocking(_scores)

    async def _scored(self, asked: list[ScoreQuery], lora_name: str | None) -> list[torch.Tensor]:
        """Return the answers to distinct queries in order, here from the rows of all prefixes."""

        def ask(queries: list[RowQuery]) -> Awaitable[torch.Tensor]:
            contexts = [_listed(query.context) for query in queries]
            return self.batch_next_token_logprobs(contexts, lora_name=lora_name)

        return await scores_of_rows(asked, ask, self.batch_size)

    _scored_sync = blocking(_scored)

    # ---------------------------------------------------------------- draws and samples

    def draw(
        self, row: AnyRow, *, generator: RandomGenerator | None = None, temperature: float = 1.0
    ) -> int:
        """Draw a token id from the softmax of ``row / temperature``; ``row`` is float ``[vocab]``.

        The row need not be normalised and is not modified; mask a token by ``-inf``. Temperature 0
        takes the first of the most probable tokens. Otherwise, a draw takes one number from
        ``generator`` or from the operating system. NumPy computes the draw on the calling thread.

        Raises:
            OptionTypeError: (``TypeError``) If a type is wrong, such as a seed as ``generator``.
            OptionError: (``ValueError``) If ``row`` has another shape, a NaN, no possible token or
                probabilities instead of logarithms, or ``temperature`` is negative.
        """
        return draw(row, len(self.byte_vocab), generator, temperature)

    @shows_options(DrawOptions)
    async def draw_next_token(
        self,
        token_ids: TokenIds,
        *,
        allowed: Allowed | None = None,
        lora_name: str | None = None,
        **options: Unpack[DrawOptions],
    ) -> Draw:
        """Draw the next token after a context, from all tokens or from the allowed ones.

        Without ``top_k``, ``top_p`` and ``min_p``, the token is, up to rounding, the one that
        ``draw`` returns, with the same generator, for the row with ``-inf`` at forbidden tokens.
        No row is copied or cached; see ``next_token_top``. A particle that the token extends gains
        the log-weight ``logprob - log_proposal`` (``log_allowed`` at temperature 1); see ``Draw``.

        Args:
            token_ids: The context.
            allowed: The tokens that may be drawn: bools ``[vocab]``, an array or a tensor; the
                ``PackedMask`` of a constraint; or a collection of token ids. By default, all.
            lora_name: The adapter to read the context with.
            **options: ``generator``: the random generator, by default the operating system's. One
                number is taken from it before the first await, none at temperature 0.
                ``temperature``: divisor of the log-probabilities; 0 takes the first of the most
                probable tokens and ignores the next three options. ``top_k``: draw from the
                ``top_k`` most probable allowed tokens and any that tie with the last of them; 0
                for no bound. ``top_p``: keep a token if the more probable ones have less than this
                share of the mass that ``top_k`` leaves, at the temperature; above 0, up to 1.
                ``min_p``: keep tokens with at least this share of the largest probability, at the
                temperature; 0 to 1. ``impossible``: if no allowed token is possible, ``"raise"`` an
                error or ``"return"`` a draw with ``token_id`` -1, whose ``logprob`` and
                ``log_allowed`` are ``-inf``, the weight of a dead particle.

        Raises:
            OptionTypeError: (``TypeError``) If a type is wrong, such as a seed as ``generator``.
            OptionError: (``ValueError``) If ``temperature``, ``top_k``, ``top_p`` or ``min_p`` is
                out of bounds, ``impossible`` is another word, or ``allowed`` has another shape, an
                id outside the vocabulary, or (under ``impossible="raise"``) no token.
            EvaluationError: (``RuntimeError``) If the row is NaN, or under ``impossible="raise"``
                if no allowed token is possible.
            Exception: Any error of ``next_token_logprobs``.
        """
        context = self._context_of_draws(token_ids, lora_name)
        drawing = drawing_of(len(self.byte_vocab), allowed, options)
        (draw,) = await self.read(context, drawing, lora_name)
        return draw

    draw_next_token_sync = blocking(draw_next_token, "draw")

    @shows_options(DrawOptions)
    async def draw_next_tokens(
        self,
        token_ids: TokenIds,
        n: int,
        *,
        distinct: bool = False,
        allowed: Allowed | None = None,
        lora_name: str | None = None,
        **options: Unpack[DrawOptions],
    ) -> list[Draw]:
        """Draw ``n`` alternatives for the next token at once, from one row.

        Without ``distinct``, they equal, up to rounding, the results of ``n`` calls of
        ``draw_next_token`` with the same generator. With ``distinct``, they are drawn without
        replacement, in proportion to probability. They then have the distribution of the ``n``
        tokens with the largest Gumbel-perturbed log-probabilities, in order (Kool et al., 2019,
        arXiv:1903.06059).
        The ``log_allowed`` and ``log_proposal`` of a draw refer to the tokens not drawn before it.

        Args:
            token_ids: The context.
            n: Number of draws, at least 1.
            distinct: Draw no token twice. If fewer than ``n`` tokens are possible, fewer are drawn.
            allowed: The tokens that may be drawn, as for ``draw_next_token``.
            lora_name: The adapter to read the context with.
            **options: Options of ``draw_next_token``. ``n`` numbers are taken from ``generator``,
                none at temperature 0. ``top_k``, ``top_p`` and ``min_p`` are applied once, before
                the first draw. Distinct draws at ``temperature=0`` are the most probable tokens in
                order. If no token is possible, ``impossible="return"`` gives ``n`` draws of id -1.

        Raises:
            Exception: Any error of ``draw_next_token``; also ``OptionError`` (``ValueError``) if
                ``n`` is below 1.
        """
        context = self._context_of_draws(token_ids, lora_name)
        draws = drawing_of(len(self.byte_vocab), allowed, options, n, distinct)
        return list(await self.read(context, draws, lora_name))

    draw_next_tokens_sync = blocking(draw_next_tokens, "draws")

    @shows_options(DrawOptions)
    async def batch_draw_next_token(
        self,
        token_ids_list: Sequence[TokenIds],
        *,
        allowed: Sequence[Allowed | None] | Mask | None = None,
        lora_name: str | None = None,
        **options: Unpack[DrawOptions],
    ) -> list[Draw]:
        """Draw a token after each of many contexts, such as those of particles in one step.

        The draws equal those of one ``draw_next_token`` call per context, in order, with the same
        generator.

        Args:
            token_ids_list: The contexts.
            allowed: The tokens that may be drawn after each context, such as the masks of
                ``Constraint.masks``; ``None`` allows all. A single mask applies to all contexts.
            lora_name: The adapter to read the contexts with.
            **options: Options of ``draw_next_token``. One number per context is taken from
                ``generator``, in order; none at temperature 0.

        Raises:
            Exception: The first error that ``draw_next_token`` would raise; also ``OptionError``
                (``ValueError``) if the length of ``allowed`` differs from the number of contexts.
        """
        self.check_adapter(lora_name)
        contexts = self.contexts.check_contexts("token_ids_list", token_ids_list, self.max_length)
        drawing = drawings_of(len(self.byte_vocab), allowed, options, len(contexts))
        return [draw for (draw,) in await self.batch_read(contexts, drawing, lora_name)]

    batch_draw_next_token_sync = blocking(batch_draw_next_token, "draws")

    def _context_of_draws(self, token_ids: TokenIds, lora_name: str | None) -> Context:
        """Check a context and its adapter before a random number is taken."""
        context = self.contexts.check_context(token_ids, self.max_length)
        self.check_adapter(lora_name)
        return context

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

        Equal seeds give equal continuations, up to the rounding of rows, whatever other requests
        run at the same time.

        Args:
            prompt_token_ids: The prompt.
            max_tokens: Ids to sample, at most; fewer once the context exceeds ``max_length``.
            eos_token_ids: Ids that end the continuation and are not returned. The default is the
                model's ``eos_token_ids``; ``[]`` for none.
            temperature: Divisor of the log-probabilities; 0 takes the most probable token.
            seed: Seed of the draws; ``None`` for a fresh one.
            lora_name: The adapter to read the contexts with.
            **others: Must be empty: any name raises an error that suggests an option.

        Returns:
            The ids, in a list whose ``finish_reason`` says why it ends: ``"eos"``, or
            ``"length"`` at ``max_tokens`` or once the context exceeds ``max_length``.

        Raises:
            OptionTypeError: (``TypeError``) If an option has a wrong type or an unknown name.
            OptionError: (``ValueError``) If ``temperature``, ``max_tokens`` or ``seed`` is
                negative, or one of ``eos_token_ids`` is outside the vocabulary.
            Exception: Any error of ``next_token_logprobs``.
        """
        check_no_others("sample", others)
        prompts = [self.contexts.check_context(prompt_token_ids)]
        options = eos_token_ids, temperature, seed, lora_name
        return (await self.batch_sample(prompts, max_tokens, *options))[0]

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
        """Sample a continuation of each prompt concurrently; see ``sample``.

        Each prompt has its own random stream, derived from ``seed`` and its index in the list, so
        that its continuation does not depend on the other prompts. ``progress`` shows a bar of the
        finished continuations, on a terminal or in a notebook.
        """
        check_no_others("batch_sample", others)
        prompts = self.contexts.check_contexts("prompt_token_ids_list", prompt_token_ids_list)
        options = check_sampling(
            len(self.byte_vocab),
            max_tokens=max_tokens,
            eos_token_ids=self.eos_token_ids if eos_token_ids is None else eos_token_ids,
            temperature=temperature,
            seed=seed,
            progress=progress,
        )
        return await self._samples(prompts, lora_name, **options)

    async def _samples(
        self, prompts: list[Context], lora_name: str | None, progress: bool, **options: Any
    ) -> list[Sampled]:
        """Sample a continuation of each prompt; the options have been checked."""
        temperature, seed = options.pop("temperature"), options.pop("seed")
        samplers = [Sampler(temperature, seed, stream) for stream in range(len(prompts))]
        if len(prompts) == 1 and not progress:  # without tqdm, whose import may fail at exit
            return [await self._sample(prompts[0], lora_name, samplers[0], **options)]
        with progress_bar(len(samplers), progress) as bar:

            async def sample(prompt: Context, sampler: Sampler) -> Sampled:
                found = await self._sample(prompt, lora_name, sampler, **options)
                bar.update()
                return found

            return await together(map(sample, prompts, samplers))

    async def _sample(
        self,
        prompt: Context,
        lora_name: str | None,
        sampler: Sampler,
        max_tokens: int,
        eos_token_ids: Collection[int],
    ) -> Sampled:
        context = prompt
        reason: Literal["eos", "length"] = "length"
        while len(context) < len(prompt) + max_tokens:
            is_full = self.max_length is not None and len(context) > self.max_length
            if is_full and len(context) > len(prompt):  # a prompt that is too long raises in read()
                break
            (drawn,) = await self.read(context, sampler.drawing, lora_name)
            if drawn.token_id in eos_token_ids:
                reason = "eos"
                break
            context = context.extend(drawn.token_id)
        return Sampled(context.packed(len(prompt)), reason)

    # ---------------------------------------------------------------- particles

    def particles(
        self,
        prompt: str | TokenIds | Sequence[str | TokenIds],
        n: int | Sequence[int],
        *,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> ParticleGroup:
        """Return a group of particles, each of which begins with a prompt; nothing is computed yet.

        Args:
            prompt: A text, token ids or a ``Context``; or a list of several prompts, each of which
                gets its own particles, with separate weights and resampling.
            n: Number of particles for each prompt; or a list with one number per prompt.
            seed: Seed of the draws and of the resampling; ``None`` for a fresh one.
            lora_name: The adapter to read the contexts with.

        Raises:
            OptionTypeError: (``TypeError``) If ``n`` or ``seed`` is no integer.
            OptionError: (``ValueError``) If ``n`` is below 1, or a list whose length differs from
                the number of prompts.
            ContextError: (``ValueError``) If a prompt is empty, too long, or cannot be encoded.
            UnknownAdapterError: (``ValueError``) If ``lora_name`` is not loaded.
        """
        self.check_adapter(lora_name)
        prompts: Any = [prompt] if is_one_prompt(prompt) else prompt
        contexts = [
            self.contexts.check_context(
                encode_text(self.tokenizer, own) if isinstance(own, str) else own, self.max_length
            )
            for own in prompts
        ]
        return group_of(self, contexts, n, seed, lora_name)

    async def particle_results(
        self,
        steps: Sequence[ParticleStep],
        lora_name: str | None,
        with_draws: Callable[[], list[ParticleStep]] | None = None,
    ) -> list[StepResult]:
        """Return the results of a ``ParticleGroup``'s steps, here computed context by context.

        If ``with_draws`` is given, it returns the steps with their draws, and ``steps`` has them
        without. The function is called once, if possible during the model's forward pass.
        """
        results = list[StepResult]()
        for step in steps if with_draws is None else with_draws():
            contexts = list(map(step.contexts.context, range(len(step))))
            if step.draws is None:
                values: Any = await self.batch_next_token_logprobs(contexts, lora_name=lora_name)
            else:
                own, readout = step.draws.readouts(contexts)
                values = numbers_of_draws(await self.batch_read(own, readout, lora_name))
            results.append(StepResult(values, np.zeros(len(step), np.int64), None))
        return results

    particle_results_sync = blocking(particle_results, "results")

    async def draws_from_rows(
        self, steps: Sequence[ParticleStep], rows: Sequence[StepResult]
    ) -> list[StepResult]:
        """Return the results of ``steps``, which have draws, given the results without draws."""
        return await asyncio.to_thread(drawn_from_rows, steps, rows)

    # ---------------------------------------------------------------- keys and values

    @property
    def kv_capacity(self) -> int | None:
        """Number of tokens whose keys and values fit into the cache; ``None`` if none are kept.

        A longer context is still answered, but computed anew each time. For a model with only
        recurrent states, it is the number of tokens that the prefix tree can hold; the states have
        a separate budget.
        """
        return None

    async def num_cached_tokens(
        self, token_ids: TokenIds, lora_name: str | None = None, *, tier: TierName | None = None
    ) -> int:
        """Return how many of a context's tokens are cached now and need not be computed.

        Args:
            token_ids: The context.
            lora_name: The adapter to read the context with.
            tier: The tier to count: ``"device"``; ``"host"``, whose keys and values are copied to
                the device when used; or ``None`` for both.
        """
        return 0

    # ---------------------------------------------------------------- adapters

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter, which queries use by its name; blocks until it is loaded.

        A name that is already in use is bound to a newly loaded adapter. The old adapter answers
        earlier queries and the new one later queries; a running generation or search looks the
        name up at each step. The call waits for the earlier queries, then frees the old adapter
        and clears the cache.

        Args:
            lora_path: A directory in PEFT's format, or a repository on the hub.
            lora_name: The name of the adapter.

        Raises:
            AdapterError: (``ValueError``) If loading fails, or the model takes no adapters. The
                old adapter then keeps the name.
        """
        raise AdapterError(f"{type(self).__name__} accepts no LoRA adapters, got {lora_name!r}")

    def remove_lora(self, lora_name: str) -> None:
        """Remove a LoRA adapter that ``add_new_lora`` has loaded, and clear the cache.

        Queries for this adapter that are still waiting get an ``UnknownAdapterError``.

        Raises:
            UnknownAdapterError: (``ValueError``) If no adapter has that name.
        """
        self.check_adapter(lora_name)

    def check_adapter(self, lora_name: str | None) -> None:
        """Raise an ``UnknownAdapterError`` unless ``lora_name`` is loaded or ``None``."""
        if lora_name is not None:
            raise UnknownAdapterError(
                f"{UNKNOWN_ADAPTER.format(lora_name)}; {type(self).__name__} accepts none"
            )

    def _adapter(self, lora_name: str | None) -> Adapter | None:
        """Check an adapter's name; return its ``Adapter`` for queries, here always ``None``."""
        self.check_adapter(lora_name)

    def _normalize(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log-softmax over the last axis, cut or padded to the vocabulary's size."""
        missing = len(self.byte_vocab) - logits.shape[-1]
        padded = torch.nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        return padded.log_softmax(-1)

    def set_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an ``AdapterError``: each call names its adapter by ``lora_name``."""
        raise AdapterError(
            "no adapter can be active for all callers: load it with add_new_lora(lora_path, "
            "lora_name) and pass lora_name= to each call"
        )

    def clear_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an ``AdapterError``: a call without ``lora_name`` uses the base model."""
        raise AdapterError(
            "no adapter can be active for all callers: a call without lora_name= uses no adapter, "
            "and remove_lora(lora_name) removes one"
        )

    # ---------------------------------------------------------------- housekeeping

    def clear_cache(self) -> None:
        """Drop every cached row, key and value. Answers stay the same."""

    def statistics(self) -> LMStatistics:
        """Return the statistics of batching and caching."""
        return LMStatistics()

    def close(self) -> None:
        """Raise an error in every waiting caller, and free the model; do nothing if closed."""


def _listed(token_ids: TokenIds) -> TokenIds:
    """Convert a ``Context`` without pictures to a list, which any subclass can take."""
    is_plain = isinstance(token_ids, Context) and token_ids.pictures is None
    return list(token_ids) if is_plain else token_ids
