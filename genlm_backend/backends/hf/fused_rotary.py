"""Rotary positions of a ``ModelView`` in one launch, on devices that have a kernel.

A view copies a model's modules, but not its weights. Many modeling modules of transformers define
``apply_rotary_pos_emb``: ten elementwise operators in each layer. Many of these functions are
equal, but some differ, so each is compared with the kernel.
"""

from __future__ import annotations

import dis
import inspect
import logging
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn

logger = logging.getLogger(__name__)

Rotate: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""A function of queries, keys, cosines and sines that returns rotated queries and keys."""


def _of_cuda() -> Rotate:
    from genlm_backend.backends.hf.layer_kernels import rotate

    return rotate


ROTARY_KERNELS: Final[dict[str, Callable[[], Rotate]]] = {"cuda": _of_cuda}
"""Functions that return the kernel, by type of device."""

_NAME: Final = "apply_rotary_pos_emb"
_ARGUMENTS: Final = ["q", "k", "cos", "sin"]
_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def fuse_rotary(copies: Mapping[nn.Module, Any]) -> None:
    """Let copies of modules call the kernel if it agrees with their function on random numbers."""
    asked: dict[tuple[Any, ...], _Rotation | None] = {}
    for module, own in copies.items():
        decorated = type(own).forward
        forward = inspect.unwrap(decorated)
        if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
            continue
        if not _is_plain(forward.__code__):
            continue
        original, weight = forward.__globals__.get(_NAME), _weight_of(module)
        if original is None or weight is None or "forward" in vars(own):
            continue
        dim = vars(module).get("head_dim")
        if not isinstance(dim, int) or dim <= 0 or dim % 2:
            dim = 64  # a common head size, for the trial
        key = original, weight.dtype, weight.device, dim
        if key not in asked:
            asked[key] = _asked(*key)
        rotation = asked[key]
        if rotation is None:
            continue
        # The view's ``forward`` has the module's code and decorators, but other globals.
        found = _Globals(forward.__globals__, rotation)
        copied = _copied(forward, found, forward.__closure__ or ())
        made = _decorated(decorated, forward, copied)
        if made is not None:
            vars(own)["forward"] = MethodType(made, own)


@final
class _Rotation:
    """Replaces ``original``: calls the kernel if it takes the arguments, else ``original``."""

    def __init__(self, original: Rotate, kernel: Rotate, dtype: torch.dtype, kind: str) -> None:
        self.original = original
        self._kernel, self._dtype, self._kind = kernel, dtype, kind

    def __call__(
        self, q: Any, k: Any, cos: Any, sin: Any, *others: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_plain = not others and options in ({}, {"unsqueeze_dim": 1})
        if is_plain and self._takes(q, k, cos, sin):
            return self._kernel(q, k, cos, sin)
        return self.original(q, k, cos, sin, *others, **options)

    def _takes(self, *given: Any) -> bool:
        if torch.is_grad_enabled() or not all(isinstance(one, torch.Tensor) for one in given):
            return False
        q, k, cos, sin = given
        if [one.dim() for one in given] != [4, 4, 3, 3] or not q.numel() or not k.numel():
            return False
        num_rows, _, num_tokens, dim = q.shape
        return (
            q.device.type == self._kind
            and all(one.device == q.device and one.dtype is self._dtype for one in given)
            and all(one.shape[-2:] == (num_tokens, dim) and one.stride(-1) == 1 for one in given)
            and dim % 2 == 0
            and len(k) == num_rows
            and cos.shape == sin.shape
            and len(cos) in (1, num_rows)
        )


@final
class _Globals(dict[str, Any]):
    """The live globals of a Python module, with ``rotation`` in place of its original."""

    def __init__(self, of_module: dict[str, Any], rotation: _Rotation) -> None:
        # Dunder names are copied: ``warnings`` and imports look them up without ``__missing__``.
        super().__init__((n, v) for n, v in [*of_module.items()] if n.startswith("__"))
        self._of_module, self._rotation = of_module, rotation

    # If globals are a subclass of ``dict``, Python looks up names by ``__getitem__``.
    def __missing__(self, name: str) -> Any:
        found = self._of_module[name]
        return self._rotation if found is self._rotation.original else found


def _is_plain(code: CodeType) -> bool:
    """Return whether code, nested functions included, only reads globals by name."""
    if not _ASIDE.isdisjoint(code.co_names) or any(
        step.opname in _NOT_PLAIN for step in dis.get_instructions(code)
    ):
        return False
    return all(_is_plain(inner) for inner in code.co_consts if isinstance(inner, CodeType))


_ASIDE: Final = frozenset({"globals", "locals", "vars", "eval", "exec"})
_NOT_PLAIN: Final = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_BUILD_CLASS"})


def _decorated(outer: Any, inner: FunctionType, made: FunctionType) -> FunctionType | None:
    """Return ``outer`` with ``made`` in the place of ``inner``; ``None`` if that fails."""
    if outer is inner:
        return made
    # ``functools.wraps`` sets ``__wrapped__``, and most decorators hold the function in a closure.
    around = getattr(outer, "__wrapped__", None)
    within = None if around is None else _decorated(around, inner, made)
    if within is None or not isinstance(outer, FunctionType):
        return None
    cells = outer.__closure__ or ()
    own_cells = tuple(CellType(within) if _holds(cell, around) else cell for cell in cells)
    if own_cells == cells:
        return None
    own = _copied(outer, outer.__globals__, own_cells)
    vars(own)["__wrapped__"] = within
    return own


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def _copied(
    function: FunctionType, found: dict[str, Any], cells: tuple[CellType, ...]
) -> FunctionType:
    """Return a copy of a function with other globals and another closure."""
    own = FunctionType(
        function.__code__, found, function.__name__, function.__defaults__, cells or None
    )
    own.__kwdefaults__ = function.__kwdefaults__
    vars(own).update(vars(function))
    return own


def _weight_of(module: nn.Module) -> torch.Tensor | None:
    """Return a module's first parameter whose dtype and device have a kernel, or ``None``."""
    return next(
        (p for p in module.parameters() if p.dtype in _TYPES and p.device.type in ROTARY_KERNELS),
        None,
    )


_SHAPES: Final = ((2, 4, 2, 3, 2), (3, 12, 1, 1, 3), (2, 1, 9, 5, 1))
"""Shapes of a trial: rows, heads, key heads, tokens of a row, and rows of cosines."""


@torch.inference_mode()
def _asked(original: Any, dtype: torch.dtype, device: torch.device, dim: int) -> _Rotation | None:
    """Return a function's replacement if both agree bit for bit on random numbers, or ``None``."""
    try:
        if [*inspect.signature(original).parameters][: len(_ARGUMENTS)] != _ARGUMENTS:
            return None
        rotation = _Rotation(original, ROTARY_KERNELS[device.type](), dtype, device.type)
        for shape in _SHAPES:
            given = _numbers(dtype, device, dim, shape)
            if not _are_same(rotation(*given), original(*given)):
                return None
    except Exception as error:  # third-party code with other arguments, or no kernel
        logger.info("%s is not replaced by a kernel: the trial failed", original, exc_info=error)
        return None
    return rotation


def _numbers(
    dtype: torch.dtype, device: torch.device, dim: int, shape: tuple[int, ...]
) -> list[torch.Tensor]:
    """Return independent random queries, keys, cosines and sines."""
    num_rows, num_heads, num_key_heads, num_tokens, cos_rows = shape
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float32)
        return made.to(device, dtype)

    by_token = [numbers(num_rows, num_tokens, heads, dim) for heads in (num_heads, num_key_heads)]
    angles = [numbers(cos_rows, num_tokens, dim) for _ in range(2)]
    return [*(states.transpose(1, 2) for states in by_token), *angles]


def _are_same(found: Any, expected: Any) -> bool:
    if not isinstance(expected, tuple) or len(expected) != 2:
        return False
    return all(
        isinstance(one, torch.Tensor) and own.dtype is one.dtype and torch.equal(own, one)
        for own, one in zip(found, expected, strict=True)
    )
