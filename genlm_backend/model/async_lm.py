"""AsyncLM: the interface of every backend."""

from __future__ import annotations

import abc
from array import array
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, Unpack

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
from genlm_backend.prefix.budgets import TierName
from genlm_backend.queries.context import Context, ContextFactory, listed_contexts
from genlm_backend.queries.query import NO_QUERY, UNKNOWN_ADAPTER, Adapter, RowQuery, TokenIds
from genlm_backend.readouts.draw import Allowed, AnyRow, Draw, Mask, RandomGenerator, draw
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


class AsyncLM(Closing):
    """A language model whose next-token log-probabilities can be awaited.

    Concurrent awaits are answered together. A row is a ``torch.Tensor`` of shape
    ``[len(byte_vocab)]`` and dtype float32: natural logarithms that sum to one in probability,
    computed in float32 whatever the model's own dtype, the caller's to modify. Ids that no token
    has are ``-inf``. The answer to a context depends on nothing else: not on the other contexts
    of its batch, nor on what is cached, beyond rounding.

    Every log-probability method takes ``lora_name``, the adapter to read the context with. A
    model of one's own has to define ``next_token_logprobs`` and ``next_token_logprobs_sync``, and
    what else it can do better than by one context after another.

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
        contexts: What checks token ids and makes a ``Context`` of them.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        "vocab_size": optional(integer(1, MAX_VOCAB)),
        "self_check": switch,
    }
    """Checks of the constructor's options, by name."""

    library_opts: ClassVar[str] = ""
    """Option of ``from_name`` that takes those of the library that loads the model."""

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
    """Longest context that the model takes, in tokens; ``None`` where nothing bounds it."""

    kv_cache_dtype: str | None = None
    """Number format in which keys and values are kept; ``None`` for the type of the model."""

    _own_eos: Collection[int] | None = None
    """Ids that end a text by the model's generation config; ``None`` if it names none."""

    _alphabet: tuple[frozenset[int], Alphabet] | None = None

    has_host_tier: bool = False
    """Whether keys and values that have to leave the device are kept on the host."""

    batch_size: int = 20
    """Number of distinct contexts that are evaluated at once, at most."""

    device: torch.device | None = None
    """Device on which rows are returned; ``None`` if a model of one's own does not say."""

    model_device: torch.device | None = None
    """Device on which the model takes its token ids; ``None`` if it does not say."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text, wherever a caller names none.

        The model's own generation config names them, and may name several. Where it names no token
        of the model, they are the tokenizer's; empty where that names none either.
        """
        return default_ends(self._own_eos, self.tokenizer, self._is_token)

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < len(self.byte_vocab) and token_id not in self.undefined_ids

    @property
    def alphabet(self) -> Alphabet:
        """The tokens in the order of their bytes, without those that end a text now."""
        ends = self.special_ids | self.eos_token_ids
        if self._alphabet is None or self._alphabet[0] != ends:
            self._alphabet = ends, Alphabet(self.byte_vocab, ends, self.undefined_ids)
        return self._alphabet[1]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check options of the constructor and of ``from_name``, before a model is loaded.

        Raises:
            OptionTypeError: (``TypeError``) If there is none of a name, or one is of a wrong type.
            OptionError: (``ValueError``) If one is out of its bounds.
        """
        check_option_names(cls, options, cls.library_opts, is_loading=True)
        checked(cls.option_checks, options)

    def context(
        self,
        token_ids: TokenIds | str = (),
        images: Sequence[Any] | Mapping[str, Any] | None = None,
    ) -> Context:
        """Return token ids as a ``Context``, which may be passed wherever token ids are.

        ``context + [token]`` is another, made and asked at a cost that is the same at any length.

        Args:
            token_ids: Token ids. With ``images`` it may be a text.
            images: Pictures, for models that see them (of transformers and vLLM): PIL
                images, arrays ``[height, width, 3]`` of bytes, paths or the bytes of files, one for
                each place in the prompt that the model's own token for a picture marks. Or what its
                processor has made of them, by name (``pixel_values``, …), for its ``input_ids``.

        Raises:
            ContextTypeError: (``TypeError``) If the ids are not integers.
            ContextError: (``ValueError``) If one is outside the vocabulary, or another model's.
            PictureError: (``ValueError``) If the model sees no pictures, there are more or fewer
                of them than places, or one cannot be read.
        """
        if images is not None:
            if isinstance(token_ids, Context) and token_ids.pictures is not None:
                raise PictureError("the context begins with its pictures already")
            return self._pictured(token_ids, images)
        return self.contexts.of(token_ids)

    def _pictured(
        self, prompt: TokenIds | str, images: Sequence[Any] | Mapping[str, Any]
    ) -> Context:
        raise PictureError(f"{type(self).__name__} takes no pictures: this model reads text alone")

    # ---------------------------------------------------------------- rows

    @abc.abstractmethod
    async def next_token_logprobs(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities of the token after ``token_ids``: float32 ``[vocab]``.

        Awaited together with whatever else is being asked; at most ``batch_size`` distinct
        contexts are one batch. Equal contexts are computed once, and the keys and
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

        Some processors of transformers, such as the repetition penalty, are defined on these. A
        backend that does not know them returns log-probabilities, which differ by one number.
        """
        return await self.next_token_logprobs(token_ids, lora_name)

    @abc.abstractmethod
    def next_token_logprobs_sync(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the same row as ``next_token_logprobs``, blocking the calling thread.

        Works from any thread, inside a running event loop too (a notebook), which waits for it.
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

    # ---------------------------------------------------------------- read off rows

    async def read(
        self, token_ids: TokenIds, readout: ReadoutOf, lora_name: str | None = None
    ) -> Any:
        """Return the answer to a readout of any kind, such as one of your own.

        All that is read off rows is asked by it. The answer may be another caller's too: it is
        copied before it is modified.

        Args:
            token_ids: The context.
            readout: A function from a ``RowQuery`` to the ``Readout`` of it, such as a class of
                readouts that are made of a query alone, or ``lambda query: Margin(query, 3)``.
            lora_name: The adapter to read the context with.

        Raises:
            OptionTypeError: (``TypeError``) If ``readout`` makes no readout.
            EvaluationError: (``RuntimeError``) If the row is NaN.
            Exception: What the kind of readout has in place of an answer, and what
                ``next_token_logprobs`` raises.
        """
        asked = readout_of(readout, NO_QUERY)
        row = await self.next_token_logprobs(_listed(token_ids), lora_name=lora_name)
        return asked.of_logprobs(row)

    read_sync = blocking(read, "answer")

    async def batch_read(
        self, token_ids_list: Sequence[TokenIds], readout: ReadoutOf, lora_name: str | None = None
    ) -> list[Any]:
        """Return the answers to a readout behind each of many contexts, in order; see ``read``.

        ``readout`` is called once for each context, in order. The first error of one is raised.
        """
        contexts = listed_contexts("token_ids_list", token_ids_list)
        return await self._together(self.read(ids, readout, lora_name) for ids in contexts)

    batch_read_sync = blocking(batch_read, "answers")

    async def next_token_top(
        self, token_ids: TokenIds, k: int, lora_name: str | None = None
    ) -> TopTokens:
        """Return the ``k`` most probable tokens after a context, and what is left for the others.

        Like all that is read off rows, it is read where the model is, in the batches of all other
        awaits: no row is made for the caller, comes out of another process, or is kept.

        Args:
            token_ids: The context.
            k: Number of tokens, from 1 to the size of the vocabulary.
            lora_name: The adapter to read the context with.

        Returns:
            Their ids, int64 ``[k]``, their log-probabilities, float32 ``[k]``, the most probable
            first, and the logarithm of the probability of all others together, summed from theirs.
            ``texts`` of it are the tokens as text, and a notebook shows these.

        Raises:
            OptionTypeError: (``TypeError``) If ``k`` is no integer.
            OptionError: (``ValueError``) If it is below 1 or above the size of the vocabulary.
            EvaluationError: (``RuntimeError``) If the row is NaN.
            Exception: What ``next_token_logprobs`` raises.
        """
        readout = top_of(k, len(self.byte_vocab))
        return own_top(await self.read(token_ids, readout, lora_name), self.str_vocab)

    next_token_top_sync = blocking(next_token_top, "tokens")

    async def next_token_logprobs_of(
        self, token_ids: TokenIds, chosen: Iterable[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities of chosen tokens after a context: float32 ``[len(chosen)]``.

        They are those of the whole row, to the last bit; see ``next_token_top``.

        Args:
            token_ids: The context.
            chosen: Ids of the tokens, in any order; one that is there twice is answered twice.
            lora_name: The adapter to read the context with.

        Raises:
            OptionTypeError: (``TypeError``) If they are no collection of integers, or a set.
            OptionError: (``ValueError``) If one is outside the vocabulary.
            EvaluationError: (``RuntimeError``) If the row is NaN.
            Exception: What ``next_token_logprobs`` raises.
        """
        readout = chosen_of(chosen, len(self.byte_vocab))
        return (await self.read(token_ids, readout, lora_name)).clone()

    next_token_logprobs_of_sync = blocking(next_token_logprobs_of, "numbers")

    async def next_token_entropy(self, token_ids: TokenIds, lora_name: str | None = None) -> float:
        """Return the entropy of the token after a context in nats, summed in float64.

        See ``next_token_top``.

        Raises:
            EvaluationError: (``RuntimeError``) If the row is NaN.
            Exception: What ``next_token_logprobs`` raises.
        """
        return await self.read(token_ids, Entropy, lora_name)

    next_token_entropy_sync = blocking(next_token_entropy, "number")

    async def next_token_log_masses(
        self, token_ids: TokenIds, groups: Sequence[Allowed], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return how probable groups of tokens are after a context: float64 ``[len(groups)]``.

        Each number is the logarithm of the probability that the next token is one of a group's,
        summed from theirs, and ``-inf`` where none of them is possible. The tokens of a node of a
        trie over the vocabulary are ``trie.tokens_below(node)``; for all nodes at once there is
        ``lm_trie_weights``. See ``next_token_top``.

        Args:
            token_ids: The context.
            groups: Groups of tokens, which may have tokens in common: each bools ``[vocab]``, the
                ``PackedMask`` of a constraint, or a collection of token ids.
            lora_name: The adapter to read the context with.

        Raises:
            OptionTypeError: (``TypeError``) If one of them is of another type.
            OptionError: (``ValueError``) If one has another shape, or an id outside the vocabulary.
            EvaluationError: (``RuntimeError``) If the row is NaN.
            Exception: What ``next_token_logprobs`` raises.
        """
        readout = masses_of(groups, len(self.byte_vocab))
        return (await self.read(token_ids, readout, lora_name)).clone()

    next_token_log_masses_sync = blocking(next_token_log_masses, "numbers")

    # ---------------------------------------------------------------- scores

    async def score(
        self, prompt: TokenIds, continuation: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-probability of each token of a continuation: float32 ``[n]``.

        Each is what the row of all tokens before it says of that token, to rounding. An
        ``AsyncTransformer`` computes each token of the text once, in the batches of other awaits,
        and makes no rows, and so does vLLM, of most texts; other backends take the rows of all
        prefixes, ``batch_size`` at a time.

        Raises:
            ContextError: (``ValueError``) If the prompt is empty, an id is outside the vocabulary,
                or the text without its last token is longer than the model's maximum.
            Exception: What ``next_token_logprobs`` raises.
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

        Each comes after its own prompt. A single prompt is for all of them.
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
        """Return more of each token of a continuation than its log-probability; see ``score``.

        Each number is that of ``next_token_entropy``, ``next_token_top`` or
        ``next_token_log_masses`` of the tokens before it. It is read off where the model computes,
        in the pass that scores the text.

        Args:
            prompt: What comes before the continuation, at least one token.
            continuation: The tokens that are scored.
            lora_name: The adapter to read the text with.
            **options: ``entropy``, whether to tell the entropy of what could come, in nats;
                ``rank``, whether to tell how many tokens were more probable; ``top``, the number of
                the most probable tokens to tell; ``groups``, groups of tokens whose masses are
                told, as ``next_token_log_masses`` has them; ``beginnings``, whether to tell how
                probable all tokens together were that begin with the first byte of the token, its
                first two, and so on, as ``alphabet`` has them.

        Raises:
            OptionTypeError: (``TypeError``) If an option is of a wrong type.
            OptionError: (``ValueError``) If ``top`` is below 0 or above the size of the vocabulary,
                or a group is of another vocabulary.
            Exception: What ``score`` raises.
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
        """Return the answers to distinct scorings."""

        def ask(queries: list[RowQuery]) -> Awaitable[torch.Tensor]:
            contexts = [_listed(query.context) for query in queries]
            return self.batch_next_token_logprobs(contexts, lora_name=lora_name)

        return await scores_of_rows(asked, ask, self.batch_size)

    _scored_sync = blocking(_scored)

    # ---------------------------------------------------------------- draws and samples

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

    @shows_options(DrawOptions)
    async def draw_next_token(
        self,
        token_ids: TokenIds,
        *,
        allowed: Allowed | None = None,
        lora_name: str | None = None,
        **options: Unpack[DrawOptions],
    ) -> Draw:
        """Draw the token after a context from its row, or from the allowed tokens of it.

        The same token as ``draw`` of the row, where what is not allowed is ``-inf``, draws with the
        same generator. It is drawn where the model is: no row is made for the caller, nor kept. Its
        ``logprob - log_proposal`` is the log-weight that a particle gains; at temperature 1 that is
        ``log_allowed``, the logarithm of the probability of all tokens that were drawn from.

        Args:
            token_ids: The context.
            allowed: The tokens that may be drawn: bools ``[vocab]``, an array or a tensor; the
                ``PackedMask`` of a constraint; or a collection of token ids. By default, all.
            lora_name: The adapter to read the context with.
            **options: ``generator``, a random stream that one number is taken from, before anything
                is awaited, and none at temperature 0; by default, a fresh one. ``temperature``, the
                divisor of the log-probabilities; 0 takes the first of the most probable, whatever
                the three bounds are. ``top_k``: only so many of the most probable allowed tokens
                are drawn from, and those that are as probable as the last of them; 0 for no bound.
                ``top_p``: only tokens than which more probable ones have less than this probability
                together, of what is left, at the temperature; above 0 to 1. ``min_p``: only tokens
                that have this share of the most probable one's probability, at the temperature; 0
                to 1. ``impossible``: ``"raise"`` an error if no allowed token has a probability, or
                ``"return"`` a draw without a token, whose ``token_id`` is -1 and whose ``logprob``
                and ``log_allowed`` are ``-inf``: the weight of a particle that dies there.

        Raises:
            OptionTypeError: (``TypeError``) If an argument is of another type, such as a seed.
            OptionError: (``ValueError``) If ``temperature`` is negative, ``impossible`` is another
                word, or ``allowed`` has another shape, an id outside the vocabulary, or no token
                where that is to raise.
            EvaluationError: (``RuntimeError``) If the row is NaN, or the model gives no allowed
                token a probability and that is to raise.
            Exception: What ``next_token_logprobs`` raises.
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
        """Draw ``n`` alternatives for the token after a context at once, from one row.

        They are those that ``n`` calls of ``draw_next_token`` draw with the same generator. Where
        they are to be ``distinct``, each is drawn from what the ones before it have left, by its
        probability: without replacement, the distribution of the ``n`` largest log-probabilities
        with Gumbel noise (Kool et al., 2019, arXiv:1903.06059), in order. ``log_allowed`` and
        ``log_proposal`` of each are then those among what was left.

        Args:
            token_ids: The context.
            n: Number of draws, at least 1.
            distinct: Whether no token is drawn twice. There are fewer draws than ``n`` where
                fewer tokens are possible.
            allowed: The tokens that may be drawn, as for ``draw_next_token``.
            lora_name: The adapter to read the context with.
            **options: Those of ``draw_next_token``. ``generator`` gives ``n`` numbers, the bounds
                hold whatever has been drawn, distinct draws at ``temperature=0`` are the most
                probable tokens in order, and ``impossible="return"`` returns ``n`` draws.

        Raises:
            Exception: What ``draw_next_token`` raises; ``OptionError`` (``ValueError``) as well if
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
        """Draw the token after each of many contexts, as a step of particles does.

        They are the draws of as many calls of ``draw_next_token``, in order, with the same
        generator.

        Args:
            token_ids_list: The contexts.
            allowed: The tokens that may be drawn behind each of them, such as the masks of
                ``Constraint.masks``; ``None`` where all may be. A single mask is for all contexts.
            lora_name: The adapter to read the contexts with.
            **options: Those of ``draw_next_token``. ``generator`` gives a number for each context,
                in order.

        Raises:
            Exception: What ``draw_next_token`` raises, of the first that raises it; ``OptionError``
                (``ValueError``) as well if there are not as many of ``allowed`` as of contexts.
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
        """Sample a continuation of each prompt, all at the same time; see ``sample``.

        Each prompt has a random stream of its own, derived from ``seed`` and its place in the
        list, so that its continuation does not depend on the prompts behind it. ``progress``
        shows a bar of the continuations that are complete, on a terminal or in a notebook.
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
        """Sample a continuation of each prompt, by checked options."""
        temperature, seed = options.pop("temperature"), options.pop("seed")
        samplers = [Sampler(temperature, seed, stream) for stream in range(len(prompts))]
        if len(prompts) == 1 and not progress:  # or a bar would import tqdm as Python exits
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
            if is_full and len(context) > len(prompt):  # of a prompt that is, the model tells
                break
            (drawn,) = await self.read(context, sampler.drawing, lora_name)
            if drawn.token_id in eos_token_ids:
                reason = "eos"
                break
            context = context.extend(drawn.token_id)
        return Sampled(context.packed(len(prompt)), reason)

    # ---------------------------------------------------------------- keys and values

    @property
    def kv_capacity(self) -> int | None:
        """Tokens whose keys and values fit at once; ``None`` where no such memory bounds them.

        A context beyond it is still answered, at the cost of computing it again and again. Of a
        model that has recurrent states alone, it is the number of tokens that can be told apart:
        its states have a budget of their own.
        """
        return None

    async def num_cached_tokens(
        self, token_ids: TokenIds, lora_name: str | None = None, *, tier: TierName | None = None
    ) -> int:
        """Return how many of a context's tokens need not be computed if it is asked now.

        Args:
            token_ids: The context.
            lora_name: The adapter it is for.
            tier: What is counted: the tokens whose keys and values are on the ``"device"``,
                on the ``"host"``, from where they are fetched, or both.
        """
        return 0

    # ---------------------------------------------------------------- adapters

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter, to be named in queries; blocks until it is there.

        A name that is loaded is bound anew, and the files are read again. Queries asked before the
        call are answered by the adapter that had the name, and those asked after it by the new one;
        a text that is being generated or searched asks for its next rows by the name. The call
        waits for the former, then frees that adapter and clears the cache, as ``remove_lora`` does.

        Args:
            lora_path: A directory in PEFT's format, or a repository on the hub.
            lora_name: The name of the adapter.

        Raises:
            AdapterError: (``ValueError``) If nothing can be loaded, or the model takes no adapters.
                An adapter that had the name keeps it.
        """
        raise AdapterError(
            f"{type(self).__name__} takes no LoRA adapters: {lora_name!r} is refused"
        )

    def remove_lora(self, lora_name: str) -> None:
        """Remove a LoRA adapter that ``add_new_lora`` has loaded.

        Queries with it that have not begun get an ``UnknownAdapterError``, and no others.

        Raises:
            UnknownAdapterError: (``ValueError``) If there is none of that name.
        """
        self.check_adapter(lora_name)

    def check_adapter(self, lora_name: str | None) -> None:
        """Raise an ``UnknownAdapterError`` unless ``lora_name`` is loaded or ``None``."""
        if lora_name is not None:
            raise UnknownAdapterError(
                f"{UNKNOWN_ADAPTER.format(lora_name)}; {type(self).__name__} has none"
            )

    def _adapter(self, lora_name: str | None) -> Adapter | None:
        """Return a checked adapter as queries have it; ``None`` if they go by its name."""
        self.check_adapter(lora_name)

    def _normalize(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits ``[..., n]`` as float32 rows, cut or filled up to the vocabulary."""
        missing = len(self.byte_vocab) - logits.shape[-1]
        padded = torch.nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        return padded.log_softmax(-1)

    def set_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an ``AdapterError``: each call says by ``lora_name`` which adapter it is for."""
        raise AdapterError(
            "no adapter is active for all callers: load it by add_new_lora(lora_path, lora_name) "
            "and pass lora_name= to each call"
        )

    def clear_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an ``AdapterError``: a call without ``lora_name`` is for the model as it is."""
        raise AdapterError(
            "no adapter is active for all callers: a call without lora_name= is for the model "
            "as it is; remove_lora(lora_name) removes an adapter"
        )

    # ---------------------------------------------------------------- keeping house

    def clear_cache(self) -> None:
        """Forget every cached row, key and value. No answer changes by it."""

    def statistics(self) -> LMStatistics:
        """Return the statistics of batching and caching."""
        return LMStatistics()

    def close(self) -> None:
        """Settle every waiter with an error and free what the model holds; again has no effect."""


def _listed(token_ids: TokenIds) -> TokenIds:
    """Return a context without pictures as a list, which another model takes too."""
    is_plain = isinstance(token_ids, Context) and token_ids.pictures is None
    return list(token_ids) if is_plain else token_ids
