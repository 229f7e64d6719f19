"""Engine: named models, and generation requests from coroutines and threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, final, overload

from genlm_backend.checks import checked, instance, near_names, optional, sequence, shown, text
from genlm_backend.checks import timeout as check_timeout
from genlm_backend.errors import (
    GenerationConfigError,
    ModelStateError,
    RuntimeConfigError,
    UnknownModelError,
    UnknownRequestError,
)
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.engine.model_entry import ModelEntry, ModelState, Submission
from genlm_backend.generation.engine.request import GenerationRequest
from genlm_backend.generation.engine.runtime_config import RuntimeConfig
from genlm_backend.generation.generated import GeneratedElements, Generation
from genlm_backend.generation.generation import check_streamable, make_config
from genlm_backend.generation.prompt import Chat, check_is_ids, check_texts, is_chat
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.queries.query import TokenIds
from genlm_backend.runtime.background_loop import BackgroundLoop
from genlm_backend.runtime.closing import Closing
from genlm_backend.runtime.forks import OfOneProcess, ProcessLock

_CHECKS = {"name": text, "runtime_config": optional(instance(RuntimeConfig, "a RuntimeConfig"))}
_CONFIGS = sequence(instance(GenerationConfig, "one"), "GenerationConfigs, one for each prompt")
_PROMPTS = sequence(lambda _, prompt: prompt, "a list of prompts")


@final
class Engine(OfOneProcess, Closing):
    """Holds models by name, and batches the generation requests of all callers.

    Requests run on the engine's own event loop, in its own thread. Any coroutine or thread may
    start, read, await and stop them, and do other work meanwhile. At most ``max_batch`` texts and
    beams of a model run at once, and only if the KV cache has room for their maximum lengths.
    Further ones wait in order.

    Methods raise an ``UnknownModelError`` (``KeyError``) if the name was never installed,
    and an ``UnknownRequestError`` (``ValueError``) for a request of another engine.

    Use an engine in a ``with`` or ``async with`` statement, or call ``close()``. It belongs to the
    process that created it: a call in a fork of that process raises a ``ForkedError``.

    Attributes:
        loop: The event loop that runs the requests.
    """

    def __init__(self) -> None:
        self.loop = BackgroundLoop("engine")
        self._lock = ProcessLock(is_reentrant=True)
        self._lock.claim()
        self._closing = threading.Lock()
        self._models: dict[str, ModelEntry] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        models = ", ".join(f"{name} {own.state.value}" for name, own in [*self._models.items()])
        return f"<Engine{' that is closed' if self.is_closed else ''}: {models or 'no model'}>"

    # ---------------------------------------------------------------- models

    def install_model(
        self,
        name: str,
        model: AsyncLM | str,
        runtime_config: RuntimeConfig | None = None,
        **fields: Any,
    ) -> None:
        """Register a model under a name, without loading it.

        Args:
            name: Name of the model in requests.
            model: A name that ``load_model_by_name`` takes, or a loaded model, which the engine
                does not close.
            runtime_config: The options for running the model.
            **fields: Fields that override those of ``runtime_config``.

        Raises:
            ModelStateError: (``RuntimeError``) If the name is in use.
            RuntimeConfigError: (``ValueError``) If the configuration does not fit the model.
        """
        checked(_CHECKS, {"name": name, "runtime_config": runtime_config}, RuntimeConfigError)
        config = (runtime_config or RuntimeConfig()).replace(**fields)
        installed = ModelEntry(name, model, config, self.loop)
        with self._lock.here:
            self._check_open()
            if name in self._models:
                self._models[name].check_state(
                    ModelState.RELEASED, to="install another of that name"
                )
            self._models[name] = installed

    def start_model(self, name: str) -> None:
        """Load a model if it is not loaded, and accept requests; block until it is ready.

        Loading allocates the KV cache. Unless ``warm_up`` is off, the first start also evaluates
        a context of the maximum length and a batch of the maximum size, so that a lack of memory
        raises an error in this call.

        Raises:
            ModelStateError: (``RuntimeError``) Unless the model is installed or stopped.
            Exception: The error of loading or evaluating; the model's state stays as it was.
        """
        self._model(name).start()

    def shut_model(self, name: str) -> None:
        """Refuse further requests for a model; accepted ones go on.

        Callers that wait for room in the queue get a ``ModelStateError``.

        Raises:
            ModelStateError: (``RuntimeError``) Unless the model is running.
        """
        self._served(name).shut()

    def stop_model(self, name: str) -> None:
        """Interrupt a model's requests, which keep their texts so far, and refuse further ones.

        Blocks until all of the model's requests have ended, then clears the model's cache.

        Raises:
            ModelStateError: (``RuntimeError``) Unless the model is running.
        """
        self._model(name).stop()

    def release_model(self, name: str) -> None:
        """Close a model and free its name; a model that was passed in already loaded stays open.

        Raises:
            ModelStateError: (``RuntimeError``) Unless the model is installed or stopped.
        """
        self._model(name).release()

    def model_state(self, name: str) -> ModelState:
        """Return a model's state: installed, running, stopped or released."""
        return self._model(name).state

    @property
    def models(self) -> dict[str, ModelState]:
        """The state of each model, by name."""
        with self._lock.here:
            return {name: model.state for name, model in self._models.items()}

    def num_running(self, name: str) -> int:
        """Return the number of a model's running sequences: texts, or whole beam searches."""
        return self._served(name).num_running

    def num_waiting(self, name: str) -> int:
        """Return how many submissions wait for a model; each may hold several requests."""
        return self._served(name).num_waiting_submissions

    def _served(self, name: str) -> ModelEntry:
        model = self._model(name)
        model.check_state(ModelState.RUNNING, to="accept requests")
        return model

    def _model(self, name: str) -> ModelEntry:
        with self._lock.here:
            self._check_open()
            if not isinstance(name, str) or name not in self._models:
                near = near_names(name, self._models, quoted=True)
                raise UnknownModelError(f"no model {shown(name)} is installed{near}")
            return self._models[name]

    # ---------------------------------------------------------------- requests

    def start_request_ids(
        self,
        model_name: str,
        input_ids: TokenIds,
        config: GenerationConfig | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> GenerationRequest:
        """Start a request for texts after token ids; return its handle without waiting for texts.

        Blocks while the queue is full. A coroutine should pass ``timeout=0``, or use ``generate``
        or ``stream``.

        Args:
            model_name: Name of a running model.
            input_ids: The prompt: a list, or an array or tensor ``[length]`` or ``[1, length]``.
            config: The configuration; by default, decoding is greedy, up to the model's limit.
            timeout: Seconds to wait, at most, while the queue is full; 0 raises an error at once.
            **fields: Fields that override those of ``config``.

        Raises:
            ModelStateError: (``RuntimeError``) If the model is not running.
            ContextError: (``ValueError``) If the prompt is empty or leaves no room for a token, or
                if the KV cache has no room for it and the longest text after it.
            ContextTypeError: (``TypeError``) If ``input_ids`` are not integers.
            GenerationConfigError: (``ValueError``) If the configuration does not fit the model,
                or ``num_beams`` exceeds ``max_batch``.
            RequestQueueFullError: (``queue.Full``) If the queue was full for ``timeout`` seconds.
        """
        check_is_ids(input_ids)
        served, prepared = self._prepare(model_name, [input_ids], config, fields)
        served.submit(prepared, timeout)
        return next(iter(prepared))

    def start_requests(
        self,
        model_name: str,
        prompts: Sequence[str | Chat | TokenIds],
        configs: Sequence[GenerationConfig] | GenerationConfig,
        *,
        timeout: float | None = None,
    ) -> list[GenerationRequest]:
        """Submit one request per prompt together: the engine accepts all of them, or none.

        They count as one submission in the queue.

        Args:
            model_name: Name of a running model.
            prompts: A list of prompts: texts, chats or sequences of token ids.
            configs: One configuration per prompt, or one for all.
            timeout: Seconds to wait, at most, while the queue is full; 0 raises an error at once.

        Raises:
            OptionTypeError: (``TypeError``) If ``prompts`` is not a list, or ``configs`` is neither
                a list nor a configuration.
            GenerationConfigError: (``ValueError``) If ``configs`` and ``prompts`` differ in number;
                otherwise as ``start_request_ids``.
        """
        timeout = check_timeout("timeout", timeout)
        prompts = _PROMPTS("prompts", prompts)
        if isinstance(configs, GenerationConfig):
            configs = [configs] * len(prompts)
        configs = _CONFIGS("configs", configs)
        if len(configs) != len(prompts):
            raise GenerationConfigError(
                f"configs must have {len(prompts)} entries, one for each prompt, got {len(configs)}"
            )
        served = self._served(model_name)
        prepared = served.prepare(zip(prompts, configs, strict=True))
        if prepared:
            served.submit(prepared, timeout)
        return list(prepared)

    @overload
    def start_request_text(
        self,
        model_name: str,
        text: str | Chat,
        config: GenerationConfig | None = ...,
        *,
        timeout: float | None = ...,
        **fields: Any,
    ) -> GenerationRequest: ...

    @overload
    def start_request_text(
        self,
        model_name: str,
        text: Iterable[str | Chat],
        config: GenerationConfig | None = ...,
        *,
        timeout: float | None = ...,
        **fields: Any,
    ) -> list[GenerationRequest]: ...

    def start_request_text(
        self,
        model_name: str,
        text: str | Chat | Iterable[str | Chat],
        config: GenerationConfig | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> GenerationRequest | list[GenerationRequest]:
        """Start a request for texts after a text or a chat, or one request for each of several.

        All prompts are checked before any request starts, and each request is its own submission.
        If the queue is full for one of them, the requests already started are interrupted.

        Args:
            model_name: Name of a running model.
            text: A text, to which the model's tokenizer adds its special tokens; a chat's messages,
                ``[{"role": …, "content": …}, …]``, which the model's chat template renders; or
                several texts or chats.
            config: The configuration, as for ``start_request_ids``.
            timeout: Seconds to wait, at most, for each request while the queue is full.
            **fields: Fields that override those of ``config``.

        Raises:
            OptionTypeError: (``TypeError``) If ``text`` is none of these.
            ContextError: (``ValueError``) If the model's tokenizer does not encode text, or has no
                chat template; otherwise as ``start_request_ids``.
        """
        is_one = isinstance(text, str) or is_chat(text)
        texts: Sequence[Any] = [text] if is_one else check_texts("text", text)
        served, prepared = self._prepare(model_name, texts, config, fields)
        requests = list(prepared)
        try:
            for request, entries in prepared.items():
                served.submit({request: entries}, timeout)
        except BaseException:  # the caller gets no handles, so stop the requests
            for request in requests:
                self.stop_request(request)
            raise
        return requests[0] if is_one else requests

    def stop_request(self, request: GenerationRequest) -> None:
        """Interrupt a request; its tokens so far can be read. An ended request stays as it is."""
        self._check_request(request)
        with self._lock.here:
            model = self._models[request.model_name]
        model.end(request)

    def release_request(self, request: GenerationRequest) -> None:
        """Interrupt a request and drop its results; a second call has no effect."""
        self.stop_request(request)
        request.queue.drop()

    def sync_request(self, request: GenerationRequest, timeout: float | None = None) -> None:
        """Block until a request has finished, failed or been interrupted.

        A coroutine should await the request instead.

        Raises:
            TimeoutError: If it has not ended after ``timeout`` seconds; the request goes on.
        """
        self._check_request(request)
        if not request.queue.wait_for_end(timeout):
            raise TimeoutError(f"request {request.id} has not ended after {timeout} s")

    def _prepare(
        self,
        model_name: str,
        prompts: Iterable[str | Chat | TokenIds],
        config: GenerationConfig | None,
        fields: dict[str, Any],
    ) -> tuple[ModelEntry, Submission]:
        served, config = self._served(model_name), make_config(config, fields)
        return served, served.prepare((prompt, config) for prompt in prompts)

    def _check_request(self, request: GenerationRequest) -> None:
        if not isinstance(request, GenerationRequest) or request.loop is not self.loop:
            raise UnknownRequestError(f"{shown(request)} is not a request of this engine")

    # ---------------------------------------------------------------- generate and stream

    async def generate(
        self,
        model_name: str,
        prompt: str | Chat | TokenIds,
        config: GenerationConfig | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[Generation]:
        """Return the texts after a prompt; a full queue does not block the caller's event loop.

        Cancelling the coroutine interrupts the request.

        Raises:
            RequestQueueFullError: (``queue.Full``) If the queue was full for ``timeout`` seconds;
                otherwise as ``start_request_ids``, or the error with which the request failed.
        """
        served, prepared = self._prepare(model_name, [prompt], config, fields)
        await served.asubmit(prepared, timeout)
        (request,) = prepared
        try:
            return await request
        except GeneratorExit:  # from garbage collection, perhaps under a lock: let the loop stop it
            self.loop.call_soon(self.stop_request, request)
            raise
        except BaseException:
            self.stop_request(request)
            raise

    async def stream(
        self,
        model_name: str,
        prompt: str | Chat | TokenIds,
        config: GenerationConfig | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> AsyncIterator[GeneratedElements]:
        """Generate one text and yield its new tokens; leaving the iteration interrupts the request.

        Raises:
            GenerationConfigError: (``ValueError``) If ``n`` or ``num_beams`` is not 1; otherwise
                as ``generate``.
        """
        check_streamable(make_config(config, fields))
        served, prepared = self._prepare(model_name, [prompt], config, fields)
        await served.asubmit(prepared, timeout)
        (request,) = prepared
        try:
            async for elements in request.queue:
                yield elements
        finally:
            self.stop_request(request)

    # ---------------------------------------------------------------- ending

    def close(self) -> None:
        """Stop and release every model and end the engine's thread; a second call has no effect.

        Every model is released, even if releasing one raises an error. A concurrent call waits for
        the first. In a fork of the engine's process, this does nothing.
        """
        if self._lock.is_foreign:
            return
        with self._lock.here:
            self._is_closed = True  # from here on, methods that take a model's name raise
            models = list(self._models.values())
        with self._closing, contextlib.ExitStack() as stack:
            stack.callback(self.loop.close)
            for model in models:
                stack.callback(model.close)

    @property
    def is_closed(self) -> bool:
        """Whether the engine refuses requests: after ``close()``, and at interpreter exit."""
        return self._is_closed or self.loop.is_closed

    def _check_open(self) -> None:
        if self.is_closed:
            raise ModelStateError("this engine has been closed")
