"""Node: a stretch of tokens in a prefix tree, and the values that say where in a tree one is."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

from genlm_backend.errors import CacheError

if TYPE_CHECKING:
    from genlm_backend.cache.tier import Tier


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
    none below it either. ``tier`` is where its slots are; what is below a node of the host is on
    the host too. ``num_below`` counts the children in the node's own tier.

    The path from the root to the end of a node never loses a token: it may become longer, and its
    tokens may go to other nodes, but where the last of them are evicted another node takes the
    place of this one, which has no parent from then on.
    """

    __slots__ = (
        "__weakref__",
        "children",
        "last_used",
        "num_below",
        "num_locks",
        "parent",
        "slots",
        "tier",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, tokens: array[int], slots: array[int], tier: Tier
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.tier = tier
        self.children: dict[int, Node] = {}
        self.num_below = 0
        self.num_locks = 0
        self.last_used = 0

    def move_to(self, tier: Tier, slots: array[int]) -> None:
        """Have this node's slots in another tier; its parent is there, or all its children are."""
        assert self.parent is not None
        self.parent.num_below += (self.parent.tier is tier) - (self.parent.tier is self.tier)
        self.tier, self.slots = tier, slots
        self.num_below = sum(child.tier is tier for child in self.children.values())

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

    def runs(self, known: dict[Node, tuple[Run, ...]] | None = None) -> tuple[Run, ...]:
        """Return the prefix as runs, one for each node from the root on.

        They hold until the tree is changed. Matches that go through one node have equal owners
        there if the runs of all are asked for after the last of them was made.

        Args:
            known: Runs up to nodes that other matches have gone through since then, which this one
                uses and adds to; ``None`` for none.

        Raises:
            CacheError: If a part of it is on the host, and has not been fetched.
        """
        if self.node.tier.name == "host":
            raise CacheError("a match has slots on the host")
        node, below, known = self.node, list[Run](), {} if known is None else known
        while node.parent is not None and node not in known:
            below.append(Run(node, node.slots, len(node.slots)))
            node = node.parent
        runs = (*known.get(node, ()), *reversed(below))
        if below:  # what one match goes through, its siblings do
            assert self.node.parent is not None
            known[self.node], known[self.node.parent] = runs, runs[:-1]
        return runs


@final
class Place(NamedTuple):
    """Where a context has been found in a tree; locks nothing, and keeps nothing alive.

    Attributes:
        node: A node on whose path from the root its first tokens are.
        num_tokens: Number of these tokens.
    """

    node: weakref.ref[Node]
    num_tokens: int

    def spot(self, root: Node, most: int) -> Spot:
        """Return where up to ``most`` of these tokens are below a root; none if they are not.

        The cost grows with the nodes above the place, and not with their tokens.
        """
        node, stop = self.node(), 0
        if node is None:
            return Spot(root, 0, 0)
        top = node
        while top.parent is not None:
            stop += len(top.tokens)
            top = top.parent
        if top is not root:  # evicted, or of another tree or namespace
            return Spot(root, 0, 0)
        num_tokens = min(self.num_tokens, most)
        while node.parent is not None:
            start = stop - len(node.tokens)
            if start < num_tokens:
                return Spot(node, num_tokens, stop - num_tokens)
            node, stop = node.parent, start
        return Spot(root, 0, 0)


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
