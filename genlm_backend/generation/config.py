"""GenerationConfig: how a text is generated, checked when it is made."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Literal, Self

from genlm_backend.errors import GenerationConfigError
from genlm_backend.generation.fields import replaced
from genlm_backend.generation.hf_config import fields_of_hf
from genlm_backend.llm.base import AsyncLM


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How a text is generated. The defaults take the most probable token, to the model's limit.

    Every field is checked at construction; ``replace`` makes another one.

    Attributes:
        do_sample: Whether to draw from the distribution, or to take its largest.
        temperature: Divides the logits, above 0; infinity draws from all possible tokens alike.
            Of use with ``do_sample``, as are the next three.
        top_k: Only so many of the most probable tokens; 0 for all.
        top_p: Only the most probable tokens that together have this probability, above 0 to 1.
        min_p: Only tokens that have this share of the most probable one's probability, 0 to 1.
        seed: Of the random stream; equal seeds give equal texts. ``None`` draws one afresh.
        n: Texts to generate of one prompt, each with a stream of its own.
        max_new_tokens: Tokens to generate, at most; ``None`` for as many as the model takes.
        max_length: Tokens of prompt and text together, at most.
        min_length: Tokens of prompt and text together before the text may end.
        min_new_tokens: Tokens of the text before it may end.
        early_stopping: Whether to stop at an end-of-sequence token at all.
        eos_token_id: One or several tokens that end a text; ``None`` for the tokenizer's own.
        stop_words_ids: Lists of token ids; a text that ends with one of them is complete.
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
        response_format: What the text must look like; see ``Constraint.from_response_format``.
        num_beams: Texts to search among for the most probable ones; 1 for no beam search. ``n``
            of them are returned, the best first.
        length_penalty: A beam's log-probability is divided by its length to this power, for
            ranking: above 0 favours long texts.
        beam_early_stopping: When a beam search ends that has found ``num_beams`` texts: ``True``
            at once, ``False`` when no beam is better by its present length, ``"never"`` when none
            can become so; as ``early_stopping`` of transformers.
        mm_info (None): Refused: a text model sees no images and hears no sounds.

    Raises:
        GenerationConfigError: (``ValueError``) Naming the field.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_new_tokens: int | None = None
    max_length: int | None = None
    min_length: int = 0
    min_new_tokens: int = 0
    early_stopping: bool = True
    eos_token_id: int | Sequence[int] | None = None
    stop_words_ids: Sequence[Sequence[int]] = ()
    stop: str | Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    repetition_penalty: float = 1.0
    suppress_repetition_in_generation: bool = False
    no_repeat_ngram_size: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: bool = False
    top_logprobs: int = 0
    lora_name: str | None = None
    response_format: Mapping[str, Any] | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    beam_early_stopping: bool | Literal["never"] = False
    mm_info: InitVar[object] = None

    def __post_init__(self, mm_info: object) -> None:
        if mm_info is not None:
            raise GenerationConfigError("mm_info: a text model takes no multimodal input")
        self._tidy("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in _LISTS_OF_IDS:
            self._tidy(name, tuple(tuple(word) for word in getattr(self, name)))
        if self.eos_token_id is not None and not isinstance(self.eos_token_id, int):
            self._tidy("eos_token_id", tuple(self.eos_token_id))
        for name in _SWITCHES:
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            if value is None:
                is_right = name in ("max_new_tokens", "max_length", "seed")
            else:
                is_integer = isinstance(value, int) and not isinstance(value, bool)
                is_right = is_integer and value >= least
            self._check(name, is_right, f"{least} or more")
        for name, (low, high, is_open) in _NUMBERS.items():
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_inside = is_number and low <= value <= high
            self._check(
                name, is_inside and not (is_open and value == low), _range(low, high, is_open)
            )
        self._check("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings")
        for name in _LISTS_OF_IDS:
            words = getattr(self, name)
            are_ids = all(word and all(isinstance(i, int) for i in word) for word in words)
            self._check(name, are_ids, "non-empty lists of token ids")
        eos = self.eos_token_id
        eos_ids = () if eos is None else eos if isinstance(eos, tuple) else (eos,)
        self._check("eos_token_id", all(isinstance(i, int) for i in eos_ids), "token ids")
        is_format = self.response_format is None or isinstance(self.response_format, Mapping)
        self._check("response_format", is_format, "None or a mapping with a 'type'")
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        if not self.do_sample:
            defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
            for name, default in defaults.items():
                is_off = getattr(self, name) == default
                self._check(name, is_off, f"{default} unless do_sample=True")
            is_one = self.n == 1 or self.n <= self.num_beams
            self._check(
                "n", is_one, "1, or at most num_beams, unless do_sample=True: texts would be equal"
            )
        if self.max_length is not None:
            self._check("min_length", self.min_length <= self.max_length, "at most max_length")
        if self.max_new_tokens is not None:
            is_less = self.min_new_tokens <= self.max_new_tokens
            self._check("min_new_tokens", is_less, "at most max_new_tokens")
        is_simple = not self.do_sample and self.response_format is None
        self._check(
            "num_beams", self.num_beams == 1 or is_simple, "1 with do_sample or response_format"
        )
        self._check(
            "beam_early_stopping",
            self.beam_early_stopping in (True, False, "never"),
            "True, False or 'never'",
        )
        if self.num_beams == 1:
            self._check("length_penalty", self.length_penalty == 1, "1.0 unless num_beams > 1")
            self._check(
                "beam_early_stopping", not self.beam_early_stopping, "False unless num_beams > 1"
            )
        self._check(
            "top_logprobs", self.logprobs or not self.top_logprobs, "0 unless logprobs=True"
        )

    def _tidy(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self, name: str, is_right: bool, wanted: str) -> None:
        if not is_right:
            raise GenerationConfigError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    def replace(self, **fields: Any) -> Self:
        """Return another configuration, with these fields changed.

        Raises:
            GenerationConfigError: (``ValueError``) As at construction, and for a name that is no
                field.
        """
        return replaced(self, fields, GenerationConfigError, ["mm_info"])

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
        return cls(**fields_of_hf(config))

    @classmethod
    def from_model(cls, lm: AsyncLM) -> Self:
        """Make one of the model's own defaults, where it has any."""
        model = getattr(lm, "model", None)
        config = getattr(model, "generation_config", None)
        return cls() if config is None else cls.from_hf(config)


_SWITCHES = ("do_sample", "early_stopping", "suppress_repetition_in_generation", "logprobs")

_LISTS_OF_IDS = ("stop_words_ids", "bad_words_ids")

_INTEGERS = {
    "top_k": 0,
    "seed": 0,
    "n": 1,
    "max_new_tokens": 1,
    "max_length": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "top_logprobs": 0,
    "num_beams": 1,
}
"""Fields that are integers → the least they may be."""

_LARGEST = sys.float_info.max

_NUMBERS = {
    "temperature": (0.0, math.inf, True),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, _LARGEST, True),
    "presence_penalty": (-_LARGEST, _LARGEST, False),
    "frequency_penalty": (-_LARGEST, _LARGEST, False),
    "length_penalty": (-_LARGEST, _LARGEST, False),
}
"""Fields that are numbers → bounds, and whether the lower one is excluded."""


def _range(low: float, high: float, is_open: bool) -> str:
    if low == -_LARGEST:
        return "a number"
    text = f"above {low:g}" if is_open else f"{low:g} or more"
    return text if high >= _LARGEST else f"{text}, up to {high:g}"
