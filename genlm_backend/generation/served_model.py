"""ServedModel: one model of an engine, and the requests that it works at."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from genlm_backend.errors import BatcherClosedError, ModelStateError, RequestQueueFullError
from genlm_backend.generation.background_loop import BackgroundLoop
from genlm_backend.generation.draft import Draft
from genlm_backend.generation.request import GenerationRequest
from genlm_backend.generation.result_queue import wait_until
from genlm_backend.generation.runtime_config import RuntimeConfig
from genlm_backend.generation.schedule import Plan, make_plan, num_shared
from genlm_backend.generation.signal import Signal
from genlm_backend.generation.status import GenerationStatus
from genlm_backend.llm.base import AsyncLM
from genlm_backend.process_lock import ProcessLock


@dataclass(eq=False, slots=True)
class _Run:
    """A draft of a request, at work or at rest."""

    request: GenerationRequest
    draft: Draft
    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False
    is_running: bool = False
    is_at_work: bool = False  # from its task's first step on; it forgets what it read, in the end
    is_ending: bool = False
    is_gone: bool = False
    asked: list[list[int]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether it takes no further step, and so no place."""
        return self.is_ending or self.draft.is_finished

    @property
    def contexts(self) -> list[list[int]]:
        return self.draft.contexts

    @property
    def width(self) -> int:
        return self.draft.width

    @property
    def lora_name(self) -> str | None:
        return self.draft.lora_name


class ServedModel:
    """Works at requests for one model: in order, so many at once, within its memory.

    The lock guards who runs and who waits, and every token that is written; the tasks live on the
    background loop. Both are the engine's business: nothing here is called by a program.

    Args:
        name: The engine's.
        lm: The model.
        config: How it is run.
        loop: Where its requests live.
    """

    def __init__(self, name: str, lm: AsyncLM, config: RuntimeConfig, loop: BackgroundLoop) -> None:
        self.name, self.config, self.loop = name, config, loop
        self._lm: AsyncLM | None = lm
        self.max_batch = config.max_batch or getattr(lm, "batch_size", 20)
        self._lock = ProcessLock(is_reentrant=True)
        self._runs: dict[_Run, None] = {}  # in the order of arrival
        self._of_request: dict[GenerationRequest, list[_Run]] = {}
        self._running: set[_Run] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = Signal()
        self._num_tokens = 0
        self._is_open = False

    @property
    def lm(self) -> AsyncLM:
        """The model, until it is released."""
        if self._lm is None:
            raise ModelStateError(f"model {self.name!r} has been released")
        return self._lm

    # ---------------------------------------------------------------- admission

    def open(self) -> None:
        """Let requests in."""
        with self._lock.here:
            self._is_open = True

    def submit(
        self, request: GenerationRequest, drafts: list[Draft], timeout: float | None
    ) -> None:
        """Take a request, blocking while as many wait as may.

        Raises:
            RequestQueueFullError: (``queue.Full``) If that took ``timeout`` seconds.
            ModelStateError: (``RuntimeError``) If the model has been stopped.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (waiter := self._try_submit(request, drafts)) is not None:
            if not wait_until(waiter, deadline):
                raise self._full()

    async def asubmit(
        self, request: GenerationRequest, drafts: list[Draft], timeout: float | None
    ) -> None:
        """Do as ``submit``, leaving the event loop free."""
        try:
            async with asyncio.timeout(timeout):
                while (waiter := self._try_submit(request, drafts)) is not None:
                    await asyncio.wrap_future(waiter)
        except TimeoutError:
            raise self._full() from None

    def _full(self) -> RequestQueueFullError:
        return RequestQueueFullError(
            f"{self.num_waiting} requests wait for model {self.name!r} already"
        )

    def _try_submit(self, request: GenerationRequest, drafts: list[Draft]) -> Future[None] | None:
        """Take a request, or return what tells when to try again."""
        with self._lock.here:
            if not self._is_open:
                raise ModelStateError(f"model {self.name!r} has been stopped")
            runs = [_Run(request, draft) for draft in drafts]
            limit = self.config.max_queue_size
            if limit is not None and self.num_waiting >= limit and not self._would_run(runs[0]):
                return self._room.waiter()
            self._runs.update(dict.fromkeys(runs))
            self._of_request[request] = runs
            self._reschedule()
            return None

    def _would_run(self, run: _Run) -> bool:
        plan = make_plan(itertools.chain(self._runs, [run]), self.max_batch, self.lm.kv_capacity)
        return run in plan.running

    @property
    def num_running(self) -> int:
        """Texts under way."""
        with self._lock.here:
            return sum(run.is_running and not run.is_leaving for run in self._runs)

    @property
    def num_waiting(self) -> int:
        """Requests of which nothing has begun."""
        with self._lock.here:
            requests = self._of_request.values()
            return sum(not any(run.has_begun for run in runs) for runs in requests)

    # ---------------------------------------------------------------- who works

    def _reschedule(self) -> None:
        """Let whoever may work go on, and the others rest; under the lock."""
        with contextlib.ExitStack() as stack:  # each is settled, whatever another's drafts do
            while (plan := self._plan()).hopeless:
                for request in {run.request: None for run in plan.hopeless}:
                    runs = self._take_off(request)
                    stack.callback(_settle, request, runs, GenerationStatus.INTERRUPTED)
            self._follow(plan)

    def _plan(self) -> Plan[_Run]:
        wanted = (run for run in self._runs if not run.is_leaving)
        return make_plan(wanted, self.max_batch, self.lm.kv_capacity)

    def _follow(self, plan: Plan[_Run]) -> None:
        self._num_tokens = plan.num_tokens
        for run in plan.running:
            if not run.is_running:
                run.is_running = run.has_begun = True
                self.loop.call_soon(self._go, run)
        for run in self._running.difference(plan.running):
            if not (run.is_gone or run.is_leaving):
                run.is_running = False
                run.request.queue.preempt()
                self.loop.call_soon(run.may_go.clear)
        self._running = set(plan.running)
        self._room.notify()

    def _go(self, run: _Run) -> None:
        """Begin or go on; on the loop."""
        if run.task is None and not run.is_gone:
            run.task = asyncio.get_running_loop().create_task(self._work(run))
            self._tasks.add(run.task)
            run.task.add_done_callback(self._tasks.discard)
        run.may_go.set()

    async def _work(self, run: _Run) -> None:
        request, draft = run.request, run.draft
        try:
            run.is_at_work = True
            request.queue.begin()
            await self._read_first(run)
            while True:
                run.asked = draft.contexts
                with self._lock.here:
                    if run.is_gone:
                        break
                    request.queue.put(draft.write())
                    if draft.is_finished:
                        break
                    self._grow(draft)
                if not self.config.prefix_cache and draft.width > 1:
                    await self._forget([c for c in run.asked if c not in draft.contexts], run)
                await run.may_go.wait()
                await draft.read()
        except asyncio.CancelledError:
            self.end(request, GenerationStatus.INTERRUPTED)
        except Exception as error:  # the request's own, and nobody else's
            self.end(request, GenerationStatus.FAILED, error)
        run.is_ending = True
        try:
            if not self.config.prefix_cache:
                await self._forget([*run.asked, *draft.contexts], run)
        finally:
            with self._lock.here:
                self._leave(run)

    async def _read_first(self, run: _Run) -> None:
        draft = run.draft
        # Both are queued at once: what is counted is what the reading finds.
        count = self.lm.num_cached_tokens(draft.contexts[0], draft.lora_name)
        num_cached, _ = await asyncio.gather(count, draft.read())
        run.request.queue.finish_context(num_cached)

    def _grow(self, draft: Draft) -> None:
        """Count the tokens of one step; under the lock."""
        self._num_tokens += draft.width
        capacity = self.lm.kv_capacity
        if capacity is not None and self._num_tokens > capacity:
            self._reschedule()

    def _leave(self, run: _Run) -> None:
        """Take a finished run off, and settle its request with the last; under the lock."""
        if run.is_gone:
            return
        run.is_gone = True
        del self._runs[run]
        if all(other.is_gone for other in self._of_request[run.request]):
            del self._of_request[run.request]
            run.request.queue.end(GenerationStatus.FINISHED, scores=run.draft.scores())
        self._reschedule()

    # ---------------------------------------------------------------- ending

    def end(
        self, request: GenerationRequest, status: GenerationStatus, error: Exception | None = None
    ) -> None:
        """Settle a request before it has finished; again has no effect."""
        with self._lock.here:
            runs = self._take_off(request)
            if runs:
                try:
                    _settle(request, runs, status, error)
                finally:
                    self._reschedule()

    def _take_off(self, request: GenerationRequest) -> list[_Run]:
        """Return the runs of a request that are to end, which nobody plans with; under the lock."""
        runs = [run for run in self._of_request.get(request, []) if not run.is_gone]
        if all(run.draft.is_finished for run in runs):  # there is none, or they are leaving
            return []
        del self._of_request[request]
        for run in runs:
            run.is_gone = True
            del self._runs[run]
            self.loop.call_soon(_cancel, run)
        return runs

    def stop(self) -> None:
        """Interrupt every request with what it has, let nobody in, and clear the cache."""
        with self._lock.here:
            self._is_open = False
            for request in reversed(list(self._of_request)):  # nobody gets a place for nothing
                self.end(request, GenerationStatus.INTERRUPTED)
        if not self.loop.is_closed:  # or it has ended them all
            self.loop.submit(self._join()).result()
        self.lm.clear_cache()

    def release(self, is_own: bool) -> None:
        """Let go of the model, and close it if it is the engine's own."""
        lm, self._lm = self.lm, None
        if is_own:
            lm.close()

    async def _join(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---------------------------------------------------------------- without a prefix cache

    async def _forget(self, contexts: list[list[int]], run: _Run) -> None:
        """Forget what is cached of a run's contexts and nobody else is at."""
        lora_name = run.draft.lora_name
        with contextlib.suppress(BatcherClosedError):  # there is nothing left to forget
            for context in contexts:
                with self._lock.here:
                    keep = max((num_shared(context, c) for c in self._needed(lora_name)), default=0)
                await self.lm.forget(context, lora_name, keep)

    def _needed(self, lora_name: str | None) -> list[list[int]]:
        """The contexts of whoever is at work and goes on; under the lock."""
        drafts = [run.draft for run in self._runs if run.is_at_work and not run.is_ending]
        return [c for draft in drafts if draft.lora_name == lora_name for c in draft.contexts]


def _settle(
    request: GenerationRequest,
    runs: list[_Run],
    status: GenerationStatus,
    error: Exception | None = None,
) -> None:
    """Hand out what there is of a request and end it, whatever its drafts do; under the lock."""
    rests: list[tuple[int, str]] = []
    try:
        for run in runs:
            request.queue.put(run.draft.unwritten())
            rests += run.draft.rest()
    finally:
        request.queue.end(status, rests, error=error)


def _cancel(run: _Run) -> None:
    """Wake up a run that is gone; on the loop."""
    if run.task is not None and not run.is_ending:  # or what it forgets last would stay
        run.task.cancel()
