"""Finds by tiny passes whether a model's keys, values and recurrent states can be cached."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from genlm_backend.attention.forward_batch import (
    AttentionBackend,
    AttentionFactory,
    TokenChunk,
    pack,
)
from genlm_backend.attention.torch.torch_cache import cache_layers
from genlm_backend.backends.hf.cascade_attention import (
    ATTENTION_FACTORIES,
    GatherAttention,
    UncachedAttention,
)
from genlm_backend.backends.hf.forward_names import given_cache, parameters_of
from genlm_backend.backends.hf.hf_runner import HFRunner
from genlm_backend.backends.hf.trial import (
    MOST_ROUNDING,
    NUM_STATES,
    difference_of,
    distance,
    paths_of,
    rounding,
    row_of,
)
from genlm_backend.checks import shown
from genlm_backend.errors import ModelStateError, OptionError, UnsupportedModelError
from genlm_backend.prefix.kv_pool import KVLayout, KVPool, LayerLayout
from genlm_backend.prefix.state_cache import CacheLayer, StateLayout, StatePool, StateTensor
from genlm_backend.runtime.progress import stage
from genlm_backend.runtime.threads import one_thread

logger = logging.getLogger(__name__)

_PROBE_LENGTH: Final = 24
_COUNTS_COLUMNS: Final = {"gpt_neo", "imagegpt", "mpt"}
_SHARE_OF_SPREAD: Final = 0.1
_SHARE_OF_SPREAD_QUANTISED: Final = 0.3  # 8-bit activations amplify rounding
_ONE_THREAD_PARAMETERS: Final = 1_000_000_000  # with so many, trials on one thread take 5 s


@dataclass(frozen=True, slots=True)
class KVSupport:
    """The layout and attention backend of a model's cache, or the ``reason`` why it has none."""

    layout: KVLayout = field(default_factory=KVLayout)
    attention: Callable[[KVPool], AttentionBackend] = GatherAttention
    reason: str = ""
    pads: bool = True
    needs_equal_lengths: bool = False
    takes_several_tokens: bool = True
    spread_alone: float = 0.0


def check_hf_model(model: Any) -> None:
    """Check from the attributes of ``model`` that it is a causal language model with named outputs.

    Raises:
        UnsupportedModelError: If ``model`` is no causal language model, is wrapped by
            ``torch.compile``, or lacks weights.
        ModelStateError: If its config has ``return_dict=False``.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not callable(getattr(model, "forward", None)):
        hint = "; pass a name to from_name" if isinstance(model, str) else ""
        raise UnsupportedModelError(
            f"hf_model must be a causal language model of transformers, got {shown(model)}{hint}"
        )
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModelError(
            "torch.compile hides the arguments of the model: pass the original model, "
            "model._orig_mod, or compile it in place with model.compile(); queries run its "
            "uncompiled code either way"
        )
    if getattr(config, "return_dict", True) is False:
        raise ModelStateError(
            "the model's config has return_dict=False, with which models of transformers cannot "
            "read the outputs of their own parts: set it to True"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model: only decoder-only (causal) "
            "language models define a next token"
        )
    if not hasattr(model, "get_output_embeddings") or "input_ids" not in parameters_of(model):
        raise UnsupportedModelError(f"{type(model).__name__} is not a language model over tokens")
    text_config: Any = model.config.get_text_config(decoder=True)
    if getattr(text_config, "prefix_lm", False) and "token_type_ids" in parameters_of(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has prefix_lm=True in its config: it attends in both "
            "directions to prompt tokens that token_type_ids mark, and queries have no such "
            "marks. To read its prompts from left to right, set prefix_lm=False"
        )
    is_split = getattr(model, "hf_device_map", None) is not None  # parts may be offloaded
    if not is_split and any(p.is_meta for p in getattr(model, "parameters", tuple)()):
        raise UnsupportedModelError(
            f"{type(model).__name__} lacks weights: some or all are on the device 'meta'"
        )


def longest_context(model: Any) -> int | None:
    """Return a config's ``max_position_embeddings``; ``None`` if it is unset or not positive."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    return length if length is None or length > 0 else None


def check_length(model: Any, max_length: int | None) -> None:
    """Refuse a ``max_length`` beyond a model's positions, unless these are rotary or ALiBi."""
    most = longest_context(model)
    if max_length is None or most is None or max_length <= most:
        return
    config = model.config.get_text_config(decoder=True)
    has_rotary = any(hasattr(module, "rope_type") for module in model.modules())
    if not (has_rotary or getattr(config, "alibi", False)):
        raise OptionError(
            f"max_length={max_length} is more than the {most} positions of this "
            f"{type(model).__name__}"
        )


def vocab_width(model: Any) -> int:
    """Return the width of a model's logits, which may be padded beyond its config's vocabulary."""
    head = model.get_output_embeddings()
    width = getattr(head, "out_features", None)
    return int(width or model.config.get_text_config(decoder=True).vocab_size)


def rotary_limit(model: Any) -> float:
    """Return the length up to which all contexts have equal rotary frequencies; may be ``inf``."""
    # For "longrope" and "dynamic", transformers changes the frequencies in longer contexts, so that
    # the keys of all positions depend on the length of the context.
    limits = [
        limit
        for module in getattr(model, "modules", list)()
        if (rope_type := getattr(module, "rope_type", None)) is not None
        for limit in _rotary_limits(module, rope_type)
    ]
    return min(limits, default=math.inf)


def _rotary_limits(module: Any, rope_type: Any) -> Iterator[int]:
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    by_layer = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    for layer_type, kind in by_layer.items():
        own = parameters if layer_type is None else parameters.get(layer_type) or {}
        if kind == "longrope":
            yield own["original_max_position_embeddings"]
        elif "dynamic" in str(kind):
            # At the limit itself, transformers keeps the frequencies of the previous pass.
            yield module.original_max_seq_len - 1


@stage("testing how the model can be cached")
def hf_probe(runner: HFRunner, vocab_size: int, max_length: int | None) -> KVSupport:
    """Find by a few tiny passes whether rows from cached tokens equal rows of whole passes."""
    # Two short contexts run whole, and then from cached tokens (``trial.py``). The first attention
    # backend is used whose rows differ from whole ones only by rounding, or by a small share of a
    # wrong token's effect. Without a cache or with states, more passes test positions and padding.
    support = _examine_slots(runner, vocab_size, max_length)
    if not support.reason and not support.layout.states:  # with states, contexts may run uncached
        return support
    return replace(support, pads=_examine_uncached(runner, vocab_size, max_length))


def _examine_uncached(runner: HFRunner, vocab_size: int, max_length: int | None) -> bool:
    """Return whether padding leaves rows unchanged; drop ``position_ids`` if they change rows."""
    length = min(_PROBE_LENGTH, max_length or _PROBE_LENGTH)
    generator = random.Random(1)
    long = [generator.randrange(vocab_size) for _ in range(length)]
    size = min(length // 2, 11)  # 11 is no multiple of the sizes to which some models pad
    if not size:
        return True
    short = TokenChunk(long[:size], outputs=(size - 1,))
    ids = torch.tensor([short.token_ids], dtype=torch.int64, device=runner.device)
    name, failure = type(runner.model).__name__, None
    with tried(runner), torch.inference_mode():
        rows = row_of(runner.view.module(input_ids=ids, **runner.caching(False)).logits[0])
        tolerance, share = bounds(runner.model)
        tolerance = max(tolerance, share * distance(rows[-1], rows[0]))
        for unknown in (set[str](), {"position_ids"}):
            runner.parameters -= unknown
            try:
                (alone,) = row_of(runner.forward(pack([short]), UncachedAttention()))
            except Exception as error:  # third-party model code may raise anything
                failure = error
                continue
            if not distance(alone, rows[-1]) > tolerance:  # NaN is accepted
                break
        else:
            raise UnsupportedModelError(
                f"{name} does not return the same rows with an attention mask as without one, "
                "whether it gets position_ids or not: its passes could not be padded"
            ) from failure
        try:
            batch = pack([short, TokenChunk(long, outputs=(length - 1,))])
            padded, _ = row_of(runner.forward(batch, UncachedAttention()))
        except Exception as error:  # the model may take only contexts of equal lengths
            logger.debug("%s does not support padding", name, exc_info=error)
            return False
    return distance(alone, padded) <= tolerance


def _examine_slots(runner: HFRunner, vocab_size: int, max_length: int | None) -> KVSupport:
    config = runner.model.config.get_text_config(decoder=True)
    if runner.view.cache_argument is None:
        return KVSupport(reason="it accepts no cache of keys and values or recurrent states")
    if config.model_type in _COUNTS_COLUMNS:
        return KVSupport(
            reason="it slices its masks from a table by the number of columns in a pass"
        )
    layers = DynamicCache(config=config).layers
    others = {type(layer).__name__ for layer in layers if not _is_known(layer)}
    if others:
        reason = f"some layers have caches of unsupported types: {sorted(others)}"
        return KVSupport(reason=reason)
    window = getattr(config, "sliding_window", None) or 0
    length = _PROBE_LENGTH if window > 64 else max(_PROBE_LENGTH, 2 * window + 4)
    length = min(length, max_length or length)
    if length < 6 or vocab_size < 3:
        few = f"a context of {length} tokens from a vocabulary of {vocab_size}"
        return KVSupport(reason=f"{few} is too short to tell")
    generator = random.Random(0)
    long, other = ([generator.randrange(vocab_size) for _ in range(length)] for _ in range(2))
    try:
        with tried(runner):
            layout, bare_row = _observe_layout(runner, long[:3], _cache_layers(layers))
            trial = _SlotTrial(runner, layout, long, other, vocab_size)
            factory, difference, several = trial.first_factory()
            alone = trial.spread_alone(factory or ATTENTION_FACTORIES[-1])
    except UnsupportedModelError as error:
        return KVSupport(reason=str(error))
    except Exception as error:  # third-party model code may raise anything; contexts can run whole
        name = type(runner.model).__name__
        logger.warning("%s runs without key-value reuse: a trial failed", name, exc_info=True)
        return KVSupport(reason=f"it does not run with this library's cache: {error!r}")
    if distance(trial.third_row, bare_row) > trial.tolerance:  # position_ids or later tokens matter
        chunk = TokenChunk(long[:3], outputs=(2,))
        (alone_row,) = row_of(runner.forward(pack([chunk]), UncachedAttention()))
        if distance(alone_row, bare_row) > trial.tolerance:
            return KVSupport(reason="it returns other rows with position_ids than without")
    if factory is None:
        return KVSupport(
            reason=f"rows from cached tokens differ by {difference:.2g} from rows of whole "
            f"passes (a wrong token makes a difference of {trial.spread:.2g})"
        )
    return KVSupport(
        layout,
        factory.over,
        # Llama 4 scales attention by the number of cached columns in a pass.
        needs_equal_lengths=bool(getattr(config, "attn_temperature_tuning", False)),
        takes_several_tokens=several,
        spread_alone=alone,
    )


def bounds(model: Any, dtype: torch.dtype | None = None) -> tuple[float, float]:
    """Return two limits of distance: an absolute one, and a share of a wrong token's effect."""
    if getattr(model, "is_quantized", False):
        return MOST_ROUNDING, _SHARE_OF_SPREAD_QUANTISED
    own = next((p.dtype for p in model.parameters()), torch.float32)
    return rounding(dtype or own), _SHARE_OF_SPREAD


@final
class _SlotTrial:
    """Compares rows of a long and a short context, computed whole, with rows from cached tokens."""

    def __init__(
        self, runner: HFRunner, layout: KVLayout, long: list[int], other: list[int], vocab_size: int
    ) -> None:
        self._runner, self._layout = runner, layout
        self._long, self._short = long, other[: len(other) // 2]
        wrong = [*long[:-3], (long[-3] + 1) % vocab_size, *long[-2:]]
        last = (len(long) - 1,)
        # All three contexts have one length, so that nothing is padded. In this pass more tokens
        # follow the short context, but none in passes with a cache: this detects looking ahead.
        whole = runner.forward(
            pack(
                [
                    TokenChunk(long, outputs=(2, *last)),
                    TokenChunk(wrong, outputs=last),
                    TokenChunk(other, outputs=(len(self._short) - 1,)),
                ]
            ),
            UncachedAttention(),
        )
        self.third_row, self._long_row, wrong_row, self._short_row = row_of(whole)
        self.spread = distance(wrong_row, self._long_row)
        self._dtype = (layout.layers or layout.states.tensors)[0].dtype
        smallest, share = bounds(runner.model, self._dtype)
        self.tolerance = max(smallest, share * self.spread)

    def first_factory(self) -> tuple[AttentionFactory | None, float, bool]:
        """Return the first factory within ``tolerance``, if any, and the last ``_difference``."""
        difference, takes_several = math.inf, True
        for factory in ATTENTION_FACTORIES:
            if factory.uses_interface and not self._layout.layers:
                continue
            self._runner.view.name_attention(factory.uses_interface)
            try:
                difference, takes_several = self._difference(factory)
            except Exception as error:  # third-party model code may raise anything
                if factory is ATTENTION_FACTORIES[-1]:
                    raise
                name = type(self._runner.model).__name__
                logger.debug("%s does not run with this attention backend", name, exc_info=error)
                continue
            if difference <= self.tolerance:
                return factory, difference, takes_several
        return None, difference, takes_several

    def _difference(self, factory: AttentionFactory) -> tuple[float, bool]:
        """Return the error of cached rows, and whether a pass may add several tokens to a row."""
        contexts, whole = (self._long, self._short), (self._long_row, self._short_row)
        pool = KVPool(self._layout, 4 * sum(map(len, contexts)))
        states = self._layout.states
        state_pool = StatePool(states, NUM_STATES) if states else None
        given = self._runner, factory.probing(pool), state_pool
        return difference_of(*given, contexts, whole, rounding(self._dtype))

    def spread_alone(self, factory: AttentionFactory) -> float:
        """Return the distance of a one-token pass's row from the whole row, or 0 if negligible."""
        # Only quantised models without states are tried: some of their kernels compute one token in
        # another precision than several. In unquantised models only the order of sums differs.
        if self._layout.states or not getattr(self._runner.model, "is_quantized", False):
            return 0.0
        *before, last = self._long
        attention = factory.probing(KVPool(self._layout, len(self._long)))
        slots = range(1, len(self._long) + 1)
        self._runner.forward(pack([TokenChunk(before, slots[:-1])]), attention)
        batch = pack([TokenChunk([last], slots[-1:], (0,))], paths_of([slots[:-1]]))
        (row,) = row_of(self._runner.forward(batch, attention))
        spread = distance(row, self._long_row)
        return spread if spread > rounding(self._dtype) else 0.0


def tried(runner: HFRunner) -> AbstractContextManager[None]:
    """Return a context manager for tiny passes: one thread for small models on the CPU."""
    num_parameters = sum(parameter.numel() for parameter in runner.model.parameters())
    # Several threads would gain less on an idle machine than they lose on a busy one.
    is_small = runner.device.type == "cpu" and num_parameters < _ONE_THREAD_PARAMETERS
    return one_thread() if is_small else contextlib.nullcontext()


def _is_known(layer: Any) -> bool:
    """Return whether a cache layer is of a supported type: keys and values, states, or neither."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return True
    if type(layer).__name__ == "DummyLayer":  # from transformers 5.23 on
        return True
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def _cache_layers(layers: Sequence[Any]) -> tuple[CacheLayer, ...]:
    """Return the contents of cache layers; ``()`` if all hold keys and values alone."""
    held = tuple(
        CacheLayer(isinstance(layer, DynamicLayer), getattr(layer, "number_of_states", 0))
        for layer in layers
    )
    return held if any(layer.num_states or layer.is_empty for layer in held) else ()


def _fresh_cache(contents: Sequence[CacheLayer]) -> Cache:
    """Return an empty cache of transformers, with layers for the given contents."""

    def attention_layer(num_states: int) -> Any:
        if num_states:
            return LinearAttentionAndFullAttentionLayer(number_of_states=num_states)
        return DynamicLayer()

    layers = cache_layers(contents, attention_layer)
    return Cache(layers=layers) if layers else DynamicCache()


@torch.inference_mode()
def _observe_layout(
    runner: HFRunner, token_ids: list[int], contents: tuple[CacheLayer, ...]
) -> tuple[KVLayout, torch.Tensor]:
    """Run a pass without ``position_ids``; return the layout of its cache, and its last row."""
    cache = _fresh_cache(contents)
    ids = torch.tensor([token_ids], dtype=torch.int64, device=runner.device)
    given = given_cache(runner.model, cache)
    logits = runner.view.module(input_ids=ids, **given, use_cache=True).logits
    if contents:  # a model that repeats layers adds cache layers
        contents = _cache_layers(cache.layers)
    states = StateLayout(_state_tensors(cache.layers), contents) if contents else StateLayout()
    layers = []
    for number, layer in enumerate(cache.layers):
        if contents and not contents[number].attends:
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape[2] != len(token_ids):
            raise UnsupportedModelError("a layer does not keep keys and values for each token")
        heads = keys.shape[1], keys.shape[3], values.shape[1], values.shape[3]
        layers.append(LayerLayout(*heads, keys.dtype, keys.device))
    if not layers and not states:
        raise UnsupportedModelError("no layer keeps keys and values or a state")
    return KVLayout(tuple(layers), states), row_of(logits[0, -1])


def _state_tensors(layers: Sequence[Any]) -> tuple[StateTensor, ...]:
    """Return the shapes, dtypes and devices of one row's recurrent states in cache layers."""
    found: list[StateTensor] = []
    for number, layer in enumerate(layers):
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(layer, name, {}).items():
                if state is not None:
                    shape = tuple(state.shape[1:])
                    found.append(StateTensor(number, name, index, shape, state.dtype, state.device))
    return tuple(found)


_NUM_MEAN_TOKENS: Final = 256
_FARTHEST_MEAN: Final = 4096


@torch.inference_mode()
def mean_keys(
    runner: HFRunner, layout: KVLayout, vocab_size: int, longest: float
) -> list[torch.Tensor]:
    """Return the mean key of each layer over random tokens, which are the same in every call."""
    generator = random.Random(0)
    farthest = int(min(longest, _FARTHEST_MEAN))
    num_tokens = min(_NUM_MEAN_TOKENS, farthest)
    ids = [generator.randrange(vocab_size) for _ in range(num_tokens)]
    # Some channels of keys lie far from zero in every context, above all those that rotary
    # positions turn slowly. Their mean depends on positions, so tokens span a long context.
    positions = torch.arange(num_tokens, dtype=torch.int64) * (farthest // num_tokens)
    inputs = {"input_ids": torch.tensor(ids, dtype=torch.int64), "position_ids": positions}
    cache = _fresh_cache(layout.states.layers)
    names = runner.parameters & inputs.keys()
    on_device = {name: inputs[name].unsqueeze(0).to(runner.device) for name in names}
    runner.view.module(**on_device, **given_cache(runner.model, cache), use_cache=True)
    held = [getattr(layer, "keys", None) for layer in cache.layers]
    keys = [own[0].float() for own in held if own is not None]
    # An overflow may make the keys of later tokens NaN; the mean leaves out infinities and NaN.
    return [
        torch.where(of_layer.isfinite(), of_layer, torch.nan).nanmean(1).nan_to_num(0).reshape(-1)
        for of_layer in keys
    ]
