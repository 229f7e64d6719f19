"""Contexts: what checks the token ids that a model is asked, and makes a ``Context`` of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final, final

import numpy as np

from genlm_backend.checks import MAX_VOCAB, integer, listed, shown
from genlm_backend.errors import ContextError, ContextTypeError, OptionTypeError, PictureError
from genlm_backend.model.beginnings import TOKENS_PER_BLOCK, Beginnings
from genlm_backend.model.context import Context
from genlm_backend.tokenization import Token
from genlm_backend.vision.pictures import Pictures


@final
class Contexts:
    """The contexts of one model.

    Args:
        vocab_size: Number of ids that the model has.

    Attributes:
        vocab_size: As given.
        image_token_id: The id that stands for a part of a picture, which no list may hold; ``None``
            where there is none. It can be set.
        image_reader: Which library reads its pictures. It can be set.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.image_token_id: int | None = None
        self.image_reader = "transformers"
        self._beginnings = Beginnings()

    def of(self, token_ids: Any, name: str = "token_ids") -> Context:
        """Return token ids as a ``Context`` of this model, without a look at those of one.

        Accepts any iterable of Python or NumPy integers and one-dimensional integer arrays and
        tensors. What becomes of a list afterwards does not matter. ``name`` is what messages call
        them.

        Raises:
            ContextTypeError: If they are not integers (a ``bool`` is none), or not iterable.
            ContextError: If one is outside ``0 … vocab_size - 1``, or they are a ``Context`` of
                another model.
        """
        if isinstance(token_ids, Context):
            if token_ids.contexts is self:
                return token_ids
            self._check_owner(token_ids)
            if (pictures := token_ids.pictures) is not None:
                return self._with_pictures(token_ids, pictures)
        ids = _listed(token_ids, name)
        found = self._beginnings.find(ids)
        rest = ids[len(found) * TOKENS_PER_BLOCK :]  # a copy, which nobody changes
        if self.image_token_id is not None and self.image_token_id in rest:
            raise PictureError(
                f"{name} holds {self.image_token_id}, which stands for a part of a picture: "
                "lm.context(prompt, images=[…]) makes a context of it, and context + [token] more"
            )
        context = Context.of(self, self._packed(rest), found)
        self._beginnings.keep(len(found), rest, context.blocks[len(found) :])
        return context

    def _with_pictures(self, context: Context, pictures: Pictures) -> Context:
        """Return an unpickled context as one of this model."""
        is_known = pictures.image_token_id == self.image_token_id
        if not is_known or pictures.reader != self.image_reader:
            raise PictureError("the context begins with pictures, and this model sees none like it")
        rest = context.packed(pictures.num_tokens)
        self._packed(list(rest))
        return Context.of(self, context.packed().tobytes(), pictures=pictures)

    def check(
        self, token_ids: Any, max_length: int | None = None, name: str = "token_ids"
    ) -> Context:
        """Return token ids as a ``Context`` that can be asked.

        Raises:
            ContextTypeError: As ``of``.
            ContextError: As there, and if there are none, or more than ``max_length``.
        """
        is_own = isinstance(token_ids, Context) and token_ids.contexts is self
        context: Context = token_ids if is_own else self.of(token_ids, name)
        num_tokens = len(context)
        if not num_tokens:
            raise ContextError(f"{name} is empty: a context needs at least one token")
        if max_length is not None and num_tokens > max_length:
            raise ContextError(
                f"the context has {num_tokens} tokens, more than the model's maximum of "
                f"{max_length}"
            )
        return context

    def check_id(self, token_id: Any) -> int:
        """Return one token id as an ``int``.

        Raises:
            ContextTypeError: If it is no integer.
            ContextError: If it is outside the vocabulary.
        """
        if type(token_id) is not int:
            token_id = _to_int(token_id)
        if not 0 <= token_id < self.vocab_size:
            raise ContextError(
                f"token id {token_id} is outside the vocabulary: "
                f"the model has {self.vocab_size} ids, 0 to {self.vocab_size - 1}"
            )
        return token_id

    def packed(self, token_ids: Any, name: str = "token_ids") -> bytes:
        """Return token ids as 32-bit integers, checked as ``of`` does."""
        self._check_owner(token_ids)
        if isinstance(token_ids, Context) and token_ids.pictures is not None:
            raise PictureError(f"{name} begins with pictures, which nothing can come before")
        return self._packed([*_listed(token_ids, name)])

    def _packed(self, ids: list[Any]) -> bytes:
        are_few_ints = len(ids) <= _FEW and set(map(type, ids)) == {int}
        if are_few_ints and min(ids) >= 0 and max(ids) < self.vocab_size:
            return struct.pack(f"{len(ids)}i", *ids)  # NumPy would take longer to begin
        try:
            packed = struct.pack(f"{len(ids)}i", *ids)
        except Exception:  # whatever an index method raises: it is said of which id
            packed = struct.pack(f"{len(ids)}i", *map(self.check_id, ids))
        if not ids:
            return packed
        values = np.frombuffer(packed, np.uint32)  # where a negative one is very large
        if np.maximum.reduce(values) >= self.vocab_size:
            self.check_id(ids[int(np.argmax(values >= self.vocab_size))])
        if np.minimum.reduce(values) < 2:  # which is how a bool is packed
            for index in np.flatnonzero(values < 2).tolist():
                self.check_id(ids[index])
        return packed

    def _check_owner(self, token_ids: Any) -> None:
        if isinstance(token_ids, Context) and token_ids.contexts not in (self, _NOBODYS):
            raise ContextError(
                "this Context is of another model, whose ids mean other tokens: "
                "pass list(context) where they are meant all the same"
            )


_FEW: Final = 64
_NOBODYS: Final = Contexts(MAX_VOCAB)


def unpickled(packed: bytes, pictures: Pictures | None = None) -> Context:
    """Return packed ids as a ``Context`` of no model."""
    return Context.of(_NOBODYS, packed, pictures=pictures)


def of_no_model(token_ids: Any) -> Context:
    """Return token ids as a ``Context`` of no model; one that is a ``Context`` stays as it is."""
    return token_ids if isinstance(token_ids, Context) else _NOBODYS.of(token_ids)


def listed_contexts(name: str, value: Any) -> list[Any]:
    """Return an iterable of contexts as a list, without a look into them.

    Raises:
        OptionTypeError: (``TypeError``) If it is no list, or one context in place of a list.
    """
    contexts = listed(name, value)
    first = contexts[0] if contexts else None
    is_id = isinstance(first, (int, np.integer)) or getattr(first, "ndim", 1) == 0
    if is_id or isinstance(value, Context):
        raise OptionTypeError(
            f"{name} must be a list of contexts, got one context: put it into a list"
        )
    return contexts


def _listed(token_ids: Any, name: str) -> list[Any]:
    """Return token ids as a list: a list itself, and not a copy of it.

    Raises:
        ContextTypeError: If there is none of them to be had.
    """
    if hasattr(token_ids, "tolist") and hasattr(token_ids, "ndim"):
        if token_ids.ndim != 1:
            raise ContextTypeError(
                f"{name} must have one dimension, got an array of shape {tuple(token_ids.shape)}"
                f"{_way_out(token_ids, name)}"
            )
        try:
            token_ids = token_ids.tolist()
        except (RuntimeError, TypeError) as error:  # a tensor on "meta", or one of sparse layout
            raise ContextTypeError(f"{name} hold no integers: {shown(token_ids)}") from error
    elif isinstance(token_ids, Mapping):  # as tokenizers and chat templates return
        ids = token_ids.get("input_ids")
        hint = _way_out(ids, "its input_ids") or (
            ": pass its 'input_ids'" if ids is not None else ""
        )
        raise ContextTypeError(f"{name} must be integers, got a {type(token_ids).__name__}{hint}")
    elif isinstance(token_ids, (list, tuple)) and _num_rows(token_ids):
        hint = _way_out(token_ids, name)
        raise ContextTypeError(f"{name} must be integers, got {shown(token_ids)}{hint}")
    elif isinstance(token_ids, (set, frozenset)):
        raise ContextTypeError(f"{name} must be in order, got a {type(token_ids).__name__}")
    elif isinstance(token_ids, (str, bytes, bytearray)):
        raise ContextTypeError(
            f"{name} must be integers, got {type(token_ids).__name__}: encode the text with "
            "the model's tokenizer first"
        )
    try:
        return token_ids if type(token_ids) is list else list(token_ids)
    except TypeError:
        message = f"{name} must be a list of integers, got {shown(token_ids)}"
        if isinstance(token_ids, (int, np.integer)):
            message += "; put it into a list"
        raise ContextTypeError(message) from None


def _num_rows(ids: Any) -> int:
    """Return the number of rows of token ids in two dimensions, as tokenizers return; 0 of others.

    The texts of a batch are so, and a single one too where tensors are asked for.
    """
    if hasattr(ids, "ndim"):
        return ids.shape[0] if ids.ndim == 2 else 0
    is_list = isinstance(ids, (list, tuple)) and len(ids)
    return len(ids) if is_list and isinstance(ids[0], (list, tuple)) else 0


def _way_out(ids: Any, name: str) -> str:
    """Return what to pass of token ids in two dimensions, or nothing."""
    num_rows = _num_rows(ids)
    if num_rows == 1:
        return f": pass {name}[0], which is its one row"
    return f": pass one of its rows, such as {name}[0], without padding" if num_rows else ""


_token_id = integer()


def _to_int(token_id: Any) -> int:
    try:
        return _token_id("token_ids", token_id)
    except OptionTypeError:
        hint = "; pass its token_id" if isinstance(token_id, Token) else ""
        if isinstance(token_id, (list, tuple, Context)):
            hint = "; a context + several makes a longer one"
        raise ContextTypeError(f"token ids must be integers, got {shown(token_id)}{hint}") from None
