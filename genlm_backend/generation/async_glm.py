"""AsyncGLM: accepts ``model.generate`` tasks from many threads; an engine batches them together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Self, final

import torch
import transformers

from genlm_backend.checks import checked, integer, mapping, near_names, optional, shown, switch
from genlm_backend.checks import timeout as check_timeout
from genlm_backend.errors import (
    ContextError,
    GenerationConfigError,
    ModelStateError,
    OptionTypeError,
    RequestQueueFullError,
    UnknownTaskError,
)
from genlm_backend.generation.config import DEFAULT_MAX_NEW_TOKENS, GenerationConfig
from genlm_backend.generation.engine.engine import Engine
from genlm_backend.generation.engine.request import GenerationRequest
from genlm_backend.generation.engine.runtime_config import RuntimeConfig
from genlm_backend.generation.hf_config import SHARED_FIELDS, own_config
from genlm_backend.generation.prompt import Prompt
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.queries.context import Context, ContextFactory
from genlm_backend.queries.query import TokenIds
from genlm_backend.readouts.sampling import listed_ids, seed_of
from genlm_backend.runtime.forks import OfOneProcess, ProcessLock
from genlm_backend.runtime.together import together

_NAME = "model"


@final
class AsyncGLM(OfOneProcess):
    """Generates texts for many threads at once: ``submit`` a task, then call ``get_result``.

    ``model.generate`` serves one caller at a time; this class batches the concurrent tasks of all
    callers into the same forward passes, on its own ``Engine``. Each row of a task is a request of
    that engine, which queues the requests. Any method may be called from any thread. Tasks that
    are submitted before ``start()`` wait until it is called.

    Args:
        model: A causal language model of transformers, or an ``AsyncLM``, which ``shutdown`` does
            not close.
        tokenizer: Tokenizer of a transformers model; optional, since tasks are token ids.
        max_queue_size: Largest number of tasks that may wait to be run; 1 or more.
        generation_kwargs: Default options of the tasks; see ``HONOURED``.
        max_running: Most texts and beams to run at once; by default the model's ``batch_size``.

    Raises:
        GenerationConfigError: (``ValueError``) If ``generation_kwargs`` is no mapping, or has an
            option that is invalid or not in ``HONOURED``; if ``max_queue_size`` or ``max_running``
            is not an integer of 1 or more.
        OptionTypeError: (``TypeError``) If ``model`` is of another type.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        max_queue_size: int = 10,
        generation_kwargs: Mapping[str, Any] | None = None,
        *,
        max_running: int | None = None,
    ) -> None:
        options = {"max_queue_size": max_queue_size, "generation_kwargs": generation_kwargs}
        given = checked(_CHECKS, {**options, "max_running": max_running}, GenerationConfigError)
        self._is_own = not isinstance(model, AsyncLM)
        self._defaults = dict(generation_kwargs or {})
        self._lm: AsyncLM = _wrap(model, tokenizer) if self._is_own else model
        try:
            padding = getattr(self._lm.tokenizer, "pad_token_id", None)
            # The model's own configuration, or a default one with the EOS ids and padding id.
            self._base: Any = own_config(self._lm) or transformers.GenerationConfig(
                eos_token_id=sorted(self._lm.eos_token_ids) or None, pad_token_id=padding
            )
            _config_of_kwargs(self._base, self._defaults, 0)
        except BaseException:
            self._close_model()
            raise
        self._max_queue_size: int = given["max_queue_size"]
        self._max_running: int = given["max_running"] or self._lm.batch_size
        self._lock = ProcessLock()
        self._tasks: dict[int, _Task] = {}  # tasks whose results have not been collected
        self._next_id = 0
        self._engine: Engine | None = None
        self._is_shut_down = False

    # ---------------------------------------------------------------- tasks

    def start(self) -> None:
        """Start the engine and the waiting tasks; a second call has no effect.

        Raises:
            ModelStateError: (``RuntimeError``) After ``shutdown()``.
        """
        self._lock.claim()
        with self._lock.here:
            self._check_open()
            if self._engine is None:
                self._engine = self._start_engine()
                for task in self._tasks.values():
                    try:
                        task.submit(self._engine, timeout=0)
                    except Exception as error:  # get_result raises it
                        task.result.set_exception(error)

    def _start_engine(self) -> Engine:
        most, most_waiting = self._max_running, self._max_queue_size
        config = RuntimeConfig(max_batch=most, max_queue_size=most_waiting, warm_up=False)
        engine = Engine()
        try:
            engine.install_model(_NAME, self._lm, config)
            engine.start_model(_NAME)
            return engine
        except BaseException:
            engine.close()
            raise

    def submit(
        self,
        inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any],
        generation_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Queue a task and return its id.

        Args:
            inputs: Token ids ``[length]`` or ``[batch, length]``, or a mapping with ``input_ids``
                and, if rows are padded left or right, an ``attention_mask``, 0 at the padding. A
                collator's ``token_type_ids`` and ``labels`` are ignored. For a model that reads
                pictures, the output of its processor for one prompt, with ``pixel_values``.
            generation_kwargs: Options that override the constructor's.
            timeout: Seconds to wait if the queue is full; ``None`` for no limit.

        Raises:
            ContextError: (``ValueError``) If a prompt is empty or too long, if the KV cache has no
                room for it and its text, or if the mapping has an entry that a text model cannot
                read. Nothing is queued after an error.
            GenerationConfigError: (``ValueError``) If ``generation_kwargs`` are wrong.
            RequestQueueFullError: (``queue.Full``) If the queue was full for ``timeout`` seconds.
            ModelStateError: (``RuntimeError``) After ``shutdown()``; or if the queue is full before
                ``start()``, and ``timeout`` is not 0.
        """
        timeout = check_timeout("timeout", timeout)
        checked(_CHECKS, {"generation_kwargs": generation_kwargs}, GenerationConfigError)
        # Check this before making tensors: torch aborts if one with views is freed at exit.
        with self._lock.here:
            self._check_open()
        own = generation_kwargs or {}
        kwargs = {**self._defaults, **own}
        for new, whole in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
            if whole in own and new not in own:
                kwargs.pop(new, None)  # else the constructor's option would override this call's
        rows, mask, pictures = _rows_of(inputs, self._lm.contexts)
        width = rows.shape[1]
        configs = [_config_of_kwargs(self._base, kwargs, row, width) for row in range(len(rows))]
        prompts: list[Context] = []
        for row, keep, config in zip(rows, mask, configs, strict=True):
            ids: TokenIds = row[keep].tolist()
            if pictures is not None:
                ids = self._lm.context(ids, images=pictures)
            prompts.append(Prompt.from_prompt(self._lm, ids, config).context)
            if config.num_beams > self._max_running:
                raise GenerationConfigError(
                    f"num_beams={config.num_beams} exceeds max_running={self._max_running}"
                )
        ends = listed_ids(configs[0].eos_token_id) or ()
        pads = (kwargs.get("pad_token_id"), self._base.pad_token_id, *ends[:1], 0)
        padding = next(token_id for token_id in pads if token_id is not None)
        return self._submit(_Task(rows, prompts, configs, padding), timeout)

    def _submit(self, task: _Task, timeout: float | None) -> int:
        with self._lock.here:
            self._check_open()
            engine = self._engine
            if engine is None:  # the task waits for start(), if the queue has room
                if self._num_waiting() >= self._max_queue_size:
                    if timeout == 0:
                        raise self._full()
                    self._check_started("the queue is full")
                return self._add(task)
        try:
            task.submit(engine, timeout)
            with self._lock.here:
                self._check_open()
                return self._add(task)
        except RequestQueueFullError:
            raise self._full() from None
        except BaseException as error:  # the caller gets no id, so stop the task
            task.interrupt(engine)
            if isinstance(error, ModelStateError):
                self._check_open()
            raise

    def _add(self, task: _Task) -> int:
        task_id, self._next_id = self._next_id, self._next_id + 1
        self._tasks[task_id] = task
        return task_id

    def get_result(self, task_id: int, timeout: float | None = None) -> torch.Tensor:
        """Wait for a task and return its result, which can be collected once.

        Returns:
            Token ids, int64 ``[batch × num_return_sequences, length]``, as ``model.generate``
            returns them: in each row, an input row, one continuation and padding.

        Raises:
            TimeoutError: If the task is not complete after ``timeout`` seconds; call again later.
            UnknownTaskError: (``KeyError``) If there is no such task, or its result has been
                collected.
            CancelledError: (of ``concurrent.futures``) If ``shutdown`` cancelled the task.
            ModelStateError: (``RuntimeError``) At once, if ``start()`` has not been called yet.
            Exception: The error with which the task failed.
        """
        timeout = check_timeout("timeout", timeout)
        with self._lock.here:
            task = self._task(task_id)
            if not (task.result.done() or self._is_shut_down):
                self._check_started(f"task {task_id} has not begun")
        try:
            task.result.exception(timeout)  # waits for the end
        except TimeoutError:
            raise TimeoutError(f"task {task_id} is not complete after {timeout} s") from None
        except CancelledError:
            pass
        with self._lock.here:
            if self._tasks.pop(task_id, None) is None:
                raise UnknownTaskError(f"the result of task {task_id} has already been collected")
        if task.result.cancelled():
            raise CancelledError("the task was cancelled by shutdown()")
        return task.result.result()

    def _task(self, task_id: int) -> _Task:
        """Return the task of an id, or raise if there is none; called under the lock."""
        task = self._tasks.get(_CHECKS["task_id"]("task_id", task_id))
        if task is None:
            raise UnknownTaskError(f"no task {task_id} exists, or its result has been collected")
        return task

    def is_ready(self, task_id: int) -> bool:
        """Return whether a task has ended, so that ``get_result`` does not wait.

        Raises:
            UnknownTaskError: (``KeyError``) As for ``get_result``.
        """
        with self._lock.here:
            return self._task(task_id).result.done()

    def queue_size(self) -> int:
        """Return the number of tasks that wait to be run."""
        with self._lock.here:
            return self._num_waiting()

    def _num_waiting(self) -> int:
        if self._engine is not None:
            return self._engine.num_waiting(_NAME)
        return sum(not task.result.done() for task in self._tasks.values())

    # ---------------------------------------------------------------- ending

    def shutdown(self, wait: bool = True, timeout: float | None = None) -> None:
        """End the engine; a second call has no effect. Results of complete tasks stay available.

        In a fork of the process that called ``start``, this does nothing.

        Args:
            wait: Whether to wait for the submitted tasks, if ``start()`` has been called. Tasks
                that are incomplete after the wait are cancelled.
            timeout: Seconds to wait, at most; ``None`` for no limit.
        """
        switch("wait", wait)
        timeout = check_timeout("timeout", timeout)
        if self._lock.is_foreign:
            return
        with self._lock.here:
            self._is_shut_down = True
            tasks, engine = list(self._tasks.values()), self._engine
        if engine is not None:
            with contextlib.suppress(ModelStateError):  # the engine may have ended, as at exit
                engine.shut_model(_NAME)  # raises in callers that wait for room in the queue
            if wait:
                concurrent.futures.wait([task.result for task in tasks], timeout)
        with self._lock.here:
            engine, self._engine = self._engine, None
            for task in self._tasks.values():
                task.result.cancel()
        if engine is not None:
            engine.close()
        self._close_model()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        self.shutdown(wait=kind is None)

    def _close_model(self) -> None:
        if self._is_own:
            self._lm.close()

    def _check_open(self) -> None:
        if self._is_shut_down or (self._engine is not None and self._engine.is_closed):
            raise ModelStateError("this AsyncGLM has been shut down")

    def _check_started(self, what: str) -> None:
        if self._engine is None:
            raise ModelStateError(
                f"{what} because this AsyncGLM has not been started: call start(), or use it in a "
                "with statement"
            )

    def _full(self) -> RequestQueueFullError:
        return RequestQueueFullError(f"the queue is full: {self._num_waiting()} tasks are waiting")


_CHECKS = {
    "max_queue_size": integer(1),
    "max_running": optional(integer(1)),
    "generation_kwargs": optional(mapping),
    "task_id": integer(),
}


def _wrap(model: Any, tokenizer: Any) -> AsyncLM:
    if not hasattr(model, "get_input_embeddings"):
        hint = ": load a model by name with load_model_by_name" if isinstance(model, str) else ""
        raise OptionTypeError(
            "model must be a transformers causal language model or an AsyncLM, "
            f"got {shown(model)}{hint}"
        )
    from genlm_backend.llm import AsyncTransformer

    if tokenizer is None:
        from tokenizers import Tokenizer, models

        # An ``AsyncGLM`` returns ids and no texts, so each id gets a placeholder word.
        size = model.get_input_embeddings().num_embeddings
        tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(size)}, unk_token="<0>"))
    return AsyncTransformer(model, tokenizer)


@final
@dataclass(eq=False)
class _Task:
    """A task: its rows, an engine's request for each row, and the future of its whole result."""

    rows: torch.Tensor  # [batch, length]
    contexts: list[Context]
    configs: list[GenerationConfig]
    pad_token_id: int
    requests: list[GenerationRequest] = field(default_factory=list)
    result: Future[torch.Tensor] = field(default_factory=Future)

    def submit(self, engine: Engine, timeout: float | None) -> None:
        self.requests = engine.start_requests(_NAME, self.contexts, self.configs, timeout=timeout)
        self.result = engine.loop.submit(self._complete(engine))

    def interrupt(self, engine: Engine) -> None:
        for request in self.requests:
            engine.stop_request(request)

    async def _complete(self, engine: Engine) -> torch.Tensor:
        """Await the requests; return the ids of each row with each of its continuations, padded."""
        try:
            found = await together(self.requests)
        except BaseException:
            self.interrupt(engine)
            raise
        texts = [(row, t) for row, several in zip(self.rows, found, strict=True) for t in several]
        if any(text.finish_reason == "interrupted" for _, text in texts):
            raise asyncio.CancelledError
        longest = max(len(text.token_ids) for _, text in texts)
        padding = [self.pad_token_id] * longest
        ids = [(text.token_ids + padding)[:longest] for _, text in texts]
        new = torch.tensor(ids, dtype=torch.int64)
        return torch.cat([torch.stack([row for row, _ in texts]), new], dim=1)


# -------------------------------------------------------------------- arguments of model.generate

HONOURED = (*SHARED_FIELDS, "early_stopping", "num_return_sequences", "pad_token_id", "seed")
"""The ``generation_kwargs`` that are accepted: options of ``model.generate``, and ``seed``."""


def _config_of_kwargs(
    defaults: Any, kwargs: Mapping[str, Any], row: int, width: int = 0
) -> GenerationConfig:
    """Return the configuration of row ``row``, which is ``width`` ids long and has its own seed."""
    merged, ours = copy.deepcopy(defaults), {}
    for name, value in kwargs.items():
        if name not in HONOURED:
            raise GenerationConfigError(
                f"{name} is not a supported option (supported: {', '.join(HONOURED)})"
                f"{near_names(name, HONOURED)}"
            )
        if name not in _APART:
            setattr(merged, name, _plain(name, value))
    apart = checked(_APART, {name: kwargs.get(name) for name in _APART}, GenerationConfigError)
    if apart["seed"] is not None:
        ours["seed"] = seed_of(apart["seed"], row)
    if merged.max_new_tokens is None and merged.max_length is None:
        merged.max_new_tokens = DEFAULT_MAX_NEW_TOKENS
    config = GenerationConfig.from_hf(merged)
    # As in ``model.generate``: without ``eos_token_id``, no token ends a text.
    if merged.eos_token_id is None:
        ours["eos_token_id"] = ()
    # Convert total lengths, which include the padding, to numbers of new tokens.
    most, least = config.max_new_tokens, config.min_new_tokens
    if config.max_length is not None:
        most = config.max_length - width
        if most < 1:
            raise ContextError(
                f"each row has {width} tokens with its padding, which leaves no room for a new "
                f"token: max_length is {config.max_length}"
            )
    if config.min_length:
        least = max(config.min_length - width, 0)
    assert most is not None
    ours |= {"max_new_tokens": most, "min_new_tokens": min(least, most)}
    return config.replace(**ours, max_length=None, min_length=0)


_APART = {"seed": optional(integer(0)), "pad_token_id": optional(integer())}
"""Checks of the accepted options that are not set on transformers' configuration."""


def _plain(name: str, value: Any) -> Any:
    """Convert an array or tensor to a list or number, which a configuration can compare."""
    try:
        return value.tolist() if hasattr(value, "tolist") else value
    except (TypeError, RuntimeError) as error:
        raise GenerationConfigError(f"{name} must hold numbers, got {shown(value)}") from error


_KNOWN_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}
"""Entries that collators make for texts; a text model uses only the ids and attention mask."""


def _rows_of(
    inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any], contexts: ContextFactory
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any] | None]:
    """Return ids ``[batch, length]``, a mask (false at padding), and picture inputs or ``None``."""
    named = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
    if "input_ids" not in named:
        raise ContextError(f"the inputs have no 'input_ids', only {sorted(named)}")
    unknown = sorted(named.keys() - _KNOWN_INPUTS)
    if unknown and contexts.image_token_id is None:
        raise ContextError(
            f"a text model cannot read {', '.join(map(repr, unknown))}; it accepts the inputs "
            f"{', '.join(sorted(_KNOWN_INPUTS))}"
        )
    ids = _tensor("input_ids", _listed(named["input_ids"], contexts))
    if ids.numel() == 0:
        raise ContextError("the inputs are empty: a context needs at least one token")
    if ids.is_floating_point() or ids.dtype is torch.bool or ids.ndim not in (1, 2):
        raise ContextError(
            f"token ids must be integers of shape [length] or [batch, length], got {ids.dtype} "
            f"of shape {list(ids.shape)}"
        )
    rows = torch.atleast_2d(ids.cpu().long())
    mask = torch.ones_like(rows, dtype=torch.bool)
    if named.get("attention_mask") is not None:
        mask = torch.atleast_2d(_tensor("attention_mask", named["attention_mask"]).cpu().bool())
    if mask.shape != rows.shape:
        raise ContextError(
            f"attention_mask has shape {list(mask.shape)}, but input_ids has {list(rows.shape)}"
        )
    if not unknown:
        return rows, mask, None
    if len(rows) != 1 or not mask.all():
        raise ContextError(
            "inputs with pictures must be one row without padding: submit a task for each prompt"
        )
    left = {"input_ids", "attention_mask", "labels"}
    return rows, mask, {name: value for name, value in named.items() if name not in left}


def _listed(value: Any, contexts: ContextFactory) -> Any:
    """Convert a ``Context``, or each in a list, to a list of ids; return other inputs unchanged."""
    if isinstance(value, Context):
        if value.pictures is not None:
            raise ContextError(
                "a task does not accept a Context with pictures: pass the processor's output, with "
                "'pixel_values', or pass the Context to a request of an Engine"
            )
        return list(contexts.of(value))
    if isinstance(value, (list, tuple)) and any(isinstance(row, Context) for row in value):
        return [_listed(row, contexts) for row in value]
    return value


def _tensor(name: str, value: Any) -> torch.Tensor:
    wanted = f"{name} must be integers of shape [length] or [batch, length], got {shown(value)}"
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ContextError(f"{wanted}{_hint(value)}") from error
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        raise ContextError(wanted)
    return tensor


def _hint(value: Any) -> str:
    """Return a hint if the value is texts, chats or rows of unequal lengths; else ``""``."""
    first, depth = value, 0
    while isinstance(first, (list, tuple)) and first and depth < 3:
        first, depth = first[0], depth + 1
    if isinstance(first, (str, bytes, Mapping)):
        return ": encode a text or a chat with the model's tokenizer first"
    return ": pad the rows to one length, and pass an attention_mask" if depth > 1 else ""
