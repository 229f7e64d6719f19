"""GenerationConfig: the options of generation, checked at construction."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self, TypedDict, final

from genlm_backend.checks import (
    Check,
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


def checked_field(default: Any, check: Check[Any]) -> Any:
    return dataclasses.field(default=default, metadata={"check": check})


class CheckedConfig(abc.ABC):
    """Base of configurations: frozen dataclasses that check their fields at construction."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    _error: ClassVar[type[Exception]]

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        """Refuse unknown names, and suggest near ones, since ``__init__`` would suggest none."""
        cls._check_names(fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        fields = [own for own in dataclasses.fields(self) if "check" in own.metadata]
        checks = {own.name: own.metadata["check"] for own in fields}
        values = {name: getattr(self, name) for name in checks}
        for name, value in checked(checks, values, self._error).items():
            object.__setattr__(self, name, value)

    @classmethod
    def _check_names(cls, names: Iterable[str]) -> None:
        known = [field.name for field in dataclasses.fields(cls)]
        check_names(names, known, f"field of {cls.__name__}", cls._error)

    def replace(self, **fields: Any) -> Self:
        """Return a copy with these fields changed.

        Raises:
            ValueError: If a value is invalid, or the class has no field of a given name.
        """
        self._check_names(fields)
        return dataclasses.replace(self, **fields)


@final
@dataclass(frozen=True, slots=True, eq=False)
class MultiMediaInfo:
    """The pictures of a prompt, for the field ``mm_info`` of a ``GenerationConfig``.

    Attributes:
        images: One image per image token in the prompt: PIL images, uint8 arrays
            ``[height, width, 3]``, paths or the bytes of files.

    Raises:
        GenerationConfigError: (``ValueError``) If ``images`` is not iterable, or is a string, bytes
            or a mapping.
    """

    images: Sequence[Any]

    def __post_init__(self) -> None:
        given = checked({"images": listed}, {"images": self.images}, GenerationConfigError)
        object.__setattr__(self, "images", tuple(given["images"]))


DEFAULT_MAX_NEW_TOKENS: Final = 20
"""Default ``max_new_tokens`` of ``generate`` and ``stream``, as of ``model.generate``."""

_BOUNDS = ("top_k", "top_p", "min_p")
"""Sampling filters; giving one turns sampling on, unless the temperature is 0."""

_LEFT_OUT = "left out with do_sample=False"
_ONE_TEXT = (
    "1, or at most num_beams, unless sampling is on, as with a temperature (else texts would be "
    "equal)"
)
_BEAMS = "unless num_beams > 1"
_MAX_BEAMS = 1 << 16
_NO_SEARCH = "1 with sampling or a response_format"
_EARLY_STOPPING = "the early_stopping of transformers, for beam search, is beam_early_stopping here"


def _early_stopping(name: str, value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise OptionError(
        f"{name} must be True or False (whether an end-of-sequence token ends a text), got "
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
_IDS = sequence(_ID, "a token id or a list of them")
_TEXTS = sequence(text, "non-empty strings")
_WORDS = sequence(sequence(_ID, "a list"), "non-empty lists of token ids")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(CheckedConfig):
    """The options of generation. The default is greedy decoding.

    Every field is checked at construction; ``replace`` returns a changed copy.

    Attributes:
        do_sample: Whether to sample; otherwise decoding is greedy or a beam search. ``None``
            samples if ``temperature``, ``top_k``, ``top_p`` or ``min_p`` is given, and
            ``temperature`` is not 0.
        temperature: Divides the logits; ``None`` for 1. 0 is greedy, and infinity samples
            uniformly from the possible tokens.
        top_k: Sample from the ``top_k`` most probable tokens; ``None``, 0 or a number above the
            vocabulary size for all.
        top_p: Sample from the smallest set of most probable tokens whose total probability reaches
            this, above 0 and up to 1.
        min_p: Sample from tokens with at least this fraction of the largest probability, 0 to 1.
        seed: Seed of the texts' random streams; ``None`` for a random seed.
        n: Texts to generate per prompt, each with its own random stream.
        max_new_tokens: Tokens to generate, at most. If ``max_length`` is ``None`` as well,
            ``generate`` and ``stream`` default to 20. With a ``response_format``, or in an engine,
            the model's limit is the default.
        max_length: Tokens of prompt and text together, at most.
        min_length: Tokens of prompt and text together before an EOS token may end the text.
        min_new_tokens: Tokens of the text before an EOS token may end it.
        early_stopping: ``False`` ignores end-of-sequence tokens; with ``True`` and ``None`` they
            end a text. Transformers uses this name for ``beam_early_stopping``, so only ``None`` is
            accepted with ``num_beams > 1``. ``eos_token_id=()`` has the effect of ``False``.
        eos_token_id: One or several tokens that end a text; ``None`` for the model's own,
            ``lm.eos_token_ids``.
        stop_words_ids: Lists of token ids; a text is complete once its last tokens are one of
            these lists. ``None`` means none, as for ``stop`` and ``bad_words_ids``.
        stop: Strings that end a text; the text is cut off before the first that occurs in it.
        bad_words_ids: Lists of token ids; no generated text contains one of these sequences. A
            list of one EOS token has no effect.
        repetition_penalty: Above 0; 1 for none. Divides the positive logits of tokens that have
            occurred, and multiplies their negative logits (Keskar et al., 2019). In beam search,
            it multiplies their log-probabilities.
        suppress_repetition_in_generation: Whether ``repetition_penalty`` counts only occurrences in
            the generated text, and not those in the prompt.
        no_repeat_ngram_size: Size of the n-grams that may not occur twice; 0 for no limit.
        presence_penalty: Subtracted from the logits of tokens that have been generated.
        frequency_penalty: Subtracted from a token's logit for each time it has been generated.
        logprobs: Whether to return the log-probabilities of the tokens.
        top_logprobs: Number of most probable tokens to return with each token; above 0, it needs
            ``logprobs=True``.
        lora_name: Name of the LoRA adapter with which the model is evaluated; ``None`` for none.
        response_format: The format of the text: a mapping, or a class, whose JSON schema is
            derived at construction; see ``Constraint.from_response_format``.
        num_beams: Number of beams; 1 for no beam search. The best ``n`` texts are returned, the
            best first.
        length_penalty: Finished beams are ranked by log-probability / length **
            ``length_penalty``; a value above 0 favours long texts.
        beam_early_stopping: When to end a beam search that has ``num_beams`` finished texts:
            ``True`` at once; ``False`` when no beam, at its current length, beats the worst of
            them; ``"never"`` when none could at any length. Transformers' name: ``early_stopping``.
        mm_info: The pictures in the prompt.

    Raises:
        GenerationConfigError: (``ValueError``) If a value is invalid; the message names the field.
    """

    do_sample: bool | None = checked_field(None, optional(switch))
    temperature: float | None = checked_field(None, optional(number(0, is_finite=False)))
    top_k: int | None = checked_field(None, optional(integer(0)))
    top_p: float | None = checked_field(None, optional(number(0, 1, is_open=True)))
    min_p: float | None = checked_field(None, optional(number(0, 1)))
    seed: int | None = checked_field(None, optional(integer(0)))
    n: int = checked_field(1, integer(1))
    max_new_tokens: int | None = checked_field(None, optional(integer(1)))
    max_length: int | None = checked_field(None, optional(integer(1)))
    min_length: int = checked_field(0, integer(0))
    min_new_tokens: int = checked_field(0, integer(0))
    early_stopping: bool | None = checked_field(None, _early_stopping)
    eos_token_id: int | Sequence[int] | None = checked_field(None, _eos)
    stop_words_ids: Sequence[Sequence[int]] | None = checked_field((), _words)
    stop: str | Sequence[str] | None = checked_field((), _stop)
    bad_words_ids: Sequence[Sequence[int]] | None = checked_field((), _words)
    repetition_penalty: float = checked_field(1.0, number(0, is_open=True))
    suppress_repetition_in_generation: bool = checked_field(False, switch)
    no_repeat_ngram_size: int = checked_field(0, integer(0))
    presence_penalty: float = checked_field(0.0, number())
    frequency_penalty: float = checked_field(0.0, number())
    logprobs: bool = checked_field(False, switch)
    top_logprobs: int = checked_field(0, integer(0))
    lora_name: str | None = checked_field(None, optional(text))
    response_format: Mapping[str, Any] | type[Any] | None = checked_field(
        None, optional(_response_format)
    )
    num_beams: int = checked_field(1, integer(1, _MAX_BEAMS))
    length_penalty: float = checked_field(1.0, number())
    beam_early_stopping: bool | Literal["never"] = checked_field(
        False, one_of(True, False, "never")
    )
    mm_info: MultiMediaInfo | None = checked_field(
        None, optional(instance(MultiMediaInfo, "a MultiMediaInfo(images=[…])"))
    )

    _error = GenerationConfigError

    def __post_init__(self) -> None:
        super().__post_init__()
        is_search, is_drawn = self.num_beams > 1, self.is_sampled
        may_draw, can_search = self.do_sample is not False, self.response_format is None
        longest, most = self.max_length or math.inf, self.max_new_tokens or math.inf
        rules = [
            ("temperature", may_draw or self.temperature in (None, 0, 1), _LEFT_OUT),
            *((name, may_draw or getattr(self, name) is None, _LEFT_OUT) for name in _BOUNDS),
            ("n", is_drawn or self.n <= self.num_beams, _ONE_TEXT),
            ("min_length", self.min_length <= longest, "at most max_length"),
            ("min_new_tokens", self.min_new_tokens <= most, "at most max_new_tokens"),
            ("num_beams", not is_search or (can_search and not is_drawn), _NO_SEARCH),
            ("length_penalty", is_search or self.length_penalty == 1, f"1.0 {_BEAMS}"),
            ("beam_early_stopping", is_search or not self.beam_early_stopping, f"False {_BEAMS}"),
            ("top_logprobs", self.logprobs or not self.top_logprobs, "0 unless logprobs=True"),
        ]
        for name, is_right, wanted in rules:
            if not is_right:
                raise GenerationConfigError(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        if is_search and self.early_stopping is not None:
            raise GenerationConfigError(
                f"early_stopping must be left out with num_beams > 1, got {self.early_stopping}: "
                f"{_EARLY_STOPPING}, and with eos_token_id=() no token ends a text"
            )

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are sampled; otherwise decoding is greedy or a beam search."""
        is_meant = any(getattr(self, name) is not None for name in ("temperature", *_BOUNDS))
        return self.temperature != 0 and (is_meant if self.do_sample is None else self.do_sample)

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        """Convert a ``transformers.GenerationConfig`` to one of this class with the same effect.

        ``max_new_tokens`` overrides ``max_length``, and ``min_new_tokens`` overrides
        ``min_length``. A minimum above the maximum is set to the maximum. Keys that change no text
        are ignored, as are keys that transformers itself does not define.

        Raises:
            GenerationConfigError: (``ValueError``) If a key is not supported or has a wrong value.
        """
        if not hasattr(config, "to_diff_dict"):
            raise GenerationConfigError(
                f"config must be a transformers.GenerationConfig, got {shown(config)}"
            )
        return cls(**fields_of_hf(config))

    @classmethod
    def from_model(cls, lm: AsyncLM) -> Self:
        """Return the model's own generation defaults, or this library's if the model has none."""
        config = own_config(_MODEL("lm", lm))
        return cls() if config is None else cls.from_hf(config)


@final
class GenerationFields(TypedDict, total=False):
    """The fields of ``GenerationConfig`` as keyword arguments; see that class for each."""

    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
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
