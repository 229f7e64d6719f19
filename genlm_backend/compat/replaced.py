"""Public names of genlm-backend 0.3.1 that the rest of this library does not have.

The package ``genlm.backend`` exports them, so that a program that imports one still starts. The
constants and ``get_byte_vocab`` work. Calling another raises an error that names a replacement.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NoReturn, final

from genlm_backend.backends.mlx.present import is_present
from genlm_backend.backends.vllm.release import installed_release, is_supported
from genlm_backend.errors import MissingExtraError, ReplacedNameError
from genlm_backend.tokenization import decode_vocab

HAS_VLLM = is_supported(installed_release())
"""Whether the installed release of vLLM is one that ``AsyncVirtualLM`` supports."""

HAS_MLX = is_present()
"""Whether the packages that ``AsyncMlxLM`` needs, MLX and mlx-lm, are installed."""

HAS_SGL = False
"""Whether ``AsyncSGLTransformer`` can load a model; false, since there is no SGLang backend."""


class _Replaced(abc.ABC):
    instead: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(type(self).__name__, self.instead)


@final
class Query(_Replaced):
    """An entry of genlm-backend 0.3.1's queue. Constructing one raises a ``ReplacedNameError``."""

    instead = "`await lm.next_token_logprobs(token_ids)` queues, batches and answers queries"


@final
class TokenTrie(_Replaced):
    """The cache of genlm-backend 0.3.1. Constructing one raises a ``ReplacedNameError``."""

    instead = (
        "models cache the keys, values and rows of recent prefixes; lm.statistics() counts the "
        "bytes of these caches, lm.clear_cache() empties them"
    )


@final
class BackendScheduler(_Replaced):
    """The scheduler of genlm-backend 0.3.1. Constructing one raises a ``ReplacedNameError``."""

    instead = "AsyncVirtualLM.from_name(name, engine_opts) runs vLLM's own scheduler"


def get_byte_vocab(tokenizer: Any) -> list[bytes]:
    """Return each token's bytes, in order of the ids; ``decode_vocab`` also returns the texts."""
    return [token.byte_string for token in decode_vocab(tokenizer).byte_vocab]


def get_byte_tokens_from_byte_decoder(tokenizer: Any, byte_decoder: Any) -> NoReturn:
    """Raise a ``ReplacedNameError``: ``decode_vocab`` needs no ``byte_decoder`` argument."""
    _refuse("get_byte_tokens_from_byte_decoder", _DECODE_VOCAB)


def get_byte_tokens_from_sp(tokenizer: Any) -> NoReturn:
    """Raise a ``ReplacedNameError``: ``decode_vocab`` reads SentencePiece models too."""
    _refuse("get_byte_tokens_from_sp", _DECODE_VOCAB)


def check_byte_decoder(tokenizer: Any, byte_decoder: Any) -> NoReturn:
    """Raise a ``ReplacedNameError``: ``decode_vocab`` itself checks the bytes."""
    _refuse("check_byte_decoder", _DECODE_VOCAB)


def bytes_to_strs(tokenizer: Any, byte_vocab: Any, byte2str_fallback: str) -> NoReturn:
    """Raise a ``ReplacedNameError``: ``decode_vocab`` returns every token's bytes and text."""
    _refuse("bytes_to_strs", "decode_vocab(tokenizer, byte2str_fallback) returns bytes and texts")


_DECODE_VOCAB = "decode_vocab(tokenizer) reads and checks the bytes of a tokenizer's tokens"


def _refuse(name: str, instead: str) -> NoReturn:
    raise ReplacedNameError(f"{name} of genlm-backend 0.3.1 has been replaced: {instead}")


@final
class AsyncSGLTransformer:
    """A model evaluated by SGLang: not available, so the constructor raises an ``ImportError``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MissingExtraError(
            "AsyncSGLTransformer is not available: this release has no SGLang backend. "
            "Use AsyncTransformer (backend 'hf'), which runs the same programs."
        )

    @classmethod
    def from_name(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an ``ImportError``: the backend is not available."""
        cls()
        raise AssertionError
