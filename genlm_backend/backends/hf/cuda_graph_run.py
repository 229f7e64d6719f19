"""CudaGraphRun: attention of decode steps; inputs that change are read from device buffers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genlm_backend.attention.forward_batch import ForwardBatch
from genlm_backend.attention.torch.torch_cache import Pair, SlotLayer, transformers_cache
from genlm_backend.backends.hf.decode_ops import DecodeOps, decode_ops_for
from genlm_backend.backends.hf.decode_tables import DecodeShape, DecodeTables, Extents
from genlm_backend.prefix.kv_pool import KVPool


class NotCapturableError(RuntimeError):
    """Raised for a pass that does something that a replay cannot repeat for other steps."""

    window: int | None = None


@final
class DecodeArrays:
    """Device buffers for the inputs of decode steps of one shape, filled by one copy."""

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self.shape = shape
        rows, num_readers = shape.rows, shape.rows * shape.splits
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (rows,),
            "positions": (rows,),
            "slot_mapping": (rows,),
            "readers": (num_readers,),
            "splits": (rows, shape.splits),
            "slot_starts": (rows,),
            "slot_counts": (rows,),
            "bounds": (shape.extents + 1,),
            "starts": (shape.extents + 1,),
            "sizes": (shape.extents,),
            "recent": (rows, shape.window),
            "recent_starts": (rows,),
            "recent_counts": (rows,),
            "slots": (shape.tokens,),  # last: a copy ends with the last slot used
        }
        are_long = {"token_ids", "positions", "slot_mapping"}
        types = {name: np.dtype(np.int64 if name in are_long else np.int32) for name in shapes}
        ends, end = dict[str, tuple[int, int]](), 0
        for name, of_array in shapes.items():
            size = math.prod(of_array) * types[name].itemsize
            ends[name] = end, end + size
            end += -(-size // 16) * 16
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._numbers: dict[str, NDArray[Any]] = {}
        self.arrays: dict[str, Tensor] = {}
        for name, (start, stop) in ends.items():
            own = self._host.numpy()[start:stop].view(types[name]).reshape(shapes[name])
            self._numbers[name] = own
            dtype = torch.from_numpy(own).dtype
            self.arrays[name] = self._on_device[start:stop].view(dtype).view(own.shape)
        self._numbers["recent_starts"][:] = np.arange(rows) * shape.window
        self._shared: Extents | None = None  # the extents in the host buffer
        self._slots_at = ends["slots"][0]
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, tables: DecodeTables, batch: ForwardBatch) -> None:
        """Copy the tables and the inputs of a step to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still read the host buffer
        shape, into, num_rows = self.shape, self._numbers, batch.num_rows
        of_rows = {
            "token_ids": batch.input_ids[:, 0].numpy(),
            "positions": batch.position_ids[:, 0].numpy(),
            "slot_mapping": batch.slot_mapping.numpy(),
            "slot_counts": tables.counts,
        }
        if shape.window:
            of_rows |= {"recent": tables.recent, "recent_counts": tables.num_recent}
        for name, numbers in of_rows.items():
            into[name][:num_rows] = numbers
            # Padding rows repeat the first row, and write the same numbers to its slot.
            if num_rows < shape.rows:
                into[name][num_rows:] = numbers[0]
        starts, num_slots = into["slot_starts"], len(tables.slots)
        starts[0], starts[num_rows:] = 0, 0
        tables.counts[:-1].cumsum(out=starts[1:num_rows])
        into["slots"][:num_slots] = tables.slots
        if shape.splits and tables.shared is not self._shared:
            self._fill_extents(tables.shared, num_rows)
            self._shared = tables.shared
        end = self._slots_at + into["slots"].itemsize * num_slots
        self._on_device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._on_device.device))

    def _fill_extents(self, shared: Extents, num_rows: int) -> None:
        into, num_splits = self._numbers, shared.splits.shape[1]
        splits, num_readers = into["splits"], len(shared.readers)
        splits[:num_rows, :num_splits], splits[:, num_splits:] = shared.splits, -1
        splits[num_rows:, :num_splits] = shared.splits[0]
        into["readers"][:num_readers], into["readers"][num_readers:] = shared.readers, 0
        num_extents, bounds = len(shared.starts), into["bounds"]
        for name, numbers in (("starts", shared.starts), ("sizes", shared.sizes)):
            into[name][:num_extents], into[name][num_extents:] = numbers, 0
        bounds[0] = 0
        bounds[1 : num_extents + 1] = shared.num_readers.cumsum()
        bounds[num_extents + 1 :] = bounds[num_extents]


@final
class CudaGraphRun:
    """The attention of a captured decode step, which the layers of a model call."""

    attends_otherwise = NotCapturableError

    def __init__(self, pool: KVPool, arrays: DecodeArrays, max_prefix_len: int) -> None:
        self._pool, self._arrays, self._max_prefix_len = pool, arrays, max_prefix_len
        numbers = range(len(pool.layout.layers))
        self._layers = [
            SlotLayer(max_prefix_len, partial(self._take, number)) for number in numbers
        ]
        self.most_tokens: float = math.inf
        self.num_attended = 0
        self._new: tuple[int, Tensor, Tensor] | None = None
        self._windowed: list[Tensor] = []  # placeholder masks of layers with a window
        self._bounds: dict[int, Tensor] = {}  # bounds of extents' queries, by group size

    def inputs(self, batch: ForwardBatch) -> dict[str, Any]:
        return {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "cache": transformers_cache(self._layers, self._pool.layout.states, None),
            "use_cache": True,
        }

    def _take(self, layer: int, keys: Tensor, values: Tensor) -> Pair:
        """Keep new keys and values, ``[B, key_heads, 1, dim]``, until ``attend``; return them."""
        if self._new is not None:
            raise NotCapturableError(
                "a layer cached keys and values without calling the attention function"
            )
        self._new = layer, keys, values
        return keys, values

    def mask(
        self, allows: Callable[..., Tensor], is_causal: bool, window: int | None
    ) -> Tensor | None:
        if is_causal:
            return None
        if window is None or not _is_window(allows, window):
            raise NotCapturableError(
                "a layer has a mask that is neither causal nor a sliding window"
            )
        if window > self._max_prefix_len:
            self.most_tokens = min(self.most_tokens, window)
            return None
        if window != self._arrays.shape.window:
            error = NotCapturableError("a layer has a sliding window of another size")
            if not self._arrays.shape.window:
                error.window = window
            raise error
        self._windowed.append(torch.empty(0, dtype=torch.bool))
        return self._windowed[-1]

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Write the new keys and values; return the attention outputs ``[B, heads, 1, dim]``."""
        num_rows, num_heads, num_new, dim = query.shape
        if self._new is None or softcap is not None:
            raise NotCapturableError(
                "a layer caps its scores, or attends without caching keys and values"
            )
        has_window = mask is not None
        if num_new > 1 or (has_window and not any(mask is own for own in self._windowed)):
            raise NotCapturableError("a layer has an unknown mask, or several new tokens per row")
        (layer, *new), self._new = self._new, None
        layout, arrays = self._pool.layout.layers[layer], self._arrays.arrays
        num_key_heads = layout.num_key_heads
        ops = decode_ops_for(query.device, query.dtype, dim, num_heads // num_key_heads)
        (codes,) = self._pool.codes[layer]
        is_kept_so = new[0].dtype is codes.dtype and layout.width == 2 * num_key_heads * dim
        if ops is None or not is_kept_so:
            raise NotCapturableError(
                "no operator supports the heads of a layer, or the format of its cache"
            )
        ops.write(new[0], new[1], arrays["slot_mapping"], codes)
        queries = query.reshape(num_rows, num_heads, dim)
        of_parts, name = None, "recent" if has_window else "slot"
        if self._arrays.shape.splits and not has_window:
            of_parts = self._in_extents(ops, queries, codes, num_key_heads, scale)
        found = ops.in_slots(
            queries,
            codes,
            arrays["recent"].view(-1) if has_window else arrays["slots"],
            arrays[f"{name}_starts"],
            arrays[f"{name}_counts"],
            of_parts,
            arrays["splits"],
            sinks,
            scale,
            num_key_heads,
        )
        self.num_attended += 1
        return found.unsqueeze(2)

    def _in_extents(
        self, ops: DecodeOps, queries: Tensor, codes: Tensor, num_key_heads: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend in place to extents (runs of slots); each head of a group is a separate query."""
        arrays = self._arrays.arrays
        num_rows, num_heads, dim = queries.shape
        group_size = num_heads // num_key_heads
        if group_size not in self._bounds:
            self._bounds[group_size] = arrays["bounds"] * group_size
        keys, values = codes.chunk(2, 1)
        return ops.in_extents(
            ops.grouped(queries, arrays["readers"], num_key_heads),
            keys.unflatten(1, (num_key_heads, dim)),
            values.unflatten(1, (num_key_heads, dim)),
            self._bounds[group_size],
            arrays["starts"],
            arrays["sizes"],
            num_rows * group_size,
            scale,
        )


def _is_window(allows: Callable[..., Tensor], window: int) -> bool:
    """Whether a mask function allows exactly the last ``window`` tokens."""
    last = 2 * window + window // 2 + 1
    zero, positions = torch.zeros(1, dtype=torch.int64), torch.arange(last + 1, dtype=torch.int64)
    found = allows(zero, zero, zero + last, positions).expand(last + 1)
    return torch.equal(found, positions > last - window)
