"""ResultQueue: what a request has generated, for threads and coroutines to read as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import cast, final

from genlm_backend.checks import timeout as check_timeout
from genlm_backend.generation.engine.signal import Signal
from genlm_backend.generation.engine.status import (
    GeneratedElements,
    GenerationStatus,
    RequestStatistics,
)
from genlm_backend.generation.generated import GeneratedToken, Generation
from genlm_backend.runtime.forks import ProcessLock


@final
class _Written:
    """One text as it was written, and how far it has been read."""

    def __init__(self) -> None:
        self.tokens: list[GeneratedToken] = []
        self.rest = ""
        self.is_cut = False
        self.num_read = 0
        self.is_end_read = False

    def has_news(self) -> bool:
        return self.num_read < len(self.tokens) or (self.is_cut and not self.is_end_read)


@final
class ResultQueue:
    """The results of one request. Any method may be called from any thread.

    ``get``, ``get_with_timeout``, ``get_nowait``, ``aget`` and both kinds of iteration take from
    the same queue: each token is handed out once. Where a request has several texts, what is
    handed out belongs to one of them. When everything has been handed out and nothing can follow,
    they return ``None`` and iterations end; those of a request that failed raise its exception.
    In a fork of its process every method raises a ``ForkedError``.
    """

    def __init__(self, num_texts: int, num_prompt_tokens: int, with_logprobs: bool) -> None:
        self._lock = ProcessLock()
        self._lock.claim()  # whoever writes to it lives here
        self._changed = Signal()
        self._texts = [_Written() for _ in range(num_texts)]
        self._scores: dict[int, float] = {}
        self._with_logprobs = with_logprobs
        self._status = GenerationStatus.INIT
        self._error: BaseException | None = None
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = self._num_host_tokens = 0
        self._num_preemptions = 0
        self._started = time.monotonic()
        self._begun: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._ended: float | None = None

    # ---------------------------------------------------------------- reading

    def get(self) -> GeneratedElements | None:
        """Return what is new, waiting until there is something; ``None`` at the end."""
        return self._wait(None)

    def get_with_timeout(self, timeout_ms: float) -> GeneratedElements | None:
        """Return what is new, waiting so many milliseconds; ``None`` if there is nothing.

        ``status().is_final`` tells whether anything can follow.
        """
        milliseconds = check_timeout("timeout_ms", timeout_ms)
        return self._wait(None if milliseconds is None else milliseconds / 1000)

    def get_nowait(self) -> GeneratedElements | None:
        """Return what is new; ``None`` if there is nothing."""
        with self._lock.here:
            return self._take()

    async def aget(self) -> GeneratedElements | None:
        """Do as ``get``, leaving the event loop free meanwhile."""
        while True:
            with self._lock.here:
                if (found := self._take()) is not None or self._status.is_final:
                    return found
                waiter = self._changed.waiter()
            await asyncio.wrap_future(waiter)

    async def __aiter__(self) -> AsyncIterator[GeneratedElements]:
        while (found := await self.aget()) is not None:
            yield found

    def __iter__(self) -> Iterator[GeneratedElements]:
        while (found := self.get()) is not None:
            yield found

    def status(self) -> GenerationStatus:
        """Return how far the request has come."""
        with self._lock.here:
            return self._status

    def generated_length(self) -> int:
        """Return how many tokens there are, of all texts, read or not."""
        with self._lock.here:
            return self._num_tokens()

    def statistics(self) -> RequestStatistics:
        """Return times and counts."""
        with self._lock.here:
            now = time.monotonic() if self._ended is None else self._ended
            longest = max((len(text.tokens) for text in self._texts), default=0)
            per_token = None
            if self._first is not None and self._last is not None and longest > 1:
                per_token = (self._last - self._first) / (longest - 1)
            return RequestStatistics(
                time_in_queue=self._since_start(self._begun),
                time_to_first_token=self._since_start(self._first),
                time_per_token=per_token,
                time_in_total=now - self._started,
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=self._num_tokens(),
                num_cached_tokens=self._num_cached_tokens,
                num_preemptions=self._num_preemptions,
            )

    def _since_start(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._started

    def _num_tokens(self) -> int:
        return sum(len(text.tokens) for text in self._texts)

    def _wait(self, timeout: float | None) -> GeneratedElements | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock.here:
                if (found := self._take()) is not None or self._status.is_final:
                    return found
                waiter = self._changed.waiter()
            if not wait_until(waiter, deadline):
                return None

    def _take(self) -> GeneratedElements | None:
        """Hand out the news of the text that has most of them; under the lock."""
        news = [(len(t.tokens) - t.num_read, -i) for i, t in enumerate(self._texts) if t.has_news()]
        if not news:
            if self._error is not None:
                raise self._error
            return None
        index = -max(news)[1]
        text = self._texts[index]
        tokens = text.tokens[text.num_read :]
        text.num_read = len(text.tokens)
        reason = tokens[-1].finish_reason if tokens else None
        rest = ""
        if text.is_cut and not text.is_end_read:
            rest, reason, text.is_end_read = text.rest, reason or "interrupted", True
        return GeneratedElements(
            token_ids=[token.token_id for token in tokens],
            text="".join(token.text for token in tokens) + rest,
            logprobs=[cast(float, t.logprob) for t in tokens] if self._with_logprobs else None,
            top_logprobs=[t.top_logprobs for t in tokens] if self._with_logprobs else None,
            index=index,
            finish_reason=reason,
            num_cached_tokens=self._num_cached_tokens,
            num_host_tokens=self._num_host_tokens,
            tokens=tokens,
        )

    # ---------------------------------------------------------------- for the request

    def wait_for_end(self, timeout: float | None) -> bool:
        """Block until nothing can follow; return whether it came to that in ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (waiter := self._end_waiter()) is not None:
            if not wait_until(waiter, deadline):
                return False
        return True

    async def await_end(self) -> None:
        """Wait until nothing can follow, leaving the event loop free."""
        while (waiter := self._end_waiter()) is not None:
            await asyncio.wrap_future(waiter)

    def _end_waiter(self) -> Future[None] | None:
        with self._lock.here:
            return None if self._status.is_final else self._changed.waiter()

    @property
    def error(self) -> BaseException | None:
        """What the request failed with."""
        with self._lock.here:
            return self._error

    def generations(self) -> list[Generation]:
        """Return every text as it is now, read or not."""
        with self._lock.here:
            return [
                Generation.of_tokens(list(text.tokens), text.rest, self._scores.get(index))
                for index, text in enumerate(self._texts)
            ]

    # ---------------------------------------------------------------- writing

    def begin(self) -> None:
        """Note that the model is being asked; once."""
        with self._lock.here:
            if self._begun is None:
                self._begun = time.monotonic()

    def finish_context(self, num_cached_tokens: int, num_host_tokens: int = 0) -> None:
        """Note that the prompt has been computed; once."""
        with self._lock.here:
            if self._status is GenerationStatus.INIT:
                self._status = GenerationStatus.CONTEXT_FINISHED
                self._num_cached_tokens = num_cached_tokens
                self._num_host_tokens = num_host_tokens
                self._changed.notify()

    def preempt(self) -> None:
        """Note that a text has to rest."""
        with self._lock.here:
            self._num_preemptions += 1

    def put(self, tokens: list[tuple[int, GeneratedToken]]) -> None:
        """Add tokens, each with its text's number."""
        if not tokens:
            return
        with self._lock.here:
            if self._status.is_final:
                return
            for number, token in tokens:
                self._texts[number].tokens.append(token)
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._status = GenerationStatus.GENERATING
            self._changed.notify()

    def end(
        self,
        status: GenerationStatus,
        rests: list[tuple[int, str]] | None = None,
        scores: dict[int, float] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Settle the request, once: what comes later has no effect.

        Args:
            status: A final one.
            rests: The characters that are left of texts that were cut off.
            scores: Scores of the texts that have one, by their number.
            error: The exception that it failed with.
        """
        with self._lock.here:
            if self._status.is_final:
                return
            for number, rest in rests or ():
                self._texts[number].rest = rest
                self._texts[number].is_cut = status is GenerationStatus.INTERRUPTED or rest != ""
            self._scores.update(scores or {})
            self._status, self._error = status, error
            self._ended = time.monotonic()
            self._changed.notify()

    def drop(self) -> None:
        """Forget what was generated."""
        with self._lock.here:
            for text in self._texts:
                text.tokens, text.num_read, text.rest, text.is_cut = [], 0, "", False
            self._error = None


def wait_until(waiter: Future[None], deadline: float | None) -> bool:
    """Block for a signal; return whether it came before ``deadline`` (of ``time.monotonic``)."""
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        waiter.result(left)
    except TimeoutError:
        return not waiter.cancel()  # so that whoever notifies can forget it
    return True
