"""Closing: what is closed at the end of a ``with`` or ``async with`` statement."""

from __future__ import annotations

import abc
import asyncio
from types import TracebackType
from typing import Self


class Closing(abc.ABC):
    """An object with a ``close()`` that blocks."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it; again has no effect."""

    async def aclose(self) -> None:
        """Do as ``close()``, leaving the event loop free meanwhile."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
