"""LlamaContext: a ``llama_context`` with its passes, sequences and cells (cached tokens)."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.backends.llama_cpp.binding import library, log_caught
from genlm_backend.backends.llama_cpp.gguf_model import GGUFModel
from genlm_backend.backends.llama_cpp.sequence_states import SequenceCounts
from genlm_backend.errors import EvaluationError, OptionError, UnsupportedModelError


class ContextSize(NamedTuple):
    """Size and number format of llama.cpp's cache, and the token limit and threads of a pass."""

    num_cells: int
    sequences: SequenceCounts
    most_tokens: int
    num_threads: int
    cell_type: int


@final
class OutOfCellsError(EvaluationError):
    """llama.cpp has too few free cells for the tokens of a pass."""


@final
class LlamaContext:
    """A ``llama_context``: one unified cache, whose cells its sequences share."""

    # The first sequences hold contexts. The recurrent state after a sequence's last token has its
    # own cell, which copies share. llama.cpp cannot cut a sequence that has a state. So the first
    # sequences have states only during a pass; the next hold only states, and the last nothing.
    def __init__(self, model: GGUFModel, size: ContextSize) -> None:
        self.model, self.size = model, size
        counts = size.sequences
        self.first_state = counts.num_contexts
        self.first_passed = self.first_state + counts.num_states
        self._spare = self.first_passed + counts.most_rows
        lib = self._lib = library()
        params = lib.llama_context_default_params()
        num_cells = max(size.num_cells, self._spare + 1)  # llama.cpp aborts with fewer
        params.n_ctx = -(-num_cells // _PADDED) * _PADDED
        params.n_seq_max = self._spare + 1
        params.n_batch, params.n_ubatch = size.most_tokens, min(size.most_tokens, _AT_ONCE)
        params.n_threads = params.n_threads_batch = size.num_threads
        params.type_k = params.type_v = size.cell_type
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # errs by up to 0.6 nats
        params.kv_unified = True
        params.swa_full = True
        params.no_perf = True
        with log_caught() as errors:
            self._pointer = lib.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise OptionError(
                f"llama.cpp cannot allocate a cache of {size.num_cells} tokens: "
                f"{'; '.join(errors) or 'it gives no reason'}; lower kv_cache_bytes or max_length"
            )
        # The finalizer keeps the model alive. It does not run when Python exits, because a thread
        # may still use the context then.
        self._freeing = weakref.finalize(self, _free, self._pointer, model)
        self._freeing.atexit = False
        self._most_tokens = int(lib.llama_n_batch(self._pointer))  # llama.cpp aborts on more
        self._memory = lib.llama_get_memory(self._pointer)
        if not self._memory:
            self.close()
            raise UnsupportedModelError(
                f"{model.path!r} contains no language model that can continue a context"
            )

    def copy(self, source: int, sequence: int, size: int) -> None:
        """Copy the first ``size`` tokens of ``source`` to ``sequence``; both share their cells."""
        self._lib.llama_memory_seq_cp(self._memory, source, sequence, 0, size)

    def cut(self, sequence: int, size: int) -> None:
        """Remove the tokens of a sequence after its first ``size``."""
        if not self._lib.llama_memory_seq_rm(self._memory, sequence, size or -1, -1):
            raise EvaluationError(f"llama.cpp cannot cut a sequence at token {size}")

    def first_position(self, sequence: int) -> int:
        """Return the first position that a sequence holds in every layer; -1 if it is empty."""
        return int(self._lib.llama_memory_seq_pos_min(self._memory, sequence))

    # ---------------------------------------------------------------- recurrent states

    def copy_state(self, source: int, sequence: int) -> None:
        """Copy the recurrent state of ``source`` to ``sequence``, without any tokens."""
        self._lib.llama_memory_seq_cp(self._memory, source, sequence, 0, 0)

    @contextlib.contextmanager
    def in_states(
        self, rows: NDArray[np.int64], before: NDArray[np.int64] | None
    ) -> Iterator[None]:
        """Copy states of sequences ``before``, if any, to ``rows``; later remove rows' states."""
        if not self.model.has_states:
            yield
            return
        try:
            if before is not None:
                for state, row in zip(before.tolist(), rows.tolist(), strict=True):
                    self.copy_state(state, row)
            yield
        finally:
            for row in rows.tolist():
                self.copy_state(self._spare, row)  # removes it: the spare sequence has none

    def passed_states(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Copy the states of ``rows`` to fixed sequences, which each call reuses; return these."""
        after = self.first_passed + np.arange(len(rows))
        for row, sequence in zip(rows.tolist(), after.tolist(), strict=True):
            self.copy_state(row, sequence)
        return after

    # ---------------------------------------------------------------- passes

    def compute(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequences: NDArray[np.int32],
        has_output: NDArray[np.int8],
    ) -> torch.Tensor:
        """Compute and cache tokens; return logits at outputs: float32 ``[num_outputs, vocab]``."""
        vocab_size, start = self.model.vocab_size, 0
        logits = torch.empty(int(has_output.sum()), vocab_size, dtype=torch.float32)
        addresses = sequences.ctypes.data + np.arange(len(tokens)) * sequences.itemsize
        ones = np.ones(len(tokens), np.int32)
        for first in range(0, len(tokens), self._most_tokens):
            part = slice(first, first + self._most_tokens)
            batch = self._lib.llama_batch()
            batch.n_tokens = len(tokens[part])
            for name, values, kind in (
                ("token", tokens, ctypes.c_int32),
                ("pos", positions, ctypes.c_int32),
                ("n_seq_id", ones, ctypes.c_int32),
                ("seq_id", addresses, ctypes.POINTER(ctypes.c_int32)),
                ("logits", has_output, ctypes.c_int8),
            ):
                setattr(batch, name, ctypes.cast(_address(values[part]), ctypes.POINTER(kind)))
            self._decode(batch)
            num_outputs = int(has_output[part].sum())
            if num_outputs:
                found = self._lib.llama_get_logits(self._pointer)
                table = np.ctypeslib.as_array(found, (num_outputs, vocab_size))
                logits[start : start + num_outputs] = torch.from_numpy(table)
                start += num_outputs
        return logits

    def _decode(self, batch: Any) -> None:
        with log_caught() as errors:
            code = self._lib.llama_decode(self._pointer, batch)
        if code:
            kind = OutOfCellsError if code == 1 else EvaluationError
            reason = "its cache has no room" if code == 1 else f"llama_decode returned {code}"
            text = f"llama.cpp could not compute {batch.n_tokens} tokens: {reason}"
            raise kind("; ".join([text, *errors]))

    def num_bytes(self, sequence: int) -> int:
        """Return how many bytes a saved copy of a sequence takes."""
        return int(self._lib.llama_state_seq_get_size(self._pointer, sequence))

    def clear(self) -> None:
        """Empty all sequences, and set all cells to zero."""
        self._lib.llama_memory_clear(self._memory, True)

    def use_adapter(self, adapter: Any | None) -> None:
        kind = self._lib.llama_adapter_lora_p_ctypes
        given = [] if adapter is None else [adapter]
        adapters, scales = (kind * 1)(*given), (ctypes.c_float * 1)(1.0)
        with log_caught():
            code = self._lib.llama_set_adapters_lora(self._pointer, adapters, len(given), scales)
        if code:
            raise EvaluationError("llama.cpp cannot compute with the adapter")

    def close(self) -> None:
        """Free the context; further calls have no effect."""
        self._freeing()
        self._pointer = None


_AT_ONCE: Final = 512
"""Most tokens of one compute graph (``n_ubatch``)."""

_PADDED: Final = 256
"""llama.cpp rounds the number of cells up to a multiple of this."""


def _free(pointer: Any, model: GGUFModel) -> None:
    with log_caught():
        library().llama_free(pointer)


def _address(values: NDArray[Any]) -> int:
    assert values.flags.c_contiguous
    return values.ctypes.data
