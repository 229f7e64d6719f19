"""CudaGraphRunner: decode steps captured as CUDA graphs, one for each shape of their tables.

**Why.** A pass of one token for each row launches hundreds of kernels. The CPU may take ten times
as long to launch them as the GPU takes to run them. A captured pass is one launch. The reference
is ``naive_row`` in tests/naive.py.

**Flow.** ``DecodeTables`` say which slots a step reads. ``DecodeArrays`` hold these tables, tokens
and positions on the device, in a fixed shape. One copy from pinned memory fills them. Shapes are
few: the number of rows is a power of two or, above 16, three quarters of one; capacities for tokens
and extents are rounded too. Padding rows repeat the first row, including its slot. FlashAttention,
with bounds on the device, reads extents of consecutive slots once for all rows that share them. A
Triton kernel reads all other slots one by one, and merges the results. A rule on rows and tokens
chooses between the two, and divides extents. The rule was fitted to times on an H100 (``make gpu``,
"division"), and its choices took at most a fifth longer than the fastest.

**Invariants.** A captured pass repeats every decision that Python made. So graphs are dropped when
parameters have moved, when a module's attributes have changed, and by ``clear_cache()``. They are
dropped together, since dropping one makes torch free memory that all graphs of its stream use.
All graphs share the memory of their logits. Operators are tried on random numbers before use,
and logits of each captured pass are compared with those of the same pass run eagerly. While the
device computes, ``HFRunner`` checks whether the owner has changed the model; if so, it drops the
results. If a capture or a replay fails, the pass runs eagerly.

**Eager.** Never captured: prefill, Llama 4, models with hooks, latent attention, soft caps,
recurrent states, keys and values in smaller formats, and float32.
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
"""Tokens that a captured pass may read slot by slot, at most."""

MAX_GRAPHS: Final = 64
"""Captured passes, at most. One more drops all; shapes that recur are then captured again."""

MIN_SEEN: Final = 2
"""Steps of one rounded number of rows until the first capture, which takes a few steps' time."""

MIN_SEEN_AGAIN: Final = 8
"""Steps that run in a larger captured pass, which is slower, before a capture of their own."""

MAX_ERRORS: Final = 2
"""Failed captures of a ``ModelView``, or replays in a row, beyond which steps run eagerly."""

FARTHEST: Final = 0.25
"""Largest distance of captured logits from eager ones, relative to the spread of the eager ones."""
# In a small model, bfloat16 alone makes a distance of 0.09 over all rows, and of 0.49 in one row.


@final
@dataclass(slots=True, eq=False)
class CapturedGraph:
    """A captured pass of one shape."""

    arrays: DecodeArrays
    most_tokens: float
    run_again: Callable[[], object]
    logits: torch.Tensor  # [rows, model_vocab]

    def replay(self, tables: DecodeTables, batch: ForwardBatch) -> torch.Tensor:
        """Run the pass; any graph's next replay overwrites the result, ``[B, model_vocab]``."""
        self.arrays.fill(tables, batch)
        self.run_again()
        return self.logits[: batch.num_rows]


@final
@dataclass(slots=True, eq=False)
class _OfView:
    """Captured passes of a ``ModelView``, which is for one adapter or for none."""

    tensors: list[torch.Tensor]
    pointers: list[int]
    memory: list[Any]  # keeps the tensors' storages alive, since a replay reads from them
    group_size: int
    by_shape: dict[DecodeShape, CapturedGraph] = field(default_factory=dict)
    failed: set[DecodeShape] = field(default_factory=set)
    window: int = 0
    num_errors: int = 0

    def find(self, shape: DecodeShape) -> DecodeShape | None:
        """Return the captured shape with the fewest rows into which ``shape`` fits, or ``None``."""
        return min((known for known in self.by_shape if known.holds(shape)), default=None)


class ReplayPlan(NamedTuple):
    """The tables of a decode step, and the captured pass that they fit, if there is one."""

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
        # By number of rows: how many steps had no captured pass of exactly that number.
        self._num_seen: Counter[int] = Counter()
        self._alive: list[CapturedGraph] = []
        self._num_failed = 0

    @staticmethod
    def can_be(
        model: Any, parameters: Collection[str], attention: AttentionBackend[Any], pool: KVPool
    ) -> bool:
        """Whether decode steps may be captured, by the checks that need no step."""
        layers = pool.layout.layers
        return (
            isinstance(attention, CascadeAttention)
            and "position_ids" in parameters
            and cache_argument(parameters) is not None
            and pool.is_exact
            and not pool.layout.states
            and all(layer.key_dim == layer.value_dim for layer in layers)
            and len({layer.device for layer in layers}) == 1
            # Operators are compiled and tried here, so that no query waits for that later.
            and all(
                decode_ops_for(layer.device, layer.dtype, layer.key_dim, _group_size(model, layer))
                for layer in dict.fromkeys(layers)
            )
        )

    def forget(self) -> None:
        """Drop all captured passes, since weights or anything else in them may have changed."""
        # All together: dropping one makes torch free memory that all graphs of its stream use.
        self._views.clear()
        self._alive.clear()
        self._recorder.forget()
        self._num_failed = 0

    def plan(self, view: ModelView, batch: ForwardBatch) -> ReplayPlan | None:
        """Return the tables of a pass that may run captured, now or later; else ``None``."""
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
                found = None  # frequent enough for a capture of its own
        if found is not None:
            captured = own.by_shape[found]
            return ReplayPlan(tables, captured) if longest <= captured.most_tokens else None
        if shape in own.failed or max(shape.tokens, shape.rows * shape.window) > MAX_SLOTS:
            return None
        return ReplayPlan(tables, None)

    def replayed(
        self, plan: ReplayPlan, view: ModelView, batch: ForwardBatch
    ) -> torch.Tensor | None:
        """Replay the captured pass; ``None`` if there is none, it fails, or tensors have moved."""
        if plan.captured is None:
            return None
        try:
            found = plan.captured.replay(plan.tables, batch)
            self._num_failed = 0
            if self._is_as_it_was(view):  # checked while the device computes
                return found
        except Exception as error:  # from the device; the pass may still run eagerly
            num_failed = self._num_failed + 1
            then = ", as all do until clear_cache()" if num_failed > MAX_ERRORS else ""
            logger.warning(
                "a captured decode step failed, and runs eagerly%s", then, exc_info=error
            )
            self.forget()
            self._num_failed = num_failed
        return None

    def capture(
        self, plan: ReplayPlan, view: ModelView, batch: ForwardBatch, logits: torch.Tensor
    ) -> None:
        """Capture a pass whose number of rows recurs, and compare its logits with eager ones."""
        own, shape = self._views.get(view), plan.tables.shape
        if own is None or not self._is_as_it_was(view):
            return
        self._num_seen[shape.rows] += 1
        if self._num_seen[shape.rows] < MIN_SEEN:
            return
        own.failed.add(shape)  # until the comparison passes
        slot_mapping, codes = batch.slot_mapping.numpy(), None
        try:
            codes = self._pool.take_rows(slot_mapping)  # put back if the capture is wrong
            captured = self._capture(plan, view, batch)
            self._alive.append(captured)
            distance = _distance(captured.replay(plan.tables, batch), logits)
        except Exception as error:  # third-party code may do anything that cannot be captured
            if codes is not None:
                self._pool.put(slot_mapping, codes)
            self._note(own, view, shape, error)
            return
        if not distance <= FARTHEST:  # or NaN
            self._pool.put(slot_mapping, codes)
            logger.warning(
                "decode steps of %s run eagerly: logits of a captured step differ from those of "
                "the eager one by %.2g standard deviations",
                shape,
                distance,
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
        """Log why a capture failed, and decide whether to capture other passes of the view."""
        if isinstance(error, NotCapturableError) and error.window is not None:
            own.window = error.window  # the next capture uses it
            own.failed.discard(shape)
            return
        own.num_errors += 1
        if isinstance(error, NotCapturableError) or own.num_errors > MAX_ERRORS:
            self._views[view] = None
        if own.num_errors > MAX_ERRORS:
            logger.warning(
                "after %d failed captures, decode steps with the same adapter (or without one) "
                "run eagerly until clear_cache()",
                own.num_errors,
                exc_info=error,
            )
        elif _is_for_memory(error):
            logger.info("not enough memory to capture decode steps of %s", shape)
        else:
            logger.info("decode steps of %s are not captured: %s", shape, error, exc_info=error)

    def _of(self, view: ModelView) -> _OfView | None:
        """Return the captured passes of a view; ``None`` if it runs eagerly."""
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
        """Whether a view's tensors still have their captured addresses; if not, drop all graphs."""
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
                    "some layers do not call the attention function named in their config"
                )
            most_tokens.append(step.most_tokens)
            return logits.contiguous()

        run_again, logits = self._recorder.record(run)
        return CapturedGraph(arrays, min(most_tokens), run_again, logits)


_RECORDING: Final = threading.Lock()
"""Held while a thread records, since a recording by another thread may make both fail."""


@final
class CudaGraphCapturer:
    """Records the launches of a function on a CUDA device as a graph."""

    # All graphs can share a memory pool, since no two run at once, and callers read the results of
    # one before the next runs.
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Use a new memory pool for later graphs; call this once all earlier ones are dropped."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        """Run a function, then capture it; return a replay function and the result tensor."""
        current = torch.cuda.current_stream(self._stream.device)
        # The outer context restores the current stream even if leaving the inner one fails.
        with _RECORDING, torch.cuda.stream(current):
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    run()  # warm-up: one-time initialisation must not be captured
                    try:
                        graph, found = self._capture(run)
                    except torch.cuda.OutOfMemoryError:
                        torch.cuda.empty_cache()  # frees memory that the graphs' pool could not use
                        graph, found = self._capture(run)
            finally:  # or the memory of inputs would be reused too early
                current.wait_stream(self._stream)
        # Later graphs reuse the memory of the result.
        return graph.replay, _unowned(found)

    def _capture(self, run: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            found = run()
        except BaseException:
            with suppress(RuntimeError):  # it only repeats that the capture failed
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, found


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that does not own its memory, so that later graphs can reuse it."""
    # Through this interface, torch imports CUDA memory that other libraries own.
    data = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False)}
    owner = SimpleNamespace(__cuda_array_interface__={**data, "version": 3})
    memory = torch.as_tensor(owner, device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)


def _is_for_memory(error: BaseException | None) -> bool:
    """Whether an error, or one in its chain of contexts, reports a lack of memory."""
    while error is not None:
        if is_out_of_memory(error):
            return True
        error = error.__context__
    return False


def _has_global_hooks() -> bool:
    """Whether the process has global module hooks, which a replay would skip."""
    of_torch = vars(torch.nn.modules.module)
    return any(of_torch.get(f"_global_forward_{kind}") for kind in ("hooks", "pre_hooks"))


def _group_size(model: Any, layer: LayerLayout) -> int:
    """Return the number of query heads for each key head, from a model's config."""
    config = model.config.get_text_config(decoder=True)
    num_heads = getattr(config, "num_attention_heads", None) or layer.num_key_heads
    return max(1, num_heads // layer.num_key_heads)


def _has_hooks(module: Any) -> bool:
    """Whether a module or a descendant has forward hooks, which a replay would skip."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square difference of logits, in standard deviations of ``expected``."""
    # At most 32 rows, the last among them, since the logits of a large batch take gigabytes.
    few = torch.linspace(0, len(found) - 1, min(len(found), 32), dtype=torch.float32).round().long()
    few = few.to(found.device)
    found, expected = found[few].float(), expected[few].float()
    # Logits that are NaN or infinite in ``expected`` are skipped, unlike those in ``found`` alone.
    is_finite = expected.isfinite()
    difference = torch.where(is_finite, found - expected, 0.0)
    expected = torch.where(is_finite, expected, 0.0)
    mean = expected.sum(-1, keepdim=True) / is_finite.sum(-1, keepdim=True).clamp(min=1)
    size = torch.where(is_finite, expected - mean, 0.0)
    return float(difference.norm() / size.norm().clamp(min=1e-30))
