"""Outcomes of an evaluation: results, or an error that a future can carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from genlm_backend.checks import shown
from genlm_backend.errors import EvaluationError


def evaluated(
    evaluate: Callable[[list[Any]], Any], queries: list[Any]
) -> tuple[list[Any], BaseException | None]:
    """Return the results of a batch, or the error that all of its queries meet.

    No frame that the error remembers knows the error, or it would stay until the garbage collector
    comes by.
    """
    if not queries:
        return [], None
    try:
        return _results(evaluate(queries), len(queries)), None
    except BaseException as raised:  # everything must settle the futures, nothing else
        return [], presentable(raised)


def _results(found: Any, num_queries: int) -> list[Any]:
    is_array = hasattr(found, "__len__") and hasattr(found, "__getitem__")
    if not is_array or isinstance(found, Mapping):
        raise EvaluationError(f"evaluate returned {shown(found)}, and no sequence")
    results = list(found)
    if len(results) != num_queries:
        raise EvaluationError(f"evaluate returned {len(results)} results for {num_queries} queries")
    return results


def is_error(result: object) -> TypeGuard[Exception]:
    """Whether a result is an exception; asks its type alone, as an object may raise when asked."""
    return issubclass(type(result), Exception)


def has_errors(results: Sequence[Any]) -> bool:
    """Whether one of the results is an exception, by a look at each type that there is."""
    return any(issubclass(kind, Exception) for kind in set(map(type, results)))


def presentable(raised: BaseException) -> BaseException:
    """An exception that may be set on a future: not one that futures or loops treat specially."""
    if is_error(raised) and not issubclass(type(raised), StopIteration):
        return raised
    try:
        said = repr(raised)
    except BaseException:  # of whatever type it is
        said = type(raised).__name__
    error = EvaluationError(f"the evaluation ended with {said}")
    error.__cause__ = raised
    return error
