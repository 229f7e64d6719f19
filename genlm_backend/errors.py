"""The exceptions that this library defines; it also raises built-in ones, such as ``TimeoutError``.

Each of them but the base class is also a subclass of a standard exception: the one in parentheses,
or that of its parent. So ``except ValueError`` works without an import of this module::

    GenlmBackendError
    ├── OptionError (ValueError)             an argument out of its bounds
    ├── OptionTypeError (TypeError)          an argument of a wrong type
    ├── ContextError (ValueError)            a context that the model cannot evaluate
    │   └── PictureError                     pictures that the model or context cannot take
    ├── ContextTypeError (TypeError)         token ids that are not integers
    ├── AdapterError (ValueError)            a LoRA adapter that cannot be used
    │   └── UnknownAdapterError              an adapter that is not loaded
    ├── UnknownBackendError (ValueError)     a backend name that is not registered
    ├── UnsupportedModelError (ValueError)   a model that the backend cannot evaluate
    ├── ModelNotFoundError (OSError)         no model of the given name was found
    ├── MissingExtraError (ImportError)      an optional library is absent
    ├── TokenizerDecodeError (ValueError)    a token's bytes cannot be determined
    ├── VocabularyError (ValueError)         a vocabulary unfit for a trie or its model
    ├── VocabularyTypeError (TypeError)      an entry that is no iterable of letters
    ├── WeightsError (ValueError)            weights whose shape does not fit the trie
    ├── WeightsTypeError (TypeError)         weights that are not real numbers
    ├── ConstraintError (ValueError)         a constraint that cannot be built
    │   └── ConstraintViolation              a token that a constraint does not allow
    ├── ConstraintTypeError (TypeError)      choices that are not a list of texts
    ├── GenerationConfigError (ValueError)   an invalid field of a GenerationConfig
    ├── RuntimeConfigError (ValueError)      an invalid field of a RuntimeConfig
    ├── UnknownModelError (KeyError)         a model name that an engine does not have
    ├── UnknownRequestError (ValueError)     a request that is not one of the engine's
    ├── UnknownTaskError (KeyError)          a task that an AsyncGLM does not have
    ├── ModelStateError (RuntimeError)       a model is not in the required state
    ├── ParticleError (RuntimeError)         a call that a particle group refuses for now
    ├── RequestQueueFullError (queue.Full)   the request queue is full
    ├── DeviceError (ValueError)             a device that cannot be used
    ├── PrefixFileError (ValueError)         a file that holds no prefix of this model
    ├── ReplacedNameError (NotImplementedError)  a name of genlm-backend 0.3.1 that was replaced
    ├── BatcherClosedError (RuntimeError)    no answer after close() or at interpreter exit
    ├── ForkedError (RuntimeError)           an object used in a fork of its process
    ├── NotPicklableError (TypeError)        an object that cannot be pickled
    ├── QueryDroppedError (RuntimeError)     the query was dropped before it was answered
    ├── EvaluationError (RuntimeError)       an evaluation gave no valid result
    │   └── EngineDiedError                  the engine or process of the model has ended
    └── CacheError (RuntimeError)            a prefix that cannot be cached, or a misused cache
        └── OutOfSlotsError                  too few free key-value slots are left

All other modules may import this one, so it imports nothing from the library.
"""

from __future__ import annotations

import queue
from typing import Any, Self


class GenlmBackendError(Exception):
    """Base class of the library's own exceptions."""


class OptionError(GenlmBackendError, ValueError):
    """An argument is out of its bounds, or is not one of the allowed values."""


class OptionTypeError(GenlmBackendError, TypeError):
    """An argument has a wrong type, or an option has an unknown name."""


class ContextError(GenlmBackendError, ValueError):
    """The context is empty or too long, has an id outside the vocabulary, or cannot be encoded."""


class PictureError(ContextError):
    """Pictures cannot be read or do not fit the prompt, or the model takes no pictures."""


class ContextTypeError(GenlmBackendError, TypeError):
    """The token ids of a context are not a sequence of integers."""


class AdapterError(GenlmBackendError, ValueError):
    """A LoRA adapter cannot be loaded or used, or has the name of another adapter."""


class UnknownAdapterError(AdapterError):
    """The LoRA adapter of a query is not loaded, or was removed or replaced before the answer."""


class UnknownBackendError(GenlmBackendError, ValueError):
    """No backend of the given name is registered."""


class UnsupportedModelError(GenlmBackendError, ValueError):
    """The backend cannot evaluate this kind of model."""


class ModelNotFoundError(GenlmBackendError, OSError):
    """No model was found under the given name."""


class MissingExtraError(GenlmBackendError, ImportError):
    """An optional library is not installed, or a backend is not available."""


class TokenizerDecodeError(GenlmBackendError, ValueError):
    """The bytes of a token cannot be determined from its tokenizer.

    Attributes:
        tokenizer: The class name of the tokenizer.
        token_id: The id of a token whose bytes are unknown; ``None`` if the error names no token.
        token: The spelling of that token in the vocabulary, or ``None``.
        reason: Why the bytes cannot be determined.
    """

    def __init__(
        self, tokenizer: str, reason: str, token_id: int | None = None, token: str | None = None
    ) -> None:
        where = "" if token_id is None else f", token {token_id} ({token!r})"
        super().__init__(f"cannot decode the vocabulary of {tokenizer}{where}: {reason}")
        self.tokenizer, self.token_id, self.token, self.reason = tokenizer, token_id, token, reason

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.tokenizer, self.reason, self.token_id, self.token)


class VocabularyError(GenlmBackendError, ValueError):
    """A vocabulary is empty or too large, holds an entry twice, or does not fit the model."""


class VocabularyTypeError(GenlmBackendError, TypeError):
    """The vocabulary is no list, or an entry is unhashable or no iterable of hashable letters."""


class WeightsError(GenlmBackendError, ValueError):
    """Weights or sums have a wrong shape, or ``mass`` finds no node and the sums are negative."""


class WeightsTypeError(GenlmBackendError, TypeError):
    """The weights are not real numbers."""


class ConstraintError(GenlmBackendError, ValueError):
    """A constraint cannot be built from the arguments, allows no token, or has failed."""


class ConstraintViolation(ConstraintError):
    """The constraint does not allow the token at this position."""


class ConstraintTypeError(GenlmBackendError, TypeError):
    """The choices of a constraint are a single text, or not iterable."""


class GenerationConfigError(GenlmBackendError, ValueError):
    """A ``GenerationConfig`` is invalid, or does not fit the model or the call."""


class RuntimeConfigError(GenlmBackendError, ValueError):
    """A field of a ``RuntimeConfig`` is invalid, or does not fit the model."""


class UnknownModelError(GenlmBackendError, KeyError):
    """An engine has no model of the given name."""

    __str__ = Exception.__str__  # that of KeyError puts the message in quotes


class UnknownRequestError(GenlmBackendError, ValueError):
    """The argument is not a request, or is a request of another engine."""


class UnknownTaskError(GenlmBackendError, KeyError):
    """An ``AsyncGLM`` has no task of the given id, or its result has been collected."""

    __str__ = Exception.__str__


class ModelStateError(GenlmBackendError, RuntimeError):
    """A model, or an object that runs models, is not in the required state."""


class ParticleError(GenlmBackendError, RuntimeError):
    """A particle group refuses a call for now, for example while another call is being awaited."""


class RequestQueueFullError(GenlmBackendError, queue.Full):
    """The request queue is full."""


class DeviceError(GenlmBackendError, ValueError):
    """Torch does not know the device, or cannot use it on this machine."""


class ReplacedNameError(GenlmBackendError, NotImplementedError):
    """A name of genlm-backend 0.3.1 was used; the message names its replacement."""


class BatcherClosedError(GenlmBackendError, RuntimeError):
    """No answer can come: the model or engine has been closed, or the interpreter is exiting."""


class ForkedError(GenlmBackendError, RuntimeError):
    """A model, engine or trie was used in a fork of its process, where its threads do not run."""


class NotPicklableError(GenlmBackendError, TypeError):
    """Models, engines and tries cannot be pickled or copied; constraints cannot be pickled."""


class QueryDroppedError(GenlmBackendError, RuntimeError):
    """The query was dropped before it was answered, for example by ``reset_async_queries``."""


class EvaluationError(GenlmBackendError, RuntimeError):
    """An evaluation failed, or gave an invalid result, such as NaN or too few answers."""


class EngineDiedError(EvaluationError):
    """The engine or process of the model has ended; the model may have to be loaded again."""


class CacheError(GenlmBackendError, RuntimeError):
    """A prefix cannot be cached, or a cache was misused or is inconsistent."""


class PrefixFileError(GenlmBackendError, ValueError):
    """A file holds no prefix of this model, or the file has been truncated or modified."""


class OutOfSlotsError(CacheError):
    """The KV cache has fewer free slots than were requested."""
