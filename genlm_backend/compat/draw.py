"""Draws, sums and single elements of rows of log-weights, batched across concurrent callers.

Functions import torch when they are called, so that importing this module does not load torch.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from genlm_backend.checks import number, shown
from genlm_backend.compat.batching import (
    Window,
    batch_abandoned,
    batch_stats,
    fail_futures,
    join_batch,
)
from genlm_backend.errors import OptionError, OptionTypeError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    LogWeights: TypeAlias = torch.Tensor | NDArray[np.floating[Any]]
    Picker: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


# -------------------------------------------------------------------- rows


async def draw_from(
    weights: LogWeights, target: LogWeights | None = None
) -> tuple[int, float, float]:
    """Draw an index from the softmax of a row.

    Concurrent draws from tensors of equal width on one device, or from arrays of equal width, are
    computed in one batch. The random numbers come from torch's global generator of the device.
    Computations use at least float32, and at least the precision of the row.

    Args:
        weights: ``V`` log-weights, float ``[V]``, normalised or not, on any device. Not modified.
        target: Log-weights of the target distribution, of the same shape as ``weights``; ``None``
            to target ``weights``.

    Returns:
        The index, the logarithm of its importance weight, and its log-probability. With a
        ``target``, the log-weight is ``target[index]`` minus the log-probability; without one, it
        is the ``logsumexp`` of ``weights``. If all weights are ``-inf``, the index is arbitrary and
        both numbers are ``-inf``.

    Raises:
        OptionError: (``ValueError``) If a weight is NaN or ``+inf``, or the shape of ``target`` is
            not that of ``weights``.
        RuntimeError: If a row of this width in the same batch does not have the shape ``[V]``.
        BatchAbandoned: (``RuntimeError``) If the first caller of the batch ended early, as by a
            cancellation; another name of ``QueryDroppedError``.
    """
    row, place = _tensor_of(weights)
    if target is not None:
        target = _tensor_of(target)[0]
        if target.shape != row.shape:
            raise OptionError(
                f"target must have the shape of weights, {tuple(row.shape)}, got "
                f"{tuple(target.shape)}"
            )
    return await _ask(("draw", place, row.shape[-1:]), row, target)


async def logsumexp_from(weights: LogWeights) -> float:
    """Return the log-sum-exp of a row; ``-inf`` if all its log-weights are ``-inf``.

    Args:
        weights: ``V`` log-weights, float ``[V]``; see ``draw_from``.
    """
    row, place = _tensor_of(weights)
    return await _ask(("logsumexp", place, row.shape[-1:]), row)


async def logp_at(weights: LogWeights, index: int) -> float:
    """Return one element of a row; concurrent calls share one transfer to the host.

    Args:
        weights: ``V`` log-weights, float ``[V]``; see ``draw_from``.
        index: Index of the element.

    Raises:
        OptionError: (``ValueError``) If the row has more than one dimension.
        IndexError: If the row has no such element.
    """
    row, place = _tensor_of(weights)
    if row.ndim != 1:
        raise OptionError(_NO_ROW.format(tuple(row.shape)))
    return await _ask(("at", place), row[operator.index(index)])


_NO_ROW = "a row must have one dimension, got the shape {}"


class _Entry(NamedTuple):
    key: tuple[Hashable, ...]  # entries of equal keys are computed together; key[0] is the kind
    row: torch.Tensor
    target: torch.Tensor | None
    future: asyncio.Future[Any]


_windows: WeakKeyDictionary[asyncio.AbstractEventLoop, Window] = WeakKeyDictionary()


async def _ask(
    key: tuple[Hashable, ...], row: torch.Tensor, target: torch.Tensor | None = None
) -> Any:
    entry = _Entry(key, row, target, asyncio.get_running_loop().create_future())
    batch = await join_batch(_windows, [entry])
    if batch is not None:
        try:
            _serve(batch)
        except BaseException as exc:
            fail_futures([other for other in batch if other is not entry], batch_abandoned(exc))
            raise
    return await entry.future


def _serve(batch: list[Any]) -> None:
    """Compute a batch in groups of equal keys, and resolve every future that is not done."""
    import torch

    groups: dict[Hashable, list[_Entry]] = {}
    for entry in batch:
        groups.setdefault(entry.key, []).append(entry)
    for group in groups.values():
        kind = group[0].key[0]
        batch_stats[kind, len(group)] += 1
        try:
            with torch.no_grad():
                results = _REDUCTIONS[kind](group)
        except Exception as error:
            fail_futures(group, error)
            continue
        for entry, result in zip(group, results, strict=True):
            if isinstance(result, Exception):
                fail_futures([entry], result)
            elif not entry.future.done():
                entry.future.set_result(result)


def _draws(group: Sequence[_Entry]) -> list[tuple[int, float, float] | OptionError]:
    import torch

    rows, log_sums = _normalise(_stacked(group))
    picked = _picker(rows)
    logps = rows.gather(-1, picked[:, None])[:, 0]
    targets = [
        entry.target.to(rows.device).index_select(0, picked[i : i + 1])
        for i, entry in enumerate(group)
        if entry.target is not None
    ]
    values = torch.cat([part.to(_wide(rows)) for part in (picked, logps, log_sums, *targets)])
    numbers = values.tolist()  # the only transfer to the host
    of_targets = iter(numbers[3 * len(group) :])
    results: list[tuple[int, float, float] | OptionError] = []
    for i, entry in enumerate(group):
        index, logp, logw = numbers[i : 3 * len(group) : len(group)]
        of_target = None if entry.target is None else next(of_targets)
        if not logw < math.inf:
            results.append(OptionError("cannot draw from weights that contain NaN or +inf"))
            continue
        if of_target is not None and logw > -math.inf:
            logw = of_target - logp
        results.append((int(index), logw, logp))
    return results


def _elements(group: Sequence[_Entry]) -> list[float]:
    import torch

    return torch.stack([entry.row for entry in group]).tolist()


_REDUCTIONS: dict[Any, Callable[[Sequence[_Entry]], Sequence[Any]]] = {
    "draw": _draws,
    "logsumexp": lambda group: _normalise(_stacked(group))[1].tolist(),
    "at": _elements,
}


def _tensor_of(row: LogWeights) -> tuple[torch.Tensor, Hashable]:
    import numpy as np
    import torch

    if isinstance(row, torch.Tensor):
        return row, row.device
    return torch.from_numpy(np.require(row, requirements=["C", "W"])), "numpy"


def _stacked(group: Sequence[_Entry]) -> torch.Tensor:
    """Return a copy of a group's rows as one table, in at least float32."""
    import torch

    rows = torch.stack([entry.row for entry in group])
    if rows.ndim != 2:
        raise RuntimeError(_NO_ROW.format(tuple(rows.shape[1:])))
    return rows.to(_at_least_float32(rows.dtype))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    import torch

    return torch.promote_types(dtype, torch.float32)


def _normalise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise rows along the last dimension, in place; return them and their log-sum-exps.

    A row whose elements are all ``-inf`` stays unchanged.
    """
    largest = _largest(rows)
    log_sums = rows.sub_(largest).exp().sum(-1, keepdim=True).log()
    rows.sub_(log_sums.masked_fill(log_sums == -math.inf, 0))
    wide = _wide(rows)
    return rows, (largest.to(wide) + log_sums.to(wide))[..., 0]


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """Return each row's maximum, or 0 if all are ``-inf``; the last dimension has size 1."""
    largest = rows.amax(-1, keepdim=True)
    return largest.masked_fill(largest == -math.inf, 0)


def _wide(rows: torch.Tensor) -> torch.dtype:
    """Return float64, or float32 on MPS, which has no float64."""
    import torch

    return torch.float32 if rows.device.type == "mps" else torch.float64


def temper(row: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of a row at a temperature; at 1, return ``row`` itself.

    Args:
        row: Rows of ``V`` log-probabilities or other log-weights, float ``[..., V]``. Not modified.
        temperature: Number above 0 that divides the row before the row is normalised.

    Raises:
        OptionError: (``ValueError``) If ``temperature`` is 0 or less, infinite or NaN.
    """
    if temperature == 1:
        return row
    _TEMPERATURE("temperature", temperature)
    scores = row.to(_at_least_float32(row.dtype))
    # Subtract the maximum first, so that division by a small temperature does not overflow.
    return _normalise((scores - _largest(scores)) / temperature)[0].to(row.dtype)


_TEMPERATURE = number(0, is_open=True)


# -------------------------------------------------------------------- draws


def gumbel_max(log_weights: torch.Tensor) -> torch.Tensor:
    """Draw an index from each row: the argmax of the log-weights plus Gumbel noise.

    Args:
        log_weights: Rows of ``V`` log-weights, float ``[..., V]``, normalised or not. A row whose
            elements are all ``-inf`` gives an arbitrary index.

    Returns:
        int64 ``[...]``, on the device of the log-weights.
    """
    import torch

    # The negative logarithm of an exponential variate is Gumbel noise.
    noise = torch.empty_like(log_weights).exponential_()
    return (log_weights - noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_()).argmax(-1)


def multinomial(log_weights: torch.Tensor) -> torch.Tensor:
    """Draw an index from each row with ``torch.multinomial``; arguments as in ``gumbel_max``."""
    import torch

    return torch.multinomial(_probabilities(log_weights), 1)[..., 0]


def inverse_cdf(log_weights: torch.Tensor) -> torch.Tensor:
    """Draw an index from each row with one uniform number; arguments as in ``gumbel_max``."""
    import torch

    probabilities = _probabilities(log_weights)
    # A parallel cumsum may increase at an element of zero probability, so set the sum to 0 there.
    ends = probabilities.cumsum(-1).masked_fill_(probabilities == 0, 0)
    total = ends.amax(-1, keepdim=True)
    point = torch.rand_like(total) * total
    # The second condition covers a point that is rounded up to the total.
    return ((ends > point) | (ends == total)).int().argmax(-1)


def _probabilities(log_weights: torch.Tensor) -> torch.Tensor:
    """Return the softmax of rows in float64 (float32 on MPS), with 1 in place of NaN."""
    return log_weights.softmax(-1, dtype=_wide(log_weights)).nan_to_num_(1.0)


DRAW_METHODS: dict[str, Picker] = {
    "gumbel_max": gumbel_max,
    "multinomial": multinomial,
    "inverse_cdf": inverse_cdf,
}
"""Functions that draw an index from each row of log-weights, by name."""

_picker: Picker = gumbel_max


def set_draw_method(method: str | Picker) -> None:
    """Set the drawing method of all later batches in the process.

    Args:
        method: A name in ``DRAW_METHODS``; or a function that takes ``N`` rows of ``V`` log-weights
            ``[N, V]``, leaves them unmodified, and returns indices, int64 ``[N]``.

    Raises:
        KeyError: If there is no method of that name.
        OptionTypeError: (``TypeError``) If ``method`` is neither a string nor callable.
    """
    global _picker
    if isinstance(method, str) and method not in DRAW_METHODS:
        raise KeyError(f"method must be one of {', '.join(DRAW_METHODS)}, got {method!r}")
    if not isinstance(method, str) and not callable(method):
        raise OptionTypeError(f"method must be a method name or a function, got {shown(method)}")
    _picker = DRAW_METHODS[method] if isinstance(method, str) else method
