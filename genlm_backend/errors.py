"""Every exception the library raises on purpose.

Each is also the standard type that a caller would expect, so that ``except ValueError``
keeps working without knowing this module::

    GenlmBackendError
    ├── OptionError (ValueError)             an argument out of its bounds
    ├── OptionTypeError (TypeError)          an argument of a wrong type
    ├── ContextError (ValueError)            a context that no model can answer
    │   └── PictureError                     pictures that a context cannot begin with
    ├── ContextTypeError (TypeError)         token ids that are not integers
    ├── AdapterError (ValueError)            a LoRA adapter that cannot be used
    │   └── UnknownAdapterError              one that is not loaded
    ├── UnknownBackendError (ValueError)     a backend name nobody registered
    ├── UnsupportedModelError (ValueError)   a model this backend cannot evaluate
    ├── ModelNotFoundError (OSError)         no model under that name
    ├── MissingExtraError (ImportError)      an optional library is absent
    ├── TokenizerDecodeError (ValueError)    a token's bytes cannot be known
    ├── VocabularyError (ValueError)         a vocabulary that no trie can be built over
    ├── VocabularyTypeError (TypeError)      an entry that has no letters
    ├── WeightsError (ValueError)            weights of another shape than the vocabulary's
    ├── WeightsTypeError (TypeError)         weights that are not real numbers
    ├── ConstraintError (ValueError)         a constraint that cannot be made
    │   └── ConstraintViolation              a token that a constraint does not allow
    ├── ConstraintTypeError (TypeError)      choices that are no list of texts
    ├── GenerationConfigError (ValueError)   a field of a GenerationConfig
    ├── RuntimeConfigError (ValueError)      a field of a RuntimeConfig
    ├── UnknownModelError (KeyError)         a model name that an engine does not have
    ├── UnknownRequestError (ValueError)     a request that is not this engine's
    ├── UnknownTaskError (KeyError)          a task that an AsyncGLM does not have, or no longer
    ├── ModelStateError (RuntimeError)       a model is not in the state that this needs
    ├── RequestQueueFullError (queue.Full)   no room among the requests that wait
    ├── DeviceError (ValueError)             a device that is not there
    ├── PrefixFileError (ValueError)         a file that holds no prefix of this model
    ├── ReplacedNameError (NotImplementedError)  a name of genlm.backend that is not needed here
    ├── BatcherClosedError (RuntimeError)    asked after close()
    ├── ForkedError (RuntimeError)           asked in a fork of the process it lives in
    ├── NotPicklableError (TypeError)        pickled or copied, though it lives in one process
    ├── QueryDroppedError (RuntimeError)     the query was dropped before it was answered
    ├── EvaluationError (RuntimeError)       an evaluation broke its contract
    │   └── EngineDiedError                  the process that evaluates has ended
    └── CacheError (RuntimeError)            a cache was misused or is inconsistent
        └── OutOfSlotsError                  no free key-value slot is left

Batchers and caches live below the models, so the errors live below everything.
"""

from __future__ import annotations

import queue
from typing import Any, Self


class GenlmBackendError(Exception):
    """Base of every error raised on purpose by this library."""


class OptionError(GenlmBackendError, ValueError):
    """An argument is out of its bounds, or none of the values that there are."""


class OptionTypeError(GenlmBackendError, TypeError):
    """An argument is of a type that it cannot have, or there is none of its name."""


class ContextError(GenlmBackendError, ValueError):
    """The context is empty, too long, or holds an id outside the model's vocabulary."""


class PictureError(ContextError):
    """Pictures that are no files, have no places in the prompt, or that the model cannot see."""


class ContextTypeError(GenlmBackendError, TypeError):
    """The context is not a sequence of integers."""


class AdapterError(GenlmBackendError, ValueError):
    """A LoRA adapter cannot be loaded, or has the name of another."""


class UnknownAdapterError(AdapterError):
    """A query names a LoRA adapter that is not loaded."""


class UnknownBackendError(GenlmBackendError, ValueError):
    """A backend name that is not registered."""


class UnsupportedModelError(GenlmBackendError, ValueError):
    """The model is of a kind that the backend cannot evaluate."""


class ModelNotFoundError(GenlmBackendError, OSError):
    """No model was found under the given name."""


class MissingExtraError(GenlmBackendError, ImportError):
    """An optional library is not installed; the message names the extra that brings it."""


class TokenizerDecodeError(GenlmBackendError, ValueError):
    """The bytes of a token cannot be known from its tokenizer.

    Attributes:
        tokenizer: The class name of the tokenizer.
        token_id: The id of the token at fault, or ``None`` where no single token is.
        token: The token as the vocabulary spells it, or ``None``.
        reason: Why its bytes cannot be known.
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
    """The vocabulary is empty, or holds an entry twice."""


class VocabularyTypeError(GenlmBackendError, TypeError):
    """An entry of the vocabulary is no iterable of hashable letters, or is not hashable itself."""


class WeightsError(GenlmBackendError, ValueError):
    """The weights are not one for each token of the trie's vocabulary."""


class WeightsTypeError(GenlmBackendError, TypeError):
    """The weights are not real numbers."""


class ConstraintError(GenlmBackendError, ValueError):
    """A schema, pattern or grammar that no constraint can be made of."""


class ConstraintViolation(ConstraintError):
    """A token that the constraint does not allow at this place."""


class ConstraintTypeError(GenlmBackendError, TypeError):
    """The choices of a constraint are not several texts."""


class GenerationConfigError(GenlmBackendError, ValueError):
    """A field of a generation's configuration is wrong, or contradicts another."""


class RuntimeConfigError(GenlmBackendError, ValueError):
    """A field of a model's runtime configuration is wrong, or does not go with the model."""


class UnknownModelError(GenlmBackendError, KeyError):
    """An engine has no model of that name."""

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class UnknownRequestError(GenlmBackendError, ValueError):
    """Something is not a request, or it is another engine's."""


class UnknownTaskError(GenlmBackendError, KeyError):
    """There is no task of that number, or its result has been collected."""

    __str__ = Exception.__str__


class ModelStateError(GenlmBackendError, RuntimeError):
    """A model, or what runs one, is not in the state that is needed."""


class RequestQueueFullError(GenlmBackendError, queue.Full):
    """As many requests as may wait are waiting."""


class DeviceError(GenlmBackendError, ValueError):
    """The device is not one that torch knows, or not on this machine."""


class ReplacedNameError(GenlmBackendError, NotImplementedError):
    """A name of genlm-backend 0.3.1 was used that something else takes the place of."""


class BatcherClosedError(GenlmBackendError, RuntimeError):
    """A query was submitted after ``close()``, or when the interpreter had ended the threads."""


class ForkedError(GenlmBackendError, RuntimeError):
    """A model, engine or trie was used in a fork of its process, where its threads are not."""


class NotPicklableError(GenlmBackendError, TypeError):
    """A model, engine or trie was pickled or copied, though its threads live in one process."""


class QueryDroppedError(GenlmBackendError, RuntimeError):
    """The query was dropped before its answer was computed."""


class EvaluationError(GenlmBackendError, RuntimeError):
    """An evaluation returned something other than one result per query, or ended abnormally."""


class EngineDiedError(EvaluationError):
    """The engine that evaluates has ended; the model has to be loaded again."""


class CacheError(GenlmBackendError, RuntimeError):
    """A cache was misused, or its books do not add up."""


class PrefixFileError(GenlmBackendError, ValueError):
    """A file holds no prefix, or not one of this model, or it has been cut short or changed."""


class OutOfSlotsError(CacheError):
    """There are fewer free slots for keys and values than were asked for."""
