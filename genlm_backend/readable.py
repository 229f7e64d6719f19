"""Readable: statistics formatted for a terminal, for a notebook and as a dictionary."""

from __future__ import annotations

import abc
import dataclasses
import html
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar


class Readable(abc.ABC):  # noqa: B024  (abstract because subclasses must be dataclasses)
    """Base class of statistics; each subclass must be a dataclass with ``repr=False``."""

    __slots__ = ()

    _derived: ClassVar[tuple[str, ...]] = ()
    """Properties to show in addition to the fields."""

    def as_dict(self) -> dict[str, Any]:
        """Return fields and derived numbers by name, in plain dictionaries that JSON can encode."""
        return {name: _plain(value) for name, value in self._items()}

    def __repr__(self) -> str:
        rows = list(_rows(self))
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {value}" for name, value in rows]
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td>"
            f"<td style='text-align:right'>{html.escape(value)}</td></tr>"
            for name, value in _rows(self)
        )
        return f"<table><caption>{type(self).__name__}</caption>{cells}</table>"

    def _items(self) -> Iterator[tuple[str, Any]]:
        names = [field.name for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        names.sort(key=lambda name: name not in type(self).__annotations__)  # inherited ones last
        for name in [*names, *self._derived]:
            yield name, getattr(self, name)


def _plain(value: Any) -> Any:
    if hasattr(value, "as_dict"):
        return value.as_dict()
    return dict(value) if isinstance(value, Mapping) else value


def _rows(statistics: Readable, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in statistics._items():
        if isinstance(value, Readable):
            yield from _rows(value, f"{prefix}{name}.")
        else:
            yield prefix + name, _text(name, value)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if dataclasses.is_dataclass(value):
        return str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{size} (×{count})" for size, count in value.items()) or "–"
    if name.startswith("time_"):
        return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"
    if "bytes" in name:
        return _bytes(value)
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
