"""ServedModel: one model of an engine, and the requests that it works at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, final

from genlm_backend.errors import (
    BatcherClosedError,
    GenerationConfigError,
    ModelStateError,
    RequestQueueFullError,
)
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.draft import Draft
from genlm_backend.generation.engine.request import GenerationRequest
from genlm_backend.generation.engine.roster import Entry, Phase, Roster, RosterChange, Settlement
from genlm_backend.generation.engine.runtime_config import RuntimeConfig
from genlm_backend.generation.engine.signal import Signal, await_for, wait_for
from genlm_backend.generation.generated import GenerationStatus
from genlm_backend.generation.generation import make_drafts
from genlm_backend.generation.prompt import Chat, Prompt, ids_of
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.model.query import TokenIds
from genlm_backend.runtime.background_loop import BackgroundLoop
from genlm_backend.runtime.forks import ProcessLock

Submission: TypeAlias = dict[GenerationRequest, list[Draft]]
"""Requests that are let in together, and the drafts of each."""

_Entry: TypeAlias = Entry[GenerationRequest, Draft]
_Change: TypeAlias = RosterChange[GenerationRequest, Draft]


class _DraftTask(NamedTuple):
    """The task of a draft, and an event that is cleared while the draft is preempted."""

    task: asyncio.Task[None]
    may_run: asyncio.Event


@final
class ServedModel:
    """Works at requests for one model, as its roster decides.

    The lock guards the roster, and every token that is chosen; the tasks live on the background
    loop. Both are the engine's business: nothing here is called by a program.
    """

    def __init__(self, name: str, lm: AsyncLM, config: RuntimeConfig, loop: BackgroundLoop) -> None:
        self.name, self.config, self.loop = name, config, loop
        self._lm: AsyncLM | None = lm
        self.max_batch = config.max_batch or lm.batch_size
        self._lock = ProcessLock(is_reentrant=True)
        self._lock.claim()  # whoever works at it lives here
        self._roster = Roster[GenerationRequest, Draft](
            self.max_batch,
            config.max_queue_size,
            lm.kv_capacity,
            keeps_contexts=config.prefix_cache,
        )
        self._tasks: dict[_Entry, _DraftTask] = {}  # on the loop
        self._room = Signal()

    @property
    def lm(self) -> AsyncLM:
        """The model, until it is handed back."""
        if self._lm is None:
            raise ModelStateError(f"model {self.name!r} has been released")
        return self._lm

    # ---------------------------------------------------------------- admission

    def open(self) -> None:
        """Let requests in."""
        with self._lock.here:
            self._roster.is_open = True

    def shut(self) -> None:
        """Let no more requests in, and tell whoever waits for room; the others go on."""
        with self._lock.here:
            self._roster.is_open = False
            self._room.notify()

    def prepare(
        self, prompts: Iterable[tuple[str | Chat | TokenIds, GenerationConfig]]
    ) -> Submission:
        """Check everything about requests, and start nothing."""
        prepared: Submission = {}
        for prompt, config in prompts:
            checked = Prompt.check(self.lm, ids_of(prompt), config, self.config.max_length)
            drafts = make_drafts(self.lm, checked, config)
            if drafts[0].width > self.max_batch:
                raise GenerationConfigError(
                    f"num_beams={config.num_beams} does not fit into max_batch={self.max_batch}"
                )
            prepared[GenerationRequest(self.name, checked.token_ids, config, self.loop)] = drafts
        return prepared

    def submit(self, requests: Submission, timeout: float | None) -> None:
        """Take requests, all or none of them. Block while ``max_queue_size`` submissions wait."""
        if not wait_for(partial(self._try_submit, requests), timeout):
            raise self._full()

    async def asubmit(self, requests: Submission, timeout: float | None) -> None:
        """Do as ``submit``, leaving the event loop free."""
        try:
            async with asyncio.timeout(timeout):
                await await_for(partial(self._try_submit, requests))
        except TimeoutError:
            raise self._full() from None

    def _full(self) -> RequestQueueFullError:
        return RequestQueueFullError(
            f"{self.num_waiting_submissions} submissions wait for model {self.name!r} already"
        )

    def _try_submit(self, requests: Submission) -> Literal[True] | Future[None]:
        """Take requests, or return what tells when to try again."""
        with self._lock.here:
            if not self._roster.is_open:
                raise ModelStateError(
                    f"model {self.name!r} has been stopped or shut: no request is let in"
                )
            try:
                self._roster.capacity = self.lm.kv_capacity
                change = self._roster.submit(requests)
                if change is None:
                    return self._room.waiter()
                self._carry_out(change)
            except BaseException:  # nobody would have their handles
                for request in requests:
                    self.end(request, GenerationStatus.INTERRUPTED)
                raise
        return True

    @property
    def num_running(self) -> int:
        """Number of drafts under way."""
        with self._lock.here:
            return self._roster.num_running

    @property
    def num_waiting_submissions(self) -> int:
        """Number of submissions of which nothing has begun."""
        with self._lock.here:
            return self._roster.num_waiting_submissions

    # ---------------------------------------------------------------- what the roster decides

    def _carry_out(self, change: _Change | None) -> None:
        """Carry out a change that the roster has decided; under the lock."""
        if change is None:
            return
        with contextlib.ExitStack() as stack:  # each is settled, whatever another's drafts do
            for settlement in change.settle:
                stack.callback(_settle, settlement)
            for entry in change.cancel:
                self.loop.call_soon(self._cancel, entry)
            for entry in change.preempt:
                entry.request.queue.preempt()
                self.loop.call_soon(self._set_may_run, entry, False)
            for entry in change.start:
                self.loop.call_soon(self._start, entry)
            for entry in change.resume:
                self.loop.call_soon(self._set_may_run, entry, True)
            self._room.notify()

    def _start(self, entry: _Entry) -> None:
        """Give a draft its task; on the loop, as are the next two."""
        if entry.is_wanted:
            may_run = asyncio.Event()
            may_run.set()
            task = asyncio.get_running_loop().create_task(self._work(entry, may_run))
            self._tasks[entry] = _DraftTask(task, may_run)
            task.add_done_callback(lambda _: self._tasks.pop(entry))

    def _set_may_run(self, entry: _Entry, may_run: bool) -> None:
        """Resume or preempt a draft."""
        if entry in self._tasks:
            event = self._tasks[entry].may_run
            event.set() if may_run else event.clear()

    def _cancel(self, entry: _Entry) -> None:
        # One that has noticed is not cancelled, or what it forgets last would stay.
        if entry in self._tasks and entry.phase is Phase.CANCELLED:
            self._tasks[entry].task.cancel()

    # ---------------------------------------------------------------- working at a draft

    async def _work(self, entry: _Entry, may_run: asyncio.Event) -> None:
        try:
            await self._generate(entry, may_run)
        except asyncio.CancelledError:
            self.end(entry.request, GenerationStatus.INTERRUPTED)
        except Exception as error:  # the request's own, and nobody else's
            self.end(entry.request, GenerationStatus.FAILED, error)
        finally:
            await self._leave(entry)

    async def _generate(self, entry: _Entry, may_run: asyncio.Event) -> None:
        """Generate a draft to its end, or until its request has ended."""
        queue, draft = entry.request.queue, entry.draft
        queue.begin()
        await self._ask_first(entry)
        while True:
            with self._lock.here:
                if not entry.is_wanted:
                    return
                queue.put(draft.choose())
                if draft.is_finished:
                    self._roster.finished(entry)
                    return
                self._roster.capacity = self.lm.kv_capacity
                self._carry_out(self._roster.grew(entry))
            await self._forget(entry)
            await may_run.wait()
            await self._ask(entry)

    async def _ask_first(self, entry: _Entry) -> None:
        draft = entry.draft
        # The counts are queued before the question, and so are taken before the prompt is computed.
        num_cached, num_on_host, _ = await asyncio.gather(
            self.lm.num_cached_tokens(draft.asked()[0], draft.lora_name),
            self._num_on_host(draft),
            self._ask(entry),
        )
        entry.request.queue.finish_context(num_cached, num_on_host)

    async def _num_on_host(self, draft: Draft) -> int:
        if not self.lm.has_host_tier:
            return 0
        return await self.lm.num_cached_tokens(draft.asked()[0], draft.lora_name, tier="host")

    async def _ask(self, entry: _Entry) -> None:
        with self._lock.here:
            self._roster.asks(entry)
        await entry.draft.ask()

    async def _leave(self, entry: _Entry) -> None:
        with self._lock.here:
            self._roster.noticed(entry)
        try:
            await self._forget(entry)
        finally:
            with self._lock.here:
                self._carry_out(self._roster.left(entry))

    async def _forget(self, entry: _Entry) -> None:
        """Forget what a draft has left behind and nobody else is at."""
        lora_name = entry.draft.lora_name
        with self._lock.here:
            contexts = self._roster.left_behind(entry)
        with contextlib.suppress(BatcherClosedError):  # there is nothing left to forget
            for context in contexts:
                with self._lock.here:
                    keep = self._roster.num_needed(context, lora_name)
                await self.lm.forget(entry.draft.asked_of(context), lora_name, keep)

    # ---------------------------------------------------------------- ending

    def end(
        self, request: GenerationRequest, status: GenerationStatus, error: Exception | None = None
    ) -> None:
        """Settle a request before it has finished; again has no effect."""
        with self._lock.here:
            self._carry_out(self._roster.ended(request, status, error))

    def stop(self) -> None:
        """Interrupt every request with what it has, let nobody in, and clear the cache."""
        with self._lock.here:
            self._carry_out(self._roster.close())
        if not self.loop.is_closed:  # or it has ended them all
            self.loop.submit(self._join()).result()
        self.lm.clear_cache()

    def hand_back(self, is_own: bool) -> None:
        """Let go of the model, and close it if it is the engine's own."""
        lm, self._lm = self.lm, None
        if is_own:
            lm.close()

    async def _join(self) -> None:
        await asyncio.gather(*(one.task for one in self._tasks.values()), return_exceptions=True)


def _settle(settlement: Settlement[GenerationRequest, Draft]) -> None:
    """Hand out what there is of a request and end it, whatever its drafts do; under the lock."""
    queue = settlement.request.queue
    held_back: list[tuple[int, str]] = []
    scores: dict[int, float] = {}
    try:
        for entry in settlement.entries:
            tokens, characters = entry.draft.cut()
            queue.put(tokens)
            held_back += characters
            scores |= entry.draft.scores
    finally:
        queue.end(settlement.status, held_back, scores, settlement.error)
