"""GenerationConfig: how a text is generated, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypedDict, TypeVar, final

from genlm_backend.checks import (
    check_names,
    checked,
    instance,
    integer,
    listed,
    number,
    one_of,
    optional,
    sequence,
    shown,
    switch,
    text,
)
from genlm_backend.errors import GenerationConfigError, OptionError
from genlm_backend.generation.grammar.schema_classes import is_class_with_schema, schema_of_class
from genlm_backend.generation.hf_config import fields_of_hf, own_config
from genlm_backend.model.async_lm import AsyncLM


@final
@dataclass(frozen=True, slots=True, eq=False)
class MultiMediaInfo:
    """The pictures of a prompt, for the field ``mm_info`` of a ``GenerationConfig``.

    Attributes:
        images: One for each of the model's own tokens for a picture in the prompt: PIL
            images, arrays ``[height, width, 3]`` of uint8, paths or the bytes of files.

    Raises:
        GenerationConfigError: (``ValueError``) If they are no list.
    """

    images: Sequence[Any]

    def __post_init__(self) -> None:
        given = checked({"images": listed}, {"images": self.images}, GenerationConfigError)
        object.__setattr__(self, "images", tuple(given["images"]))


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How a text is generated. The defaults take the most probable token, to the model's limit.

    Every field is checked at construction; ``replace`` makes another one.

    Attributes:
        do_sample: Whether to draw from the distribution, or to take its largest; ``None`` draws
            where one of the next four is given.
        temperature: Divides the logits; ``None`` for 1. 0 takes the largest, and infinity draws
            from all possible tokens alike.
        top_k: Only so many of the most probable tokens; 0 for all. More than there are are all,
            too, as in transformers.
        top_p: Only the most probable tokens that together have this probability, above 0 to 1.
        min_p: Only tokens that have this share of the most probable one's probability, 0 to 1.
        seed: Seed of the random stream; equal seeds give equal texts. ``None`` draws one afresh.
        n: Texts to generate of one prompt, each with a stream of its own.
        max_new_tokens: Tokens to generate, at most. Where ``max_length`` is ``None`` as well,
            ``generate`` and ``stream`` take 20, or as many as the model takes where there is a
            ``response_format``; an engine as many as it takes.
        max_length: Tokens of prompt and text together, at most.
        min_length: Tokens of prompt and text together before the text may end.
        min_new_tokens: Tokens of the text before it may end.
        early_stopping: ``False`` for texts that no end-of-sequence token ends; ``True`` and
            ``None`` say that one does. In transformers, the name is of ``beam_early_stopping``: so
            it is refused beside ``num_beams``, where ``eos_token_id=()`` says ``False``.
        eos_token_id: One or several tokens that end a text; ``None`` for the model's own,
            ``lm.eos_token_ids``.
        stop_words_ids: Lists of token ids; a text that ends with one of them is complete. ``None``
            means none, as with the next two.
        stop: Strings; a text is complete, and cut off, where one of them begins.
        bad_words_ids: Lists of token ids that are not generated.
        repetition_penalty: Above 0; 1 for none. Divides the positive logits of tokens that were
            there before, and multiplies the negative ones (Keskar et al., 2019).
        suppress_repetition_in_generation: Whether ``repetition_penalty`` looks at the generated
            tokens only, and not at the prompt.
        no_repeat_ngram_size: No so many tokens follow one another twice; 0 for no such rule.
        presence_penalty: Taken from the logits of tokens that were generated before.
        frequency_penalty: Taken from them once for each time.
        logprobs: Whether to return the log-probabilities of the tokens.
        top_logprobs: How many alternatives to return with each token.
        lora_name: The adapter to read the context with.
        response_format: What the text must look like: a mapping, or a class that has a JSON
            schema, which is made of it at once; see ``Constraint.from_response_format``.
        num_beams: Texts to search among for the most probable ones; 1 for no beam search. ``n``
            of them are returned, the best first.
        length_penalty: A beam's log-probability is divided by its length to this power, for
            ranking: above 0 favours long texts.
        beam_early_stopping: When a beam search ends that has found ``num_beams`` texts: ``True``
            at once, ``False`` when no beam is better by its present length, ``"never"`` when none
            can become so; as ``early_stopping`` of transformers.
        mm_info: The pictures that the prompt begins with.

    Raises:
        GenerationConfigError: (``ValueError``) Naming the field.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_new_tokens: int | None = None
    max_length: int | None = None
    min_length: int = 0
    min_new_tokens: int = 0
    early_stopping: bool | None = None
    eos_token_id: int | Sequence[int] | None = None
    stop_words_ids: Sequence[Sequence[int]] | None = ()
    stop: str | Sequence[str] | None = ()
    bad_words_ids: Sequence[Sequence[int]] | None = ()
    repetition_penalty: float = 1.0
    suppress_repetition_in_generation: bool = False
    no_repeat_ngram_size: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: bool = False
    top_logprobs: int = 0
    lora_name: str | None = None
    response_format: Mapping[str, Any] | type[Any] | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    beam_early_stopping: bool | Literal["never"] = False
    mm_info: MultiMediaInfo | None = None

    def __new__(cls, **fields: Any) -> Self:
        """Refuse unknown names and suggest near ones, which ``__init__`` would not."""
        check_fields(cls, fields, GenerationConfigError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _CHECKS}
        for name, value in checked(_CHECKS, given, GenerationConfigError).items():
            object.__setattr__(self, name, value)
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        is_search, most = self.num_beams > 1, self.max_new_tokens or math.inf
        if self.do_sample is False:
            self._check("temperature", self.temperature in (None, 0, 1), _LEFT_OUT)
            for name, default in _NO_BOUNDS.items():
                self._check(name, getattr(self, name) == default, _LEFT_OUT)
        self._check("n", self.is_sampled or self.n <= self.num_beams, _ONE_TEXT)
        is_within = self.min_length <= (self.max_length or math.inf)
        self._check("min_length", is_within, "at most max_length")
        self._check("min_new_tokens", self.min_new_tokens <= most, "at most max_new_tokens")
        can_search = not self.is_sampled and self.response_format is None
        self._check("num_beams", can_search or not is_search, _NO_SEARCH)
        is_plain = is_search or self.length_penalty == 1
        self._check("length_penalty", is_plain, "1.0 unless num_beams > 1")
        is_plain = is_search or not self.beam_early_stopping
        self._check("beam_early_stopping", is_plain, "False unless num_beams > 1")
        if is_search and self.early_stopping is not None:
            raise GenerationConfigError(
                f"early_stopping must be left out with num_beams > 1, got {self.early_stopping}: "
                f"{_EARLY_STOPPING}, and eos_token_id=() has no token end a text"
            )
        is_plain = self.logprobs or not self.top_logprobs
        self._check("top_logprobs", is_plain, "0 unless logprobs=True")

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn, and not the most probable ones taken."""
        bounds = any(getattr(self, name) != default for name, default in _NO_BOUNDS.items())
        is_meant = bounds or self.temperature is not None
        return self.temperature != 0 and (is_meant if self.do_sample is None else self.do_sample)

    def _check(self, name: str, is_right: bool, wanted: str) -> None:
        if not is_right:
            raise GenerationConfigError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    def replace(self, **fields: Any) -> Self:
        """Return another configuration, with these fields changed.

        Raises:
            GenerationConfigError: (``ValueError``) As at construction, and for a name that is no
                field.
        """
        return replaced(self, fields, GenerationConfigError)

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        """Make one of a ``transformers.GenerationConfig``, to the same texts as ``model.generate``.

        Where it has both, ``max_new_tokens`` takes the place of ``max_length``, and
        ``min_new_tokens`` that of ``min_length``; a least length beyond the greatest means the
        greatest. Keys that change no text are ignored, as are those that transformers does not
        know itself.

        Raises:
            GenerationConfigError: (``ValueError``) Naming what it asks for that is not done here.
        """
        if not hasattr(config, "to_diff_dict"):
            raise GenerationConfigError(
                f"config must be a GenerationConfig of transformers, got {shown(config)}"
            )
        return cls(**fields_of_hf(config))

    @classmethod
    def from_model(cls, lm: AsyncLM) -> Self:
        """Make one of the model's own defaults, where it has any."""
        config = own_config(_MODEL("lm", lm))
        return cls() if config is None else cls.from_hf(config)


@final
class GenerationFields(TypedDict, total=False):
    """The fields of a ``GenerationConfig``, which says what they mean, as keyword arguments."""

    do_sample: bool | None
    temperature: float | None
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    n: int
    max_new_tokens: int | None
    max_length: int | None
    min_length: int
    min_new_tokens: int
    early_stopping: bool | None
    eos_token_id: int | Sequence[int] | None
    stop_words_ids: Sequence[Sequence[int]] | None
    stop: str | Sequence[str] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    repetition_penalty: float
    suppress_repetition_in_generation: bool
    no_repeat_ngram_size: int
    presence_penalty: float
    frequency_penalty: float
    logprobs: bool
    top_logprobs: int
    lora_name: str | None
    response_format: Mapping[str, Any] | type[Any] | None
    num_beams: int
    length_penalty: float
    beam_early_stopping: bool | Literal["never"]
    mm_info: MultiMediaInfo | None


DEFAULT_MAX_NEW_TOKENS: Final = 20
"""Tokens of a text whose length nobody has named, as of ``model.generate`` of transformers."""

_NO_BOUNDS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The bounds on draws that exclude no token."""

_LEFT_OUT = "left out with do_sample=False"
_ONE_TEXT = "1, or at most num_beams, without a temperature: texts would be equal"
_NO_SEARCH = "1 with a temperature or response_format"
_EARLY_STOPPING = "what transformers calls so, how a beam search ends, is beam_early_stopping"


def _early_stopping(name: str, value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise OptionError(
        f"{name} must be True or False, whether an end-of-sequence token ends a text, got "
        f"{shown(value)}: {_EARLY_STOPPING}"
    )


def _eos(name: str, value: Any) -> int | tuple[int, ...] | None:
    if value is None or getattr(value, "ndim", 1) == 0:
        return optional(_ID)(name, value)
    return _ID(name, value) if not hasattr(value, "__iter__") else _IDS(name, value)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    return _TEXTS(name, () if value is None else (value,) if isinstance(value, str) else value)


def _words(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    words = _WORDS(name, () if value is None else value)
    if not all(words):
        raise OptionError(f"{name} must be non-empty lists of token ids, got {shown(value)}")
    return words


def _response_format(name: str, value: Any) -> Mapping[str, Any]:
    if is_class_with_schema(value):
        return {"type": "json_schema", "json_schema": schema_of_class(value)}
    return instance(Mapping, "a mapping with a 'type', or a class that has a JSON schema")(
        name, value
    )


_MODEL = instance(AsyncLM, "an AsyncLM")
_ID = integer()
_IDS = sequence(_ID, "a token id, or several")
_TEXTS = sequence(text, "non-empty strings")
_WORDS = sequence(sequence(_ID, "a list"), "non-empty lists of token ids")

_CHECKS = {
    "do_sample": optional(switch),
    "temperature": optional(number(0, is_finite=False)),
    "top_k": integer(0),
    "top_p": number(0, 1, is_open=True),
    "min_p": number(0, 1),
    "seed": optional(integer(0)),
    "n": integer(1),
    "max_new_tokens": optional(integer(1)),
    "max_length": optional(integer(1)),
    "min_length": integer(0),
    "min_new_tokens": integer(0),
    "early_stopping": _early_stopping,
    "eos_token_id": _eos,
    "stop_words_ids": _words,
    "stop": _stop,
    "bad_words_ids": _words,
    "repetition_penalty": number(0, is_open=True),
    "suppress_repetition_in_generation": switch,
    "no_repeat_ngram_size": integer(0),
    "presence_penalty": number(),
    "frequency_penalty": number(),
    "logprobs": switch,
    "top_logprobs": integer(0),
    "lora_name": optional(text),
    "response_format": optional(_response_format),
    "num_beams": integer(1),
    "length_penalty": number(),
    "beam_early_stopping": one_of(True, False, "never"),
    "mm_info": optional(instance(MultiMediaInfo, "a MultiMediaInfo(images=[…])")),
}

C = TypeVar("C")


def check_fields(kind: type, names: Iterable[str], error: type[Exception]) -> None:
    """Raise an error, as ``replaced`` does, unless every name is a field of a dataclass."""
    known = [field.name for field in dataclasses.fields(kind)]
    check_names(names, known, f"field of {kind.__name__}", error)


def replaced(config: C, fields: Mapping[str, Any], error: type[Exception]) -> C:
    check_fields(type(config), fields, error)
    return dataclasses.replace(config, **fields)  # pyright: ignore[reportArgumentType]
