"""Can this model's keys and values be kept token by token? Asked of the model, not of its name."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from genlm_backend.cache import KVLayout, KVStore, LayerLayout, Run
from genlm_backend.checks import shown
from genlm_backend.errors import UnsupportedModelError
from genlm_backend.llm.hf.attend import WAYS, Attend, GatherAttend, Way, WholeAttend
from genlm_backend.llm.hf.packing import Span
from genlm_backend.llm.hf.runner import Placement, Runner
from genlm_backend.llm.threads import one_thread

logger = logging.getLogger(__name__)

_PROBE_LENGTH: Final = 24
_ONE_THREAD_PARAMETERS: Final = 1_000_000_000  # some five seconds on one thread
_ROUNDING: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05}
_DEFAULT_ROUNDING: Final = 0.25  # bfloat16, and quantised weights whatever they compute in
_SHARE_OF_SPREAD: Final = 0.1
_SHARE_OF_SPREAD_QUANTISED: Final = 0.3  # 8-bit activations: one rounding flips the next
_MOST_COLUMNS: Final = 1 << 20
_COPIED_BYTES: Final = 1 << 27  # of one layer's keys and values at a time
_ALIGNMENT: Final = 1024
_SHARE_OF_ROUNDING: Final = 0.02


@dataclass(frozen=True, slots=True)
class KVSupport:
    """What can be kept of a model and how it is attended to, or why nothing can.

    Attributes:
        layout: Shape of one token's keys and values; without layers where the model keeps other
            states and so runs every context whole.
        attend: The way to attend to them that gives the model's own rows.
        reason: Why there is no layer; empty where there are some.
        pads: Whether a context run whole may be padded beside a longer one.
        aligns: Whether contexts may share a pass only if as many tokens of each are in slots.
    """

    layout: KVLayout = field(default_factory=KVLayout)
    attend: Callable[[KVStore], Attend] = GatherAttend
    reason: str = ""
    pads: bool = True
    aligns: bool = False


def rounding(dtype: torch.dtype) -> float:
    """Return what rows may differ by that are computed in another order."""
    return _ROUNDING.get(dtype, _DEFAULT_ROUNDING)


def check_model(model: Any) -> None:
    """Raise an ``UnsupportedModelError`` if ``model`` is no causal language model."""
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not callable(getattr(model, "forward", None)):
        hint = "; from_name takes a name" if isinstance(model, str) else ""
        raise UnsupportedModelError(
            f"hf_model must be a causal language model of transformers, got {shown(model)}{hint}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model; a next token is only defined "
            "for decoder-only (causal) language models"
        )
    if not hasattr(model, "get_output_embeddings") or "input_ids" not in Runner(model).parameters:
        raise UnsupportedModelError(f"{type(model).__name__} is not a language model over tokens")
    is_split = getattr(model, "hf_device_map", None) is not None  # parts may wait elsewhere
    if not is_split and (placement := Placement.of(model)) and placement.device.type == "meta":
        raise UnsupportedModelError(f"{type(model).__name__} is on 'meta': it has no weights")


def longest_context(model: Any) -> int | None:
    """Return the longest context that a model's config speaks of; some say -1 for any."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    return length if length is None or length > 0 else None


def vocab_width(model: Any) -> int:
    """Return the width of a model's logits, which may be padded beyond its config's vocabulary."""
    head = model.get_output_embeddings()
    width = getattr(head, "out_features", None)
    return int(width or model.config.get_text_config(decoder=True).vocab_size)


def rotary_limit(model: Any) -> int | None:
    """Return the longest context whose rotary positions are read as in shorter ones.

    ``None`` if all are. Where transformers recomputes the frequencies for long contexts (the
    types "longrope" and "dynamic"), all positions of a context depend on how long it is.
    """
    limits = [
        limit
        for module in getattr(model, "modules", list)()
        if (rope_type := getattr(module, "rope_type", None)) is not None
        for limit in _rotary_limits(module, rope_type)
    ]
    return min(limits, default=None)


def _rotary_limits(module: Any, rope_type: Any) -> Iterator[int]:
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    by_layer = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    for layer_type, kind in by_layer.items():
        own = parameters if layer_type is None else parameters.get(layer_type) or {}
        if kind == "longrope":
            yield own["original_max_position_embeddings"]
        elif "dynamic" in str(kind):
            yield module.original_max_seq_len - 1  # at the limit, it reads as in the one before


def examine(runner: Runner, vocab_size: int, max_length: int | None) -> KVSupport:
    """Find out by a few tiny forward passes whether slots give the right answers.

    The rows of two short contexts are computed whole and then from slots, in two steps and padded
    to one batch. The first way to attend is taken whose difference is rounding, compared with the
    difference that one wrong token makes. That takes five passes, of a small model on one thread.
    Where nothing can be kept, two more tell whether the model minds the padding of its rows.

    Raises:
        UnsupportedModelError: If the model gives other rows when it is told positions.
    """
    support = _examine_slots(runner, vocab_size, max_length)
    if not support.reason or _bears_padding(runner, vocab_size, max_length):
        return support
    return replace(support, pads=False)


def _bears_padding(runner: Runner, vocab_size: int, max_length: int | None) -> bool:
    """Whether a context beside a longer one has the row that it has alone."""
    length = min(_PROBE_LENGTH, max_length or _PROBE_LENGTH)
    generator = random.Random(1)
    long = [generator.randrange(vocab_size) for _ in range(length)]
    short = Span(long[: length // 2], outputs=(length // 2 - 1,))
    if not short.num_new:
        return True
    try:
        with one_thread() if _is_small(runner) else contextlib.nullcontext():
            alone = _row(runner.forward([short], WholeAttend()))
            beside = _row(runner.forward([short, Span(long, outputs=(length - 1,))], WholeAttend()))
    except Exception as error:  # third-party model code may raise anything; alone it may do
        logger.debug("%s takes no padding", type(runner.model).__name__, exc_info=error)
        return False
    dtype = next((p.dtype for p in runner.model.parameters()), torch.float32)
    spread = _distance(beside[0], beside[1])
    return _distance(alone[0], beside[0]) <= max(rounding(dtype), _SHARE_OF_SPREAD * spread)


def _examine_slots(runner: Runner, vocab_size: int, max_length: int | None) -> KVSupport:
    config = runner.model.config.get_text_config(decoder=True)
    if "past_key_values" not in runner.parameters:
        return KVSupport(reason="its state is not one of keys and values")
    layers = DynamicCache(config=config).layers
    others = {type(layer).__name__ for layer in layers} - {
        DynamicLayer.__name__,
        DynamicSlidingWindowLayer.__name__,
    }
    if others:
        reason = f"some layers keep states that belong to no token: {sorted(others)}"
        return KVSupport(reason=reason)
    window = getattr(config, "sliding_window", None) or 0
    length = _PROBE_LENGTH if window > 64 else max(_PROBE_LENGTH, 2 * window + 4)
    length = min(length, max_length or length)
    if length < 6 or vocab_size < 3:
        return KVSupport(reason=f"a context of {length} tokens is too short to tell")
    generator = random.Random(0)
    long, other = ([generator.randrange(vocab_size) for _ in range(length)] for _ in range(2))
    try:
        with one_thread() if _is_small(runner) else contextlib.nullcontext():
            layout, bare_row = _observe_layout(runner, long[:3])
            expected = _expected(runner, long, other, vocab_size)
            tolerance = _tolerance(runner, layout, expected.spread)
            trial, difference = _first_trial(runner, layout, expected, tolerance)
            aligns = trial is not None and _counts_columns(trial, max_length)
    except UnsupportedModelError as error:
        return KVSupport(reason=str(error))
    except Exception as error:  # third-party model code may raise anything; it still runs whole
        logger.warning(
            "%s runs without key-value reuse", type(runner.model).__name__, exc_info=True
        )
        return KVSupport(reason=f"it does not run on a foreign cache: {error!r}")
    if _distance(expected.third, bare_row) > tolerance:  # its positions, or it looks ahead
        (alone_row,) = _row(runner.forward([Span(long[:3], outputs=(2,))], WholeAttend()))
        if _distance(alone_row, bare_row) > tolerance:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} counts positions in a way of its own: told that a "
                "context begins at position 0, it gives other rows than when it is told nothing"
            )
    if trial is None:
        return KVSupport(
            reason=f"rows from cached keys and values differ by {difference:.2g} from whole ones, "
            f"and by {expected.spread:.2g} between different contexts"
        )
    return KVSupport(layout, trial.way.over, aligns=aligns)


def _is_small(runner: Runner) -> bool:
    """Whether threads would gain less on an idle machine than they would lose on a busy one."""
    num_parameters = sum(parameter.numel() for parameter in runner.model.parameters())
    return runner.device.type == "cpu" and num_parameters < _ONE_THREAD_PARAMETERS


@torch.inference_mode()
def _observe_layout(runner: Runner, token_ids: list[int]) -> tuple[KVLayout, torch.Tensor]:
    """The shape of keys and values, and the last row of the model that is told no positions."""
    cache = DynamicCache()
    ids = torch.tensor([token_ids], device=runner.device)
    logits = runner.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    layers = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape[2] != len(token_ids):
            raise UnsupportedModelError("a layer keeps no keys and values")
        layers.append(
            LayerLayout(
                num_key_heads=keys.shape[1],
                key_dim=keys.shape[3],
                num_value_heads=values.shape[1],
                value_dim=values.shape[3],
                dtype=keys.dtype,
                device=keys.device,
            )
        )
    if not layers:
        raise UnsupportedModelError("no layer keeps keys and values")
    return KVLayout(tuple(layers)), _row(logits[0, -1])


@dataclass(frozen=True, slots=True)
class _Expected:
    """Two contexts and their rows, computed whole.

    Attributes:
        long: The first context.
        short: The second one, half as long.
        long_row: Row after the first.
        short_row: Row after the second.
        third: Row after the first three tokens of the first.
        spread: Distance that one wrong token makes.
    """

    long: list[int]
    short: list[int]
    long_row: torch.Tensor
    short_row: torch.Tensor
    third: torch.Tensor
    spread: float


def _expected(runner: Runner, long: list[int], other: list[int], vocab_size: int) -> _Expected:
    short = other[: len(other) // 2]
    wrong = [*long[:-3], (long[-3] + 1) % vocab_size, *long[-2:]]
    last = (len(long) - 1,)
    # One pass for all: of one length, so that nothing is padded. What follows ``short`` takes no
    # part in its row, or the row from slots, where nothing follows, is another one.
    whole = runner.forward(
        [
            Span(long, outputs=(2, *last)),
            Span(wrong, outputs=last),
            Span(other, outputs=(len(short) - 1,)),
        ],
        WholeAttend(),
    )
    third, long_row, wrong_row, short_row = _row(whole)
    return _Expected(long, short, long_row, short_row, third, _distance(wrong_row, long_row))


def _tolerance(runner: Runner, layout: KVLayout, spread: float) -> float:
    """Return the distance up to which two rows are the same one."""
    is_quantised = getattr(runner.model, "is_quantized", False)
    share = _SHARE_OF_SPREAD_QUANTISED if is_quantised else _SHARE_OF_SPREAD
    smallest = _DEFAULT_ROUNDING if is_quantised else rounding(layout.layers[0].dtype)
    return max(smallest, share * spread)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Two contexts whose first tokens are in slots, and the rest of them.

    Attributes:
        runner: What has computed the first tokens.
        way: The way to attend to them.
        store: The slots.
        spans: The rest; the first and the last are of one context.
        rows: Their rows.
    """

    runner: Runner
    way: Way
    store: KVStore
    spans: tuple[Span, ...]
    rows: torch.Tensor

    @classmethod
    def begun(cls, runner: Runner, layout: KVLayout, way: Way, expected: _Expected) -> Self:
        """Compute the first tokens of both contexts, and then the rest of them."""
        long, short = expected.long, expected.short
        size = len(long) + len(short)
        store = KVStore(layout, size + 2)
        long_slots, short_slots = range(1, len(long) + 1), range(len(long) + 1, size + 1)
        first = [Span(long[:-2], (), long_slots[:-2]), Span(short[:1], (), short_slots[:1])]
        runner.forward(first, way.probing(store, 0))
        past, other = [(Run(i, span.slots, span.num_new),) for i, span in enumerate(first)]
        spans = (
            Span(long[-2:], past, long_slots[-2:], (1,)),
            Span(short[1:], other, short_slots[1:], (len(short) - 2,)),
            Span(long[-2:], past, range(size + 1, size + 3), (1,)),
        )
        rows = _row(runner.forward(spans, way.probing(store, 0)))
        return cls(runner, way, store, spans, rows)

    def change(self, wider: int) -> float:
        """Return how far rows are from before in a pass with so many columns more."""
        attend = self.way.probing(self.store, wider)
        return _distance(_row(self.runner.forward(self.spans, attend)), self.rows)


def _first_trial(
    runner: Runner, layout: KVLayout, expected: _Expected, tolerance: float
) -> tuple[_Trial | None, float]:
    """Return the first way's trial whose rows are the expected ones, and the last distance.

    Raises:
        Exception: What the last way raises; the model may be unable to attend in the others.
    """
    wanted = expected.long_row, expected.short_row, expected.long_row
    difference = math.inf
    for way in WAYS:
        try:
            trial = _Trial.begun(runner, layout, way, expected)
            difference = max(map(_distance, trial.rows, wanted))
        except Exception as error:  # third-party model code may raise anything
            if way is WAYS[-1]:
                raise
            logger.debug("%s cannot attend so", type(runner.model).__name__, exc_info=error)
            continue
        if difference <= tolerance:
            return trial, difference
    return None, difference


def _counts_columns(trial: _Trial, max_length: int | None) -> bool:
    """Return whether rows change beside a context that is far longer.

    A model is told how many columns a pass has before the new tokens, which is as many as the
    longest past, and where each row's tokens stand among its own. Some count by the first number:
    they scale attention by it, or cut it out of a table. Rows that have as many past tokens each
    are right all the same. A trial that is as wide as passes can be sees what no context of a few
    tokens would: a scale that is 1 for the first 8,192 columns, a table that ends.
    """
    dtype = trial.store.layout.layers[0].dtype
    wider = min(2 * (max_length or _MOST_COLUMNS), _MOST_COLUMNS)
    if trial.way.copies:
        num_bytes = trial.store.bytes_per_slot // len(trial.store.layout.layers)
        wider = min(wider, _COPIED_BYTES // (num_bytes * len(trial.spans)))
    wider = -(-wider // _ALIGNMENT) * _ALIGNMENT  # or kernels add up in another order
    try:
        change = trial.change(wider)
        if change <= _SHARE_OF_ROUNDING * rounding(dtype):
            return False
        return change > 4 * trial.change(0)  # some devices add up in any order
    except Exception as error:  # third-party model code may raise anything
        name = type(trial.runner.model).__name__
        logger.debug("%s takes no longer past", name, exc_info=error)
        return True


def _row(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).cpu()


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).square().mean().sqrt())
