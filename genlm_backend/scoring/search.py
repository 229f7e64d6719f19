"""Searches of tokenisations: which contexts are asked next, and how each wave of them is asked."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.model.context import Context
from genlm_backend.model.query import Query
from genlm_backend.model.readout import Readout
from genlm_backend.model.token_readouts import ReadoutOf

T = TypeVar("T")
Question: TypeAlias = tuple[Context, ReadoutOf]
"""A context, and a maker of the readout that is asked of its row."""

Search: TypeAlias = Generator[list[Question], list[Any], T]
"""A search that yields questions, is sent their answers, and returns what it has found."""


async def searched(lm: AsyncLM, search: Search[T], lora_name: str | None) -> T:
    """Return the finding of a search, whose waves of questions are awaited one after another."""
    try:
        questions = next(search)
        while True:
            contexts, readout = _asked(questions)
            questions = search.send(await lm.batch_read(contexts, readout, lora_name))
    except StopIteration as found:
        return found.value


def searched_sync(lm: AsyncLM, search: Search[T], lora_name: str | None) -> T:
    """Return the same finding as ``searched``, blocking the calling thread."""
    try:
        questions = next(search)
        while True:
            contexts, readout = _asked(questions)
            questions = search.send(lm.batch_read_sync(contexts, readout, lora_name))
    except StopIteration as found:
        return found.value


def _asked(questions: Sequence[Question]) -> tuple[list[Context], ReadoutOf]:
    """Return the contexts of questions, and a maker of their readouts one after another."""
    makers = iter([make for _, make in questions])

    def readout(query: Query) -> Readout:
        return next(makers)(query)

    return [context for context, _ in questions], readout
