"""Closing: the base of objects that a ``with`` or ``async with`` statement closes."""

from __future__ import annotations

import abc
import asyncio
from typing import Self


class Closing(abc.ABC):
    """An object with a blocking ``close()``; a sync and async context manager."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the object and free its resources; a second call has no effect."""

    async def aclose(self) -> None:
        """Call ``close()`` on another thread, so that it does not block the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
