"""What a model of mlx-lm can do: asked, not recognised."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

import mlx.core as mx
import torch
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from genlm_backend.checks import shown
from genlm_backend.errors import ModelStateError, UnsupportedModelError
from genlm_backend.llm.hf.packing import Run, Span
from genlm_backend.llm.mlx.attend import WAYS, GatherAttend, MlxAttend, ShapeLayer, Way, WholeAttend
from genlm_backend.llm.mlx.runner import MlxRunner
from genlm_backend.llm.mlx.store import LayerShape, MlxStore

logger = logging.getLogger(__name__)

_PROBE_LENGTH: Final = 12
_SHARE_OF_SPREAD: Final = 0.02
_ROUNDING: Final = {mx.float32: 1e-4}
_DEFAULT_ROUNDING: Final = 0.05
_GATHERED: Final = Way(GatherAttend, GatherAttend)


@final
@dataclass(frozen=True, slots=True)
class MlxSupport:
    """What a model can do.

    Attributes:
        vocab_size: Width of its logits.
        shapes: Shapes of the keys and values of its layers; none where it runs contexts whole.
        way: The way to attend to them that gives the model's own rows.
        reason: Why it does; empty where it does not.
        pads: Whether contexts that are run whole may be padded beside longer ones.
    """

    vocab_size: int
    shapes: tuple[LayerShape, ...] = ()
    way: Way = _GATHERED
    reason: str = ""
    pads: bool = True


def check_model(model: Any) -> None:
    """Raise an ``UnsupportedModelError`` for what is no language model of mlx-lm."""
    if not hasattr(model, "layers") or not hasattr(model, "named_modules"):
        raise UnsupportedModelError(
            f"{shown(model)} is no language model of mlx-lm: mlx_lm.load returns one, with its "
            "tokenizer, and from_name takes a name"
        )


def evaluate_all(model: Any) -> None:
    """Compute every array of a model, those too that are none of its parameters.

    What is not computed yet belongs to the thread that has asked for it, and no other can compute
    it: weights that are loaded lazily, or tables of rotary frequencies.
    """
    for module in model.modules():
        mx.eval(list(_arrays_in([*vars(module).values(), *module.values()])))


def _arrays_in(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, (list, tuple)) or type(value) is dict:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _arrays_in(part)


def examine(runner: MlxRunner, max_length: int | None) -> MlxSupport:
    """Find out by a few tiny passes what a model can do.

    Rows of two short contexts are computed whole and then from slots, in two steps and padded to
    one batch. Slots are used where the difference is rounding, compared with the difference that
    one wrong token makes.

    Raises:
        UnsupportedModelError: (``ValueError``) If the model does not take token ids alone.
    """
    try:
        logits = runner.forward([Span([1, 2], outputs=(1,))], WholeAttend())
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        name = type(runner.model).__name__
        raise UnsupportedModelError(f"{name} does not run on token ids alone: {error}") from error
    vocab_size = logits.shape[1]
    length = min(_length(runner.model), max_length or 1 << 30)
    if length < 6 or vocab_size < 3:
        reason = f"a context of {length} tokens is too short to tell"
        return MlxSupport(vocab_size, reason=reason, pads=False)
    generator = random.Random(0)
    long, other = ([generator.randrange(vocab_size) for _ in range(length)] for _ in range(2))
    short = other[: length // 2]
    wrong = [*long[:-3], (long[-3] + 1) % vocab_size, *long[-2:]]
    whole = [_rows(runner, [ids], WholeAttend())[0] for ids in (long, short, wrong)]
    tolerance = max(_rounding(runner.model), _SHARE_OF_SPREAD * _distance(whole[0], whole[2]))
    beside = _rows(runner, [long, short], WholeAttend())
    pads = max(map(_distance, beside, whole)) <= tolerance
    shapes, reason = _shapes(runner.model)
    if not shapes:
        return MlxSupport(vocab_size, reason=reason, pads=pads)
    for way in WAYS:
        difference, reason = _difference(runner, shapes, way, long, short, whole)
        if not reason and difference <= tolerance:
            return MlxSupport(vocab_size, shapes, way, pads=pads)
        reason = reason or (
            f"rows from cached keys and values differ by {difference:.2g} from whole ones"
        )
        logger.debug("%s: %s", type(runner.model).__name__, reason)
    # It has keys and values and cannot be told where each row's tokens stand, but counts them
    # itself: mlx-lm's "dynamic" rotary positions go by the columns of a pass once these are more
    # than a limit, which contexts of a few tokens do not show.
    return MlxSupport(vocab_size, reason=reason, pads=False)


def _length(model: Any) -> int:
    """Return a number of tokens that no window of the model holds, if it is small."""
    windows = [getattr(cache, "max_size", 0) for cache in make_prompt_cache(model)]
    window = max(windows, default=0)
    return _PROBE_LENGTH if window > 64 else max(_PROBE_LENGTH, 2 * window + 4)


def _shapes(model: Any) -> tuple[tuple[LayerShape, ...], str]:
    """Return the shapes of a model's keys and values, or why it keeps none token by token."""
    kinds = {type(cache) for cache in make_prompt_cache(model)}
    if others := sorted(kind.__name__ for kind in kinds - {KVCache, RotatingKVCache}):
        return (), f"some layers keep states that belong to no token: {others}"
    layers = [ShapeLayer() for _ in make_prompt_cache(model)]
    try:
        mx.eval(model(mx.array([[1, 2, 3]]), cache=layers))
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        return (), f"it does not run on foreign caches: {error!r}"
    shapes = [layer.shape for layer in layers if layer.shape is not None]
    if len(shapes) < len(layers) or not shapes:
        return (), "some caches are not given keys and values of one token each"
    return tuple(shapes), ""


def _difference(
    runner: MlxRunner,
    shapes: tuple[LayerShape, ...],
    way: Way,
    long: list[int],
    short: list[int],
    whole: list[torch.Tensor],
) -> tuple[float, str]:
    """Return the largest distance of rows from slots, in two steps, or why there are none."""
    size = len(long) + len(short)
    attend = way.probing(MlxStore(shapes, size + 2))
    long_slots, short_slots = range(1, len(long) + 1), range(len(long) + 1, size + 1)
    first = [Span(long[:-2], (), long_slots[:-2]), Span(short[:1], (), short_slots[:1])]
    last = len(short) - 2
    try:
        runner.forward([*first], attend)
        pasts = [(Run(n, span.slots, span.num_new),) for n, span in enumerate(first)]
        second = [
            Span(long[-2:], pasts[0], long_slots[-2:], (1,)),
            Span(short[1:], pasts[1], short_slots[1:], (last,)),
            Span(long[-2:], pasts[0], range(size + 1, size + 3), (1,)),
        ]
        rows = runner.forward(second, attend).log_softmax(-1)
    except (TypeError, ValueError, AttributeError, IndexError, ModelStateError) as error:
        logger.debug("%s runs on no slots", type(runner.model).__name__, exc_info=error)
        return 0.0, f"it does not run on foreign caches: {error!r}"
    return max(map(_distance, rows, (whole[0], whole[1], whole[0]))), ""


def _rows(runner: MlxRunner, contexts: list[list[int]], attend: MlxAttend) -> torch.Tensor:
    spans = [Span(ids, outputs=(len(ids) - 1,)) for ids in contexts]
    return runner.forward(spans, attend).log_softmax(-1)


def is_half(model: Any) -> bool:
    """Return whether some weights of a model are in half precision."""
    return bool(_kinds(model) & {mx.float16, mx.bfloat16})


def _rounding(model: Any) -> float:
    """Return how far rows may be apart by rounding alone."""
    return max((_ROUNDING.get(kind, _DEFAULT_ROUNDING) for kind in _kinds(model)), default=1e-4)


def _kinds(model: Any) -> set[Any]:
    """Return the floating-point types of a model's weights."""
    flat: Any = tree_flatten(model.parameters())
    return {value.dtype for _, value in flat if mx.issubdtype(value.dtype, mx.floating)}


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).square().mean().sqrt())
