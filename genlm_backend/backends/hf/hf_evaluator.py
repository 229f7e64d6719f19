"""HFEvaluator: answers queries by a model of transformers, which ``open()`` probes."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

import torch

from genlm_backend.backends.hf.architecture import check_predicts
from genlm_backend.backends.hf.cascade_attention import UncachedAttention
from genlm_backend.backends.hf.cuda_graph_runner import CudaGraphRunner
from genlm_backend.backends.hf.hf_runner import HFRunner
from genlm_backend.backends.hf.model_picture_rules import examine_pictures, image_token_id
from genlm_backend.backends.hf.options import HFOptions, hf_options
from genlm_backend.backends.hf.prefix_file import PrefixFiles
from genlm_backend.backends.hf.support import (
    KVSupport,
    check_hf_model,
    check_length,
    hf_probe,
    longest_context,
    mean_keys,
    rotary_limit,
    tried,
    vocab_width,
)
from genlm_backend.errors import OptionError
from genlm_backend.multimodal.pictures import PictureRules
from genlm_backend.prefix.budgets import Budgets, default_kv_budget, state_budget
from genlm_backend.prefix.codecs import KVCacheDtype, needs_mean
from genlm_backend.prefix.kv_pool import KVLayout, KVPool
from genlm_backend.prefix.state_cache import StatePool
from genlm_backend.queries.evaluator import EvaluatorCounts, EvaluatorInfo
from genlm_backend.queries.query import Adapter, RowQuery
from genlm_backend.readouts.sampling import ends_of_model
from genlm_backend.runtime.memory import is_out_of_memory
from genlm_backend.runtime.threads import use_num_threads
from genlm_backend.scheduling.local_evaluator import LocalEvaluator
from genlm_backend.scheduling.prefill_plan import CostModel
from genlm_backend.scheduling.prefix_cache import PrefixCache
from genlm_backend.scheduling.scheduler import Capabilities

logger = logging.getLogger(__name__)


@final
class HFEvaluator(LocalEvaluator):
    """Answers queries by a causal language model of transformers, cached if a probe allows it."""

    _runner: HFRunner

    def __init__(
        self, model: Any, *, output_device: torch.device | None = None, **options: Any
    ) -> None:
        """Check ``HFOptions`` and a model, and put the model into evaluation mode; run no pass."""
        self._options = hf_options(options)
        check_hf_model(model)
        packs = self._options.get("packs_weights")
        if packs is None:  # copies of weights in training would have to be packed again and again
            is_in_training = model.training and any(own.requires_grad for own in model.parameters())
            self._packs = not is_in_training
        else:
            self._packs = packs
        model.eval()
        runner = HFRunner(model, bool(packs), lambda: self.check_cancelled())
        cost = CostModel.on(runner.device.type)
        super().__init__(runner, cost, UncachedAttention(), output_device)
        max_length = self._options.get("max_length")
        check_length(model, max_length)
        self._max_length = longest_context(model) if max_length is None else max_length

    # ---------------------------------------------------------------- probing

    def open(self) -> EvaluatorInfo:
        """Pack weights if wanted, probe the model by tiny passes, and allocate its cache."""
        runner = self._runner
        width = vocab_width(runner.model)
        if num_threads := self._options.get("num_threads"):
            use_num_threads(num_threads)
        if self._packs:
            runner.packed.pack(runner.model)
        with tried(runner):
            tokens = [[i % width for i in (5, 6, 7)]]
            ids = torch.tensor(tokens, dtype=torch.int64, device=runner.device)
            runner.try_views(ids)
        self._in_place(None)
        check_predicts(runner, width)
        support = hf_probe(runner, width, self._max_length)
        limit = rotary_limit(runner.model)
        longest = min(longest_context(runner.model) or math.inf, limit)
        layout = layout_of(runner, support, self._options.get("kv_cache_dtype"), width, longest)
        if support.spread_alone:
            warnings.warn(
                f"rows of this {type(runner.model).__name__} depend on the other rows of their "
                "batch by more than rounding: computed alone, a row differs from the same row "
                f"among others by a root mean square of {support.spread_alone:.2g}; kernels for "
                "quantised weights may compute one row in another precision than many",
                stacklevel=2,
            )
        can = Capabilities(
            support.pads, support.needs_equal_lengths, support.takes_several_tokens, limit
        )
        self._attention = support.attention
        cache = hf_prefix_cache(runner, support, layout, self._options)
        cache = cache or PrefixCache(runner, UncachedAttention(layout), layout=layout)
        self._schedule(cache, UncachedAttention(layout), can)
        has_bytes = self._options.get("kv_cache_bytes") != 0
        self._files = PrefixFiles(self.scheduler, runner, has_bytes=has_bytes)
        if cache.keeps:
            given = runner.model, runner.parameters, cache.attention, cache.pool
            if not support.needs_equal_lengths and CudaGraphRunner.can_be(*given):
                runner.graphs = CudaGraphRunner(cache.pool)
        runner.num_forwards = runner.tokens_computed = 0  # the probe's do not count
        return EvaluatorInfo(
            vocab_size=width,
            max_length=self._max_length,
            num_slots=cache.tree.num_slots if cache.keeps else None,
            num_states=cache.state_pool.num_states or None,
            num_host_slots=cache.tree.host_slots.num_slots or None,
            kv_cache_dtype=self._options.get("kv_cache_dtype"),
            device=str(runner.device),
            takes_adapters=True,
            uses_openmp=runner.device.type == "cpu",
            scores=not support.reason,  # if rows from slots are right, attention is causal
            omits_undefined=True,
            reads_out=True,
            takes_steps=True,
            image_token_id=image_token_id(runner.model),
            eos_token_ids=ends_of_model(runner.model),
        )

    # ---------------------------------------------------------------- active adapter, pictures

    def _in_place(self, adapter: Adapter | None) -> AbstractContextManager[object]:
        self._runner.activate(adapter)  # the adapter stays active afterwards
        return nullcontext()

    def picture_rules(
        self, token_ids: Sequence[int], inputs: Mapping[str, torch.Tensor]
    ) -> PictureRules:
        """Find by a few passes how text continues after the pictures of a context."""
        runner, placeholder = self._runner, image_token_id(self._runner.model)
        if placeholder is None:
            return super().picture_rules(token_ids, inputs)
        before = runner.num_forwards, runner.tokens_computed
        runner.view = runner.view_with(None)
        rules = examine_pictures(
            runner, self.scheduler.cache.layout, self._attention, token_ids, inputs, placeholder
        )
        runner.num_forwards, runner.tokens_computed = before
        return rules

    # ---------------------------------------------------------------- files of prefixes, clearing

    def save_prefix(self, query: RowQuery, path: str) -> None:
        """Compute a context and write its keys, values and recurrent state into a file."""
        self._files.check_can_keep(len(query.context))
        with self._in_place(query.adapter):
            self._files.save(self.scheduler.computed(query), query, Path(path))

    def load_prefix(self, path: str, adapter: Adapter | None) -> Sequence[int]:
        return self._files.load(path, adapter, self._max_length)

    def clear(self) -> None:
        """Free all slots, pinned ones too, and read weights again, in case they changed."""
        self.scheduler.tree.clear()
        self._runner.look_again()
        self._files.look_again()

    # ---------------------------------------------------------------- adapters

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter, and try it by a few tiny passes."""
        self._runner.load(adapter, path, self.scheduler.cache.keeps)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Drop an adapter, and free all slots."""
        self._runner.remove(adapter)
        self.clear()

    # ---------------------------------------------------------------- counts, closing

    def counts(self) -> EvaluatorCounts:
        """Return all counts, with the bytes of packed weights and the steps that ran captured."""
        return replace(
            super().counts(),
            packed_weight_bytes=self._runner.packed.nbytes,
            num_captured_steps=self._runner.num_captured_steps,
        )

    def close(self) -> None:
        self._runner.close()
        self._let_go()


# -------------------------------------------------------------------- prefix cache

_CACHED_TYPES: Final = """
    bailing_hybrid bamba bloom cohere deepseek_v3 falcon falcon_h1 falcon_mamba gemma gemma2
    gemma3_text gemma4_text gpt2 gpt_neox gpt_oss gptj granite granitemoehybrid
    inkling2_loop_text inkling2_text inkling_text jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3
    llama llama4_text mamba mamba2 mistral mixtral nemotron_h olmo_hybrid opt phi qwen2
    qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next stablelm starcoder2 zamba zamba2
    zaya
"""
CACHED_TYPES: Final = frozenset(_CACHED_TYPES.split())
"""Model types whose caching the tests cover; a warning tells if such a model cannot be cached."""


def layout_of(
    runner: HFRunner, support: KVSupport, kept: KVCacheDtype | None, vocab_size: int, longest: float
) -> KVLayout:
    """Return the layout of cached keys and values, in the format ``kept`` if it is given."""
    if kept is None:
        return support.layout
    why = f"runs every context whole: {support.reason}" if support.reason else ""
    if not support.reason and not support.layout.layers:
        why = "has only recurrent states, which have a single format"
    if why:
        raise OptionError(
            f"kv_cache_dtype={kept!r} needs a model with cached keys and values, but "
            f"{type(runner.model).__name__} {why}"
        )
    means = mean_keys(runner, support.layout, vocab_size, longest) if needs_mean(kept) else None
    return support.layout.kept_as(kept, means)


def hf_prefix_cache(
    runner: HFRunner, support: KVSupport, layout: KVLayout, wanted: HFOptions
) -> PrefixCache | None:
    """Return a prefix cache within the budgets ``wanted``; ``None`` if every context runs whole."""
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
                f"{name} runs every context whole, although models of its type can be cached: "
                f"{support.reason}. Check whether its code was changed, or use another release of "
                "transformers; kv_cache_bytes=0 runs it this way without the warning",
                stacklevel=2,
            )
        return None
    budget = default_kv_budget(layout) if kv_bytes is None else kv_bytes
    size = layout.states.bytes_per_state
    attends = bool(layout.layers)
    of_states = state_budget(state_bytes, budget, size, name, attends=attends)
    num_slots = layout.num_slots(budget - of_states)
    if of_states and not num_slots:
        raise OptionError(
            f"kv_cache_bytes={budget} has no room for keys and values, {layout.bytes_per_slot} "
            f"bytes per token, beside {of_states} bytes of recurrent states: raise kv_cache_bytes"
        )
    if attends and not num_slots:
        raise OptionError(
            f"kv_cache_bytes={budget} has no room for one token and a reserved slot, which take "
            f"{layout.bytes_per_slot} bytes each: raise it, or set it to 0 to cache nothing"
        )
    states = host_states = host_pool = None
    if of_states:
        with _fits("state_cache_bytes", of_states):
            states = StatePool(layout.states, of_states // size)
    with _fits("kv_cache_bytes", kv_bytes):
        pool = KVPool(layout, num_slots)
    if host and layout.devices == {"cpu"}:
        warnings.warn(
            "host_cache_bytes gains nothing here, since the whole cache is in CPU memory anyway: "
            "add the bytes to kv_cache_bytes instead",
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
        ("host_cache_bytes", host or None, "cached keys and values or recurrent states"),
        ("state_cache_bytes", state_bytes, "cached recurrent states"),
    ):
        if value is not None:
            raise OptionError(
                f"{option}={value} needs a model with {kind}, but {name} runs every context "
                f"whole: {reason}"
            )


def _num_host_states(host: int, size: int, name: str, *, attends: bool) -> int:
    """Return how many states fit into half of ``host`` bytes, or into all if no layer attends."""
    num_bytes = host // 2 if attends else host
    if host and num_bytes < size:
        raise OptionError(
            f"the recurrent state of {name} after one token takes {size} bytes, but "
            f"host_cache_bytes={host} has only {num_bytes}{' (half of it)' if attends else ''} "
            "for states: raise host_cache_bytes"
        )
    return num_bytes // size if size else 0


@contextlib.contextmanager
def _fits(name: str, num_bytes: int | None) -> Iterator[None]:
    """Turn an out-of-memory error into an ``OptionError``, unless ``num_bytes`` is ``None``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if num_bytes is None or not is_out_of_memory(error):
            raise
        raise OptionError(f"{name}={num_bytes} does not fit into memory") from error
