"""Engine: models by name, and requests for texts of them, from coroutines and threads alike."""

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
_PROMPTS = sequence(lambda _, prompt: prompt, "several prompts in a list")


@final
class Engine(OfOneProcess, Closing):
    """Holds models by name and generates texts for whoever asks, batched together.

    Requests live on an event loop of the engine's own, on a thread of its own: they are started,
    read, awaited and stopped from any coroutine and any thread, and go on while those do other
    things. At most ``max_batch`` texts of a model are under way, and no more than have room in its
    memory at their longest; the others wait in order.

    A name that no model has is an ``UnknownModelError`` (``KeyError``), and a request of another
    engine an ``UnknownRequestError`` (``ValueError``), in every method that takes one.

    Use it in a ``with`` or ``async with`` statement, or call ``close()``. It belongs to the process
    that made it: a fork of that process gets a ``ForkedError``.

    Attributes:
        loop: The event loop that requests live on.
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
        """Make a model known; nothing is loaded yet.

        Args:
            name: Name of the model in requests.
            model: What ``load_model_by_name`` takes, or a model that is loaded: such a one stays
                its owner's, who closes it.
            runtime_config: How the model is run.
            **fields: Fields of the configuration, in place of its own.

        Raises:
            ModelStateError: (``RuntimeError``) If the name is in use.
            RuntimeConfigError: (``ValueError``) If the configuration does not go with the model.
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
        """Load a model if need be, and let requests in; blocks until it is ready.

        Loading allocates the memory of keys and values. Unless ``warm_up`` is off, a context of the
        maximum length and a batch of the maximum size are computed once, so that what does not
        fit into memory fails here.

        Raises:
            ModelStateError: (``RuntimeError``) Unless it is installed or stopped.
            Exception: What loading or computing raised; the state has not changed then.
        """
        self._model(name).start()

    def shut_model(self, name: str) -> None:
        """Let no more requests for a model in, and tell whoever waits for room; the others go on.

        Raises:
            ModelStateError: (``RuntimeError``) Unless it is running.
        """
        self._served(name).shut()

    def stop_model(self, name: str) -> None:
        """Interrupt a model's requests with what they have, and take no more; blocks until done.

        Raises:
            ModelStateError: (``RuntimeError``) Unless it is running.
        """
        self._model(name).stop()

    def release_model(self, name: str) -> None:
        """Return a model's memory; a model that was given loaded is not closed.

        Raises:
            ModelStateError: (``RuntimeError``) Unless it is installed or stopped.
        """
        self._model(name).release()

    def model_state(self, name: str) -> ModelState:
        """Return the state of a model."""
        return self._model(name).state

    @property
    def models(self) -> dict[str, ModelState]:
        """Every name, and what its model is ready for."""
        with self._lock.here:
            return {name: model.state for name, model in self._models.items()}

    def num_running(self, name: str) -> int:
        """Return how many drafts of a model are under way: texts, or beam searches of several."""
        return self._served(name).num_running

    def num_waiting(self, name: str) -> int:
        """Return how many requests for a model wait; those submitted together count as one."""
        return self._served(name).num_waiting_submissions

    def _served(self, name: str) -> ModelEntry:
        model = self._model(name)
        model.check_state(ModelState.RUNNING, to="take requests")
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
        """Start a request for texts after token ids, and return its handle at once.

        Where as many submissions wait as ``max_queue_size`` allows, this blocks until there is
        room; a coroutine gives ``timeout=0``, or uses ``generate`` and ``stream``.

        Args:
            model_name: Name of a running model.
            input_ids: A list, or an array or tensor ``[length]`` or ``[1, length]``.
            config: How; by default greedily, to the model's limit.
            timeout: Seconds to wait for room, at most; 0 refuses at once.
            **fields: Fields of the configuration, in place of its own.

        Raises:
            ModelStateError: (``RuntimeError``) If the model is not running.
            ContextError: (``ValueError``) If the prompt is empty, leaves no room for a token, or
                memory has no room for it and the longest text after it.
            ContextTypeError: (``TypeError``) If its ids are not integers.
            GenerationConfigError: (``ValueError``) If the configuration does not go with the model,
                or has more beams than a batch has rows.
            RequestQueueFullError: (``queue.Full``) If there was no room in time.
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
        """Start a request for each of several prompts with one submission, all or none of them.

        They count as one of the submissions that wait.

        Args:
            model_name: Name of a running model.
            prompts: Texts, chats or token ids.
            configs: The configuration of each, or one for all.
            timeout: Seconds to wait for room, at most; 0 refuses at once.

        Raises:
            OptionTypeError: (``TypeError``) If ``prompts`` or ``configs`` are not several.
            GenerationConfigError: (``ValueError``) If there is not a configuration for each prompt;
                otherwise as ``start_request_ids``.
        """
        timeout = check_timeout("timeout", timeout)
        prompts = _PROMPTS("prompts", prompts)
        if isinstance(configs, GenerationConfig):
            configs = [configs] * len(prompts)
        configs = _CONFIGS("configs", configs)
        if len(configs) != len(prompts):
            raise GenerationConfigError(
                f"configs must be one for each of {len(prompts)} prompts, got {len(configs)}"
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
        """Start a request for texts after a text or a chat, or one for each of several.

        Several are all checked before any is started, and each is a submission of its own.
        Where one of them finds no room, those that have been started are interrupted.

        Args:
            model_name: Name of a running model.
            text: A text, with the special tokens that the model's tokenizer puts around texts; a
                chat's messages, ``[{"role": …, "content": …}, …]``, which the model's chat template
                puts together; or several of either.
            config: How, as for ``start_request_ids``; so are ``timeout``, of each, and ``fields``.

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
        except BaseException:  # nobody would have their handles
            for request in requests:
                self.stop_request(request)
            raise
        return requests[0] if is_one else requests

    def stop_request(self, request: GenerationRequest) -> None:
        """Interrupt a request: what there is can be read. One that has ended stays as it is."""
        self._check_request(request)
        with self._lock.here:
            model = self._models[request.model_name]
        model.end(request)

    def release_request(self, request: GenerationRequest) -> None:
        """Interrupt a request and forget what it has generated; again has no effect."""
        self.stop_request(request)
        request.queue.drop()

    def sync_request(self, request: GenerationRequest, timeout: float | None = None) -> None:
        """Block until a request has ended, in whatever way; a coroutine awaits the request.

        Raises:
            TimeoutError: If it has not after ``timeout`` seconds; it goes on.
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
            raise UnknownRequestError(f"{shown(request)} is no request of this engine")

    # ---------------------------------------------------------------- short forms

    async def generate(
        self,
        model_name: str,
        prompt: str | Chat | TokenIds,
        config: GenerationConfig | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[Generation]:
        """Return the texts after a prompt, awaiting room; cancelling interrupts the request.

        Raises:
            RequestQueueFullError: (``queue.Full``) If there was no room in ``timeout`` seconds;
                otherwise as ``start_request_ids`` and the request itself.
        """
        served, prepared = self._prepare(model_name, [prompt], config, fields)
        await served.asubmit(prepared, timeout)
        (request,) = prepared
        try:
            return await request
        except GeneratorExit:  # of the garbage collector, maybe where its thread holds a lock
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
        """Yield pieces of a text as they come; leaving the iteration interrupts the request.

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
        """Stop and release every model and end the engine's thread; again has no effect.

        What one model raises keeps no other from ending. A second thread waits for the first.
        In a fork of the engine's process, nothing is done.
        """
        if self._lock.is_foreign:
            return
        with self._lock.here:
            self._is_closed = True  # from here on nobody installs or starts anything
            models = list(self._models.values())
        with self._closing, contextlib.ExitStack() as stack:
            stack.callback(self.loop.close)
            for model in models:
                stack.callback(model.close)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be asked: after ``close()``, and at interpreter exit."""
        return self._is_closed or self.loop.is_closed

    def _check_open(self) -> None:
        if self.is_closed:
            raise ModelStateError("this engine has been closed")
