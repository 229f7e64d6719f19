"""The prefix cache of a Hugging Face model: shapes of keys, values and states, and budgets."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Final

from genlm_backend.backends.hf.hf_runner import HFRunner
from genlm_backend.backends.hf.options import HFOptions
from genlm_backend.backends.hf.support import KVSupport, mean_keys
from genlm_backend.errors import OptionError
from genlm_backend.prefix.budgets import Budgets, default_kv_budget, state_budget
from genlm_backend.prefix.codecs import KVCacheDtype, needs_mean
from genlm_backend.prefix.kv_pool import KVLayout, KVPool
from genlm_backend.prefix.state_cache import StatePool
from genlm_backend.runtime.memory import is_out_of_memory
from genlm_backend.scheduling.prefix_cache import PrefixCache

logger = logging.getLogger(__name__)

_CACHED_TYPES: Final = """
    bailing_hybrid bamba bloom cohere deepseek_v3 falcon falcon_h1 falcon_mamba gemma gemma2
    gemma3_text gemma4_text gpt2 gpt_neox gpt_oss gptj granite granitemoehybrid
    inkling2_loop_text inkling2_text inkling_text jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3
    llama llama4_text mamba mamba2 mistral mixtral nemotron_h olmo_hybrid opt phi qwen2
    qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next stablelm starcoder2 zamba zamba2
    zaya
"""
CACHED_TYPES: Final = frozenset(_CACHED_TYPES.split())
"""Types of models that the tests have cached; one that is not is a warning."""


def layout_of(
    runner: HFRunner, support: KVSupport, kept: KVCacheDtype | None, vocab_size: int, longest: float
) -> KVLayout:
    """Return the shapes of keys and values, and how they are kept."""
    if kept is None:
        return support.layout
    why = f"runs every context whole: {support.reason}" if support.reason else ""
    if not support.reason and not support.layout.layers:
        why = "has recurrent states alone, which stay as they are"
    if why:
        raise OptionError(
            f"kv_cache_dtype={kept!r} is for models whose keys and values are kept, and "
            f"{type(runner.model).__name__} {why}"
        )
    means = mean_keys(runner, support.layout, vocab_size, longest) if needs_mean(kept) else None
    return support.layout.kept_as(kept, means)


def hf_prefix_cache(
    runner: HFRunner, support: KVSupport, layout: KVLayout, wanted: HFOptions
) -> PrefixCache | None:
    """Return room for contexts; ``None`` if every context is run whole."""
    name = type(runner.model).__name__
    kv_bytes, host = wanted.get("kv_cache_bytes"), wanted.get("host_cache_bytes", 0)
    state_bytes = wanted.get("state_cache_bytes")
    if kv_bytes == 0:
        return None
    if support.reason:
        _check_nothing_wanted(host, state_bytes, name, support.reason)
        logger.info("%s runs every context whole: %s", name, support.reason)
        kind = runner.model.config.get_text_config(decoder=True).model_type
        if kind in CACHED_TYPES and not support.reason.endswith("too short to tell"):
            warnings.warn(
                f"{name} runs every context whole, which models of its type need not: "
                f"{support.reason}. Look for what has changed its code, or take another release of "
                "transformers; kv_cache_bytes=0 has it run so without this warning",
                stacklevel=2,
            )
        return None
    budget = default_kv_budget(layout) if kv_bytes is None else kv_bytes
    size, attends = layout.states.bytes_per_state, bool(layout.layers)
    of_states = state_budget(state_bytes, budget, size, name, attends=attends)
    num_slots = layout.num_slots(budget - of_states)
    if of_states and not num_slots:
        raise OptionError(
            f"state_cache_bytes={of_states} leaves no room for keys and values of "
            f"kv_cache_bytes={budget}: a token takes {layout.bytes_per_slot} bytes"
        )
    if attends and not num_slots:
        raise OptionError(
            f"kv_cache_bytes={budget} has no room for one token, which takes "
            f"{layout.bytes_per_slot} bytes beside as many that stay free; 0 keeps nothing"
        )
    states = host_states = host_pool = None
    if of_states:
        with _fits("state_cache_bytes", of_states):
            states = StatePool(layout.states, of_states // size)
    with _fits("kv_cache_bytes", kv_bytes):
        pool = KVPool(layout, num_slots)
    if host and layout.devices == {"cpu"}:
        warnings.warn(
            "host_cache_bytes gains nothing here, since all that is kept is in the "
            "processor's memory anyway: give the bytes to kv_cache_bytes",
            stacklevel=2,
        )
    num_host_states = _num_host_states(host, size, name, attends=attends)
    num_host_slots = layout.num_slots(host - num_host_states * size) if attends else 0
    pins = "cuda" in layout.devices
    with _fits("host_cache_bytes", host):
        if num_host_states:
            host_states = StatePool(layout.states.on_host(), num_host_states, pins)
        if num_host_slots:
            host_pool = KVPool(layout.on_host(), num_host_slots, pins)
    return PrefixCache(
        runner,
        support.attention(pool),
        pool,
        num_slots,
        host_pool,
        num_host_slots,
        states,
        host_states,
        Budgets(budget, host, of_states),
    )


def _check_nothing_wanted(host: int, state_bytes: int | None, name: str, reason: str) -> None:
    for option, value, kind in (
        ("host_cache_bytes", host or None, "whose keys and values are kept"),
        ("state_cache_bytes", state_bytes, "with recurrent states that are kept"),
    ):
        if value is not None:
            raise OptionError(
                f"{option}={value} is for models {kind}, and {name} runs every context whole: "
                f"{reason}"
            )


def _num_host_states(host: int, size: int, name: str, *, attends: bool) -> int:
    """Return how many states of some size have room in their half of the host's bytes, or all."""
    num_bytes = host // 2 if attends else host
    if host and num_bytes < size:
        raise OptionError(
            f"the recurrent state of {name} behind one token takes {size} bytes, and of "
            f"host_cache_bytes={host} there are {num_bytes} for such"
            f"{' (half of them)' if attends else ''}: give more to it"
        )
    return num_bytes // size if size else 0


@contextlib.contextmanager
def _fits(name: str, num_bytes: int | None) -> Iterator[None]:
    """Name the option that needs more memory than there is in the error."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if num_bytes is None or not is_out_of_memory(error):
            raise
        raise OptionError(f"{name}={num_bytes} do not fit into memory") from error
