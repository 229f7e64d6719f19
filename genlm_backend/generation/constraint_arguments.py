"""Checks of what a Constraint takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from genlm_backend.checks import Check, checked, instance, integer, sequence, shown, text
from genlm_backend.errors import ConstraintError, OptionError, OptionTypeError
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.model.query import check_known_ids

check_token_id: Check[int] = integer()
"""Check of a token id."""


def check_arguments(**arguments: Any) -> dict[str, Any]:
    """Return arguments of the methods that make a constraint as they are meant.

    Raises:
        ConstraintError: (``ValueError``) If one of them is wrong.
    """
    return checked(_CHECKS, arguments, ConstraintError)


def eos_of(lm: AsyncLM, given: Collection[int] | None) -> frozenset[int]:
    """Return the tokens that end a text; by default those of the model.

    Raises:
        ConstraintError: (``ValueError``) If there is none, or one is outside the vocabulary.
    """
    ends: Any = lm.eos_token_ids if given is None else given
    listed = [ends] if isinstance(ends, int) else ends
    ids = frozenset(check_arguments(eos_token_ids=listed)["eos_token_ids"])
    if not ids:
        raise ConstraintError("the model names no token that ends a text: pass eos_token_ids")
    check_known_ids("eos_token_ids", ids, len(lm.byte_vocab), ConstraintError)
    return ids


def check_row(row: Any, vocab_size: int) -> None:
    """Refuse what is no row of log-probabilities.

    Raises:
        OptionTypeError: (``TypeError``) If it is no tensor.
        OptionError: (``ValueError``) If it is of another shape or dtype.
    """
    wanted = f"a tensor of the log-probabilities of all tokens, float [{vocab_size}]"
    _check_tensor("row", row, wanted, torch.is_floating_point, vocab_size)


def check_mask(mask: Any, vocab_size: int) -> None:
    """Refuse what is no mask of the tokens that are allowed.

    Raises:
        OptionTypeError: (``TypeError``) If it is no tensor.
        OptionError: (``ValueError``) If it is of another shape or dtype.
    """
    wanted = f"a tensor of which tokens are allowed, bool [{vocab_size}]"
    _check_tensor("mask", mask, wanted, lambda tensor: tensor.dtype is torch.bool, vocab_size)


def _check_tensor(
    name: str, value: Any, wanted: str, is_kind: Callable[[torch.Tensor], bool], size: int
) -> None:
    if not isinstance(value, torch.Tensor):
        raise OptionTypeError(f"{name} must be {wanted}, got {shown(value)}")
    if not is_kind(value) or value.shape != (size,):
        got = f"{value.dtype} of shape {list(value.shape)}"
        raise OptionError(f"{name} must be {wanted}, got {got}")


def _writable(check: Check[str]) -> Check[str]:
    """Return a check of a text that refuses lone surrogates, which UTF-8 cannot write."""

    def check_text(name: str, value: Any) -> str:
        found = check(name, value)
        try:
            found.encode()
        except UnicodeEncodeError as error:
            letter = found[error.start]
            raise OptionError(f"{name} has {letter!r}, which UTF-8 cannot write") from error
        return found

    return check_text


_CHECKS = {
    "lm": instance(AsyncLM, "an AsyncLM"),
    "whitespace": _writable(instance(str, "a pattern")),
    "pattern": _writable(instance(str, "a regular expression")),
    "grammar": _writable(text),
    "choices": sequence(_writable(text), "texts of at least one letter that UTF-8 can write"),
    "response_format": instance(Mapping, "a mapping with a 'type'"),
    "eos_token_ids": sequence(check_token_id, "token ids"),
}
