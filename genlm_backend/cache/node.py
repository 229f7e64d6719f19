"""Node: a stretch of tokens in a prefix tree, and the values that say where in a tree one is."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final


@final
@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Slots of consecutive tokens of a context.

    Attributes:
        owner: What the slots belong to. In one batch, two runs of one owner begin with the same
            tokens in the same slots.
        slots: The owner's slots, in order.
        num_tokens: How many of them, from the first, the context has.
    """

    owner: object
    slots: Sequence[int]
    num_tokens: int


@final
class Node:
    """An edge of the tree and the subtree at its end.

    ``num_locks`` counts the live matches that end here or below, so that a node with none has
    none below it either.

    The path from the root to the end of a node never loses a token: it may become longer, and its
    tokens may go to other nodes, but where the last of them are evicted another node takes the
    place of this one, which has no parent from then on.
    """

    __slots__ = (
        "__weakref__",
        "children",
        "last_used",
        "num_locks",
        "parent",
        "slots",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: array[int], slots: array[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, Node] = {}
        self.num_locks = 0
        self.last_used = 0

    def path(self) -> Iterator[Node]:
        """Yield this node, its parent, and so on up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """Yield this node and everything below it."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


@final
@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A locked cached prefix of one context; valid until it is unlocked or inserted below.

    Attributes:
        node: The node at whose end the prefix ends.
        num_tokens: Number of the context's tokens that need not be computed.
    """

    node: Node
    num_tokens: int

    def runs(self) -> tuple[Run, ...]:
        """Return the prefix as runs, one for each node from the root on.

        They hold until the tree is changed. Matches that go through one node have equal owners
        there if the runs of all are asked for after the last of them was made.
        """
        runs: list[Run] = []
        node = self.node
        while node.parent is not None:
            runs.append(Run(node, node.slots, len(node.slots)))
            node = node.parent
        return tuple(reversed(runs))


@final
class Place(NamedTuple):
    """Where a context has been found in a tree; locks nothing, and keeps nothing alive.

    Attributes:
        node: A node on whose path from the root its first tokens are.
        num_tokens: Number of these tokens.
    """

    node: weakref.ref[Node]
    num_tokens: int


@final
class Spot(NamedTuple):
    """A number of tokens into a tree, until the tree is changed.

    Attributes:
        node: The node on whose edge they end.
        num_tokens: Their number.
        num_left: Number of tokens of that edge beyond them, all of them for none.
    """

    node: Node
    num_tokens: int
    num_left: int
