"""GenerationRequest: the handle of an engine's request, with the queue of its results."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, final

from genlm_backend.checks import timeout as check_timeout
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.generated import (
    GeneratedElements,
    GeneratedToken,
    Generation,
    GenerationStatus,
    RequestStatistics,
)
from genlm_backend.runtime.background_loop import BackgroundLoop
from genlm_backend.runtime.forks import ProcessLock

T = TypeVar("T")


@final
class Signal:
    """Wakes all callers that wait for a state to change; use it under the lock of that state."""

    def __init__(self) -> None:
        self._waiters: list[Future[None]] = []

    def waiter(self) -> Future[None]:
        """Return a future that the next ``notify()`` completes."""
        self._waiters = [waiter for waiter in self._waiters if not waiter.done()]
        self._waiters.append(Future())
        return self._waiters[-1]

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)


def wait_for(attempt: Callable[[], T | Future[None]], timeout: float | None) -> T | None:
    """Return the result of ``attempt``; block and retry if it is a future. ``None`` on timeout."""
    timeout = check_timeout("timeout", timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while isinstance(found := attempt(), Future):
        try:
            found.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if found.cancel():  # its Signal drops a cancelled waiter
                return None
    return found


async def await_for(attempt: Callable[[], T | Future[None]]) -> T:
    """Do the same as ``wait_for``, without a timeout and without blocking the event loop."""
    while isinstance(found := attempt(), Future):
        await asyncio.wrap_future(found)
    return found


@final
@dataclass(slots=True)
class _Text:
    """The tokens of a text so far, and how many of them have been read."""

    tokens: list[GeneratedToken] = field(default_factory=list)
    held_back: str = ""
    num_read: int = 0
    is_cut: bool = False  # its interruption or held-back text has not been read


@final
class ResultQueue:
    """The results of one request. Any method may be called from any thread.

    ``get``, ``get_with_timeout``, ``get_nowait``, ``aget``, ``for`` and ``async for`` read from the
    same queue, and each token is returned once. If a request has several texts, each result has
    tokens of one text. After the last token of an ended request, these methods return ``None`` and
    iterations stop; if the request failed, they raise its exception.
    In a fork of the engine's process, every method raises a ``ForkedError``.
    """

    def __init__(self, num_texts: int, num_prompt_tokens: int, with_logprobs: bool) -> None:
        self._lock = ProcessLock()
        self._lock.claim()  # the thread that writes to this queue lives in this process
        self._changed = Signal()
        self._texts = [_Text() for _ in range(num_texts)]
        self._scores: dict[int, float] = {}
        self._with_logprobs = with_logprobs
        self._status = GenerationStatus.INIT
        self._error: BaseException | None = None
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = self._num_host_tokens = 0
        self._started = time.monotonic()
        self._since: dict[str, float] = {}  # seconds from the start to each event

    # ---------------------------------------------------------------- reading

    def get(self) -> GeneratedElements | None:
        """Return the unread tokens of one text; block until there are any. ``None`` at the end."""
        return wait_for(self._next, None)

    def get_with_timeout(self, timeout_ms: float) -> GeneratedElements | None:
        """Return the unread tokens of one text, or ``None`` if none come in ``timeout_ms``.

        ``timeout_ms`` is in milliseconds. ``None`` is also returned at the end, when
        ``status().is_final`` is true.
        """
        milliseconds = check_timeout("timeout_ms", timeout_ms)
        return wait_for(self._next, None if milliseconds is None else milliseconds / 1000)

    def get_nowait(self) -> GeneratedElements | None:
        """Return the unread tokens of one text; ``None`` if there are none yet, or at the end."""
        with self._lock.here:
            return self._take()

    async def aget(self) -> GeneratedElements | None:
        """Await the unread tokens of one text; ``None`` at the end, as with ``get``."""
        return await await_for(self._next)

    async def __aiter__(self) -> AsyncIterator[GeneratedElements]:
        while (found := await self.aget()) is not None:
            yield found

    def __iter__(self) -> Iterator[GeneratedElements]:
        while (found := self.get()) is not None:
            yield found

    def status(self) -> GenerationStatus:
        """Return the request's progress, which no longer changes once ``is_final`` is true."""
        with self._lock.here:
            return self._status

    def generated_length(self) -> int:
        """Return the number of generated tokens in all texts, read or not."""
        with self._lock.here:
            return self._num_tokens()

    def statistics(self) -> RequestStatistics:
        """Return the request's times and token counts so far."""
        with self._lock.here:
            since, longest = self._since, max(len(text.tokens) for text in self._texts)
            per_token = None if longest < 2 else (since["last"] - since["first"]) / (longest - 1)
            return RequestStatistics(
                time_in_queue=since.get("begin"),
                time_to_first_token=since.get("first"),
                time_per_token=per_token,
                time_in_total=since.get("end", self._now()),
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=self._num_tokens(),
                num_cached_tokens=self._num_cached_tokens,
            )

    def _now(self) -> float:
        return time.monotonic() - self._started

    def _num_tokens(self) -> int:
        return sum(len(text.tokens) for text in self._texts)

    def _next(self) -> GeneratedElements | Future[None] | None:
        """Return unread tokens, ``None`` at the end, or a future of the next change."""
        with self._lock.here:
            found = self._take()
            is_over = found is not None or self._status.is_final
            return found if is_over else self._changed.waiter()

    def _take(self) -> GeneratedElements | None:
        """Return the unread tokens of the text with most unread; called under the lock."""
        unread = [len(text.tokens) - text.num_read for text in self._texts]
        news = [(n, -i) for i, n in enumerate(unread) if n or self._texts[i].is_cut]
        if not news:
            if self._error is not None:
                raise self._error
            return None
        index = -max(news)[1]
        text = self._texts[index]
        tokens = text.tokens[text.num_read :]
        text.num_read = len(text.tokens)
        reason = tokens[-1].finish_reason if tokens else None
        held_back = ""
        if text.is_cut:
            held_back, reason, text.is_cut = text.held_back, reason or "interrupted", False
        return GeneratedElements(
            token_ids=[token.token_id for token in tokens],
            text="".join(token.text for token in tokens) + held_back,
            logprobs=[cast(float, t.logprob) for t in tokens] if self._with_logprobs else None,
            top_logprobs=[t.top_logprobs for t in tokens] if self._with_logprobs else None,
            index=index,
            finish_reason=reason,
            num_cached_tokens=self._num_cached_tokens,
            num_host_tokens=self._num_host_tokens,
            tokens=tokens,
        )

    # ---------------------------------------------------------------- the end and the texts

    def wait_for_end(self, timeout: float | None) -> bool:
        """Block until the request has ended; return ``False`` after ``timeout`` seconds."""
        return bool(wait_for(self._end, timeout))

    async def await_end(self) -> None:
        await await_for(self._end)

    def _end(self) -> bool | Future[None]:
        with self._lock.here:
            return self._status.is_final or self._changed.waiter()

    @property
    def error(self) -> BaseException | None:
        """The error with which the request failed, or ``None``."""
        with self._lock.here:
            return self._error

    def generations(self) -> list[Generation]:
        """Return every text so far, read or not."""
        with self._lock.here:
            return [
                Generation.of_tokens(list(text.tokens), text.held_back, self._scores.get(index))
                for index, text in enumerate(self._texts)
            ]

    # ---------------------------------------------------------------- writing

    def begin(self) -> None:
        """Record the time of the first query to the model; later calls have no effect."""
        with self._lock.here:
            self._since.setdefault("begin", self._now())

    def finish_context(self, num_cached_tokens: int, num_host_tokens: int = 0) -> None:
        """Record that the prompt has been evaluated; later calls have no effect."""
        with self._lock.here:
            if self._status is GenerationStatus.INIT:
                self._status = GenerationStatus.CONTEXT_FINISHED
                self._num_cached_tokens = num_cached_tokens
                self._num_host_tokens = num_host_tokens
                self._changed.notify()

    def put(self, tokens: list[GeneratedToken]) -> None:
        if not tokens:
            return
        with self._lock.here:
            if self._status.is_final:
                return
            for token in tokens:
                self._texts[token.index].tokens.append(token)
            self._since["last"] = self._now()
            self._since.setdefault("first", self._since["last"])
            self._status = GenerationStatus.GENERATING
            self._changed.notify()

    def end(
        self,
        status: GenerationStatus,
        held_back: dict[int, str] | None = None,
        scores: dict[int, float] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Set the final status, held-back characters and scores; later calls have no effect."""
        with self._lock.here:
            if self._status.is_final:
                return
            for number, characters in (held_back or {}).items():
                self._texts[number].held_back = characters
                is_interrupted = status is GenerationStatus.INTERRUPTED
                self._texts[number].is_cut = is_interrupted or characters != ""
            self._scores.update(scores or {})
            self._status, self._error = status, error
            self._since["end"] = self._now()
            self._changed.notify()

    def drop(self) -> None:
        with self._lock.here:
            self._texts = [_Text() for _ in self._texts]
            self._error = None


@final
@dataclass(eq=False, repr=False)
class GenerationRequest:
    """A generation request, which an engine's ``start_request…`` methods return.

    ``await request`` waits for its end and returns its texts; iterating over ``request.queue``
    yields their tokens as they are generated.

    Attributes:
        id: Number of the request, unique in the process.
        prompt_token_ids: Token ids of the prompt.
        config: The configuration of its texts.
        queue: The queue of its results.
        model_name: Name of the model in its engine.
        loop: Event loop of its engine.
    """

    model_name: str
    prompt_token_ids: tuple[int, ...]
    config: GenerationConfig
    loop: BackgroundLoop
    id: int = field(init=False, default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        config = self.config
        self.queue = ResultQueue(config.n, len(self.prompt_token_ids), config.logprobs)

    def status(self) -> GenerationStatus:
        """Return the request's progress, which no longer changes once ``is_final`` is true."""
        return self.queue.status()

    def statistics(self) -> RequestStatistics:
        """Return the request's times and token counts so far."""
        return self.queue.statistics()

    @property
    def is_done(self) -> bool:
        """Whether the request has finished, failed or been interrupted."""
        return self.queue.status().is_final

    def result(self, timeout: float | None = None) -> list[Generation]:
        """Block until the request ends, and return its texts.

        An interrupted request returns its texts so far; an interrupted text's
        ``finish_reason`` is ``"interrupted"``.

        Raises:
            TimeoutError: If it has not ended after ``timeout`` seconds; the request goes on.
            Exception: The error with which the request failed.
        """
        if not self.queue.wait_for_end(timeout):
            raise TimeoutError(f"request {self.id} has not ended after {timeout} s")
        return self._texts()

    def __await__(self) -> Generator[Any, None, list[Generation]]:
        """Return ``result()`` at the end; the request goes on if the awaiting task is cancelled."""
        yield from self.queue.await_end().__await__()
        return self._texts()

    def _texts(self) -> list[Generation]:
        if self.queue.error is not None:
            raise self.queue.error
        return self.queue.generations()

    def __repr__(self) -> str:
        return (
            f"<GenerationRequest {self.id} of {self.model_name!r}: {self.status().value}, "
            f"{self.queue.generated_length()} tokens>"
        )
