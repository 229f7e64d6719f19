"""Checks of arguments: each returns the value in its proper type, or raises an error.

A check takes a name and a value, so that a table of checks can describe a constructor's options.
An integer is anything that ``operator.index`` takes, such as a NumPy integer, except a ``bool``. A
``bool`` is not a number either, and a ``float`` is not an integer, even without a fraction.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from genlm_backend.errors import DeviceError, OptionError, OptionTypeError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, Any], T]
"""A function of an argument's name and value that returns the value in its proper type."""


def checked(
    checks: Mapping[str, Check[Any]],
    values: Mapping[str, Any],
    error: type[Exception] | None = None,
) -> dict[str, Any]:
    try:
        return {n: checks[n](n, value) if n in checks else value for n, value in values.items()}
    except (OptionError, OptionTypeError, DeviceError) as refused:
        if error is None:
            raise
        raise error(str(refused)) from None


def check_names(
    given: Iterable[Any],
    known: Collection[str],
    of: str,
    error: type[Exception] = OptionTypeError,
    also: Iterable[str] = (),
    hint: str = "",
) -> None:
    """Raise an error that suggests similar names, unless every given name is known."""
    for name in given:
        if name not in known:
            names = dict.fromkeys([*known, *also])
            others = f"; expected one of {', '.join(names)}{'.' if hint else ''}"
            article = "an" if of.startswith("option") else "a"
            raise error(f"{name} is not {article} {of}{near_names(name, names) or others}{hint}")


def check_option_names(
    kind: type, given: Iterable[str], library_opts: str = "", is_loading: bool = False
) -> None:
    """Raise an ``OptionTypeError`` unless a class's constructor has every given option.

    With ``is_loading``, the options of the class's ``from_name`` are allowed too.
    """
    libraries = {"hf_opts": "transformers (dtype, device_map, …)", "engine_opts": "vLLM"}
    owner = libraries.get(library_opts)
    hint = f" Options of {owner} go into {library_opts}" if owner else ""
    known = loading_option_names(kind) if is_loading else [*_option_names(kind)]
    check_names(given, known, f"option of {kind.__name__}", hint=hint)


def loading_option_names(kind: type) -> list[str]:
    """Return the names of the options of a class's constructor and ``from_name``."""
    own = [*_option_names(kind)]
    owner = next((base for base in kind.__mro__ if "from_name" in vars(base)), None)
    if owner is None:
        return own
    parameters = inspect.signature(vars(owner)["from_name"].__get__(None, kind)).parameters.values()
    # Leave out options of an inherited ``from_name`` that the subclass's constructor refuses.
    refused = {*_option_names(owner)} - {*own}
    named = (p.name for p in parameters if p.default is not p.empty and p.name not in refused)
    return [*dict.fromkeys([*own, *named])]


def _option_names(kind: type) -> Iterator[str]:
    """Yield a constructor's options, and those of base classes that its ``**kwargs`` may reach."""
    for owner in kind.__mro__:
        if "__init__" not in vars(owner):
            continue
        parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
        yield from (p.name for p in parameters if p.default is not p.empty)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return


class Option(NamedTuple):
    """An option's default and check, stored in its ``Annotated`` type in a ``TypedDict``."""

    default: Any = None
    check: Check[Any] = lambda _, value: value


@functools.cache
def options_of(kind: type) -> Mapping[str, Option]:
    """Return the ``Option`` of each key of a ``TypedDict``."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def checks_of(kind: type) -> dict[str, Check[Any]]:
    return {name: option.check for name, option in options_of(kind).items()}


def defaults_of(kind: type) -> dict[str, Any]:
    return {name: option.default for name, option in options_of(kind).items()}


def checked_options(
    kind: type, given: Mapping[str, Any], of: str, also: Iterable[str] = ()
) -> dict[str, Any]:
    """Return all options of a ``TypedDict``, given or default, checked; refuse other names."""
    check_names(given, options_of(kind), of, also=also)
    return {n: own.check(n, given.get(n, own.default)) for n, own in options_of(kind).items()}


def shows_options(kind: type, **defaults: Any) -> Callable[[F], F]:
    """Return a decorator that makes ``help`` show the options of a function with ``**options``.

    Args:
        kind: The ``TypedDict`` of the options; each has an ``Option`` or is in ``defaults``.
        **defaults: Defaults of this function, which override those of the options.
    """

    def shown_by_help(function: F) -> F:
        signature = inspect.signature(function)
        *others, _ = signature.parameters.values()
        own = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name] if name in defaults else options_of(kind)[name].default,
                annotation=_annotation(hint.__forward_arg__),
            )
            for name, hint in kind.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*others, *own])
        return function

    return shown_by_help


def _annotation(source: str) -> str:
    """Return the source of a type without its ``Annotated`` metadata."""
    tree: Any = ast.parse(source, mode="eval").body
    is_annotated = source.startswith("Annotated[")
    return ast.unparse(tree.slice.elts[0]) if is_annotated else source


def near_names(name: object, known: Iterable[str], quoted: bool = False) -> str:
    """Return ``"; did you mean …?"`` with up to two known names close to ``name``, or ``""``."""
    by_lower = {other.lower(): other for other in known}
    matches = get_close_matches(str(name).lower(), by_lower, n=2, cutoff=0.65)
    near = [by_lower[match] for match in matches]
    return f"; did you mean {' or '.join(map(repr, near) if quoted else near)}?" if near else ""


def shown(value: object) -> str:
    """Return a value's ``repr`` on one line, truncated to 80 characters."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 80 else f"{line[:79]}…"


# -------------------------------------------------------------------- kinds of values


def optional(check: Check[T]) -> Check[T | None]:
    return lambda name, value: None if value is None else check(name, value)


def integer(least: int | None = None, most: int | None = None) -> Check[int]:
    """Return a check for an integer within bounds; it returns a plain ``int``."""
    wanted = "an integer" if least is None else f"an integer of {least} or more"

    def check(name: str, value: Any) -> int:
        found = _index(value)
        if found is None:
            is_whole = isinstance(value, float) and value.is_integer()
            hint = f": write {int(value)}" if is_whole else ""
            hint = "; pass its token_id" if hasattr(value, "token_id") else hint
            raise OptionTypeError(f"{name} must be {wanted}, got {shown(value)}{hint}")
        if least is not None and found < least:
            raise OptionError(f"{name} must be {wanted}, got {found}")
        if most is not None and found > most:
            raise OptionError(f"{name} must be at most {most}, got {found}")
        return found

    return check


def _index(value: Any) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor without data
        return None


def number(
    low: float = -math.inf, high: float = math.inf, *, is_open: bool = False, is_finite: bool = True
) -> Check[float]:
    """Return a check for a real number within bounds; the check refuses NaN and returns a float."""
    wanted = "a number"
    if low > -math.inf:
        wanted += f" above {low:g}" if is_open else f" of {low:g} or more"
    if high < math.inf:
        wanted += f", up to {high:g}"

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise OptionTypeError(f"{name} must be {wanted}, got {shown(value)}")
        found = _float(value)
        is_inside = low <= found <= high and not (is_open and found == low)
        if not is_inside or (is_finite and math.isinf(found)):
            raise OptionError(f"{name} must be {wanted}, got {shown(value)}")
        return found

    return check


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionTypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def text(name: str, value: Any) -> str:
    """Return the value if it is a non-empty string; raise an error otherwise."""
    if not isinstance(value, str):
        raise OptionTypeError(f"{name} must be a string, got {shown(value)}")
    if not value:
        raise OptionError(f"{name} must be a non-empty string, got ''")
    return value


def one_of(*choices: Any) -> Check[Any]:
    wanted = ", ".join(map(repr, choices))

    def check(name: str, value: Any) -> Any:
        is_plain = isinstance(value, (str, bool)) or value is None
        if not is_plain or value not in choices:
            raise OptionError(f"{name} must be one of {wanted}, got {shown(value)}")
        return value

    return check


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise OptionTypeError(f"{name} must be a mapping of options, got {shown(value)}")
    return value


def function(name: str, value: Any) -> Callable[..., Any]:
    if not callable(value):
        raise OptionTypeError(f"{name} must be a function, got {shown(value)}")
    return value


def instance(kind: type[T] | tuple[type[Any], ...], wanted: str) -> Check[T]:
    def check(name: str, value: Any) -> T:
        if not isinstance(value, kind):
            raise OptionTypeError(f"{name} must be {wanted}, got {shown(value)}")
        return value

    return check


def listed(name: str, value: Any) -> list[Any]:
    """Return a list of an iterable's elements; refuse strings, bytes, mappings and scalars."""
    is_list = hasattr(value, "__iter__") and getattr(value, "ndim", 1) > 0
    if not is_list or isinstance(value, (str, bytes, bytearray, Mapping)):
        raise OptionTypeError(f"{name} must be a list, got {shown(value)}")
    return list(value)


def sequence(check: Check[T], wanted: str) -> Check[tuple[T, ...]]:
    """Return a check that makes a tuple of checked elements, but refuses strings and mappings."""

    def check_all(name: str, value: Any) -> tuple[T, ...]:
        is_text = isinstance(value, (str, bytes, bytearray, Mapping))
        try:
            if not is_text:
                return tuple(check(name, element) for element in value)
        except OptionError as error:
            raise OptionError(f"{name} must be {wanted}, got {shown(value)}") from error
        except (TypeError, RuntimeError) as error:  # RuntimeError: a tensor without data
            hint = "; pass the token_id of each" if _has_tokens(value) else ""
            raise OptionTypeError(f"{name} must be {wanted}, got {shown(value)}{hint}") from error
        raise OptionTypeError(f"{name} must be {wanted}, got {shown(value)}")

    return check_all


def _has_tokens(value: Any) -> bool:
    is_plain = isinstance(value, (list, tuple, set, frozenset))
    return is_plain and any(hasattr(each, "token_id") for each in value)


def known_device(name: str, value: Any) -> Any:
    """Return a device or its name unchanged if torch knows it, even if this machine lacks it.

    Refuses the device "meta", whose tensors hold no data.
    """
    import torch

    wanted = f"{name} must be a device such as 'cpu' or 'cuda:0', got {shown(value)}"
    if not isinstance(value, (str, torch.device)):
        raise DeviceError(wanted)
    try:
        kind = torch.device(value).type
    except RuntimeError as error:
        raise DeviceError(wanted) from error
    if kind == "meta":
        raise DeviceError(f"{wanted}, whose tensors hold no data")
    return value


def device(name: str, value: Any) -> Any:
    """Return the ``torch.device``, including its index, of a device that this machine has."""
    import torch

    found = torch.device(known_device(name, value))
    try:
        return torch.empty(1, dtype=torch.float32, device=found).device  # with its index
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).split("\n")[0]
        raise DeviceError(f"{name} {str(value)!r} cannot be used: {reason}") from error


# -------------------------------------------------------------------- bounds that recur

MAX_BYTES = (1 << 63) - 1
"""Largest number of bytes to accept: the maximum of a signed 64-bit integer."""

MAX_THREADS = 4096
"""Largest number of threads to accept: OpenMP aborts a process that asks for too many."""

MAX_VOCAB = 1 << 24
"""Largest vocabulary to accept: each id costs a Python object, and known models have fewer."""

byte_count = integer(0, MAX_BYTES)

thread_count = integer(1, MAX_THREADS)

_seconds = optional(number(0, is_finite=False))


def timeout(name: str, value: Any) -> float | None:
    """Return the seconds to wait; ``None`` (no limit) if ``None`` or above ``TIMEOUT_MAX``."""
    seconds = _seconds(name, value)
    return None if seconds is None or seconds > threading.TIMEOUT_MAX else seconds


def absolute_path(name: str, value: Any) -> str:
    """Return an absolute path, with ``~`` and symbolic links resolved; the file need not exist."""
    path = instance((str, Path), "a path")(name, value)
    if not str(path):
        raise OptionError(f"{name} must be a non-empty path, got {shown(value)}")
    return os.path.realpath(os.path.expanduser(path))
