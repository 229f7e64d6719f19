"""From rows of token ids and slots to the padded tensors of one forward pass; pure.

The past is padded on the **left** and the new tokens on the **right**::

    slots      0  0  7  8 | 9 10 11        a row with 2 past and 3 new tokens
               1  2  3  4 | 5  0  0        a row with 4 past and 1 new token
               └─ past ─┘   └ new ┘

so that within a row the distance between two columns is the distance between two positions,
which is what causal and sliding-window masks are made from. Only the left padding has to be
masked: the right padding comes after every real token of its row, where causality hides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a forward pass.

    Attributes:
        token_ids: The new tokens; at least one.
        past_slots: Slots of the tokens before them.
        slots: Slots that receive the new tokens' keys and values; empty to keep none.
        outputs: Indices into ``token_ids`` after which the row of logits is wanted.
    """

    token_ids: Sequence[int]
    past_slots: Sequence[int] = ()
    slots: Sequence[int] = ()
    outputs: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The tensors of one forward pass of ``B`` rows, ``P`` past and ``Q`` new columns.

    Attributes:
        input_ids: int64 ``[B, Q]``; padding is 0.
        position_ids: int64 ``[B, Q]``; padding repeats the row's last position.
        attention_mask: int64 ``[B, P + Q]``; 0 on the left padding (and, where nothing is
            cached, on the right padding).
        gather: int64 ``[B * (P + Q)]``: the slot behind each column; padding is slot 0.
        new_slots: int64 ``[num_new]``: where the new tokens' keys and values go.
        new_columns: int64 ``[num_new]``: which of the ``B * Q`` columns they are, or ``None``
            for all of them.
        output_rows: int64 ``[num_outputs]``: the row of each wanted output …
        output_columns: … and its column, int64 ``[num_outputs]``.
        num_past: ``P``.
        num_new_tokens: Tokens to compute, padding not counted.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    gather: torch.Tensor
    new_slots: torch.Tensor
    new_columns: torch.Tensor | None
    output_rows: torch.Tensor
    output_columns: torch.Tensor
    num_past: int
    num_new_tokens: int


def pack(rows: Sequence[Row]) -> PackedBatch:
    """Pad ``rows`` to one rectangle. All have slots for their new tokens, or none has."""
    num_rows = len(rows)
    num_new = max(len(row.token_ids) for row in rows)
    num_past = max(len(row.past_slots) for row in rows)
    is_cached = bool(rows[0].slots)
    input_ids = np.zeros((num_rows, num_new), np.int64)
    position_ids = np.empty((num_rows, num_new), np.int64)
    attention_mask = np.ones((num_rows, num_past + num_new), np.int64)
    gather = np.zeros((num_rows, num_past + num_new), np.int64)
    is_new = np.zeros((num_rows, num_new), bool)
    for index, row in enumerate(rows):
        past, new = len(row.past_slots), len(row.token_ids)
        input_ids[index, :new] = row.token_ids
        position_ids[index] = np.minimum(np.arange(past, past + num_new), past + new - 1)
        attention_mask[index, : num_past - past] = 0
        is_new[index, :new] = True
        if is_cached:
            gather[index, num_past - past : num_past] = row.past_slots
            gather[index, num_past : num_past + new] = row.slots
        else:
            attention_mask[index, num_past + new :] = 0
    new_slots = np.concatenate([np.asarray(row.slots, np.int64) for row in rows])
    new_columns = None if is_new.all() else torch.from_numpy(np.flatnonzero(is_new))
    outputs = [(index, column) for index, row in enumerate(rows) for column in row.outputs]
    output_rows, output_columns = np.array(outputs, np.int64).reshape(-1, 2).T
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        attention_mask=torch.from_numpy(attention_mask),
        gather=torch.from_numpy(gather.reshape(-1)),
        new_slots=torch.from_numpy(new_slots),
        new_columns=new_columns,
        output_rows=torch.from_numpy(output_rows.copy()),
        output_columns=torch.from_numpy(output_columns.copy()),
        num_past=num_past,
        num_new_tokens=sum(len(row.token_ids) for row in rows),
    )
