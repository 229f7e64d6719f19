"""States of each family, gathered by row into a fresh cache, and what transformers makes of that.

A prompt runs once; its states, keys and values are gathered to rows of another cache, which goes on
from them; each row's log-probabilities are compared with those of its whole context. Nothing of
ours runs.
"""

import copy
import functools
import inspect
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from tests.llm import families, state_families
from tests.llm.families import VOCAB

CLOSE = 2e-4
"""The largest difference of log-probabilities that is rounding."""

FAR = 1e-3
"""A difference of log-probabilities that is none."""

HALF, SINGLE = torch.bfloat16, torch.float32


class Row(NamedTuple):
    """A row of a cache, of which the last tokens are its own and the ones before padding."""

    cache: DynamicCache
    index: int
    length: int


class Holds(NamedTuple):
    """Facts about a family, in the release of transformers that is installed."""

    cache: str = "past_key_values"
    """The forward's parameter for the cache, before release 5.24."""
    positions: bool = True
    """The forward takes `position_ids`."""
    hybrid: bool = False
    """A layer of its cache has a state as well as keys and values."""
    one: bool = True
    """A token behind a state has the scores of the whole context."""
    several: bool = True
    """So have several tokens at once."""
    zeros: bool = True
    """A state of zeros, said to be one, is as good as none."""
    mask: bool = True
    """A mask of past and new tokens may be given with a state."""
    beside: tuple[str, ...] = ()
    """Attributes by row that the model puts on the cache, beside the layers."""
    conv: tuple[torch.dtype, ...] = (HALF,)
    """Dtypes of a layer's convolution states, by index, under weights in bfloat16."""
    recurrent: tuple[torch.dtype, ...] = (SINGLE,)
    """Dtypes of its recurrent states, by index, likewise."""


POSITIONS = () if hasattr(DynamicIndexedLayer(), "indexer_position_ids") else ("position_ids",)
"""What Qwen 4 keeps beside the layers; from 5.24 on it is in one of them."""

HOLDS = {
    # A scan of several tokens takes no state to begin with: it begins with zeros.
    "mamba": Holds(cache="cache_params", positions=False, several=False, mask=False),
    "falcon_mamba": Holds(cache="cache_params", positions=False, several=False, mask=False),
    "jamba": Holds(several=False),
    "zamba": Holds(several=False, hybrid=True),
    # A scan's time steps are at least `time_step_min`, a single token's are not.
    "nemotron_h": Holds(one=False),
    "zamba2": Holds(one=False, hybrid=True),
    # One of its states is the last tokens' ids, which are EOS before the first.
    "qwen4_exp": Holds(zeros=False, beside=POSITIONS, conv=(HALF, HALF, torch.int64)),
    "mamba2": Holds(cache="cache_params", positions=False),
    "bamba": Holds(),
    "falcon_h1": Holds(hybrid=True),
    "granitemoehybrid": Holds(),
    "glm5_next": Holds(),
    "inkling": Holds(hybrid=True, conv=(SINGLE,) * 4, recurrent=()),
    "kimi_linear": Holds(),
    "lfm2": Holds(recurrent=()),
    "lfm2_moe": Holds(recurrent=()),
    "olmo_hybrid": Holds(),
    "qwen3_5": Holds(),
    "qwen3_5_moe": Holds(),
    "qwen3_next": Holds(),
    "zaya": Holds(hybrid=True, recurrent=(HALF,)),  # the value of the last token
}
"""What holds of each family, and where it is another than of most, why."""

HOLDS |= {
    name: holds
    for name, holds in {
        "bailing_hybrid": Holds(),
        "inkling2": Holds(hybrid=True, conv=(SINGLE,) * 4, recurrent=()),
        "inkling2_loop": Holds(hybrid=True, conv=(SINGLE,) * 4, recurrent=()),
        "lara_mini": Holds(),
        "lfm3": Holds(recurrent=()),
    }.items()
    if name in state_families.NAMES
}

each_family = pytest.mark.parametrize("name", HOLDS)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@functools.cache
def model_of(name: str) -> tf.PreTrainedModel:
    return state_families.make(name)


@functools.cache
def unclamped(name: str) -> tf.PreTrainedModel:
    """A model whose scans have no smallest time step: then a token is what a scan is."""
    model = state_families.make(name)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model


def tokens(generator: random.Random, length: int) -> list[int]:
    return [generator.randrange(3, VOCAB) for _ in range(length)]


def given_beside(
    model: tf.PreTrainedModel, cache: DynamicCache, positions: torch.Tensor
) -> dict[str, Any]:
    """The arguments of a forward beside the ids and the mask."""
    parameters = inspect.signature(model.forward).parameters
    name = next(n for n in ("cache", "past_key_values", "cache_params") if n in parameters)
    beside: dict[str, Any] = {name: cache, "use_cache": True}
    return {**beside, "position_ids": positions} if "position_ids" in parameters else beside


def step(
    model: tf.PreTrainedModel, cache: DynamicCache, new: list[list[int]], past: list[int]
) -> torch.Tensor:
    """Log-probabilities behind new tokens, as many of each row, of rows with so many past ones."""
    ids, most = torch.tensor(new), max(past)
    positions = torch.tensor(past)[:, None] + torch.arange(ids.shape[1])
    beside = given_beside(model, cache, positions)
    if min(past) < most and any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        columns = torch.arange(most + ids.shape[1])
        beside["attention_mask"] = (columns >= most - torch.tensor(past)[:, None]).long()
    return model(ids, **beside).logits[:, -1].log_softmax(-1)


def whole(model: tf.PreTrainedModel, contexts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities behind contexts, each computed whole and for itself."""
    rows = [model(torch.tensor([c]), use_cache=False).logits[0, -1] for c in contexts]
    return torch.stack(rows).log_softmax(-1)


def prompted(model: tf.PreTrainedModel, prompt: list[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    step(model, cache, [prompt], [0])
    return cache


def empty_like(other: DynamicCache, model: tf.PreTrainedModel) -> DynamicCache:
    """A new cache, with as many layers as another has, of which the model may have added some."""
    cache = DynamicCache(config=model.config)
    for source in other.layers[len(cache.layers) :]:
        like = next(layer for layer in cache.layers if type(layer) is type(source))
        cache.layers.append(copy.deepcopy(like))
    return cache


def gathered(model: tf.PreTrainedModel, rows: Sequence[Row]) -> DynamicCache:
    """A cache of rows of other caches; what is by token is padded on its left to the longest."""
    cache = empty_like(rows[0].cache, model)
    for i, layer in enumerate(cache.layers):
        sources = [row.cache.layers[i] for row in rows]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            put_states(layer, sources, rows)
        if isinstance(layer, DynamicLayer):
            put_keys_and_values(layer, sources, rows)
    if hasattr(rows[0].cache, "position_ids"):
        put_positions(cache, "position_ids", [row.cache for row in rows], rows)
    return cache


def put_positions(target: Any, name: str, sources: Sequence[Any], rows: Sequence[Row]) -> None:
    """Gather what a model with pictures counts by: three axes × rows × tokens."""
    of_each = zip(sources, rows, strict=True)
    own = [getattr(source, name)[:, row.index].T for source, row in of_each]
    setattr(target, name, on_the_left(own, rows).permute(2, 0, 1))


def put_states(layer: Any, sources: Sequence[Any], rows: Sequence[Row]) -> None:
    first = sources[0]
    layer.dtype, layer.device = first.dtype, first.device
    for index in range(layer.number_of_states):
        layer.has_previous_state[index] = first.has_previous_state[index]
        layer.conv_kernel_size[index] = first.conv_kernel_size[index]
        for kind in ("conv_states", "recurrent_states"):
            if getattr(first, kind)[index] is not None:
                of_each = zip(sources, rows, strict=True)
                own = [getattr(source, kind)[index][row.index] for source, row in of_each]
                getattr(layer, kind)[index] = torch.stack(own)
                getattr(layer, f"is_{kind}_initialized")[index] = True


def put_keys_and_values(layer: DynamicLayer, sources: Sequence[Any], rows: Sequence[Row]) -> None:
    def of_each(name: str) -> torch.Tensor:
        pairs = zip(sources, rows, strict=True)
        return on_the_left([getattr(source, name)[row.index] for source, row in pairs], rows)

    keys, values = of_each("keys"), of_each("values")
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = max(row.length for row in rows)
    if isinstance(layer, DynamicIndexedLayer) and sources[0].is_indexer_initialized:
        indexed = of_each("indexer_keys")
        layer.lazy_initialization_indexer(indexed)
        layer.indexer_keys = indexed
        if getattr(sources[0], "indexer_position_ids", None) is not None:
            put_positions(layer, "indexer_position_ids", sources, rows)


def on_the_left(by_token: list[torch.Tensor], rows: Sequence[Row]) -> torch.Tensor:
    """What rows have by token (the last axis but one), without their padding, padded anew."""
    own = [tensor[..., -row.length :, :] for tensor, row in zip(by_token, rows, strict=True)]
    most = max(tensor.shape[-2] for tensor in own)
    return torch.stack([pad(tensor, (0, 0, most - tensor.shape[-2], 0)) for tensor in own])


def states(cache: DynamicCache) -> dict[tuple[int, str, int], torch.Tensor]:
    """The states that a cache keeps, by layer, kind and index."""
    return {
        (i, kind, index): state
        for i, layer in enumerate(cache.layers)
        if isinstance(layer, LinearAttentionCacheLayerMixin)
        for kind in ("conv_states", "recurrent_states")
        for index, state in getattr(layer, kind).items()
        if state is not None
    }


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (ours.float() - theirs.float()).abs().max().item()


def check(differences: list[float], holds: bool) -> None:
    """Each difference is rounding where that holds, and else one of them is far from it."""
    if holds:
        assert max(differences) < CLOSE
    else:
        assert max(differences) > FAR, "a deviation of transformers is mended: correct `HOLDS`"


def follow(
    model: tf.PreTrainedModel, prompts: list[int], counts: list[int], chosen: list[list[int]]
) -> list[float]:
    """The difference at each step of gathered rows: of so many tokens, behind prompts so long.

    Args:
        model: The model.
        prompts: The length of each prompt.
        counts: The number of new tokens of each row, for each step.
        chosen: The rows that are gathered before each step.
    """
    generator, differences = random.Random(1), []
    contexts = [tokens(generator, length) for length in prompts]
    rows = [Row(prompted(model, context), 0, len(context)) for context in contexts]
    for count, indices in zip(counts, chosen, strict=True):
        contexts = [contexts[i] for i in indices]
        cache = gathered(model, [rows[i] for i in indices])
        new = [tokens(generator, count) for _ in indices]
        ours = step(model, cache, new, [len(c) for c in contexts])
        contexts = [c + t for c, t in zip(contexts, new, strict=True)]
        differences.append(difference(ours, whole(model, contexts)))
        rows = [Row(cache, i, len(context)) for i, context in enumerate(contexts)]
    return differences


RESAMPLED = [[0, 0, 0], [2, 0, 2, 1], [3, 3]]
"""Rows of a prompt, and of them, and of those."""

OTHERS = [[0, 1, 2, 1], [2, 0, 2, 3], [3, 0]]
"""Likewise, of three prompts; the last ones without the longest."""

OTHERS_OF_TWO = [[0, 1, 1], [2, 0, 0], [1]]


def test_each_family_of_transformers_is_here():
    folder = Path(tf.__file__).parent / "models"
    calls = re.compile(r"\bupdate_(?:conv|recurrent)_state\b")
    found = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if calls.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(HOLDS) == set(state_families.NAMES)


@each_family
def test_how_a_model_is_called(name):
    model = model_of(name)
    cache, parameters = prompted(model, [5, 6, 7]), inspect.signature(model.forward).parameters
    hybrid = any(
        isinstance(layer, LinearAttentionCacheLayerMixin) and isinstance(layer, DynamicLayer)
        for layer in cache.layers
    )
    beside = set(vars(cache)) - set(vars(DynamicCache(config=model.config)))
    assert (HOLDS[name].cache if families.CACHE == "past_key_values" else "cache") in parameters
    assert HOLDS[name].positions == ("position_ids" in parameters)
    assert HOLDS[name].hybrid == hybrid
    assert HOLDS[name].beside == tuple(beside)


@each_family
def test_each_state_is_read(name):
    """What is compared below would show a state that is another."""
    model, generator = model_of(name), random.Random(4)
    cache, new = prompted(model, tokens(generator, 23)), [tokens(generator, 1)]
    true = step(model, gathered(model, [Row(cache, 0, 23)]), new, [23])
    for key in states(cache):
        other = gathered(model, [Row(cache, 0, 23)])
        states(other)[key].zero_()
        assert difference(step(model, other, new, [23]), true) > 10 * CLOSE, key


@each_family
def test_one_token(name):
    model = model_of(name)
    check(follow(model, [23], [1, 1, 1], RESAMPLED), HOLDS[name].one)
    check(follow(model, [23, 23, 23], [1, 1, 1], OTHERS), HOLDS[name].one)


@each_family
def test_one_token_of_rows_of_unequal_lengths(name):
    """One prompt is shorter than a convolution, one longer than the window of attention."""
    assert max(follow(unclamped(name), [23, 9, 2], [1, 1, 1], OTHERS)) < CLOSE


@each_family
@pytest.mark.parametrize("count", [2, 17])
def test_several_tokens(name, count):
    model = model_of(name)
    check(follow(model, [23], [count], [[0, 0]]), HOLDS[name].several)
    check(follow(model, [23, 23, 23], [count], OTHERS[:1]), HOLDS[name].several)
    check(follow(model, [23, 9, 2], [count], OTHERS[:1]), HOLDS[name].several)


@each_family
def test_zeros_in_the_place_of_no_state(name):
    model, generator = unclamped(name), random.Random(2)
    cache = prompted(model, tokens(generator, 23))
    differences = []
    for count in (1, 17):
        zeros, new = empty_like(cache, model), [tokens(generator, count) for _ in "ab"]
        for layer, source in zip(zeros.layers, cache.layers, strict=True):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                put_states(layer, [source] * 2, [Row(cache, 0, 23)] * 2)
        for state in states(zeros).values():
            state.zero_()
        differences.append(difference(step(model, zeros, new, [0, 0]), whole(model, new)))
    check(differences, HOLDS[name].zeros)


def padded_step(
    model: tf.PreTrainedModel, cache: DynamicCache, past: torch.Tensor, new: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities behind unequal numbers of new tokens, padded on the left, and the mask."""
    most = max(map(len, new))
    ids = torch.tensor([[0] * (most - len(row)) + row for row in new])
    now = torch.tensor([[0] * (most - len(row)) + [1] * len(row) for row in new])
    mask = torch.cat([past, now], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -most:]
    logits = model(ids, attention_mask=mask, **given_beside(model, cache, positions)).logits
    return logits[:, -1].log_softmax(-1), mask


@each_family
def test_a_mask(name):
    """Prompts padded on the left are as good as others; then a mask is of past and new tokens."""
    model, generator = unclamped(name), random.Random(3)
    contexts = [tokens(generator, n) for n in (11, 5, 1)]
    cache, none = DynamicCache(config=model.config), torch.zeros(3, 0, dtype=torch.long)
    ours, mask = padded_step(model, cache, none, contexts)
    assert difference(ours, whole(model, contexts)) < CLOSE
    new = [tokens(generator, 1) for _ in contexts]
    ours, _ = padded_step(model, cache, mask, new)
    true = whole(model, [c + t for c, t in zip(contexts, new, strict=True)])
    # Without an error: what was a single token is as many as the mask has columns.
    check([difference(ours, true)], HOLDS[name].mask)


@each_family
def test_no_padding_between_a_state_and_new_tokens(name):
    """It goes through convolutions and states, masked or not: rows have as many new tokens each."""
    model, generator = unclamped(name), random.Random(3)
    contexts = [tokens(generator, 23) for _ in range(2)]
    cache = gathered(model, [Row(prompted(model, context), 0, 23) for context in contexts])
    new = [tokens(generator, 5), tokens(generator, 3)]
    columns = 23 if HOLDS[name].mask else 0
    ours, _ = padded_step(model, cache, torch.ones(2, columns, dtype=torch.long), new)
    true = whole(model, [c + t for c, t in zip(contexts, new, strict=True)])
    if HOLDS[name].several:
        assert difference(ours[:1], true[:1]) < CLOSE
    assert difference(ours[1:], true[1:]) > FAR


@each_family
def test_padding_behind_new_tokens_spoils_the_state_alone(name):
    """The scores of what is before the padding are right; the state is that of other tokens."""
    model, generator = unclamped(name), random.Random(3)
    rows = [tokens(generator, 9), tokens(generator, 6)]
    cache, alone = DynamicCache(config=model.config), prompted(model, rows[1])
    ids, mask = torch.tensor([rows[0], [*rows[1], 0, 0, 0]]), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    beside = given_beside(model, cache, torch.arange(9).expand(2, 9))
    logits = model(ids, attention_mask=mask, **beside).logits
    ours = torch.stack([logits[0, 8], logits[1, 5]]).log_softmax(-1)
    assert difference(ours, whole(model, rows)) < CLOSE
    true = states(alone)
    assert all(difference(s[1], true[key][0]) > FAR for key, s in states(cache).items())


@each_family
def test_states_are_written_where_they_are(name):
    """A step, of one token or several, writes into the tensors that it was given."""
    model, generator = model_of(name), random.Random(5)
    cache, past = prompted(model, tokens(generator, 23)), 23
    for count in (1, 2):
        before = {key: (state, state.clone()) for key, state in states(cache).items()}
        step(model, cache, [tokens(generator, count)], [past])
        past += count
        for key, state in states(cache).items():
            assert state is before[key][0], key
            assert not torch.equal(state, before[key][1]), key


@each_family
def test_dtypes_of_states_under_bfloat16(name):
    if name == "inkling2" and families.CACHE == "past_key_values":
        pytest.skip("before release 5.24 it does not run in bfloat16")
    model, generator = state_families.make(name, torch.bfloat16), random.Random(6)
    cache = prompted(model, tokens(generator, 23))
    step(model, cache, [tokens(generator, 1)], [23])
    step(model, cache, [tokens(generator, 2)], [24])
    most = {"conv_states": {}, "recurrent_states": {}}
    for (_, kind, index), state in states(cache).items():
        assert most[kind].setdefault(index, state.dtype) == state.dtype
    assert tuple(most["conv_states"].values()) == HOLDS[name].conv
    assert tuple(most["recurrent_states"].values()) == HOLDS[name].recurrent


@pytest.mark.slow
@each_family
def test_prompts_of_several_chunks(name):
    """Behind more tokens than a chunk of any scan, as many once more."""
    model = unclamped(name)
    assert max(follow(model, [150, 131], [1, 1, 1], OTHERS_OF_TWO)) < CLOSE
    check(follow(model, [150, 131], [80], OTHERS_OF_TWO[:1]), HOLDS[name].several)


@pytest.mark.slow
@each_family
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_history(name, data):
    """Rows of unequal lengths, forked and left as it comes."""
    rows = prompts = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    counts = st.integers(1, 4) if HOLDS[name].several else st.just(1)
    history = []
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
        history.append((data.draw(counts), rows))
    with torch.inference_mode():
        differences = follow(unclamped(name), prompts, *map(list, zip(*history, strict=True)))
    assert max(differences) < CLOSE
