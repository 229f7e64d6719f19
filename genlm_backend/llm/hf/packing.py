"""From spans of token ids to the rectangle of one forward pass; pure.

New tokens are padded on the **right**, where causality hides the padding from every real token of
its row. What a row's tokens attend to before them is up to an ``Attend``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.cache import Run


@final
@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one context that go through the model in one pass.

    Attributes:
        token_ids: The new tokens; at least one.
        past: The slots of the tokens before them, as runs that other spans may share.
        slots: Slots that receive the new tokens' keys and values; empty to keep none.
        outputs: Indices into ``token_ids`` after which the row of logits is wanted.
        shift: Number that the positions of the new tokens are larger by than their places.
        num_new: Number of new tokens.
        num_past: Number of tokens before them.
    """

    token_ids: Sequence[int]
    past: tuple[Run, ...] = ()
    slots: Sequence[int] = ()
    outputs: Sequence[int] = ()
    shift: int = 0
    num_new: int = field(init=False)
    num_past: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_new", len(self.token_ids))
        object.__setattr__(self, "num_past", sum(run.num_tokens for run in self.past))


@final
@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The tensors of one forward pass of ``B`` spans, padded to ``Q`` new tokens.

    Attributes:
        spans: What was packed, row by row.
        input_ids: int64 ``[B, Q]``; padding is 0.
        position_ids: int64 ``[B, Q]``; padding repeats the row's last position.
        new_slots: int64 ``[num_new]``: where the new tokens' keys and values go.
        new_columns: int64 ``[num_new]``: which of the ``B * Q`` columns they are, or ``None``
            for all of them.
        output_rows: int64 ``[num_outputs]``: the row of each wanted output.
        output_columns: int64 ``[num_outputs]``: its column.
        num_new_tokens: Number of tokens to compute, padding not counted.
    """

    spans: tuple[Span, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    new_slots: torch.Tensor
    new_columns: torch.Tensor | None
    output_rows: torch.Tensor
    output_columns: torch.Tensor
    num_new_tokens: int


def pack(spans: Sequence[Span]) -> PackedBatch:
    """Pad spans to one rectangle. All have slots for their new tokens, or none has."""
    num_new = np.array([[span.num_new] for span in spans])
    num_past = np.array([[span.num_past + span.shift] for span in spans])
    num_columns = int(num_new.max())
    columns = np.arange(num_columns)
    is_new = columns < num_new
    input_ids = np.zeros(is_new.shape, np.int64)
    input_ids[is_new] = _joined(span.token_ids for span in spans)
    position_ids = num_past + np.minimum(columns, num_new - 1)
    new_slots = _joined(span.slots for span in spans)
    new_columns = None if is_new.all() else torch.from_numpy(np.flatnonzero(is_new))
    outputs = [(index, column) for index, span in enumerate(spans) for column in span.outputs]
    output_rows, output_columns = np.array(outputs, np.int64).reshape(-1, 2).T
    return PackedBatch(
        spans=tuple(spans),
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        new_slots=torch.from_numpy(new_slots),
        new_columns=new_columns,
        output_rows=torch.from_numpy(output_rows.copy()),
        output_columns=torch.from_numpy(output_columns.copy()),
        num_new_tokens=int(num_new.sum()),
    )


def _joined(sequences: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(sequences), np.int64)
