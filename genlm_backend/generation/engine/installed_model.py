"""InstalledModel: a model of an engine, and the states it goes through."""

from __future__ import annotations

import enum
import random
import threading
from typing import final

from genlm_backend.backends.registry import check_loading, default_backend, load_model_by_name
from genlm_backend.checks import shown
from genlm_backend.errors import ModelStateError, RuntimeConfigError
from genlm_backend.generation.engine.request import GenerationRequest
from genlm_backend.generation.engine.runtime_config import RuntimeConfig
from genlm_backend.generation.engine.served_model import ServedModel
from genlm_backend.generation.generated import GenerationStatus
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.runtime.background_loop import BackgroundLoop


class ModelState(enum.Enum):
    """State of a model of an engine."""

    INSTALLED = "installed"
    """Its name and configuration are known."""
    RUNNING = "running"
    """It takes requests."""
    STOPPED = "stopped"
    """It is in memory and takes none."""
    RELEASED = "released"
    """Its memory has been returned; the name is free."""


@final
class InstalledModel:
    """A name, what is behind it, and the only ways from one state to another.

    One transition at a time; they may take long, and requests for other models do not wait.
    """

    def __init__(
        self, name: str, source: AsyncLM | str, config: RuntimeConfig, loop: BackgroundLoop
    ) -> None:
        if isinstance(source, AsyncLM):
            config.check_model(source)
            config.check_loaded(source)
        elif isinstance(source, str):
            backend = config.backend or default_backend()
            check_loading(source, backend, config.loading_options(backend))
        else:
            raise RuntimeConfigError(f"model must be an AsyncLM or a name, got {shown(source)}")
        self.name, self.state = name, ModelState.INSTALLED
        self._source: AsyncLM | str | None = source
        self._config, self._loop = config, loop
        self._served: ServedModel | None = None
        self._lock = threading.Lock()

    @property
    def served(self) -> ServedModel:
        """The model that takes its requests."""
        served = self._served
        self.check_state(ModelState.RUNNING, to="take requests")
        assert served is not None
        return served

    def start(self) -> None:
        """Load it if need be, warm it up, and let requests in."""
        with self._lock:
            self.check_state(ModelState.INSTALLED, ModelState.STOPPED, to="start")
            if self._served is None:
                self._served = self._load()
            self._served.open()
            self.state = ModelState.RUNNING

    def interrupt(self, request: GenerationRequest) -> None:
        """Interrupt a request; one that has ended stays as it is."""
        if (served := self._served) is not None:
            served.end(request, GenerationStatus.INTERRUPTED)

    def stop(self) -> None:
        """Interrupt its requests and take no more."""
        with self._lock:
            self.check_state(ModelState.RUNNING, to="stop")
            self._stop()

    def release(self) -> None:
        """Return its memory."""
        with self._lock:
            self.check_state(ModelState.INSTALLED, ModelState.STOPPED, to="release")
            self._release()

    def end(self) -> None:
        """Stop and release it, whatever its state, after a transition that is under way."""
        with self._lock:
            try:
                if self.state is ModelState.RUNNING:
                    self._stop()
            finally:
                if self.state is not ModelState.RELEASED:
                    self._release()

    def _stop(self) -> None:
        self.state = ModelState.STOPPED
        assert self._served is not None
        self._served.stop()

    def _release(self) -> None:
        self.state = ModelState.RELEASED
        served, self._served = self._served, None
        source, self._source = self._source, None
        if served is not None:
            served.hand_back(is_own=served.lm is not source)

    def check_state(self, *allowed: ModelState, to: str) -> None:
        """Raise a ``ModelStateError`` unless it is in one of some states."""
        if self.state not in allowed:
            wanted = " or ".join(state.value for state in allowed)
            raise ModelStateError(
                f"model {self.name!r} is {self.state.value}; to {to} it must be {wanted}"
            )

    def _load(self) -> ServedModel:
        config, source = self._config, self._source
        if isinstance(source, AsyncLM):
            lm = source
        else:
            assert source is not None
            backend = config.backend or default_backend()
            lm = load_model_by_name(source, backend, config.loading_options(backend))
        try:
            config.check_loaded(lm)
            served = ServedModel(self.name, lm, config, self._loop)
            if config.warm_up:
                _warm_up(lm, served.max_batch, config.max_length)
        except BaseException:
            if lm is not source:
                lm.close()
            raise
        return served


def _warm_up(lm: AsyncLM, max_batch: int, max_length: int | None) -> None:
    """Ask for the longest context and the largest batch there can be."""
    bounds = [None if max_length is None else max_length - 1, lm.max_length]
    known = [bound for bound in bounds if bound is not None]
    unusable = {*lm.undefined_ids, lm.contexts.image_token_id}
    usable = [i for i in range(len(lm.byte_vocab)) if i not in unusable]
    generator = random.Random(0)
    if known:
        lm.next_token_logprobs_sync(generator.choices(usable, k=min(known)))
    length = min([8, *known])
    contexts = [generator.choices(usable, k=length) for _ in range(max_batch)]
    lm.batch_next_token_logprobs_sync(contexts)
    lm.clear_cache()
