"""AsyncGLM: tasks for a model from ordinary threads, batched together behind their backs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import transformers

from genlm_backend.checks import checked, integer, mapping, optional, shown, switch
from genlm_backend.checks import timeout as check_timeout
from genlm_backend.errors import (
    GenerationConfigError,
    ModelStateError,
    OptionTypeError,
    OutOfSlotsError,
    RequestQueueFullError,
    UnknownTaskError,
)
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.engine import Engine
from genlm_backend.generation.hf_inputs import config_of_kwargs, rows_of
from genlm_backend.generation.prompt import Prompt
from genlm_backend.llm.base import AsyncLM
from genlm_backend.llm.together import together
from genlm_backend.process_lock import ProcessLock

_NAME = "model"


@dataclass
class _Task:
    id: int
    rows: torch.Tensor
    prompts: list[list[int]]
    configs: list[GenerationConfig]
    pad_token_id: int
    future: Future[torch.Tensor]


class AsyncGLM:
    """Generates for many threads at once: ``submit`` a task, ``get_result`` later.

    What ``model.generate`` does for one caller at a time, this does for as many as come: tasks
    that are under way at the same time share forward passes, on an ``Engine`` of its own. Any
    method may be called from any thread. Tasks that are submitted before ``start()`` wait for it.

    Args:
        model: A causal language model of transformers, or an ``AsyncLM``, which is not closed at
            ``shutdown``.
        tokenizer: The model's; tasks are token ids, so that it may be left out.
        max_queue_size: Tasks that may wait for others to end, at least 1.
        generation_kwargs: For every task that does not say otherwise; see ``hf_inputs.HONOURED``.
        max_running: Tasks, and texts of them, under way at once; by default as many as the model
            takes in a batch.

    Raises:
        GenerationConfigError: (``ValueError``) If ``generation_kwargs`` has something else, or a
            bound is too small.
        OptionTypeError: (``TypeError``) If ``model`` is neither.
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
        options = {
            "max_queue_size": max_queue_size,
            "max_running": max_running,
            "generation_kwargs": generation_kwargs,
        }
        given = checked(_CHECKS, options, GenerationConfigError)
        self._is_own = not isinstance(model, AsyncLM)
        self._defaults = dict(generation_kwargs or {})
        self._lm: AsyncLM = _wrap(model, tokenizer) if self._is_own else model
        try:
            self._base = _defaults_of(self._lm)
            config_of_kwargs(self._base, self._defaults, 0)
        except BaseException:
            self._close_model()
            raise
        self._max_queue_size: int = given["max_queue_size"]
        self._max_running: int = given["max_running"] or getattr(self._lm, "batch_size", 20)
        self._lock = ProcessLock()
        self._changed = threading.Condition(self._lock.native)
        self._waiting: deque[_Task] = deque()
        self._tasks: dict[int, _Task] = {}
        self._num_running = 0
        self._next_id = 0
        self._engine: Engine | None = None
        self._is_shut_down = False

    # ---------------------------------------------------------------- tasks

    def start(self) -> None:
        """Start working; again has no effect.

        Raises:
            ModelStateError: (``RuntimeError``) After ``shutdown()``.
        """
        with self._lock.here:
            self._check_open()
            if self._engine is None:
                self._engine = Engine()
                self._engine.install_model(
                    _NAME, self._lm, max_batch=self._max_running, warm_up=False
                )
                self._engine.start_model(_NAME)
            self._advance()

    def submit(
        self,
        inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any],
        generation_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Queue a task and return its id.

        Args:
            inputs: Token ids ``[length]`` or ``[batch, length]``, or a mapping with ``input_ids``
                and an ``attention_mask`` that is 0 where a row is padded, on either side
                (``token_type_ids`` and ``labels`` of a collator are left aside).
            generation_kwargs: In place of the constructor's.
            timeout: Seconds to wait where the queue is full; ``None`` waits as long as it takes.

        Raises:
            ContextError: (``ValueError``) If a prompt is empty or too long, or the mapping has
                something that a text model cannot read. Nothing is queued then, as with the next.
            GenerationConfigError: (``ValueError``) If ``generation_kwargs`` are wrong.
            RequestQueueFullError: (``queue.Full``) If the queue was full for ``timeout`` seconds.
            ModelStateError: (``RuntimeError``) If it is full and ``start()`` has not been called,
                and after ``shutdown()``.
        """
        timeout = check_timeout("timeout", timeout)
        checked(_CHECKS, {"generation_kwargs": generation_kwargs}, GenerationConfigError)
        with self._lock.here:
            self._check_open()
        own = generation_kwargs or {}
        kwargs = {**self._defaults, **own}
        for new, whole in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
            if whole in own and new not in own:
                kwargs.pop(new, None)  # or the constructor's would go before it
        rows, mask = rows_of(inputs)
        prompts = [row[keep].tolist() for row, keep in zip(rows, mask, strict=True)]
        width = rows.shape[1]
        configs = [config_of_kwargs(self._base, kwargs, row, width) for row in range(len(prompts))]
        for prompt, config in zip(prompts, configs, strict=True):
            Prompt.check(self._lm, prompt, config)
            if config.num_beams > self._max_running:
                raise GenerationConfigError(
                    f"num_beams={config.num_beams} is more than max_running={self._max_running}"
                )
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock.here:
            while not self._is_shut_down and len(self._waiting) >= self._max_queue_size:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise RequestQueueFullError(f"{len(self._waiting)} tasks are waiting already")
                self._check_started("the queue is full")
                self._changed.wait(left)
            self._check_open()
            pad = self._pad(kwargs, configs[0])
            task = _Task(self._next_id, rows, prompts, configs, pad, Future())
            self._next_id += 1
            self._tasks[task.id] = task
            self._waiting.append(task)
            self._advance()
        return task.id

    def get_result(self, task_id: int, timeout: float | None = None) -> torch.Tensor:
        """Wait for a task and return its result, once.

        Returns:
            Token ids, int64 ``[batch × num_return_sequences, length]``, as ``model.generate``
            gives them: each row as it was given, its continuation, and padding.

        Raises:
            TimeoutError: If it is not complete after ``timeout`` seconds; it can be asked again.
            UnknownTaskError: (``KeyError``) If there is no such task, or its result has been
                collected.
            CancelledError: (of ``concurrent.futures``) If ``shutdown`` came first.
            ModelStateError: (``RuntimeError``) Before ``start()``, at once, even if another thread
                might call it later.
            Exception: What made the task fail.
        """
        timeout = check_timeout("timeout", timeout)
        with self._lock.here:
            task = self._task(task_id)
            if not (task.future.done() or self._is_shut_down):
                self._check_started(f"task {task_id} has not begun")
        try:
            error = task.future.exception(timeout)
        except CancelledError:
            self._collect(task_id)
            raise
        self._collect(task_id)
        if error is not None:
            raise error
        return task.future.result()

    def _collect(self, task_id: int) -> None:
        with self._lock.here:
            if self._tasks.pop(task_id, None) is None:
                raise UnknownTaskError(f"the result of task {task_id} has been collected")

    def _task(self, task_id: int) -> _Task:
        """Return a task whose result has not been collected; under the lock."""
        task = self._tasks.get(_CHECKS["task_id"]("task_id", task_id))
        if task is None:
            raise UnknownTaskError(f"no task {task_id}, or its result has been collected")
        return task

    def is_ready(self, task_id: int) -> bool:
        """Return whether ``get_result`` would not have to wait.

        Raises:
            UnknownTaskError: (``KeyError``) As there.
        """
        with self._lock.here:
            return self._task(task_id).future.done()

    def queue_size(self) -> int:
        """Return how many tasks wait to be begun."""
        with self._lock.here:
            return len(self._waiting)

    # ---------------------------------------------------------------- ending

    def shutdown(self, wait: bool = True, timeout: float | None = None) -> None:
        """End it; again has no effect. Results that are there can still be collected.

        In a fork of the process that first used it, nothing is done.

        Args:
            wait: Whether to complete the tasks first. Those that are not are cancelled.
            timeout: Seconds to wait for them, at most.
        """
        switch("wait", wait)
        timeout = check_timeout("timeout", timeout)
        if self._lock.is_foreign:
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock.here:
            self._is_shut_down = True
            self._changed.notify_all()
            while wait and self._engine is not None and (self._waiting or self._num_running):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            unfinished = list(self._tasks.values())
            self._waiting.clear()
            engine, self._engine = self._engine, None
        for task in unfinished:
            task.future.cancel()
        if engine is not None:
            engine.close()
        self._close_model()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
                f"{what}, since this AsyncGLM has not been started: call start(), or use it in a "
                f"with statement"
            )

    # ---------------------------------------------------------------- working

    def _advance(self) -> None:
        """Begin what there is room for; under the lock."""
        if self._engine is None:
            return
        while self._waiting and self._num_running < self._max_running:
            task = self._waiting.popleft()
            self._num_running += 1
            self._engine.loop.submit(self._run(task, self._engine))
        self._changed.notify_all()

    async def _run(self, task: _Task, engine: Engine) -> None:
        result: torch.Tensor | None = None
        error: BaseException | None = None
        try:
            if task.future.set_running_or_notify_cancel():
                result = await self._generate(task, engine)
        except BaseException as raised:  # a future is settled
            error = raised
            if not isinstance(raised, Exception):
                error = CancelledError("the task was cancelled by shutdown()")
        finally:
            if task.future.running():
                if error is None and result is not None:
                    task.future.set_result(result)
                else:
                    task.future.set_exception(error)
            with self._lock.here:
                self._num_running -= 1
                self._advance()

    async def _generate(self, task: _Task, engine: Engine) -> torch.Tensor:
        pairs = zip(task.prompts, task.configs, strict=True)
        found = await together(engine.generate(_NAME, prompt, config) for prompt, config in pairs)
        if any(text.finish_reason == "interrupted" for texts in found for text in texts):
            if self._is_shut_down:
                raise CancelledError("the task was cancelled by shutdown()")
            raise OutOfSlotsError("the task's keys and values do not fit into the model's memory")
        texts = [
            (row, generation.token_ids)
            for row, generations in zip(task.rows, found, strict=True)
            for generation in generations
        ]
        longest = max(len(token_ids) for _, token_ids in texts)
        return torch.stack(
            [
                torch.cat([row, torch.tensor(ids + [task.pad_token_id] * (longest - len(ids)))])
                for row, ids in texts
            ]
        )

    # ---------------------------------------------------------------- what is asked for

    def _pad(self, kwargs: Mapping[str, Any], config: GenerationConfig) -> int:
        """The token behind shorter texts of a task: as in ``model.generate``, or else 0."""
        eos = config.eos_token_id
        first = next(iter(eos), None) if isinstance(eos, Sequence) else eos
        found = (kwargs.get("pad_token_id"), self._base.pad_token_id, first)
        return next((token_id for token_id in found if token_id is not None), 0)


def _defaults_of(lm: AsyncLM) -> Any:
    """The model's own ``transformers.GenerationConfig``, or what its tokenizer says."""
    config = getattr(getattr(lm, "model", None), "generation_config", None)
    return config or transformers.GenerationConfig(
        eos_token_id=getattr(lm.tokenizer, "eos_token_id", None),
        pad_token_id=getattr(lm.tokenizer, "pad_token_id", None),
    )


_CHECKS = {
    "max_queue_size": integer(1),
    "max_running": optional(integer(1)),
    "generation_kwargs": optional(mapping),
    "task_id": integer(),
}


def _wrap(model: Any, tokenizer: Any) -> AsyncLM:
    if not hasattr(model, "get_input_embeddings"):
        hint = ": load_model_by_name takes a name" if isinstance(model, str) else ""
        raise OptionTypeError(
            "model must be a causal language model of transformers or an AsyncLM, "
            f"got {shown(model)}{hint}"
        )
    from genlm_backend.llm import AsyncTransformer

    if tokenizer is None:
        from tokenizers import Tokenizer, models

        # Nothing here looks at the bytes of a token; each id gets a word of its own.
        size = model.get_input_embeddings().num_embeddings
        tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(size)}, unk_token="<0>"))
    return AsyncTransformer(model, tokenizer)
