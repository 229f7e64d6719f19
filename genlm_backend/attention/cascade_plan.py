"""Cascade plans: which cached tokens the rows of a pass read together, in numpy arrays.

**Why.** Particles share long prefixes. Attention row by row reads such a prefix once per row;
cascade attention (Hydragen: Juravsky et al., 2024, arXiv:2402.05099) reads it once in all. A plan
divides the cached tokens of a pass into *prefixes*, each with the rows that have it (perhaps a
single row), and one *suffix* per row: the row's short runs of tokens, padded to the longest
suffix. Suffixes are gathered row by row. ``cascade_run.py`` executes the plan. The reference is
``naive_attention`` in tests/naive.py.

**Division.** Cached tokens are the nodes of a tree. A compiled loop visits each token of the rows
once. In depth-first order, the rows below a node are consecutive, so a node needs no list of rows.
The time is linear in the distinct tokens and the entries of the suffix. A run of few tokens goes to
the suffix (``FEW_TOKENS``), unless one of its rows has many new tokens (``MANY_NEW_TOKENS``).
A prefix with consecutive slots is read in place, which is why the allocator prefers consecutive
slots.

**Extension.** A decode step takes the plan of the step before, reorders, copies or drops its rows,
and adds a column to the suffix (``advanced``). Tokens that rows have come to share since the plan
was made are gathered for each row. ``is_stale`` asks for a new plan in two cases. The suffix is
more than twice as wide as at first, and more than 64 columns wider; or copied rows have read more
suffix tokens again than the plan's first pass read in all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self, final

import numpy as np

from genlm_backend.attention import cascade_loops
from genlm_backend.prefix.nodes import Nodes
from genlm_backend.prefix.slot_allocator import PADDING_SLOT

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEW_TOKENS = 384
"""About how many tokens of a run, times its rows, make a separate attention product pay off."""
# Below this, the small operators of a product and its merge take longer than gathering the tokens.

FEW_BYTES = 2**21
"""The same on a CPU, in bytes of the keys and values of a layer, if that makes more tokens."""
# For 20 rows of SmolLM2-135M (1,536 bytes a token), a product for 50 shared tokens takes 5 % longer
# than gathering them, and one for 100 takes 3 % less.

MANY_NEW_TOKENS: Final = 16
"""In rows with at least this many new tokens, even short runs of cached tokens become prefixes."""
# In the suffix, each cached token would add a column to a mask with one row per new token.

MIN_ADDED: Final = 64
"""Columns that a plan's suffix may always grow by before its width makes the plan stale."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefixes:
    """The cached tokens of ``B`` rows: for each row, the path from a tree node to the root."""

    # The tree's own arrays, indexed by node; valid until the tree changes.
    parent: NDArray[np.int32]
    depth: NDArray[np.int32]
    slot: NDArray[np.int32]
    nodes: NDArray[np.int64]  # [B] int64

    @classmethod
    def of(cls, tree: Nodes, nodes: NDArray[np.int32]) -> Self:
        return cls(tree.parent, tree.depth, tree.slot, nodes.astype(np.int64))

    @classmethod
    def none(cls, num_rows: int) -> Self:
        root = np.zeros(1, np.int32)
        return cls(root, root, root, np.zeros(num_rows, np.int64))

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Number of cached tokens of each row: int64 ``[B]``."""
        return self.depth[self.nodes].astype(np.int64)

    def columns(self, num_columns: int) -> NDArray[np.int64]:
        """Return each row's last ``num_columns`` slots, left-padded: int64 ``[B, num_columns]``."""
        slots = np.full((len(self.nodes), num_columns), PADDING_SLOT, np.int64)
        self.write_last(slots[:, ::-1])
        return slots

    def write_last(self, slots: NDArray[np.int64]) -> None:
        """Write the slots of each row's last tokens into ``slots``, the last token's slot first."""
        cascade_loops.write_last(self.parent, self.depth, self.slot, self.nodes, slots)


@final
@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """``n`` cached tokens that are read together, and the ``G`` rows that have all of them."""

    rows: NDArray[np.int64]  # [G] int64
    positions: NDArray[np.int64]  # [n] int64
    slots: NDArray[np.int64]  # [n] int64

    def __len__(self) -> int:
        return len(self.slots)


@final
@dataclass(frozen=True, slots=True, eq=False)
class CascadePlan:
    """How a pass reads its cached tokens: by prefixes that rows share, and one suffix per row."""

    prefixes: tuple[SharedPrefix, ...]
    # Slots and their positions, left-padded to ``P`` columns; padding is slot 0 at position -1.
    suffix: NDArray[np.int64]  # [2, B, P] int64
    prefix_lens: NDArray[np.int64]  # [B] int64
    # For ``is_stale``: suffix width, tokens read and each row's number when the plan was made.
    num_columns: int
    num_tokens: int
    origins: NDArray[np.int64]  # [B] int64
    num_repeated: int = 0

    @classmethod
    def of(cls, past: CachedPrefixes, num_new: NDArray[np.int64], few_tokens: int) -> Self:
        """Return a plan of the tokens in ``past``, in time linear in those that the plan reads."""
        # A large tree costs little: the OS zeroes only the pages that the walk touches.
        numbers = np.zeros(len(past.parent), np.int32)
        is_long = num_new >= MANY_NEW_TOKENS
        tree = past.parent, past.depth, past.slot
        slots, positions, shared, bounds, starts, num_rows, order, suffix = cascade_loops.divide(
            *tree, past.nodes, is_long, few_tokens, numbers
        )
        prefixes: list[SharedPrefix] = []
        for start, stop in itertools.pairwise(bounds.tolist()):
            own = shared[start:stop]
            first, size = starts[own[0]], num_rows[own[0]]
            prefixes.append(
                SharedPrefix(np.sort(order[first : first + size]), positions[own], slots[own])
            )
        num_tokens, origins = len(shared) + suffix[0].size, np.arange(len(past.nodes))
        num_columns = suffix.shape[2]
        return cls(tuple(prefixes), suffix, past.num_tokens, num_columns, num_tokens, origins)

    @property
    def is_padded(self) -> bool:
        """Whether some rows have shorter suffixes than others."""
        return bool((self.suffix[1, :, :1] < 0).any())

    @property
    def is_stale(self) -> bool:
        """Whether the next step should make a new plan instead of advancing this one."""
        # The paragraph "Extension" of the module's docstring explains these bounds.
        num_added = self.suffix.shape[2] - self.num_columns
        return num_added > max(MIN_ADDED, self.num_columns) or self.num_repeated > self.num_tokens

    def advanced(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> CascadePlan:
        """Return the next plan: this plan's ``rows``, each with one more token, in ``slots``."""
        prefixes: list[SharedPrefix] = []
        everybody = np.arange(len(rows))
        for prefix in self.prefixes:
            if len(prefix.rows) == len(self.prefix_lens) == len(rows):
                prefixes.append(prefix)  # unchanged: a cache key of ``decode_tables._extents_of``
                continue
            own = everybody
            if len(prefix.rows) < len(self.prefix_lens):
                is_reader = np.zeros(len(self.prefix_lens), bool)
                is_reader[prefix.rows] = True
                own = np.flatnonzero(is_reader[rows])
            if len(own):
                prefixes.append(SharedPrefix(own, prefix.positions, prefix.slots))
        prefix_lens, origins = self.prefix_lens[rows], self.origins[rows]
        num_others = len(rows) - int(np.count_nonzero(np.bincount(origins)))
        column = np.stack([slots, prefix_lens])[:, :, None]
        return replace(
            self,
            prefixes=tuple(prefixes),
            suffix=np.concatenate([self.suffix.take(rows, 1), column], 2),
            prefix_lens=prefix_lens + 1,
            origins=origins,
            num_repeated=self.num_repeated + num_others * self.num_columns,
        )
