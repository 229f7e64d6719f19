"""Constraint: the next tokens that a schema, pattern or grammar allows.

llguidance (extra ``grammar``) computes the masks from the token bytes in the model's
``byte_vocab``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NoReturn, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.checks import Check, checked, instance, integer, sequence, shown, text
from genlm_backend.errors import (
    ConstraintError,
    ConstraintTypeError,
    ConstraintViolation,
    NotPicklableError,
    OptionError,
    OptionTypeError,
)
from genlm_backend.generation.grammar.grammar_library import (
    executor_of,
    fault_of_generated,
    fault_of_own,
    load_library,
    vocabulary_of,
)
from genlm_backend.generation.grammar.json_schema import check_schema, unwrapped
from genlm_backend.generation.grammar.schema_classes import (
    check_is_no_instance,
    is_class_with_schema,
)
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.queries.query import check_known_ids
from genlm_backend.readouts.draw import PackedMask, as_scores
from genlm_backend.readouts.sample_readout import log_mass, log_sum

_MOST_OF_A_ROW: Final = 0.1
"""Largest accepted log of the allowed tokens' total probability; bfloat16 rounding adds less."""

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Without ``no_forcing``, llguidance allows only one tokenisation of text that a grammar forces.

This line follows the caller's grammar, so that the grammar's lines keep their numbers.
"""


@final
class Constraint:
    """The grammar state of one text: the tokens so far, and the tokens that may follow.

    Make a constraint with a ``from_…`` method. A token is allowed if the text and the token's bytes
    together begin a text of the grammar, so every tokenisation is possible. A sampler that draws
    from the allowed tokens thus samples from the model restricted to the grammar, prefix by prefix.
    Give each particle of a program its own constraint; ``fork`` copies one.

    Draw tokens ``while not constraint.is_ended``. The token that ends a text has a probability, so
    draw and weigh it like any other, even if no other token may follow. A loop that skips it
    leaves that probability out of some weights, and so samples another distribution.

    The grammar decides whether one of ``eos_token_ids`` ends the text. If the grammar accepts the
    token (a line break, say, in a grammar of lines), it is part of the text. Otherwise it ends a
    complete text, and is not allowed in an incomplete one.

    Two threads must not use one constraint at once.

    Attributes:
        token_ids: The tokens passed to ``advance`` so far.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.token_ids: list[int] = []
        self._is_ended = False
        self._origin = object()  # shared by all copies

    # ---------------------------------------------------------------- construction

    @classmethod
    def from_json_schema(
        cls,
        lm: AsyncLM,
        schema: Mapping[str, Any] | bool | str | type[Any],
        *,
        whitespace: str = " ?",
        eos_token_ids: Collection[int] | None = None,
    ) -> Self:
        """Constrain to the JSON values that a schema describes.

        Args:
            lm: The model that generates the text.
            schema: A JSON schema, its JSON text, or a type that has one: a pydantic model, a
                dataclass, a typed dictionary or a ``pydantic.TypeAdapter``. The objects of a class
                have its fields and no others, unless the class allows extra keys.
            whitespace: A regular expression of the white space between the parts of a value;
                ``""`` for none.
            eos_token_ids: The tokens that end a text; by default ``lm.eos_token_ids``.

        Raises:
            ConstraintError: If ``schema`` is invalid, or has a keyword or value that no constraint
                can enforce; most messages name its place and an alternative. Annotations are
                allowed: ``title``, ``description``, ``default``, ``examples``, … and any keyword
                that begins with ``x-``.
        """
        _check_arguments(lm=lm, whitespace=whitespace)
        walk = check_schema(schema)
        fault_of = partial(walk.fault, whitespace)
        return cls._make(lm, walk.grammar(whitespace) + _OPTIONS, eos_token_ids, fault_of)

    @classmethod
    def from_json_object(cls, lm: AsyncLM, **options: Any) -> Self:
        """Constrain to any JSON object; ``options`` as for ``from_json_schema``."""
        return cls.from_json_schema(lm, {"type": "object"}, **options)

    @classmethod
    def from_regex(
        cls, lm: AsyncLM, pattern: str, *, eos_token_ids: Collection[int] | None = None
    ) -> Self:
        """Constrain to the texts that a regular expression matches in full.

        Args:
            lm: The model that generates the text.
            pattern: A pattern in the syntax of Rust's ``regex``: no look-around and no
                back-references.
            eos_token_ids: The tokens that end a text; by default ``lm.eos_token_ids``.

        Raises:
            ConstraintError: If ``pattern`` is not a valid expression.
        """
        _check_arguments(lm=lm, pattern=pattern)
        grammar = json.loads(load_library().LLMatcher.grammar_from_regex(pattern))
        return cls._make(lm, grammar["grammars"][0]["lark_grammar"] + _OPTIONS, eos_token_ids)

    @classmethod
    def from_choice(
        cls, lm: AsyncLM, choices: Iterable[str], *, eos_token_ids: Collection[int] | None = None
    ) -> Self:
        """Constrain to one of several texts; many thousands are supported.

        Raises:
            ConstraintError: If ``choices`` is empty, or an entry is empty or is not a text.
            ConstraintTypeError: (``TypeError``) If ``choices`` is a single text or is not iterable.
        """
        _check_arguments(lm=lm)
        if isinstance(choices, (str, bytes)) or not isinstance(choices, Iterable):
            raise ConstraintTypeError(f"choices must be a list of texts, got {choices!r}")
        texts: tuple[str, ...] = _check_arguments(choices=choices)["choices"]
        if not texts:
            raise ConstraintError("choices must have at least one text, got none")
        # One terminal instead of a rule: in a rule, each text would be an item in a row of the
        # Earley parser, and the number of items in a row is limited.
        grammar = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, texts))
        return cls._make(lm, grammar + _OPTIONS, eos_token_ids)

    @classmethod
    def from_grammar(
        cls, lm: AsyncLM, grammar: str, *, eos_token_ids: Collection[int] | None = None
    ) -> Self:
        """Constrain to the texts of a context-free grammar.

        Args:
            lm: The model that generates the text.
            grammar: A grammar in llguidance's Lark syntax, beginning at the rule ``start``.
            eos_token_ids: The tokens that end a text; by default ``lm.eos_token_ids``.

        Raises:
            ConstraintError: If ``grammar`` is not valid.
            MissingExtraError: (``ImportError``) If llguidance is not installed.
        """
        _check_arguments(lm=lm, grammar=grammar)
        options = "" if "%llguidance" in grammar else _OPTIONS
        fault_of = partial(fault_of_own, num_lines=grammar.count("\n") + 1)
        return cls._make(lm, grammar + options, eos_token_ids, fault_of)

    @classmethod
    def from_response_format(
        cls,
        lm: AsyncLM,
        response_format: Mapping[str, Any] | type[Any],
        *,
        eos_token_ids: Collection[int] | None = None,
    ) -> Self:
        """Constrain by a ``response_format`` in the style of OpenAI's API.

        Args:
            lm: The model that generates the text.
            response_format: A class that ``from_json_schema`` takes, or a mapping with a ``type``:
                ``"json_schema"``, ``"json_object"``, ``"regex"``, ``"choice"`` or ``"grammar"``.
                All but ``"json_object"`` need an entry named like the type, which holds the
                argument of the ``from_…`` method. A JSON schema may have OpenAI's wrapper,
                ``{"name": …, "strict": …, "schema": {…}}``; ``strict`` changes nothing.
            eos_token_ids: The tokens that end a text; by default ``lm.eos_token_ids``.

        Raises:
            ConstraintError: If ``response_format`` is none of these, or holds an invalid argument.
        """
        makers = {
            "json_schema": cls.from_json_schema,
            "regex": cls.from_regex,
            "choice": cls.from_choice,
            "grammar": cls.from_grammar,
        }
        asked: Any = response_format
        if is_class_with_schema(asked):
            return cls.from_json_schema(lm, asked, eos_token_ids=eos_token_ids)
        check_is_no_instance(asked)
        _check_arguments(lm=lm, response_format=asked)
        named = asked.get("type")
        kind = named if isinstance(named, str) else ""
        if kind == "json_object" and set(asked) == {"type"}:
            return cls.from_json_object(lm, eos_token_ids=eos_token_ids)
        if kind not in makers or set(asked) != {"type", kind}:
            known = ", ".join(repr(name) for name in ["json_object", *makers])
            raise ConstraintError(
                f"response_format must have a 'type' (one of {known}) and, unless this is "
                f"'json_object', one other entry, named as the type; got {shown(dict(asked))}"
            )
        given = asked[kind]
        wanted = unwrapped(given) if kind == "json_schema" else given
        return makers[kind](lm, wanted, eos_token_ids=eos_token_ids)

    @classmethod
    def _make(
        cls,
        lm: AsyncLM,
        grammar: str,
        eos_token_ids: Collection[int] | None,
        fault_of: Callable[[str], str] = fault_of_generated,
    ) -> Self:
        library = load_library()
        eos = _eos_of(lm, eos_token_ids)
        matcher = library.LLMatcher(
            vocabulary_of(lm), library.LLMatcher.grammar_from_lark(grammar), log_level=0
        )
        if matcher.is_error():
            raise ConstraintError(f"invalid constraint: {fault_of(matcher.get_error())}")
        return cls(matcher, len(lm.byte_vocab), eos)

    # ---------------------------------------------------------------- use

    def mask(self, *, may_end: bool = True) -> torch.Tensor:
        """Return a mask of the tokens that may come next: a new tensor, bool ``[vocab]``.

        If the text is complete, the mask also allows the tokens that end it. If the text has
        ended, the mask allows no token.

        Args:
            may_end: ``False`` excludes the tokens that would end the text, say to enforce a minimum
                length.
        """
        if self._is_ended:
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return torch.from_numpy(self._unpacked(bits, may_end).view(np.bool_))

    @staticmethod
    def masks(constraints: Iterable[Constraint], *, may_end: bool = True) -> list[PackedMask]:
        """Return the mask of each constraint, in order; llguidance's threads compute them at once.

        A mask has one bit per token instead of a bool; ``draw_next_token`` accepts it.

        Args:
            constraints: The constraints, of any models and grammars.
            may_end: See ``mask``.

        Raises:
            OptionTypeError: (``TypeError``) If an item is not a ``Constraint``.
            ConstraintError: If ``mask`` of one of the constraints would raise this error.
        """
        all_of = list(_check_many("constraints", constraints))
        for i, each in enumerate(all_of):
            _check_constraint(f"constraints[{i}]", each)
        distinct = {id(each): each for each in all_of}
        found = dict[int, PackedMask]()
        for vocab_size in {each._vocab_size for each in distinct.values()}:
            own = [each for each in distinct.values() if each._vocab_size == vocab_size]
            # llguidance's vocabulary has one more token than the model's: an EOS of its own.
            table = np.zeros((len(own), vocab_size // 32 + 1), np.int32)
            going_on = [(each._matcher, i) for i, each in enumerate(own) if not each._is_ended]
            if going_on:
                executor = executor_of(os.getpid())
                executor.unsafe_compute_mask_ptr(
                    going_on, table.ctypes.data, table.shape[1] * 4, len(own)
                )
            for each, bits in zip(own, table.view(np.uint8), strict=True):
                each._check()
                packed = np.packbits(each._unpacked(bits, may_end))
                found[id(each)] = PackedMask(packed.tobytes(), vocab_size)
        return [found[id(each)] for each in all_of]

    def _unpacked(self, bits: NDArray[np.uint8], may_end: bool) -> NDArray[np.uint8]:
        """Unpack llguidance's mask to a uint8 per token; allow EOS tokens if the text may end."""
        bools = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        if may_end and self.can_end:
            bools[[*self._eos_token_ids]] = 1
        return bools

    def restrict(
        self, row: torch.Tensor, mask: torch.Tensor | PackedMask | None = None
    ) -> tuple[torch.Tensor, float]:
        """Return the row renormalised over the allowed tokens, and their total log-probability.

        Args:
            row: Log-probabilities of all tokens, float ``[vocab]``, as a model returns them; not
                modified.
            mask: The next token's mask, from ``mask`` or ``masks``, if already computed, say during
                the forward pass with ``asyncio.to_thread(constraint.mask)``.

        Returns:
            The renormalised row, in which excluded tokens are ``-inf``; and the logarithm of the
            allowed tokens' total probability, at most 0: the log-weight of a particle's step. If no
            allowed token is possible, this logarithm and the whole row are ``-inf``.

        Raises:
            ConstraintViolation: (``ValueError``) If the text has ended.
            OptionTypeError: (``TypeError``) If ``row`` or ``mask`` is of another type.
            OptionError: (``ValueError``) If a shape or dtype is wrong, or the probabilities of the
                allowed tokens sum to more than exp(0.1), as with logits.
        """
        size = self._vocab_size
        wanted = f"a tensor of the log-probabilities of all tokens, float [{size}]"
        _check_tensor("row", row, wanted, torch.is_floating_point, size)
        mask = self.mask() if mask is None else mask
        mask = mask.unpacked() if isinstance(mask, PackedMask) else mask
        wanted = f"a tensor of the allowed tokens, bool [{size}]"
        _check_tensor("mask", mask, wanted, lambda tensor: tensor.dtype is torch.bool, size)
        if self._is_ended:
            raise ConstraintViolation("the text has ended: no token can follow")
        allowed = row.masked_fill(~mask.to(row.device), -torch.inf)
        total = log_sum(as_scores(allowed))
        if total > _MOST_OF_A_ROW:
            raise OptionError(
                f"row must be log-probabilities, but the allowed tokens have a probability of "
                f"exp({total:.3g}), more than 1: for logits, pass logits.log_softmax(-1)"
            )
        normalised = allowed if total == -math.inf else allowed - total
        return normalised, log_mass(total, as_scores(row))

    def advance(self, token_id: int) -> None:
        """Append one token to the text.

        Raises:
            ConstraintViolation: (``ValueError``) If the token may not come next. The constraint
                stays unchanged.
            OptionTypeError: (``TypeError``) If ``token_id`` is not an integer.
        """
        token_id = _check_token_id("token_id", token_id)
        is_known = 0 <= token_id < self._vocab_size and not self._is_ended
        if is_known and self._matcher.validate_tokens([token_id]) == 1:
            self._matcher.consume_token(token_id)
            self._check()
        elif self._is_ended:
            raise ConstraintViolation(f"the text has ended: token {token_id} cannot follow")
        elif token_id not in self._eos_token_ids:
            raise ConstraintViolation(f"token {token_id} is not allowed here")
        elif not self.can_end:
            raise ConstraintViolation(
                f"the text cannot end here: token {token_id} would end it incomplete"
            )
        else:
            self._is_ended = True
        self.token_ids.append(token_id)

    def fork(self) -> Self:
        """Return an independent copy; ``copy.copy`` and ``copy.deepcopy`` do the same."""
        copy = type(self)(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)
        copy.token_ids, copy._origin = list(self.token_ids), self._origin
        copy._is_ended = self._is_ended
        return copy

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise NotPicklableError(
            "a Constraint cannot be pickled: copy it with fork(), or in another process build it "
            "again and advance it by its token_ids"
        )

    @property
    def state_key(self) -> Hashable:
        """A key that is equal for copies of one constraint that have the same ``token_ids``."""
        return self._origin, tuple(self.token_ids)

    @property
    def can_end(self) -> bool:
        """Whether the text is complete and has not ended, so that a token may end it."""
        return not self._is_ended and bool(self._matcher.is_accepting())

    @property
    def is_ended(self) -> bool:
        """Whether ``advance`` has taken a token that ends the text."""
        return self._is_ended

    @property
    def must_end(self) -> bool:
        """Whether the text has not ended, and only a token that ends it may follow.

        A loop that needs no weights may stop here; one that weighs texts runs until ``is_ended``.
        """
        return not self._is_ended and bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error()
            if error.startswith("NoExtensionBias"):
                where = f"after {len(self.token_ids)} tokens" if self.token_ids else "at the start"
                raise ConstraintError(
                    f"no token is possible {where}: no continuation satisfies the constraint, or "
                    "no token of the vocabulary begins one"
                )
            raise ConstraintError(f"the constraint failed: {error}")


_check_constraint = instance(Constraint, "a Constraint")
_check_many = instance(Iterable, "a list of Constraints")
_check_token_id: Check[int] = integer()


def _check_arguments(**arguments: Any) -> dict[str, Any]:
    return checked(_CHECKS, arguments, ConstraintError)


def _eos_of(lm: AsyncLM, given: Collection[int] | None) -> frozenset[int]:
    ends: Any = lm.eos_token_ids if given is None else given
    listed = [ends] if isinstance(ends, int) else ends
    ids = frozenset(_check_arguments(eos_token_ids=listed)["eos_token_ids"])
    if not ids:
        raise ConstraintError("no end-of-sequence token is known: pass some as eos_token_ids")
    check_known_ids("eos_token_ids", ids, len(lm.byte_vocab), ConstraintError)
    return ids


def _check_tensor(
    name: str, value: Any, wanted: str, is_kind: Callable[[torch.Tensor], bool], size: int
) -> None:
    if not isinstance(value, torch.Tensor):
        raise OptionTypeError(f"{name} must be {wanted}, got {shown(value)}")
    if not is_kind(value) or value.shape != (size,):
        got = f"{value.dtype} of shape {list(value.shape)}"
        raise OptionError(f"{name} must be {wanted}, got {got}")


def _writable(check: Check[str]) -> Check[str]:
    """Return a check of a string that also refuses lone surrogates, which UTF-8 cannot encode."""

    def check_text(name: str, value: Any) -> str:
        found = check(name, value)
        try:
            found.encode()
        except UnicodeEncodeError as error:
            letter = found[error.start]
            raise OptionError(f"{name} has {letter!r}, which UTF-8 cannot encode") from error
        return found

    return check_text


_CHECKS = {
    "lm": instance(AsyncLM, "an AsyncLM"),
    "whitespace": _writable(instance(str, "a pattern")),
    "pattern": _writable(instance(str, "a regular expression")),
    "grammar": _writable(text),
    "choices": sequence(_writable(text), "non-empty texts that UTF-8 can encode"),
    "response_format": instance(Mapping, "a mapping with a 'type'"),
    "eos_token_ids": sequence(_check_token_id, "token ids"),
}
