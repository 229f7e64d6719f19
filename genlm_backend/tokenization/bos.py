"""BOS: the beginning-of-sequence token, which a text may spell and a tokenizer may add."""

from __future__ import annotations

from typing import Any

from genlm_backend.errors import ContextError


def adds_bos(tokenizer: Any) -> bool:
    """Return whether a tokenizer prepends its BOS to texts, judged by the ids of an empty text."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and list(tokenizer.encode(""))[:1] == [bos]


def with_one_bos(tokenizer: Any, token_ids: list[int]) -> list[int]:
    """Return a text's token ids, without the added BOS if the text itself begins with the BOS."""
    bos = getattr(tokenizer, "bos_token_id", None)
    is_twice = bos is not None and token_ids[:2] == [bos, bos] and adds_bos(tokenizer)
    return token_ids[1:] if is_twice else token_ids


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a prompt, without the added BOS if the prompt begins with the BOS.

    Raises:
        ContextError: (``ValueError``) If the tokenizer cannot encode text, or returns no ids.
    """
    method = getattr(tokenizer, "encode", None)
    if method is None:
        raise ContextError("the model's tokenizer cannot encode text: pass token ids")
    encoded = method(text)
    ids = encoded if isinstance(encoded, list) else encoded.ids
    if not ids:
        raise ContextError("the prompt is empty: a context needs at least one token")
    return with_one_bos(tokenizer, ids)


def without_bos(tokenizer: Any, text: str) -> str:
    """Return a text, without a BOS at its beginning if the tokenizer adds a BOS to texts."""
    bos = getattr(tokenizer, "bos_token", None)
    return text.removeprefix(bos) if bos and adds_bos(tokenizer) else text


def begins_turns(tokenizer: Any) -> bool:
    """Return whether the chat template writes the BOS before each message."""
    bos = getattr(tokenizer, "bos_token", None)
    if not bos or not getattr(tokenizer, "chat_template", None):
        return False
    first, second = "first message", "second message"
    chat = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # a template may raise anything
        return False
    before, _, behind = text.partition(first)
    return bos in before and bos in behind.partition(second)[0]
