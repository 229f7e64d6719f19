"""MlxEvaluator: answers of a model of mlx-lm."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, cast, final

import mlx.core as mx
import torch

from genlm_backend.cache import TierName
from genlm_backend.llm.evaluator import Evaluator, EvaluatorCounts, EvaluatorInfo
from genlm_backend.llm.hf.by_adapter import answers_by_adapter
from genlm_backend.llm.hf.job import Asked, Found
from genlm_backend.llm.hf.memory import cpu_budget
from genlm_backend.llm.hf.passes import Passes
from genlm_backend.llm.hf.plan import CostModel
from genlm_backend.llm.mlx.adapters import MlxAdapters
from genlm_backend.llm.mlx.attend import WholeAttend
from genlm_backend.llm.mlx.runner import MlxRunner
from genlm_backend.llm.mlx.store import MlxStore
from genlm_backend.llm.mlx.support import check_model, evaluate_all, examine, is_half
from genlm_backend.llm.query import Adapter, Query
from genlm_backend.llm.row import Row, rows_of_logits, scores_of_logits
from genlm_backend.llm.scoring import Answer, Question
from genlm_backend.llm.threads import frequent_switches

logger = logging.getLogger(__name__)

_CPU: Final = torch.device("cpu")
_METAL_FRACTION: Final = 0.5

_turn = threading.Lock()
"""Held by who computes: a pass changes modules of its model for as long as it takes, and several
evaluators may be over one model."""


@final
class MlxEvaluator(Evaluator):
    """Answers queries by a language model of mlx-lm, on MLX's default device.

    A model whose states cannot be kept token by token runs every context whole.

    Args:
        model: The model.
        max_length: Longest context to accept; ``None`` for what its arguments say.
        kv_cache_bytes: Bytes of keys and values to keep; ``None`` for a part of what is free.
        eos_token_ids: The ids that end a text; ``None`` for the tokenizer's.

    Raises:
        UnsupportedModelError: If it is no language model of mlx-lm.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int | None = None,
        kv_cache_bytes: int | None = None,
        eos_token_ids: Collection[int] | None = None,
    ) -> None:
        check_model(model)
        model.eval()
        self._is_metal = is_metal = mx.default_device().type == mx.DeviceType.gpu
        if not is_metal:  # it would take a compiler, and write files beside the program
            mx.disable_compile()
        evaluate_all(model)
        self._runner, self._adapters = MlxRunner(model), MlxAdapters(model)
        self.passes = Passes(
            cast(Any, self._runner),
            CostModel.on("mps" if is_metal else "cpu"),
            self._finished,
            self._scored,
            lambda: self.check_wanted(),
        )
        self._max_length = _longest_context(model) if max_length is None else max_length
        self._wanted_bytes, self._ends = kv_cache_bytes, eos_token_ids
        self._budget = 0

    @property
    def model(self) -> Any:
        """The model as it was given; ``None`` after ``close()``."""
        return self._runner.model

    # ---------------------------------------------------------------- getting ready

    def open(self) -> EvaluatorInfo:
        """Find out what the model can do by a few tiny passes, and make room for what is kept."""
        runner = self._runner
        with _turn:
            support = examine(runner, self._max_length)
        whole: Any = WholeAttend()
        self.passes.pads = support.pads
        self.passes.attend_whole = whole
        if support.reason:
            logger.info("%s runs contexts whole: %s", type(runner.model).__name__, support.reason)
        elif self._wanted_bytes != 0:
            per_slot = sum(shape.bytes_per_slot for shape in support.shapes)
            budget = _default_budget() if self._wanted_bytes is None else self._wanted_bytes
            num_slots = max(0, budget // per_slot - 1)
            store: Any = MlxStore(support.shapes, num_slots)
            attend: Any = support.way.over(store)
            self.passes.keep(store, num_slots, attend)
            self.passes.attend_whole = whole
            self._budget = budget
        if not self._is_metal and is_half(runner.model):
            warnings.warn(
                "MLX computes in half precision slowly on a CPU: wrap a model in float32 (what "
                "mlx_lm.load returns has set_dtype(mx.float32))",
                stacklevel=2,
            )
        runner.num_forwards = runner.tokens_computed = 0  # the examination is not the user's
        return EvaluatorInfo(
            vocab_size=support.vocab_size,
            max_length=self._max_length,
            num_slots=self.passes.tree.num_slots if self.passes.keeps else None,
            device="cpu",  # where rows are
            can_forget=True,
            takes_adapters=True,
            scores=support.pads or self.passes.keeps,
            omits_undefined=True,
            eos_token_ids=self._ends,
        )

    # ---------------------------------------------------------------- rows and scores

    def evaluate(self, queries: Sequence[Question]) -> Sequence[Answer | Exception]:
        """Return one answer to each query or scoring, adapter by adapter."""
        with frequent_switches():
            return answers_by_adapter(queries, self._answers)

    def _answers(self, questions: list[Asked]) -> list[Found]:
        """Return the answers to questions of one adapter."""
        with self._in_place(questions[0].adapter):
            return self.passes.evaluate(questions)

    @contextlib.contextmanager
    def _in_place(self, adapter: Adapter | None) -> Iterator[None]:
        """Let the model compute with an adapter, or as it came, and nobody else meanwhile."""
        with _turn, self._adapters.in_place(adapter):
            yield

    def evaluate_whole(self, query: Query) -> Row:
        """Return the row of a context run whole and alone, past whatever is kept."""
        with self._in_place(query.adapter):
            (row,) = self.passes.whole([query])
        return cast(Row, row)

    def _finished(self, logits: torch.Tensor) -> list[Row]:
        return rows_of_logits(logits, _CPU, self.undefined_ids, in_place=True)

    def _scored(self, logits: torch.Tensor, places: list[int], targets: list[int]) -> torch.Tensor:
        return scores_of_logits(logits, places, targets, self.undefined_ids)

    # ---------------------------------------------------------------- what is kept

    def num_cached(self, query: Query, tier: TierName | None = None) -> int:
        """Return how many of a context's tokens have their keys and values in slots."""
        # The last token always goes through the model: its logits are the answer.
        return self.passes.tree.num_cached(query.context.packed()[:-1], query.adapter, tier)

    def forget(self, query: Query, keep: int) -> None:
        """Free the slots of a context beyond its first ``keep`` tokens."""
        self.passes.tree.forget(query.context.packed(), query.adapter, keep)

    def pin(self, query: Query) -> bool:
        """Compute a context and keep its slots until ``clear()``; return whether there was room."""
        self._answers([query])
        node = self.passes.match(query.context, query.adapter, len(query.context))
        if self.passes.tree.nodes.depth[node] < len(query.context):
            return False
        self.passes.tree.pin(node)
        return True

    def clear(self) -> None:
        """Free all slots, pinned ones too."""
        self.passes.tree.clear()

    # ---------------------------------------------------------------- keeping house

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter in mlx-lm's format, and try it by a tiny pass."""
        with _turn:
            self._adapters.load(adapter, path)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Let go of an adapter, and free all slots."""
        self._adapters.remove(adapter)
        self.clear()

    def counts(self) -> EvaluatorCounts:
        """Return what the runner and the tree have counted."""
        passes = self.passes
        used = passes.tree.slots.num_used
        return EvaluatorCounts(
            num_forwards=self._runner.num_forwards,
            tokens_computed=self._runner.tokens_computed,
            tokens_reused=passes.tokens_reused,
            kv_bytes_used=used * getattr(passes.store, "bytes_per_slot", 0),
            kv_bytes_budget=self._budget,
            num_evicted_tokens=passes.tree.num_evicted,
        )

    def close(self) -> None:
        """Let go of the model and of the slots, and give their memory back."""
        self.passes.keep_nothing()
        self._runner.model = None
        self._adapters.close()
        self._budget = 0
        mx.clear_cache()


def _longest_context(model: Any) -> int | None:
    """Return the longest context that a model's arguments speak of."""
    args = getattr(model, "args", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        length = getattr(args, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None


def _default_budget() -> int:
    """Return the bytes of keys and values to keep where nobody says.

    A quarter of the machine's free memory, 4 GiB at most, on the CPU; half of what Metal
    recommends and does not use.
    """
    if mx.default_device().type != mx.DeviceType.gpu:
        return cpu_budget()
    recommended = mx.device_info().get("max_recommended_working_set_size", 0)
    return int(max(0, int(recommended) - mx.get_active_memory()) * _METAL_FRACTION)
