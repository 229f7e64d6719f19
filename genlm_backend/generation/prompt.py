"""Prompt: a prompt with its length limit and constraint, checked before the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard, cast, final

from genlm_backend.checks import Check, sequence, shown
from genlm_backend.errors import (
    ContextError,
    ContextTypeError,
    GenerationConfigError,
    OptionTypeError,
    PictureError,
)
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.constraint import Constraint
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.queries.context import Context
from genlm_backend.queries.query import TokenIds, check_known_ids
from genlm_backend.readouts.sampling import listed_ids
from genlm_backend.tokenization.bos import encode_text

Chat = Sequence[Mapping[str, Any]]
"""A chat's messages, each with its ``role`` and ``content``."""


@final
@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, checked against a model and a configuration."""

    context: Context
    token_ids: tuple[int, ...]
    eos_token_ids: frozenset[int]
    max_length: int
    constraint: Constraint | None

    @classmethod
    def from_prompt(
        cls,
        lm: AsyncLM,
        prompt: str | Chat | TokenIds,
        config: GenerationConfig,
        max_length: int | None = None,
    ) -> Prompt:
        """Encode and check a prompt; ``max_length`` is another bound like ``config.max_length``."""
        context = _context(lm, prompt, config)
        token_ids = tuple(context)
        lm.check_adapter(config.lora_name)
        for name in ("stop_words_ids", "bad_words_ids"):
            for word in getattr(config, name):
                check_known_ids(name, word, len(lm.byte_vocab), GenerationConfigError)
        eos = _eos_ids(lm, config)
        constraint = None
        if config.response_format is not None:
            constraint = Constraint.from_response_format(
                lm, config.response_format, eos_token_ids=eos if len(eos) else None
            )
        longest = _max_length(lm, len(token_ids), config, max_length)
        return cls(context, token_ids, eos, longest, constraint)


def _context(lm: AsyncLM, prompt: str | Chat | TokenIds, config: GenerationConfig) -> Context:
    info = config.mm_info
    if info is not None and isinstance(prompt, Context) and prompt.pictures is not None:
        raise PictureError("the context already has its pictures: leave mm_info out")
    if is_chat(prompt):
        prompt = _of_chat(lm, prompt, info is not None)
    elif not isinstance(prompt, str):
        _check_is_one(prompt)
    if info is not None:
        prompt = lm.context(cast(TokenIds | str, prompt), images=info.images)
    elif isinstance(prompt, str):
        prompt = encode_text(lm.tokenizer, prompt)
    return lm.contexts.check_context(cast(TokenIds, prompt))


def _check_is_one(prompt: Any) -> None:
    """Raise a ``ContextTypeError`` if ``prompt`` is a list of prompts, a message or no iterable."""
    first = prompt[0] if isinstance(prompt, (list, tuple)) and prompt else None
    if isinstance(prompt, Mapping) and "role" in prompt:
        hint = ": pass a chat as a list of messages"
    elif isinstance(first, (list, tuple)) and len(prompt) == 1 and not is_chat(first):
        hint = ": pass prompt[0], the only row"
    elif isinstance(first, (str, list, tuple)):
        hint = ": call once for each prompt"
    elif isinstance(prompt, Iterable):
        return
    else:
        hint = ""
    raise ContextTypeError(
        f"a prompt must be a text, a chat's messages or token ids, got {shown(prompt)}{hint}"
    )


def _of_chat(lm: AsyncLM, messages: Chat, has_images: bool) -> Any:
    """Render a chat up to the start of the answer: as text if it has images, else as token ids."""
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ContextError(
                f"a chat message must be a mapping with a 'role', got {shown(message)}"
            )
        if not has_images and not isinstance(message.get("content"), str):
            raise ContextError(
                f"the 'content' of a message must be text, got the message {shown(message)}: pass "
                "images with mm_info=MultiMediaInfo(images=[…]); sounds and other parts are refused"
            )
    processor = getattr(lm, "processor", None) if has_images else None
    source: Any = processor if getattr(processor, "chat_template", None) else lm.tokenizer
    if not getattr(source, "chat_template", None):
        kind = "processor" if has_images else "tokenizer"
        raise ContextError(f"the model's {kind} has no chat template: pass text or token ids")
    options = {"tokenize": False} if has_images else {"return_dict": False}
    try:
        return source.apply_chat_template(list(messages), add_generation_prompt=True, **options)
    except Exception as error:  # a template may raise anything
        raise ContextError(f"the chat template failed on these messages: {error}") from error


def is_chat(text: object) -> TypeGuard[Chat]:
    """Return whether ``text`` is a chat: a list or tuple whose first element is a mapping."""
    return isinstance(text, (list, tuple)) and bool(text) and isinstance(text[0], Mapping)


def is_many(prompt: Any) -> bool:
    """Return whether ``prompt`` is a list of prompts: texts, chats, or sequences of token ids."""
    is_list = isinstance(prompt, (list, tuple)) and bool(prompt) and not is_chat(prompt)
    return is_list and isinstance(prompt[0], (str, list, tuple, Context))


def _is_one(name: str, value: Any) -> Any:
    is_scalar = isinstance(value, (bytes, Mapping)) or getattr(value, "ndim", 1) == 0
    if is_scalar or not isinstance(value, Iterable):
        raise OptionTypeError(f"{name} must be a text or a chat, got {shown(value)}")
    return value


check_texts: Final[Check[tuple[Any, ...]]] = sequence(
    _is_one, "a text, a chat's messages, or a list of either (for token ids, use start_request_ids)"
)


def ids_of(input_ids: Any) -> Any:
    """Return ``input_ids``, or its only row if it is an array or tensor ``[1, length]``."""
    if getattr(input_ids, "ndim", 1) == 2 and input_ids.shape[0] == 1:
        return input_ids[0]
    return input_ids


def check_is_ids(input_ids: Any) -> None:
    """Raise a ``ContextTypeError`` if ``input_ids`` is a text, a chat or a mapping."""
    if isinstance(input_ids, (Mapping, str)) or is_chat(input_ids):
        raise ContextTypeError(
            f"input_ids must be token ids, got {type(input_ids).__name__}: for a text or "
            "a chat, call start_request_text; of a tokenizer's output, pass only the 'input_ids'"
        )


def _max_length(
    lm: AsyncLM, prompt_length: int, config: GenerationConfig, max_length: int | None
) -> int:
    limits = [
        None if config.max_new_tokens is None else prompt_length + config.max_new_tokens,
        config.max_length,
        max_length,
        None if lm.max_length is None else lm.max_length + 1,  # the last token is never evaluated
    ]
    known = [limit for limit in limits if limit is not None]
    if not known:
        raise GenerationConfigError(
            "max_new_tokens or max_length must be given: this model has no maximum length"
        )
    if min(known) <= prompt_length:
        raise ContextError(
            f"the prompt has {prompt_length} tokens and leaves no room for a new token: "
            f"prompt and generated text together may have at most {min(known)} tokens"
        )
    return min(known)


def _eos_ids(lm: AsyncLM, config: GenerationConfig) -> frozenset[int]:
    if config.early_stopping is False:
        return frozenset()
    given = listed_ids(config.eos_token_id)
    if given is None:
        return lm.eos_token_ids
    check_known_ids("eos_token_id", given, len(lm.byte_vocab), GenerationConfigError)
    return frozenset(given)
