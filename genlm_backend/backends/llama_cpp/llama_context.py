"""LlamaContext: the memory of llama.cpp's sequences, and the passes that fill it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.backends.llama_cpp.binding import library, log_caught
from genlm_backend.backends.llama_cpp.gguf_model import GGUFModel
from genlm_backend.backends.llama_cpp.sequence_states import SequenceCounts
from genlm_backend.backends.llama_cpp.sequences import (
    MOST_PARKED,
    Compact,
    Copy,
    Discard,
    Park,
    Step,
    Unpark,
)
from genlm_backend.errors import EvaluationError, OptionError, UnsupportedModelError


class ContextSize(NamedTuple):
    """Bounds of what llama.cpp keeps, and of a pass."""

    num_cells: int
    sequences: SequenceCounts
    most_tokens: int
    num_threads: int
    cell_type: int


Saved: TypeAlias = "ctypes.Array[ctypes.c_uint8]"
"""Keys and values in llama.cpp's own format."""


@final
class LlamaContext:
    """A context of llama.cpp: cells that its sequences share, in one unified cache.

    The first sequences are for contexts. Where a model has layers with a window, each of them has a
    *guard* that holds the same cells: a cell beyond the window is given to another token as soon as
    one sequence alone holds it.

    The running state of a sequence is a cell of its own, which copies share as well. It is behind
    the last token, and llama.cpp cuts no sequence that has one. So sequences of contexts have none
    but in a pass, and states are in others, which hold nothing else.
    """

    def __init__(self, model: GGUFModel, size: ContextSize) -> None:
        self.model, self.size = model, size
        counts = size.sequences
        self._to_guard = counts.num_contexts if model.window else 0
        self.first_state = counts.num_contexts + self._to_guard
        self.first_passed = self.first_state + counts.num_states
        self._spare = self.first_passed + counts.most_rows
        self._parked: dict[int, Saved] = {}
        lib = self._lib = library()
        params = lib.llama_context_default_params()
        num_cells = max(size.num_cells + MOST_PARKED, self._spare + 1)  # or it aborts
        params.n_ctx = -(-num_cells // _PADDED) * _PADDED
        params.n_seq_max = self._spare + 1
        params.n_batch, params.n_ubatch = size.most_tokens, min(size.most_tokens, _AT_ONCE)
        params.n_threads = params.n_threads_batch = size.num_threads
        params.type_k = params.type_v = size.cell_type
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds, by up to 0.6 nats
        params.kv_unified = True
        params.swa_full = True
        params.no_perf = True
        with log_caught() as errors:
            self._pointer = lib.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise OptionError(
                f"llama.cpp makes no room for {size.num_cells} tokens: "
                f"{'; '.join(errors) or 'it does not say why'}; give less by kv_cache_bytes or "
                "max_length"
            )
        # It holds the model, which must not be freed before it; at exit a thread may still compute.
        self._freeing = weakref.finalize(self, _free, self._pointer, model)
        self._freeing.atexit = False
        self._most_tokens = int(lib.llama_n_batch(self._pointer))  # it aborts beyond these
        self._memory = lib.llama_get_memory(self._pointer)
        if not self._memory:
            self.close()
            raise UnsupportedModelError(f"{model.path!r} holds no language model that goes on")

    def do(self, steps: Sequence[Step]) -> None:
        """Have sequences hold what has been decided, in order."""
        for step in steps:
            if isinstance(step, Park):
                start, stop, own = step.chain
                self._parked[step.number] = self._saved(own[0], start, stop)
                for sequence in own:
                    self._remove(sequence, start)
            elif isinstance(step, Unpark):
                self._restore(self._parked.pop(step.number), step.start, step.stops)
            elif isinstance(step, Discard):
                del self._parked[step.number]
            elif isinstance(step, Compact):
                saved = [self._saved(own[0], start, stop) for start, stop, own in step.chains]
                for sequence in {i for chain in step.chains for i in chain.sequences}:
                    self._remove(sequence)
                for data, (start, stop, own) in zip(saved, step.chains, strict=True):
                    self._restore(data, start, dict.fromkeys(own, stop))
            elif isinstance(step, Copy):
                self._copy(step.source, step.sequence, step.start, step.stop)
            else:
                self._remove(*step)

    def _copy(self, source: int, sequence: int, start: int, stop: int) -> None:
        """Have a sequence of a context, and its guard, hold tokens that another one holds."""
        for own in self._with_guard(sequence):
            self._lib.llama_memory_seq_cp(self._memory, source, own, start, stop)

    def _remove(self, sequence: int, start: int = 0, stop: int = -1) -> None:
        """Have a sequence of a context, and its guard, hold no tokens at these positions."""
        for own in self._with_guard(sequence):
            if not self._lib.llama_memory_seq_rm(self._memory, own, start or -1, stop):
                raise EvaluationError(f"llama.cpp cannot cut a sequence at token {start}")

    def _with_guard(self, sequence: int) -> tuple[int, ...]:
        return (sequence, sequence + self._to_guard) if self._to_guard else (sequence,)

    def _saved(self, sequence: int, start: int, stop: int) -> Saved:
        """Return the keys and values of a sequence at positions, in llama.cpp's own format."""
        lib, spare = self._lib, self._spare
        lib.llama_memory_seq_cp(self._memory, sequence, spare, start, stop)
        size = int(lib.llama_state_seq_get_size(self._pointer, spare))
        data = (ctypes.c_uint8 * size)()
        written = lib.llama_state_seq_get_data(self._pointer, data, size, spare)
        lib.llama_memory_seq_rm(self._memory, spare, -1, -1)
        if written != size:
            raise EvaluationError("llama.cpp does not save what it keeps")
        return data

    def _restore(self, saved: Saved, start: int, stops: Mapping[int, int]) -> None:
        """Put keys and values into cells, which sequences hold then, each up to a position."""
        lib, spare, size = self._lib, self._spare, len(saved)
        with log_caught():
            found = lib.llama_state_seq_set_data(self._pointer, saved, size, spare)
        if found != size:
            raise EvaluationError("llama.cpp does not read what it has saved")
        for sequence, stop in stops.items():
            self._copy(spare, sequence, start, stop)
        lib.llama_memory_seq_rm(self._memory, spare, -1, -1)

    # ---------------------------------------------------------------- running states

    def copy_state(self, source: int, sequence: int) -> None:
        """Give a sequence the running state of another one, and nothing else of it."""
        self._lib.llama_memory_seq_cp(self._memory, source, sequence, 0, 0)

    @contextlib.contextmanager
    def in_states(self, rows: NDArray[np.int64], before: NDArray[np.int64] | None) -> Iterator[Any]:
        """Have sequences go on from running states for one pass."""
        after = self.first_passed + np.arange(len(rows))
        own = [self._with_guard(row) for row in rows.tolist()]
        try:
            if before is not None:
                for state, sequences in zip(before.tolist(), own, strict=True):
                    for sequence in sequences:
                        self.copy_state(state, sequence)
            yield after
            for row, sequence in zip(rows.tolist(), after.tolist(), strict=True):
                self.copy_state(row, sequence)
        finally:
            for sequence in itertools.chain(*own):
                self.copy_state(self._spare, sequence)  # which has none

    # ---------------------------------------------------------------- passes

    def compute(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequences: NDArray[np.int32],
        has_output: NDArray[np.int8],
    ) -> torch.Tensor:
        """Compute tokens and keep them; return the logits: float32 ``[num_outputs, vocab]``."""
        vocab_size, start = self.model.vocab_size, 0
        logits = torch.empty(int(has_output.sum()), vocab_size, dtype=torch.float32)
        for first in range(0, len(tokens), self._most_tokens):
            part = slice(first, first + self._most_tokens)
            num_outputs = int(has_output[part].sum())
            self._decode(tokens[part], positions[part], sequences[part], has_output[part])
            if num_outputs:
                found = self._lib.llama_get_logits(self._pointer)
                table = np.ctypeslib.as_array(found, (num_outputs, vocab_size))
                logits[start : start + num_outputs] = torch.from_numpy(table)
                start += num_outputs
        return logits

    def _decode(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequences: NDArray[np.int32],
        has_output: NDArray[np.int8],
    ) -> None:
        lib, size = self._lib, len(tokens)
        own = np.stack([sequences, sequences + self._to_guard], axis=1, dtype=np.int32)
        addresses = own.ctypes.data + np.arange(size, dtype=np.uintp) * own.strides[0]
        num_own = np.full(size, 2 if self._to_guard else 1, np.int32)
        batch = lib.llama_batch()
        batch.n_tokens = size
        for name, values, kind in (
            ("token", tokens, ctypes.c_int32),
            ("pos", positions, ctypes.c_int32),
            ("n_seq_id", num_own, ctypes.c_int32),
            ("seq_id", addresses, ctypes.POINTER(ctypes.c_int32)),
            ("logits", has_output, ctypes.c_int8),
        ):
            setattr(batch, name, ctypes.cast(_address(values), ctypes.POINTER(kind)))
        with log_caught() as errors:
            code = lib.llama_decode(self._pointer, batch)
        if code:
            said = "; ".join([_reason(code), *errors])
            raise EvaluationError(f"llama.cpp computed no rows of {size} tokens: {said}")
        if self._to_guard and not self.model.has_states:  # of which only the last position is told
            for sequence in set(sequences.tolist()):
                if lib.llama_memory_seq_pos_min(self._memory, sequence):
                    raise EvaluationError("llama.cpp has dropped tokens behind a window")

    def num_bytes(self, sequence: int) -> int:
        """Return how many bytes the state of a sequence takes when it is saved."""
        return int(self._lib.llama_state_seq_get_size(self._pointer, sequence))

    def clear(self) -> None:
        """Have all sequences hold nothing, and all cells be zero."""
        self._lib.llama_memory_clear(self._memory, True)
        self._parked.clear()

    def use_adapter(self, adapter: Any | None) -> None:
        """Compute with an adapter of the model from now on, or with none."""
        kind = self._lib.llama_adapter_lora_p_ctypes
        given = [] if adapter is None else [adapter]
        adapters, scales = (kind * 1)(*given), (ctypes.c_float * 1)(1.0)
        with log_caught():
            code = self._lib.llama_set_adapters_lora(self._pointer, adapters, len(given), scales)
        if code:
            raise EvaluationError("llama.cpp does not compute with the adapter")

    def close(self) -> None:
        """Free the memory; again has no effect."""
        self._freeing()
        self._pointer = None


_AT_ONCE: Final = 512
"""Tokens of one graph, at most."""

_PADDED: Final = 256
"""Number of cells that llama.cpp makes others of multiples of."""


def _free(pointer: Any, model: GGUFModel) -> None:
    with log_caught():
        library().llama_free(pointer)


def _address(values: NDArray[Any]) -> int:
    assert values.flags.c_contiguous
    return values.ctypes.data


def _reason(code: int) -> str:
    if code == 1:
        return "there is no room for them"
    return f"llama_decode returned {code}"
