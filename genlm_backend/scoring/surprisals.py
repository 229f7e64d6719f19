"""surprisal: the surprisal of each word, token or character of a text, in bits or nats."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypedDict,
    Unpack,
    cast,
    final,
    overload,
)

import numpy as np
from numpy.typing import NDArray

from genlm_backend.checks import (
    Option,
    checked_options,
    instance,
    integer,
    listed,
    one_of,
    optional,
    shown,
    shows_options,
    switch,
)
from genlm_backend.errors import ContextError, MissingExtraError, OptionError, OptionTypeError
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.queries.query import TokenIds
from genlm_backend.readouts.score_query import TokenScores
from genlm_backend.runtime.blocking import blocking, in_form
from genlm_backend.runtime.progress import progress_bar
from genlm_backend.scoring.words import (
    NOT_BLANK,
    WORDS,
    Region,
    Spelling,
    Words,
    context_ids,
    is_between_words,
    word_begins,
)


@final
@dataclass(frozen=True, slots=True)
class Surprisal:
    """The surprisal of a word, token or character: the negative logarithm of its probability.

    Attributes:
        text: Its characters; for a token that holds part of a character, the whole character.
        start: Index of its first character in the text.
        end: Index after its last character.
        token_ids: Its tokens. For a word, they include the blanks before it; for a character, all
            tokens with a part of it.
        surprisal: The surprisal, in ``Surprisals.unit``.
        num_context: Number of tokens that the model read before its first token, ``context``
            included.
        entropy: The entropy of the distribution of its first token, in ``Surprisals.unit``;
            ``None`` if not requested.
        rank: Rank of its first token among all tokens; 0 if greedy decoding would choose it.
            ``None`` if not requested.
    """

    text: str
    start: int
    end: int
    token_ids: tuple[int, ...]
    surprisal: float
    num_context: int
    entropy: float | None = None
    rank: int | None = None


@final
class Surprisals(list[Surprisal]):
    """The surprisals of a text's words, tokens or characters, in order.

    Attributes:
        text: The text.
        unit: ``"bits"`` or ``"nats"``.
        context: The token ids before the text.
        log_likelihood: The natural logarithm of the probability of the text's tokens, without any
            correction for word ends.
        num_tokens: Number of the text's tokens.
    """

    def __init__(
        self,
        values: Iterable[Surprisal],
        *,
        text: str,
        unit: str,
        context: Sequence[int],
        behind: str,
        log_likelihood: float,
        num_tokens: int,
    ) -> None:
        super().__init__(values)
        self.text, self.unit, self.context = text, unit, tuple(context)
        self._behind = behind
        self.log_likelihood, self.num_tokens = log_likelihood, num_tokens

    @property
    def total(self) -> float:
        """The sum of the surprisals, in their unit."""
        return math.fsum(each.surprisal for each in self)

    @property
    def perplexity(self) -> float:
        """The perplexity of the text: e to the negative mean log-probability of its tokens."""
        return math.exp(-self.log_likelihood / self.num_tokens)

    def __repr__(self) -> str:
        parts = (f"{each.text!r} {each.surprisal:.2f}" for each in itertools.islice(self, 6))
        more = ", …" if len(self) > 6 else ""
        return f"Surprisals({', '.join(parts)}{more}; {self.unit}, after {self._behind!r})"

    def to_dataframe(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per surprisal and a column per attribute.

        The columns ``entropy`` and ``rank`` are left out if they were not requested.

        Raises:
            MissingExtraError: (``ImportError``) If pandas is not installed.
        """
        return _table(self)


@final
class SurprisalsOfTexts(list[Surprisals]):
    """The surprisals of several texts, in order."""

    def to_dataframe(self) -> Any:
        """Return the surprisals of all texts as one ``pandas.DataFrame``.

        Its first column, ``text_index``, is the index of the text in the list; the others are as
        in ``Surprisals.to_dataframe``.

        Raises:
            MissingExtraError: (``ImportError``) If pandas is not installed.
        """
        table = _table([each for own in self for each in own])
        table.insert(0, "text_index", [i for i, own in enumerate(self) for _ in own])
        return table


def _table(values: Sequence[Surprisal]) -> Any:
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            "to_dataframe needs pandas: pip install 'genlm-backend[pandas]'"
        ) from error
    columns = {name: [getattr(own, name) for own in values] for name in Surprisal.__slots__}
    for name in ("entropy", "rank"):
        if all(told is None for told in columns[name]):
            del columns[name]
    return pandas.DataFrame(columns)


By: TypeAlias = Literal["word", "token", "character"]
"""The parts of a text that get surprisals."""

Unit: TypeAlias = Literal["bits", "nats"]
"""The unit of a logarithm: base 2, or base e."""


@final
class SurprisalOptions(TypedDict, total=False):
    """The options of ``surprisal``, which documents them."""

    by: Annotated[By, Option("word", one_of("word", "token", "character"))]
    unit: Annotated[Unit, Option("bits", one_of("bits", "nats"))]
    words: Annotated[Words, WORDS]
    word_ends: Annotated[bool | None, Option(None, optional(switch))]
    context: Annotated[str | TokenIds | None, Option()]
    contexts: Annotated[Sequence[str | TokenIds] | None, Option()]
    entropy: Annotated[bool, Option(False, switch)]
    rank: Annotated[bool, Option(False, switch)]
    stride: Annotated[int | None, Option(None, optional(integer(1)))]
    lora_name: Annotated[str | None, Option()]
    progress: Annotated[bool, Option(False, switch)]


@overload
async def surprisal(lm: AsyncLM, texts: str, **options: Unpack[SurprisalOptions]) -> Surprisals: ...


@overload
async def surprisal(
    lm: AsyncLM, texts: Sequence[str], **options: Unpack[SurprisalOptions]
) -> SurprisalsOfTexts: ...


@shows_options(SurprisalOptions)
async def surprisal(
    lm: AsyncLM, texts: str | Sequence[str], **options: Unpack[SurprisalOptions]
) -> Surprisals | SurprisalsOfTexts:
    """Return the surprisal of each word, token or character of texts.

    Blanks separate words. A word's surprisal includes its tokens and its end. The probability that
    a word ends is the mass of all tokens that begin another word or end the text. The tokens of the
    next word are conditional on that end (Oh and Schuler, 2024, arXiv:2406.10851; Pimentel and
    Meister, 2024, arXiv:2406.14561). So the probabilities of all possible next words sum to one.
    Without this correction (``word_ends=False``), a word's surprisal includes that of the blank
    before it, and its probability includes all longer words that begin with it.

    A text is scored after the tokenizer's BOS (``bos_token_id``), which the result has as its
    ``context``; without a BOS, pass ``context``. A warning is given if the chat template writes the
    BOS before each message, since plain texts perhaps never followed the BOS in training. Texts
    share batches with each other and with the model's other queries.

    Args:
        lm: The model.
        texts: A text, or several.
        **options: ``by``, ``"word"`` (the default), ``"token"`` or ``"character"``; ``unit``,
            ``"bits"`` (the default) or ``"nats"``; ``words``, a regular expression of words, or a
            function from a text to the spans of its words, ``r"\\S+"`` by default;
            ``word_ends``, whether a word's surprisal includes its end, by default only if blanks
            separate words; ``context``, a text or token ids before each text, with a BOS as for
            ``continuations``; ``contexts``, a list with such a context for each of several texts;
            ``entropy`` and ``rank``, whether to compute these for the first token of each word,
            token or character; ``stride``, for texts longer than the model's limit: the number of
            tokens scored per window after the first, half a window by default; ``lora_name``, the
            LoRA adapter to use; ``progress``, whether to show a bar of the finished texts, on a
            terminal or in a notebook.

    Returns:
        The list of the text's surprisals; for several texts, a list of such lists.

    Raises:
        OptionTypeError: (``TypeError``) If an option is unknown, or an argument is of a wrong type.
        OptionError: (``ValueError``) If an option is out of its bounds or conflicts with another,
            or the tokenizer names no BOS and no ``context`` is given.
        ContextError: (``ValueError``) If a text has no token, the tokenizer cannot encode text or
            normalises it, or ``context`` leaves no room for a text.
        Exception: Any error of ``score``.
    """
    asked = _Asked(lm, options)
    many, read = asked.read(texts)
    asker = await in_form(lm)
    size = 1 if asker is lm else _AT_ONCE
    with progress_bar(len(read), asked.progress, "scoring") as bar:

        async def told(some: list[_Text]) -> list[Surprisals]:
            prompts = [prompt for text in some for prompt in text.parts[0]]
            parts = [part for text in some for part in text.parts[1]]
            scores = iter(
                await asker.batch_score_with(prompts, parts, asked.lora_name, **asked.beside)
            )
            surprisals = list[Surprisals]()
            for text in some:
                surprisals.append(text.surprisals(itertools.islice(scores, len(text.parts[0]))))
                bar.update()
            return surprisals

        asking = (told(read[start : start + size]) for start in range(0, len(read), size))
        found = await asker._together(asking)
    told_of_all = SurprisalsOfTexts(own for some in found for own in some)
    return told_of_all if many else told_of_all[0]


surprisal_sync = blocking(surprisal, "surprisals")

_AT_ONCE: Final = 200
"""Most texts per ``batch_score_with`` of ``surprisal_sync``; its progress bar moves per call."""


@final
class _Asked:
    """The checked options of ``surprisal``, and those of ``batch_score_with`` that they require."""

    def __init__(self, lm: AsyncLM, options: SurprisalOptions) -> None:
        instance(AsyncLM, "an AsyncLM")("lm", lm)
        given = checked_options(SurprisalOptions, options, "option of surprisal")
        self.lm, self.by, self.progress = lm, given["by"], given["progress"]
        self.words: Words = given["words"]
        if self.by != "word" and "words" in options:
            raise OptionError("words applies only with by='word'")
        self.unit, self.stride = given["unit"], given["stride"]
        self.lora_name: str | None = given["lora_name"]
        has_blanks = self.by == "word" and self.words == NOT_BLANK
        if given["word_ends"] and not has_blanks:
            raise OptionError(
                "word_ends=True applies only to words between blanks: leave out by and words"
            )
        self._contexts: Any = given["contexts"]
        if self._contexts is None:
            self._begin = self._begin_of(given["context"], "context")
        elif given["context"] is not None:
            raise OptionError(
                "context is for all texts, and contexts has one per text: pass only one of the two"
            )
        has_ends = has_blanks and given["word_ends"] is not False
        groups = [word_begins(lm)] if has_ends else []
        self.begins: NDArray[np.bool_] | None = groups[0].unpacked().numpy() if groups else None
        self.beside = {"entropy": given["entropy"], "rank": given["rank"], "groups": groups}
        if self.by == "character":
            self.beside["beginnings"] = True

    def read(self, texts: Any) -> tuple[bool, list[_Text]]:
        if isinstance(texts, str):
            if self._contexts is not None:
                raise OptionError(
                    "contexts is for a list of texts: for a single text, pass context"
                )
            return False, [_Text(self, texts, "texts", *self._begin)]
        many = listed("texts", texts)
        for i, text in enumerate(many):
            if not isinstance(text, str):
                hint = "; for token ids, use lm.score" if isinstance(text, (int, list)) else ""
                raise OptionTypeError(f"texts[{i}] must be a string, got {shown(text)}{hint}")
        begins = [self._begin] * len(many) if self._contexts is None else self._begins(len(many))
        pairs = enumerate(zip(many, begins, strict=True))
        return True, [_Text(self, text, f"texts[{i}]", *begin) for i, (text, begin) in pairs]

    def _begins(self, num_texts: int) -> list[tuple[list[int], bool]]:
        contexts = listed("contexts", self._contexts)
        if len(contexts) != num_texts:
            raise OptionError(
                "contexts must have one context per text, "
                f"got {len(contexts)} contexts for {num_texts} texts"
            )
        return [self._begin_of(own, f"contexts[{i}]") for i, own in enumerate(contexts)]

    def _begin_of(self, context: Any, name: str) -> tuple[list[int], bool]:
        """Return the token ids of a context, and whether the context ends outside a word."""
        ids = context_ids(self.lm, context, name)
        # A context may end within a word, which the text then continues.
        return ids, context is None or is_between_words(self.lm, ids)


@final
class _Text:
    """A text, divided into windows; computes the text's surprisals from the windows' scores."""

    def __init__(
        self, asked: _Asked, text: str, name: str, context: list[int], is_between: bool
    ) -> None:
        self._asked, self._context, self._is_between = asked, context, is_between
        self._spelling = Spelling(asked.lm, text, name)
        if asked.by == "word":
            self._regions = self._spelling.words(asked.words)
        else:
            is_token = asked.by == "token"
            self._regions = self._spelling.tokens if is_token else self._spelling.characters
        begins, ids = asked.begins, self._spelling.token_ids
        self._begins: list[bool] | None = None if begins is None else begins[ids].tolist()
        self._num_context: list[int] = []
        self.parts: tuple[list[list[int]], list[list[int]]] = [], []
        self._divide(asked.lm.max_length, asked.stride)

    def _divide(self, max_length: int | None, stride: int | None) -> None:
        """Divide the text into parts, each scored after the context and earlier tokens that fit."""
        ids, begin = self._spelling.token_ids, self._context
        most = len(ids) if max_length is None else max_length - len(begin) + 1
        if most < 1:
            raise ContextError(
                f"context has {len(begin)} tokens, but the model accepts at most {max_length}"
            )
        if self._begins is not None and max_length is not None and max_length <= len(begin):
            raise ContextError(
                f"context has {len(begin)} tokens of the {max_length} that the model accepts, "
                "which leaves no room for the end of a word: cut context, or pass word_ends=False"
            )
        step = stride or max(1, most // 2)
        if step > most and len(ids) > most:
            raise OptionError(
                f"stride must be at most {most}, the number of a text's tokens that fit in a window"
            )
        start = done = 0
        while done < len(ids):
            stop = min(len(ids), most if not done else done + step)
            start = max(0, stop - most) if done else 0
            self.parts[0].append([*begin, *ids[start:done]])
            self.parts[1].append(ids[done:stop])
            self._num_context += range(len(begin) + done - start, len(begin) + stop - start)
            done = stop
        if self._begins is None:
            return
        # The last word's end needs the masses after the last token: score any token after that one.
        room = len(ids) if max_length is None else max_length - len(begin)
        if done - start <= room:
            self.parts[1][-1] = [*self.parts[1][-1], ids[0]]
        else:
            self.parts[0].append([*begin, *ids[done - room :]])
            self.parts[1].append([ids[0]])

    def surprisals(self, scores: Iterable[TokenScores]) -> Surprisals:
        found, ids = [*scores], self._spelling.token_ids
        scale = 1 / math.log(2) if self._asked.unit == "bits" else 1.0
        logprobs, ends = _joined(found, "logprobs") or [], _joined(found, "log_masses")
        entropies, ranks = _joined(found, "entropies"), _joined(found, "ranks")
        beginnings = _joined(found, "log_beginnings")
        if beginnings is None:
            totals = [self._logprob(region, logprobs, ends) for region in self._regions]
        else:
            totals = self._of_characters(logprobs, beginnings)
        values = [
            Surprisal(
                text=self._spelling.text[region.start : region.stop],
                start=region.start,
                end=region.stop,
                token_ids=tuple(ids[region.first : region.last]),
                surprisal=0.0 - total * scale,
                num_context=self._num_context[region.first],
                entropy=None if entropies is None else entropies[region.first] * scale,
                rank=None if ranks is None else ranks[region.first],
            )
            for region, total in zip(self._regions, totals, strict=True)
        ]
        return Surprisals(
            values,
            text=self._spelling.text,
            unit=self._asked.unit,
            context=self._context,
            behind="".join(self._asked.lm.str_vocab[i] for i in self._context),
            log_likelihood=math.fsum(logprobs[: len(ids)]),
            num_tokens=len(ids),
        )

    def _logprob(self, region: Region, logprobs: list[float], ends: list[float] | None) -> float:
        """Return a region's log-probability; with ``ends``, of word and end, given the last end."""
        total = math.fsum(logprobs[region.first : region.last])
        if ends is None:
            return total
        return total + self._end(region.last, ends) - self._end(region.first, ends)

    def _end(self, index: int, ends: list[float]) -> float:
        """Return the log-probability of a word's end after ``index`` tokens, given these tokens."""
        begins = cast(list[bool], self._begins)
        # 0 if the end is certain, as after a blank, or if token ``index`` begins no word. A token
        # that begins with only a part of a multi-byte blank begins no word.
        is_known = self._spelling.ends_blank[index - 1] if index else self._is_between
        is_asked = index == len(begins) or begins[index]
        return ends[index] if is_asked and not is_known else 0.0

    def _of_characters(self, logprobs: list[float], beginnings: list[list[float]]) -> list[float]:
        """Return each character's log-probability, summed over the tokens with a part of it."""
        found = [list[float]() for _ in self._spelling.text]
        parts = zip(self._spelling.portions, logprobs, beginnings, strict=True)
        for portions, logprob, begun in parts:
            before, last = 0.0, len(portions) - 1
            for i, (char, stop) in enumerate(portions):
                behind = logprob if i == last else begun[stop - 1]
                if before > -math.inf:  # after an impossible prefix, the difference would be NaN
                    found[char].append(behind - before)
                before = behind
        return [math.fsum(own) for own in found]


def _joined(scores: Sequence[TokenScores], name: str) -> list[Any] | None:
    """Concatenate a field of all scores into one list; ``None`` if no score has it."""
    columns = [own for each in scores if (own := getattr(each, name)) is not None]
    if name == "log_masses":
        columns = [own[:, 0] for own in columns]
    return [number for own in columns for number in own.tolist()] or None
