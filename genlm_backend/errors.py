"""The library's own exceptions; timeouts and file errors raise built-in exceptions.

Except for the base class, each is also a subclass of the standard exception in parentheses, so
that ``except ValueError`` works without an import of this module::

    GenlmBackendError
    ├── OptionError (ValueError)             an argument out of its bounds
    ├── OptionTypeError (TypeError)          an argument of a wrong type
    ├── ContextError (ValueError)            a context that the model cannot evaluate
    │   └── PictureError                     pictures that the model or context cannot take
    ├── ContextTypeError (TypeError)         token ids that are not integers
    ├── AdapterError (ValueError)            a LoRA adapter that cannot be used
    │   └── UnknownAdapterError              an adapter that is not loaded
    ├── UnknownBackendError (ValueError)     a backend name that is not registered
    ├── UnsupportedModelError (ValueError)   a model this backend cannot evaluate
    ├── ModelNotFoundError (OSError)         no model under that name
    ├── MissingExtraError (ImportError)      an optional library is absent
    ├── TokenizerDecodeError (ValueError)    a token's bytes cannot be determined
    ├── VocabularyError (ValueError)         a vocabulary unfit for a trie or its model
    ├── VocabularyTypeError (TypeError)      an entry that has no letters
    ├── WeightsError (ValueError)            weights whose shape does not fit the trie
    ├── WeightsTypeError (TypeError)         weights that are not real numbers
    ├── ConstraintError (ValueError)         a constraint that cannot be built
    │   └── ConstraintViolation              a token that a constraint does not allow
    ├── ConstraintTypeError (TypeError)      choices that are not a list of texts
    ├── GenerationConfigError (ValueError)   an invalid field of a GenerationConfig
    ├── RuntimeConfigError (ValueError)      an invalid field of a RuntimeConfig
    ├── UnknownModelError (KeyError)         a model name that an engine does not have
    ├── UnknownRequestError (ValueError)     a request that does not belong to this engine
    ├── UnknownTaskError (KeyError)          a task that an AsyncGLM does not have
    ├── ModelStateError (RuntimeError)       a model is not in the required state
    ├── ParticleError (RuntimeError)         a call that a particle group cannot take now
    ├── RequestQueueFullError (queue.Full)   the request queue is full
    ├── DeviceError (ValueError)             a device that cannot be used
    ├── PrefixFileError (ValueError)         a file that holds no prefix of this model
    ├── ReplacedNameError (NotImplementedError)  a name of genlm-backend 0.3.1 that was replaced
    ├── BatcherClosedError (RuntimeError)    no answer after close(), or at exit
    ├── ForkedError (RuntimeError)           an object used in a fork of its process
    ├── NotPicklableError (TypeError)        an object that cannot be pickled
    ├── QueryDroppedError (RuntimeError)     the query was dropped before it was answered
    ├── EvaluationError (RuntimeError)       an evaluation gave no valid result
    │   └── EngineDiedError                  the engine or process that evaluates has ended
    └── CacheError (RuntimeError)            a prefix that cannot be cached, or a misused cache
        └── OutOfSlotsError                  too few free key-value slots are left

All other modules may raise these errors, so this module imports nothing from the library.
"""

from __future__ import annotations

import queue
from typing import Any, Self


class GenlmBackendError(Exception):
    """Base class of the library's own exceptions."""


class OptionError(GenlmBackendError, ValueError):
    """An argument is out of its bounds, or is not one of the allowed values."""


class OptionTypeError(GenlmBackendError, TypeError):
    """An argument has a wrong type, or an option an unknown name."""


class ContextError(GenlmBackendError, ValueError):
    """The context is empty, too long, or holds an id outside the model's vocabulary."""


class PictureError(ContextError):
    """Pictures cannot be read or do not fit the prompt, or the model takes no pictures."""


class ContextTypeError(GenlmBackendError, TypeError):
    """The context is not a sequence of integers."""


class AdapterError(GenlmBackendError, ValueError):
    """A LoRA adapter cannot be loaded or used, or has the name of another adapter."""


class UnknownAdapterError(AdapterError):
    """A query names a LoRA adapter that is not loaded, or that was removed or replaced since."""


class UnknownBackendError(GenlmBackendError, ValueError):
    """No backend of that name is registered."""


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
        token_id: The id of the token at fault, or ``None`` if no single token is.
        token: The token as the vocabulary spells it, or ``None``.
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
    """A vocabulary is empty, too large, holds an entry twice, or does not fit the model."""


class VocabularyTypeError(GenlmBackendError, TypeError):
    """The vocabulary is not a list, or an entry is unhashable or does not have hashable letters."""


class WeightsError(GenlmBackendError, ValueError):
    """The shape of weights or sums does not fit the trie, or ``mass`` got negative sums."""


class WeightsTypeError(GenlmBackendError, TypeError):
    """The weights are not real numbers."""


class ConstraintError(GenlmBackendError, ValueError):
    """A constraint cannot be built from the arguments, allows no token, or has failed."""


class ConstraintViolation(ConstraintError):
    """The constraint does not allow the token at this position."""


class ConstraintTypeError(GenlmBackendError, TypeError):
    """The choices of a constraint are a single text, or not iterable."""


class GenerationConfigError(GenlmBackendError, ValueError):
    """A ``GenerationConfig`` is invalid, or does not fit the call."""


class RuntimeConfigError(GenlmBackendError, ValueError):
    """A field of a ``RuntimeConfig`` is invalid, or does not fit the model."""


class UnknownModelError(GenlmBackendError, KeyError):
    """An engine has no model of that name."""

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class UnknownRequestError(GenlmBackendError, ValueError):
    """The argument is not a request, or is a request of another engine."""


class UnknownTaskError(GenlmBackendError, KeyError):
    """There is no task of that number, or its result has been collected."""

    __str__ = Exception.__str__


class ModelStateError(GenlmBackendError, RuntimeError):
    """A model, or an object that runs models, is not in the required state."""


class ParticleError(GenlmBackendError, RuntimeError):
    """A particle group cannot take this call now, for example while one of its awaits runs."""


class RequestQueueFullError(GenlmBackendError, queue.Full):
    """The request queue is full."""


class DeviceError(GenlmBackendError, ValueError):
    """Torch does not know the device, or this machine does not have it."""


class ReplacedNameError(GenlmBackendError, NotImplementedError):
    """A name of genlm-backend 0.3.1 was used; the message names its replacement."""


class BatcherClosedError(GenlmBackendError, RuntimeError):
    """No answer can come: the model or engine has been closed, or the interpreter is exiting."""


class ForkedError(GenlmBackendError, RuntimeError):
    """A model, engine or trie was used in a fork of its process, where its threads do not run."""


class NotPicklableError(GenlmBackendError, TypeError):
    """Models, engines and tries cannot be pickled or copied; constraints cannot be pickled."""


class QueryDroppedError(GenlmBackendError, RuntimeError):
    """The query was dropped before its result was computed."""


class EvaluationError(GenlmBackendError, RuntimeError):
    """An evaluation returned an invalid result, such as NaN or a wrong count, or failed."""


class EngineDiedError(EvaluationError):
    """The engine or process that evaluates has ended; the model may have to be loaded again."""


class CacheError(GenlmBackendError, RuntimeError):
    """A prefix cannot be cached, or a cache was misused or is inconsistent."""


class PrefixFileError(GenlmBackendError, ValueError):
    """A file holds no prefix of this model, or it has been truncated or modified."""


class OutOfSlotsError(CacheError):
    """The KV cache has fewer free slots than were requested."""
