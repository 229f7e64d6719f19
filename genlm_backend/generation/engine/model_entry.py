"""ModelEntry: an engine's model, its state, and its requests."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, final

from genlm_backend.backends.registry import check_loading, default_backend, load_model_by_name
from genlm_backend.checks import shown
from genlm_backend.checks import timeout as check_timeout
from genlm_backend.errors import (
    ContextError,
    GenerationConfigError,
    ModelStateError,
    RequestQueueFullError,
    RuntimeConfigError,
)
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.engine.request import GenerationRequest, Signal, await_for, wait_for
from genlm_backend.generation.engine.runtime_config import RuntimeConfig
from genlm_backend.generation.generated import GenerationStatus
from genlm_backend.generation.generation import make_sequences
from genlm_backend.generation.prompt import Chat, Prompt, ids_of
from genlm_backend.generation.text_sequence import TextSequence
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.queries.query import TokenIds
from genlm_backend.runtime.background_loop import BackgroundLoop
from genlm_backend.runtime.forks import ProcessLock


class ModelState(enum.Enum):
    """State of a model in an engine."""

    INSTALLED = "installed"
    """It is registered under its name, and has not been started."""
    RUNNING = "running"
    """It is in memory and takes requests, unless ``shut_model`` has been called."""
    STOPPED = "stopped"
    """It is in memory and takes no requests."""
    RELEASED = "released"
    """It is closed if the engine had loaded it; another model may be installed under its name."""


@dataclass(eq=False, slots=True)
class _Entry:
    """A sequence of a request: waiting, running, or ended before the request's other sequences."""

    request: GenerationRequest
    sequence: TextSequence
    submission: int = -1
    task: asyncio.Task[None] | None = None
    has_left: bool = False


Submission: TypeAlias = dict[GenerationRequest, list[_Entry]]


@final
class ModelEntry:
    """Loads and releases a model of an engine, admits its requests, and runs their sequences."""

    def __init__(
        self, name: str, source: AsyncLM | str, config: RuntimeConfig, loop: BackgroundLoop
    ) -> None:
        if isinstance(source, AsyncLM):
            config.check_model(source)
            config.check_loaded(source)
        elif isinstance(source, str):
            backend = config.backend or default_backend()
            self._loading = source, backend, config.loading_options(backend)
            check_loading(*self._loading)
        else:
            raise RuntimeConfigError(f"model must be an AsyncLM or a name, got {shown(source)}")
        self.name, self.state = name, ModelState.INSTALLED
        self._given = source if isinstance(source, AsyncLM) else None
        self._config, self._loop = config, loop
        self._lm: AsyncLM | None = None
        self._transition = threading.RLock()  # held during a whole start, stop or release
        self._lock = ProcessLock(is_reentrant=True)  # guards the lists below and calls of choose()
        self._lock.claim()  # the engine's thread lives in this process
        self._room = Signal()
        self._is_open = False
        self._requests: dict[GenerationRequest, list[_Entry]] = {}  # requests that have not ended
        self._waiting: deque[_Entry] = deque()  # may contain entries of ended requests
        self._running: list[_Entry] = []
        self._tasks: set[asyncio.Task[None]] = set()  # changed only by the loop's thread
        self._num_submissions = 0
        self._last_begun = -1

    # ---------------------------------------------------------------- states

    @property
    def lm(self) -> AsyncLM:
        if self._lm is None:
            raise ModelStateError(f"model {self.name!r} has been released")
        return self._lm

    def check_state(self, *allowed: ModelState, to: str) -> None:
        if self.state not in allowed:
            wanted = " or ".join(state.value for state in allowed)
            is_to_start = self.state in (ModelState.INSTALLED, ModelState.STOPPED)
            hint = f": start_model({self.name!r}) starts it" if is_to_start else ""
            raise ModelStateError(
                f"model {self.name!r} is {self.state.value}; to {to}, it must be {wanted}{hint}"
            )

    def start(self) -> None:
        """Load the model and warm it up, unless that is done already, and accept requests."""
        with self._transition:
            self.check_state(ModelState.INSTALLED, ModelState.STOPPED, to="start")
            if self._lm is None:
                self._lm = self._load()
            with self._lock.here:
                self._is_open = True
            self.state = ModelState.RUNNING

    def shut(self) -> None:
        """Refuse further requests, including those waiting in ``submit``; accepted ones go on."""
        with self._lock.here:
            self._is_open = False
            self._room.notify()

    def stop(self) -> None:
        """Interrupt the requests, refuse further ones, and clear the prefix cache."""
        with self._transition:
            self.check_state(ModelState.RUNNING, to="stop")
            self.state = ModelState.STOPPED
            with self._lock.here, contextlib.ExitStack() as stack:  # ends all, even if one raises
                self.shut()
                self._waiting.clear()
                for request in list(self._requests):
                    stack.callback(self.end, request)
            if not self._loop.is_closed:  # a closed loop has ended its tasks
                self._loop.submit(self._join()).result()
            self.lm.clear_cache()

    async def _join(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def release(self) -> None:
        with self._transition:
            self.check_state(ModelState.INSTALLED, ModelState.STOPPED, to="release")
            self.state = ModelState.RELEASED
            lm, given, self._lm, self._given = self._lm, self._given, None, None
            if lm is not None and lm is not given:
                lm.close()

    def close(self) -> None:
        """Stop and release the model from any state, once no other thread is changing its state."""
        with self._transition:
            try:
                if self.state is ModelState.RUNNING:
                    self.stop()
            finally:
                if self.state is not ModelState.RELEASED:
                    self.release()

    def _load(self) -> AsyncLM:
        lm = self._given or load_model_by_name(*self._loading)
        try:
            self._config.check_loaded(lm)
            if self._config.warm_up:
                _warm_up(lm, self._max_batch(lm), self._config.max_length)
        except BaseException:
            if lm is not self._given:
                lm.close()
            raise
        return lm

    def _max_batch(self, lm: AsyncLM) -> int:
        return self._config.max_batch or lm.batch_size

    # ---------------------------------------------------------------- admission

    def prepare(
        self, prompts: Iterable[tuple[str | Chat | TokenIds, GenerationConfig]]
    ) -> Submission:
        """Check prompts and configurations, and build their requests without starting them."""
        prepared: Submission = {}
        for prompt, config in prompts:
            lm, max_length = self.lm, self._config.max_length
            checked = Prompt.from_prompt(lm, ids_of(prompt), config, max_length)
            if config.num_beams > self._max_batch(lm):
                raise GenerationConfigError(
                    f"num_beams={config.num_beams} exceeds max_batch={self._max_batch(lm)}"
                )
            request = GenerationRequest(self.name, checked.token_ids, config, self._loop)
            sequences = make_sequences(lm, checked, config)
            prepared[request] = [_Entry(request, sequence) for sequence in sequences]
            needed = _num_tokens(prepared[request][:1])
            if lm.kv_capacity is not None and needed > lm.kv_capacity:
                raise ContextError(
                    f"the prompt of {len(checked.token_ids)} tokens and the longest text or beams "
                    f"after it need KV cache for {needed} tokens, but the cache has room for "
                    f"{lm.kv_capacity}: lower max_new_tokens, or raise kv_cache_bytes"
                )
        return prepared

    def submit(self, requests: Submission, timeout: float | None) -> None:
        """Accept all requests or none; block while the queue is full."""
        if not wait_for(partial(self._try_submit, requests), timeout):
            raise self._full()

    async def asubmit(self, requests: Submission, timeout: float | None) -> None:
        """Do the same as ``submit``, without blocking the event loop."""
        timeout = check_timeout("timeout", timeout)
        try:
            async with asyncio.timeout(timeout):
                await await_for(partial(self._try_submit, requests))
        except TimeoutError:
            raise self._full() from None

    def _full(self) -> RequestQueueFullError:
        return RequestQueueFullError(
            f"the queue of model {self.name!r} is full: "
            f"{self.num_waiting_submissions} submissions are waiting"
        )

    def _try_submit(self, requests: Submission) -> Literal[True] | Future[None]:
        """Accept the requests, or return a future that completes when the queue may have room."""
        with self._lock.here:
            if not self._is_open:
                raise ModelStateError(
                    f"model {self.name!r} accepts no requests: it has been stopped or shut"
                )
            waiting = [entry for entries in requests.values() for entry in entries]
            limit = self._config.max_queue_size
            is_full = limit is not None and self.num_waiting_submissions >= limit
            if is_full and (self._waiting or not self._fits(waiting[0])):
                return self._room.waiter()
            for entry in waiting:
                entry.submission = self._num_submissions
            self._num_submissions += 1
            self._requests |= requests
            self._waiting += waiting
            try:
                self._admit()
            except BaseException:  # the caller gets no handles, so stop the requests
                for request in requests:
                    self.end(request)
                raise
        return True

    @property
    def num_running(self) -> int:
        with self._lock.here:
            return len(self._running)

    @property
    def num_waiting_submissions(self) -> int:
        """Number of submissions without a started sequence."""
        with self._lock.here:
            waiting = {e.submission for e in self._waiting if e.request in self._requests}
            return len(waiting - {self._last_begun})

    def _admit(self) -> None:
        """Start waiting sequences in order until one does not fit; called under the lock."""
        while self._waiting:
            entry = self._waiting[0]
            is_wanted = entry.request in self._requests
            if is_wanted and not self._fits(entry):
                break
            self._waiting.popleft()
            if is_wanted:
                self._running.append(entry)
                self._last_begun = entry.submission
                self._loop.call_soon(self._start, entry)
        self._room.notify()

    def _fits(self, entry: _Entry) -> bool:
        together, lm = [*self._running, entry], self.lm
        has_rows = sum(one.sequence.width for one in together) <= self._max_batch(lm)
        # Room for the maximum length of every sequence, so that none runs out of KV cache later.
        has_memory = lm.kv_capacity is None or _num_tokens(together) <= lm.kv_capacity
        return not self._running or (has_rows and has_memory)

    # ---------------------------------------------------------------- running a sequence

    def _start(self, entry: _Entry) -> None:
        """Create a sequence's task, unless its request has ended; called on the loop's thread."""
        if entry.request in self._requests:
            entry.task = asyncio.get_running_loop().create_task(self._work(entry))
            self._tasks.add(entry.task)
            entry.task.add_done_callback(self._tasks.discard)

    def _cancel(self, entry: _Entry) -> None:
        if entry.task is not None:
            entry.task.cancel()

    async def _work(self, entry: _Entry) -> None:
        try:
            await self._generate(entry)
        except asyncio.CancelledError:
            self.end(entry.request)
        except Exception as error:  # fails this request only
            self.end(entry.request, GenerationStatus.FAILED, error)
        finally:
            self._leave(entry)

    async def _generate(self, entry: _Entry) -> None:
        """Generate a sequence until it finishes or its request ends."""
        queue, sequence, lm = entry.request.queue, entry.sequence, self.lm
        queue.begin()
        prompt = sequence.asked_of(sequence.contexts[0])
        # The counts are queued before the query, so they do not include the query's prefill.
        count = partial(lm.num_cached_tokens, prompt, sequence.lora_name)
        asked = [count(), count(tier="host")] if lm.has_host_tier else [count()]
        counts, _ = await asyncio.gather(asyncio.gather(*asked), sequence.ask())
        queue.finish_context(*counts)
        while True:
            with self._lock.here:
                if entry.request not in self._requests:
                    return
                queue.put(sequence.choose())
                if sequence.is_finished:
                    return
            await sequence.ask()

    def _leave(self, entry: _Entry) -> None:
        """Free an ended sequence's place; finish the request if all its sequences have ended."""
        request = entry.request
        with self._lock.here:
            self._running = [other for other in self._running if other is not entry]
            entry.has_left = True
            entries = self._requests.get(request, [])
            if entries and all(other.has_left for other in entries):
                self._settle(request, GenerationStatus.FINISHED)
            else:
                self._admit()

    # ---------------------------------------------------------------- ending

    def end(
        self,
        request: GenerationRequest,
        status: GenerationStatus = GenerationStatus.INTERRUPTED,
        error: Exception | None = None,
    ) -> None:
        """End a request, unless it has ended or all its sequences are finished."""
        with self._lock.here:
            entries = self._requests.get(request, [])
            if not all(entry.sequence.is_finished for entry in entries):
                for entry in entries:
                    self._loop.call_soon(self._cancel, entry)
                self._settle(request, status, error)

    def _settle(
        self, request: GenerationRequest, status: GenerationStatus, error: Exception | None = None
    ) -> None:
        """Put a request's last tokens into its queue; end the request even if a sequence raises."""
        entries = self._requests.pop(request)
        self._running = [entry for entry in self._running if entry.request is not request]
        held_back: dict[int, str] = {}
        scores: dict[int, float] = {}
        try:
            for entry in entries:
                tokens, characters = entry.sequence.cut()
                request.queue.put(tokens)
                held_back |= characters
                scores |= entry.sequence.scores
        finally:
            request.queue.end(status, held_back, scores, error)
            self._admit()


def _num_tokens(entries: Sequence[_Entry]) -> int:
    """Return the most KV-cache tokens that sequences may need; a request's prompt counts once."""
    prompts = {entry.request: len(entry.request.prompt_token_ids) for entry in entries}
    # The last token of a text is never evaluated.
    new = [
        own.sequence.width * (own.sequence.max_length - 1 - prompts[own.request]) for own in entries
    ]
    return sum(prompts.values()) + sum(new)


def _warm_up(lm: AsyncLM, max_batch: int, max_length: int | None) -> None:
    """Evaluate a context of the maximum length, if any, then ``max_batch`` of at most 8 tokens."""
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
