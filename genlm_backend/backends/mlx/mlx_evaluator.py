"""MlxEvaluator: evaluates queries with an mlx-lm model."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Final, final

import mlx.core as mx
import torch

from genlm_backend.backends.mlx.mlx_adapters import MlxAdapters
from genlm_backend.backends.mlx.mlx_gather import MlxUncachedAttention
from genlm_backend.backends.mlx.mlx_kv_pool import MlxKVPool, MlxStatePool
from genlm_backend.backends.mlx.mlx_runner import MlxRunner
from genlm_backend.backends.mlx.mlx_support import (
    MlxSupport,
    check_mlx_model,
    evaluate_all,
    is_half,
    mlx_probe,
)
from genlm_backend.errors import OptionError
from genlm_backend.prefix.budgets import Budgets, state_budget
from genlm_backend.prefix.kv_pool import FREE_SLOTS
from genlm_backend.queries.evaluator import EvaluatorInfo
from genlm_backend.queries.query import Adapter
from genlm_backend.runtime.memory import cpu_budget
from genlm_backend.scheduling.local_evaluator import LocalEvaluator
from genlm_backend.scheduling.prefill_plan import CostModel
from genlm_backend.scheduling.prefix_cache import PrefixCache
from genlm_backend.scheduling.scheduler import Capabilities

logger = logging.getLogger(__name__)

_CPU: Final = torch.device("cpu")

_turn = threading.Lock()
"""A lock for passes: they replace modules of a model, which several evaluators may share."""


@final
class MlxEvaluator(LocalEvaluator):
    """Evaluates queries with an mlx-lm model on MLX's default device, with a cache if possible."""

    _runner: MlxRunner

    def __init__(
        self,
        model: Any,
        *,
        max_length: int | None = None,
        kv_cache_bytes: int | None = None,
        state_cache_bytes: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        prefill_step_size: int | None = None,
    ) -> None:
        check_mlx_model(model)
        model.eval()
        self._is_metal = is_metal = mx.default_device().type == mx.DeviceType.gpu
        if not is_metal:  # compilation would need a C++ compiler, and leave temporary files
            mx.disable_compile()
        evaluate_all(model)
        self._adapters = MlxAdapters(model)
        whole: Any = MlxUncachedAttention()
        cost = CostModel.on("mps" if is_metal else "cpu")
        if prefill_step_size is not None:
            cost = replace(cost, max_chunk=prefill_step_size)
        super().__init__(MlxRunner(model), cost, whole, _CPU)
        self._max_length = _longest_context(model) if max_length is None else max_length
        self._wanted_bytes, self._ends = kv_cache_bytes, eos_token_ids
        self._wanted_state_bytes = state_cache_bytes

    @property
    def model(self) -> Any:
        """The model that was passed; ``None`` after ``close()``."""
        return self._runner.model

    # ---------------------------------------------------------------- opening

    def open(self) -> EvaluatorInfo:
        """Probe the model by a few tiny passes, and make its prefix cache."""
        runner = self._runner
        with _turn:
            support = mlx_probe(runner, self._max_length)
        can = Capabilities(support.pads, takes_several_tokens=support.takes_several_tokens)
        if support.reason:
            logger.info("%s runs contexts whole: %s", type(runner.model).__name__, support.reason)
        cache = mlx_prefix_cache(runner, support, self._wanted_bytes, self._wanted_state_bytes)
        whole = self.scheduler.uncached_attention
        self._schedule(cache or PrefixCache(runner, whole), whole, can)
        if not self._is_metal and is_half(runner.model):
            warnings.warn(
                "MLX is slow in half precision on a CPU: wrap a model in float32 (call "
                "set_dtype(mx.float32) on the model that mlx_lm.load returns)",
                stacklevel=2,
            )
        runner.num_forwards = runner.tokens_computed = 0  # do not count the probe
        return EvaluatorInfo(
            vocab_size=support.vocab_size,
            max_length=self._max_length,
            num_slots=self.scheduler.tree.num_slots if self.scheduler.cache.keeps else None,
            num_states=self.scheduler.cache.state_pool.num_states or None,
            device="cpu",  # where rows are returned
            takes_adapters=True,
            scores=support.pads or self.scheduler.cache.keeps,
            omits_undefined=True,
            reads_out=True,
            takes_steps=True,
            eos_token_ids=self._ends,
        )

    # ---------------------------------------------------------------- passes

    @contextlib.contextmanager
    def _in_place(self, adapter: Adapter | None) -> Iterator[None]:
        """Activate an adapter, or none, for a pass; only one MLX model computes at a time."""
        with _turn, self._adapters.in_place(adapter):
            yield

    # ---------------------------------------------------------------- adapters, freeing

    def clear(self) -> None:
        """Free all slots, pinned ones too."""
        self.scheduler.tree.clear()

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter in mlx-lm's format, and run it on two tokens."""
        with _turn:
            self._adapters.load(adapter, path)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Drop an adapter, and free all slots."""
        self._adapters.remove(adapter)
        self.clear()

    def close(self) -> None:
        """Drop the model and the slots, and return MLX's cached memory."""
        self._let_go()
        self._adapters.close()
        mx.clear_cache()


def _longest_context(model: Any) -> int | None:
    """Return the longest context in a model's arguments; ``None`` if they name none."""
    args = getattr(model, "args", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        length = getattr(args, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None


_METAL_FRACTION: Final = 0.5


def mlx_prefix_cache(
    runner: MlxRunner, support: MlxSupport, kv_bytes: int | None, state_bytes: int | None
) -> PrefixCache | None:
    """Return a prefix cache; ``None`` if the model supports none or the budget is 0."""
    name = type(runner.model).__name__
    if support.reason:
        if state_bytes is not None:
            raise OptionError(
                f"state_cache_bytes={state_bytes} needs a model with cached recurrent states, but "
                f"{name} runs every context whole: {support.reason}"
            )
        return None
    budget = _default_budget() if kv_bytes is None else kv_bytes
    if budget == 0 and state_bytes is None:
        return None
    size = support.states.bytes_per_state
    per_slot = sum(shape.bytes_per_slot for shape in support.shapes)
    of_states = state_budget(state_bytes, budget, size, name, attends=per_slot > 0)
    num_slots = max(0, (budget - of_states) // per_slot - 1) if per_slot else FREE_SLOTS
    pool: Any = MlxKVPool(support.shapes, num_slots)
    states: Any = MlxStatePool(support.states, of_states // size) if support.states else None
    attention: Any = support.factory.over(pool)
    budgets = Budgets(budget, states=of_states)
    return PrefixCache(runner, attention, pool, num_slots, states=states, budgets=budgets)


def _default_budget() -> int:
    """Return the default cache bytes: ``cpu_budget``, or half of Metal's unused working set."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return cpu_budget()
    recommended = mx.device_info().get("max_recommended_working_set_size", 0)
    return int(max(0, int(recommended) - mx.get_active_memory()) * _METAL_FRACTION)
