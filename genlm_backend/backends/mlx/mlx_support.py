"""Probes the capabilities of an mlx-lm model with tiny passes, instead of going by its name."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast, final

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from genlm_backend.attention.forward_batch import AttentionFactory, TokenChunk, pack
from genlm_backend.backends.hf.trial import (
    NUM_STATES,
    difference_of,
    distance,
    farthest,
    row_of,
)
from genlm_backend.backends.mlx.mlx_batch_states import caches_of, leaves, state_caches
from genlm_backend.backends.mlx.mlx_cascade import GATHERED, MLX_ATTENTION_FACTORIES
from genlm_backend.backends.mlx.mlx_gather import MlxAttention, MlxUncachedAttention
from genlm_backend.backends.mlx.mlx_kv_pool import LayerShape, MlxKVPool, MlxStatePool, StateArray
from genlm_backend.backends.mlx.mlx_runner import MlxRunner
from genlm_backend.checks import shown
from genlm_backend.errors import ModelStateError, UnsupportedModelError
from genlm_backend.prefix.state_cache import StateLayout

logger = logging.getLogger(__name__)

_PROBE_LENGTH: Final = 12
_SHARE_OF_SPREAD: Final = 0.02
_ROUNDING: Final = {mx.float32: 1e-4}
_DEFAULT_ROUNDING: Final = 0.05


_Kept: TypeAlias = tuple[tuple[LayerShape, ...], StateLayout]
"""Shapes of cached keys and values by layer, and the layout of recurrent states."""


@final
@dataclass(frozen=True, slots=True)
class MlxSupport:
    """Capabilities of a model; ``reason`` says why it cannot be cached, or is empty."""

    vocab_size: int
    shapes: tuple[LayerShape, ...] = ()
    states: StateLayout = field(default_factory=StateLayout)
    factory: AttentionFactory = GATHERED
    reason: str = ""
    pads: bool = True
    takes_several_tokens: bool = True


def check_mlx_model(model: Any) -> None:
    """Raise an ``UnsupportedModelError`` if a model lacks attributes of mlx-lm's models."""
    if not hasattr(model, "layers") or not hasattr(model, "named_modules"):
        raise UnsupportedModelError(
            f"{shown(model)} is no language model of mlx-lm: load a model and its tokenizer with "
            "mlx_lm.load, or pass a name to from_name"
        )


def evaluate_all(model: Any) -> None:
    """Evaluate every lazy array of a model, including arrays that are not parameters."""
    # Only the thread that created a lazy array can evaluate it. Loaded weights are lazy, and so are
    # tables of rotary frequencies.
    for module in model.modules():
        mx.eval(list(_arrays_in([*vars(module).values(), *module.values()])))


def _arrays_in(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, (list, tuple)) or type(value) is dict:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _arrays_in(part)


def mlx_probe(runner: MlxRunner, max_length: int | None) -> MlxSupport:
    """Find by tiny passes which caches and attention backends give the rows of whole passes."""
    try:
        logits = runner.forward(pack([TokenChunk([1, 2], outputs=(1,))]), MlxUncachedAttention())
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        name = type(runner.model).__name__
        raise UnsupportedModelError(f"{name} does not run on token ids alone: {error}") from error
    # Two short contexts run whole, and then from cached keys, values and states (``trial.py``). A
    # cache is used if its rows differ from whole ones by at most the dtype's rounding, or 2 % of a
    # wrong token's effect.
    vocab_size = logits.shape[1]
    length = min(_length(runner.model), max_length or 1 << 30)
    if length < 6 or vocab_size < 3:
        reason = f"{length} tokens and {vocab_size} ids are too few to compare rows"
        return MlxSupport(vocab_size, reason=reason, pads=False)
    generator = random.Random(0)
    long, other = ([generator.randrange(vocab_size) for _ in range(length)] for _ in range(2))
    short = other[: length // 2]
    wrong = [*long[:-3], (long[-3] + 1) % vocab_size, *long[-2:]]
    whole = [_rows(runner, [ids], MlxUncachedAttention())[0] for ids in (long, short, wrong)]
    tolerance = max(_rounding(runner.model), _SHARE_OF_SPREAD * distance(whole[0], whole[2]))
    beside = _rows(runner, [long, short], MlxUncachedAttention())
    pads = farthest(map(distance, beside, whole)) <= tolerance
    kept, reason = _kept(runner.model)
    if kept is None:
        return MlxSupport(vocab_size, reason=reason, pads=pads)
    shapes, states = kept
    for factory in MLX_ATTENTION_FACTORIES if shapes else [GATHERED]:
        difference, reason, several = _difference(runner, kept, factory, (long, short), whole)
        if not reason and difference <= tolerance:
            return MlxSupport(vocab_size, shapes, states, factory, "", pads, several)
        reason = (
            reason or f"rows from the cache differ by {difference:.2g} from rows of whole passes"
        )
        logger.debug("%s: %s", type(runner.model).__name__, reason)
    # Without slots, a model with keys and values gets no positions per row, so it counts columns.
    # mlx-lm's "dynamic" rotary positions depend on the number of columns beyond a limit, which this
    # short probe does not reach. So a model with keys and values is not padded.
    return MlxSupport(vocab_size, reason=reason, pads=pads and not shapes)


def _length(model: Any) -> int:
    """Return the probe's length; it exceeds the model's largest window, unless that is above 64."""
    windows = [getattr(cache, "max_size", 0) for cache in leaves(make_prompt_cache(model))]
    window = max(windows, default=0)
    return _PROBE_LENGTH if window > 64 else max(_PROBE_LENGTH, 2 * window + 4)


def _kept(model: Any) -> tuple[_Kept | None, str]:
    """Return the shapes of what a model caches; or ``None``, and why it cannot be cached."""
    kinds = {type(cache) for cache in leaves(make_prompt_cache(model))}
    others = {kind for kind in kinds if not issubclass(kind, ArraysCache)}
    if names := sorted(kind.__name__ for kind in others - {KVCache, RotatingKVCache}):
        return None, f"some layers have caches of unsupported types: {names}"
    if any(_num_attending(cache) > 1 for cache in make_prompt_cache(model)):
        # The second set may belong to an indexer, which picks keys in long contexts only.
        return None, "some layers keep more than one set of keys and values"
    try:
        kept, of_one = _seen(model, [1, 2, 1, 2, 1]), _seen(model, [1])
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        return None, f"it does not run with this library's caches: {error!r}"
    if kept is None:
        return None, "some caches do not get keys and values for each token"
    if kept != of_one:
        return None, "some layers keep states whose shapes depend on the number of tokens"
    return kept, ""


def _num_attending(cache: Any) -> int:
    """Return how many caches of keys and values one layer's cache contains."""
    return sum(not isinstance(part, ArraysCache) for part in leaves([cache]))


@final
class _ShapeLayer:
    """A cache that only records the shapes of the keys and values that it receives."""

    offset = 0
    shape: LayerShape | None = None

    def make_mask(self, N: int, return_array: bool = False, **_: Any) -> Any:
        """Return the causal mask of a pass without cached tokens."""
        return mx.array(np.tri(N, dtype=bool)) if return_array else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if keys.shape[1] == values.shape[1] and self.shape is None:
            self.shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        return keys, values


def _seen(model: Any, token_ids: list[int]) -> _Kept | None:
    """Run a model; return the shapes of what it caches, or ``None`` if some are unknown."""
    layers = [_ShapeLayer() for _ in range(sum(map(_num_attending, make_prompt_cache(model))))]
    caches = caches_of(model, layers, None)
    mx.eval(model(mx.array([token_ids]), cache=caches))
    shapes = [layer.shape for layer in layers if layer.shape is not None]
    states = [
        StateArray(number, index, tuple(state.shape[1:]), state.dtype)
        for number, cache in enumerate(state_caches(caches))
        for index, state in enumerate(cache.cache)
        if state is not None
    ]
    if len(shapes) < len(layers) or not (shapes or states):
        return None
    return tuple(shapes), StateLayout(cast(Any, tuple(states)))


def _difference(
    runner: MlxRunner,
    kept: _Kept,
    factory: AttentionFactory,
    contexts: tuple[list[int], ...],
    whole: Any,
) -> tuple[float, str, bool]:
    """Return cached rows' distance from whole ones, any failure, and ``takes_several_tokens``."""
    (long, short), (shapes, states) = contexts, kept
    attention = factory.probing(MlxKVPool(shapes, 4 * (len(long) + len(short))))
    state_pool = MlxStatePool(states, NUM_STATES) if states else None
    rounding = _rounding(runner.model)
    try:
        found = difference_of(runner, attention, state_pool, contexts, whole[:2], rounding)
    except (TypeError, ValueError, AttributeError, IndexError, ModelStateError) as error:
        logger.debug(
            "%s does not run on cached keys, values or states",
            type(runner.model).__name__,
            exc_info=error,
        )
        return 0.0, f"it does not run with this library's caches: {error!r}", True
    return found[0], "", found[1]


def _rows(runner: MlxRunner, contexts: list[list[int]], attention: MlxAttention) -> torch.Tensor:
    spans = [TokenChunk(ids, outputs=(len(ids) - 1,)) for ids in contexts]
    return row_of(runner.forward(pack(spans), attention))


def is_half(model: Any) -> bool:
    return bool(_kinds(model) & {mx.float16, mx.bfloat16})


def _rounding(model: Any) -> float:
    """Return the largest distance of rows that counts as rounding, for the weights' dtypes."""
    return max((_ROUNDING.get(kind, _DEFAULT_ROUNDING) for kind in _kinds(model)), default=1e-4)


def _kinds(model: Any) -> set[Any]:
    """Return the floating-point dtypes of a model's weights."""
    flat: Any = tree_flatten(model.parameters())
    return {value.dtype for _, value in flat if mx.issubdtype(value.dtype, mx.floating)}
