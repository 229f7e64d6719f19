"""CudaGraphRunner: decode steps captured as CUDA graphs, one for each shape of their tables.

**Why.** A pass of one token for each row is some eight hundred kernels, and to launch them takes
the processor ten times as long as a GPU computes. Captured, they are one launch.

**Flow.** Tokens, positions, slots and the plan are tables on the device, of a fixed shape, filled
by one copy from pinned memory (``DecodeTables``, pure; ``DecodeArrays``). Shapes are few: rows by
powers of two and three quarters of them, room for tokens and extents, and a window. Surplus rows
repeat the first one, down to its slot. Extents of consecutive slots are read once for all rows
that share them, by FlashAttention with bounds on the device; everything else is read slot by slot
by a kernel of Triton, which merges the pieces too. Which of the two, and the number of splits, is
a rule of the rows and tokens that was read off times on an H100 (``make gpu``, "division"), within
a fifth of the fastest.

**Invariants.** Whatever Python decides is in a captured pass for good. So all graphs are forgotten
when parameters have moved, when a part of the model is another object, and by ``clear_cache()``:
all together, since torch frees the memory of a stream with the first graph that was captured on
it. All graphs share the memory of their logits. Operators are tried on random numbers before they
are used, and each captured pass is compared with the same pass run eagerly. Whether the owner has
changed the model is checked while the device computes; if so, the results are thrown away. A
capture or a replay that fails runs eagerly.

**Eager.** Prefill, Llama 4, modules with hooks, latent attention, soft caps, recurrent states,
keys and values in smaller formats, and float32.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, final

import torch

from genlm_backend.attention.cascade_plan import CachedPrefixes
from genlm_backend.attention.forward_batch import AttentionBackend, ForwardBatch
from genlm_backend.backends.hf.attention_interface import dispatched_to
from genlm_backend.backends.hf.cascade_attention import CascadeAttention
from genlm_backend.backends.hf.cuda_graph_run import CudaGraphRun, DecodeArrays, NotCapturableError
from genlm_backend.backends.hf.decode_ops import decode_ops_for
from genlm_backend.backends.hf.decode_tables import DecodeShape, DecodeTables
from genlm_backend.backends.hf.forward_names import cache_argument
from genlm_backend.backends.hf.model_view import ModelView
from genlm_backend.prefix.kv_pool import KVPool, LayerLayout
from genlm_backend.runtime.memory import is_out_of_memory

logger = logging.getLogger(__name__)

MAX_SLOTS: Final = 1 << 20
"""Tokens that a captured pass may read slot by slot."""

MAX_GRAPHS: Final = 64
"""Passes that are captured; then all are forgotten, and those captured that are met again."""

MIN_SEEN: Final = 2
"""Steps of some number of rows from which on one is captured, which takes as long as a few."""

MIN_SEEN_AGAIN: Final = 8
"""The same if a pass of more rows has been captured, which is as good, but slower."""

MAX_ERRORS: Final = 2
"""Errors of captures, or of replays, after which it is left alone."""

FARTHEST: Final = 0.25
"""Distance of a captured pass's logits from those of the same pass as it runs, over their size."""
# Rounding of bfloat16 alone makes 0.09 of a small model's rows together, and 0.49 of one of them.


@final
@dataclass(slots=True, eq=False)
class CapturedGraph:
    """A captured pass of some shape."""

    arrays: DecodeArrays
    most_tokens: float
    run_again: Callable[[], object]
    logits: torch.Tensor  # [rows, model_vocab]

    def replay(self, tables: DecodeTables, batch: ForwardBatch) -> torch.Tensor:
        """Run a captured pass; the next replay overwrites its logits, ``[B, model_vocab]``."""
        self.arrays.fill(tables, batch)
        self.run_again()
        return self.logits[: batch.num_rows]


@final
@dataclass(slots=True, eq=False)
class _OfView:
    """Captured passes of a view."""

    tensors: list[torch.Tensor]
    pointers: list[int]
    memory: list[Any]  # of the tensors, which a replay reads wherever they are by now
    group_size: int
    by_shape: dict[DecodeShape, CapturedGraph] = field(default_factory=dict)
    failed: set[DecodeShape] = field(default_factory=set)
    window: int = 0
    num_errors: int = 0

    def find(self, shape: DecodeShape) -> DecodeShape | None:
        """Return the shape of the pass of fewest rows that tables have room in, if there is one."""
        return min((known for known in self.by_shape if known.holds(shape)), default=None)


class ReplayPlan(NamedTuple):
    """A decode step that may run captured."""

    tables: DecodeTables
    captured: CapturedGraph | None


@final
class CudaGraphRunner:
    """Captured decode steps of a model, over a pool of its keys and values."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        layers = pool.layout.layers
        self.device = layers[0].device
        self._num_key_heads = layers[0].num_key_heads
        self._recorder = CudaGraphCapturer(self.device)
        self._views: weakref.WeakKeyDictionary[ModelView, _OfView | None] = (
            weakref.WeakKeyDictionary()
        )
        # How often each number of rows has been met that no pass was captured for.
        self._num_seen: Counter[int] = Counter()
        self._alive: list[CapturedGraph] = []
        self._num_failed = 0

    @staticmethod
    def can_be(
        model: Any, parameters: Collection[str], attention: AttentionBackend[Any], pool: KVPool
    ) -> bool:
        """Whether decode steps can be captured, as far as it shows before one runs."""
        layers = pool.layout.layers
        return (
            isinstance(attention, CascadeAttention)
            and "position_ids" in parameters
            and cache_argument(parameters) is not None
            and pool.is_exact
            and not pool.layout.states
            and all(layer.key_dim == layer.value_dim for layer in layers)
            and len({layer.device for layer in layers}) == 1
            # They are compiled and tried here, and not when somebody waits for a step.
            and all(
                decode_ops_for(layer.device, layer.dtype, layer.key_dim, _group_size(model, layer))
                for layer in dict.fromkeys(layers)
            )
        )

    def forget(self) -> None:
        """Forget all captured passes: weights may be others, or anything else they depend on."""
        # All at once: when one graph goes, torch frees memory that all graphs of its stream use.
        self._views.clear()
        self._alive.clear()
        self._recorder.forget()
        self._num_failed = 0

    def plan(self, view: ModelView, batch: ForwardBatch) -> ReplayPlan | None:
        """Return how a pass may run captured; ``None`` if it runs eagerly."""
        if not batch.is_decode or batch.plan is None or batch.states is not None:
            return None
        own = self._of(view)
        if own is None:
            return None
        longest = int(batch.prefix_lens.max()) + 1
        tables = DecodeTables.of(
            batch.plan,
            batch.past,
            batch.slot_mapping.numpy(),
            own.group_size,
            self._num_key_heads,
            own.window if longest > own.window else 0,
        )
        shape = tables.shape
        found = own.find(shape)
        if found is not None and found.rows > shape.rows:
            self._num_seen[shape.rows] += 1
            if self._num_seen[shape.rows] > MIN_SEEN_AGAIN and shape not in own.failed:
                found = None  # it is worth a pass of its own
        if found is not None:
            captured = own.by_shape[found]
            return ReplayPlan(tables, captured) if longest <= captured.most_tokens else None
        if shape in own.failed or max(shape.tokens, shape.rows * shape.window) > MAX_SLOTS:
            return None
        return ReplayPlan(tables, None)

    def replayed(
        self, plan: ReplayPlan, view: ModelView, batch: ForwardBatch
    ) -> torch.Tensor | None:
        """Replay the captured pass; ``None`` if there is none, or it fails."""
        if plan.captured is None:
            return None
        try:
            found = plan.captured.replay(plan.tables, batch)
            self._num_failed = 0
            if self._is_as_it_was(view):  # looked at while the device computes
                return found
        except Exception as error:  # of the device, which the pass may yet do without
            num_failed = self._num_failed + 1
            then = " until clear_cache()" if num_failed > MAX_ERRORS else ""
            logger.warning(
                "a captured decode step has failed, and runs eagerly%s", then, exc_info=error
            )
            self.forget()
            self._num_failed = num_failed
        return None

    def capture(
        self, plan: ReplayPlan, view: ModelView, batch: ForwardBatch, logits: torch.Tensor
    ) -> None:
        """Record a pass of a number of rows that has been met before, and compare it."""
        own, shape = self._views.get(view), plan.tables.shape
        if own is None or not self._is_as_it_was(view):
            return
        self._num_seen[shape.rows] += 1
        if self._num_seen[shape.rows] < MIN_SEEN:
            return
        own.failed.add(shape)  # until it has been seen to be right
        slot_mapping, codes = batch.slot_mapping.numpy(), None
        try:
            codes = self._pool.take_rows(slot_mapping)  # a wrong capture writes wrong ones
            captured = self._capture(plan, view, batch)
            self._alive.append(captured)
            distance = _distance(captured.replay(plan.tables, batch), logits)
        except Exception as error:  # whatever third-party code does that cannot be captured
            if codes is not None:
                self._pool.put(slot_mapping, codes)
            self._note(own, view, shape, error)
            return
        if not distance <= FARTHEST:  # or NaN
            self._pool.put(slot_mapping, codes)
            logger.warning(
                "decode steps of %s run eagerly: a captured one is %.2g off", shape, distance
            )
        else:
            own.failed.discard(shape)
            own.by_shape[shape] = captured
            if captured.most_tokens < math.inf:
                own.window = int(captured.most_tokens)
        if len(self._alive) > MAX_GRAPHS:
            self._num_seen.clear()
            self.forget()

    def _note(self, own: _OfView, view: ModelView, shape: DecodeShape, error: Exception) -> None:
        """Note why a pass was not captured, and whether others are to be."""
        if isinstance(error, NotCapturableError) and error.window is not None:
            own.window = error.window  # with which it is tried again
            own.failed.discard(shape)
            return
        own.num_errors += 1
        if isinstance(error, NotCapturableError) or own.num_errors > MAX_ERRORS:
            self._views[view] = None
        if own.num_errors > MAX_ERRORS:
            logger.warning(
                "after %d errors, decode steps run operator by operator until clear_cache()",
                own.num_errors,
                exc_info=error,
            )
        elif _is_for_memory(error):
            logger.info("no memory is left to capture decode steps of %s", shape)
        else:
            logger.info("decode steps of %s are not captured: %s", shape, error, exc_info=error)

    def _of(self, view: ModelView) -> _OfView | None:
        """Return the captured passes of a view; ``None`` if there can be none."""
        if self._num_failed > MAX_ERRORS or _has_global_hooks():
            return None
        if view in self._views:
            return self._views[view]
        own, tensors = None, [*view.module.parameters(), *view.module.buffers()]
        pointers = [tensor.data_ptr() for tensor in tensors]
        has_memory = all(p or not t.numel() for p, t in zip(pointers, tensors, strict=True))
        if has_memory and not _has_hooks(view.module):
            memory = [tensor.untyped_storage() for tensor in tensors]
            group_size = _group_size(view.module, self._pool.layout.layers[0])
            own = _OfView(tensors, pointers, memory, group_size)
        self._views[view] = own
        return own

    def _is_as_it_was(self, view: ModelView) -> bool:
        """Whether the parameters of a view are where they were; else its passes are forgotten."""
        own = self._views.get(view)
        if own is not None and [one.data_ptr() for one in own.tensors] == own.pointers:
            return True
        self.forget()
        return False

    def _capture(self, plan: ReplayPlan, view: ModelView, batch: ForwardBatch) -> CapturedGraph:
        shape = plan.tables.shape
        arrays = DecodeArrays(shape, self.device)
        arrays.fill(plan.tables, batch)
        tensors, rows = arrays.arrays, shape.rows
        on_device = ForwardBatch(
            input_ids=tensors["token_ids"][:, None],
            position_ids=tensors["positions"][:, None],
            slot_mapping=tensors["slot_mapping"],
            unpadded_index=None,
            output_rows=torch.arange(rows, dtype=torch.int64),
            output_columns=torch.zeros(rows, dtype=torch.int64),
            num_new=batch.num_new,
            prefix_lens=batch.prefix_lens,
            past=CachedPrefixes.none(rows),
            is_decode=True,
        )
        max_prefix_len, num_layers = int(batch.prefix_lens.max()), len(self._pool.layout.layers)
        most_tokens: list[float] = []

        def run() -> torch.Tensor:
            step = CudaGraphRun(self._pool, arrays, max_prefix_len)
            with dispatched_to(step):
                logits = view.logits(on_device, step.inputs(on_device))
            if step.num_attended != num_layers:
                raise NotCapturableError(
                    "some layers do not attend by the function of their config"
                )
            most_tokens.append(step.most_tokens)
            return logits.contiguous()

        run_again, logits = self._recorder.record(run)
        return CapturedGraph(arrays, min(most_tokens), run_again, logits)


_RECORDING: Final = threading.Lock()
"""Held by a thread that records, since what others do meanwhile may end it."""


@final
class CudaGraphCapturer:
    """Records the launches of a function on a CUDA device as a graph."""

    # All graphs share a pool of memory: no two run at once, and no caller reads the results of one
    # after the next has run.
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Begin with memory of its own for the graphs to come; all those before have gone."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        """Run a function twice, capture the second run; return a replay function and the result."""
        current = torch.cuda.current_stream(self._stream.device)
        # A capture that fails leaves its stream the current one, but for the outer context.
        with _RECORDING, torch.cuda.stream(current):
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    run()  # what is made once is not to be a part of it
                    try:
                        graph, found = self._capture(run)
                    except torch.cuda.OutOfMemoryError:
                        torch.cuda.empty_cache()  # which no pool may use
                        graph, found = self._capture(run)
            finally:  # or memory of its inputs would be had again too early
                current.wait_stream(self._stream)
        # The next graph uses the memory of the result too.
        return graph.replay, _unowned(found)

    def _capture(self, run: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            found = run()
        except BaseException:
            with suppress(RuntimeError):  # which says again that the capture has failed
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, found


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that does not keep it from being used again."""
    # As torch takes bytes on a CUDA device from other libraries, which own them.
    data = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False)}
    owner = SimpleNamespace(__cuda_array_interface__={**data, "version": 3})
    memory = torch.as_tensor(owner, device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)


def _is_for_memory(error: BaseException | None) -> bool:
    """Whether an error, or one in whose handling it was raised, is one of memory."""
    while error is not None:
        if is_out_of_memory(error):
            return True
        error = error.__context__
    return False


def _has_global_hooks() -> bool:
    """Whether hooks of all modules of the process are there, which a replay would leave out."""
    of_torch = vars(torch.nn.modules.module)
    return any(of_torch.get(f"_global_forward_{kind}") for kind in ("hooks", "pre_hooks"))


def _group_size(model: Any, layer: LayerLayout) -> int:
    """Return the number of heads that share a head of keys, as the config of a model has it."""
    config = model.config.get_text_config(decoder=True)
    num_heads = getattr(config, "num_attention_heads", None) or layer.num_key_heads
    return max(1, num_heads // layer.num_key_heads)


def _has_hooks(module: Any) -> bool:
    """Whether something of a module's owner runs with it, which a replay would leave out."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square difference of logits, over the deviation of the expected ones."""
    # Those of a few rows, the last among them, since the tables of a large batch take gigabytes.
    few = torch.linspace(0, len(found) - 1, min(len(found), 32), dtype=torch.float32).round().long()
    few = few.to(found.device)
    found, expected = found[few].float(), expected[few].float()
    # Infinite and NaN expected logits are left out; any other makes the result infinite or NaN.
    is_finite = expected.isfinite()
    difference = torch.where(is_finite, found - expected, 0.0)
    expected = torch.where(is_finite, expected, 0.0)
    mean = expected.sum(-1, keepdim=True) / is_finite.sum(-1, keepdim=True).clamp(min=1)
    size = torch.where(is_finite, expected - mean, 0.0)
    return float(difference.norm() / size.norm().clamp(min=1e-30))
