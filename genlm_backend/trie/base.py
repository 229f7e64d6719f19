"""VocabularyTrie: the base class of tries over a vocabulary."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, final, get_args

import numpy as np
from numpy.typing import NDArray

from genlm_backend.checks import integer, listed, shown
from genlm_backend.errors import OptionTypeError, VocabularyTypeError, WeightsError
from genlm_backend.trie.construction import build_layout, check_unique, keys_of
from genlm_backend.trie.layout import TrieLayout
from genlm_backend.trie.weights import Operation, Weights, check_batch, check_weights

if TYPE_CHECKING:
    import graphviz


class VocabularyTrie(abc.ABC):
    """A trie over a vocabulary's letters; it combines the token weights under every prefix.

    Each entry of ``decode`` has its own leaf below the node of its last letter, even if several
    entries have the same spelling; an empty entry's leaf is a child of the root. Nodes are numbered
    so that children come before parents and the root is last; equal vocabularies get equal numbers.

    Weights are one real number per entry, in ``decode``'s order: a NumPy array, a sequence, or a
    torch tensor on any device. Results carry no gradients. Half precision, float32 and booleans
    give float32 results; float64 and integers give float64 (float32 on MPS). A NaN propagates to
    the prefixes of its token and nowhere else. Do not modify weights while you await a result.

    Args:
        decode: The vocabulary: ``Token`` objects, ``bytes``, strings, or other iterables of
            hashable letters, such as an end-of-sequence marker that yields itself.

    Raises:
        VocabularyError: If ``decode`` is empty, has more than about 2**31 letters, or holds an
            entry twice (for tokens: the same id with the same bytes).
        VocabularyTypeError: If ``decode`` is a string, ``bytes``, a mapping or not iterable; if an
            entry is not iterable; or if an entry or one of its letters is not hashable.

    Attributes:
        decode: The vocabulary, as a list.
        layout: The trie as flat arrays.
    """

    def __init__(self, decode: Iterable[Any]) -> None:
        try:
            self.decode: list[Any] = listed("decode", decode)
        except OptionTypeError:
            raise VocabularyTypeError(
                f"decode must be a list of tokens, got {shown(decode)}"
            ) from None
        self.layout = build_layout(self.decode)
        check_unique(self.decode)

    # ---------------------------------------------------------------- the tree

    @property
    def num_nodes(self) -> int:
        """Number of nodes: one per distinct prefix, including the root, and a leaf per token."""
        return self.layout.num_nodes

    @property
    def root(self) -> int:
        """The node of the empty prefix: ``num_nodes - 1``."""
        return self.layout.num_nodes - 1

    @cached_property
    def children(self) -> Sequence[dict[Any, int]]:
        """For each node its children: letter → node.

        A leaf has the key ``(None, position)``, with the position of its token in ``decode``. Each
        dictionary is built at its first use.
        """
        return _PerNode(self.num_nodes, self._children)

    @cached_property
    def leaves(self) -> NDArray[np.int32]:
        """The leaf of each token, indexed by position in ``decode``: int32 ``[len(decode)]``."""
        layout = self.layout
        leaves = np.empty(layout.num_tokens, np.int32)
        leaves[layout.leaf_tokens] = layout.run_start[layout.leaf_runs]
        return leaves

    @cached_property
    def word2leaf(self) -> dict[Hashable, int]:
        """Maps each entry to its leaf; the key of a ``Token`` is ``(bytes, token_id)``."""
        return dict(zip(keys_of(self.decode), self.leaves.tolist(), strict=True))

    @cached_property
    def leaf2word(self) -> dict[int, Hashable]:
        """Maps each leaf to its entry, in the form of the keys of ``word2leaf``."""
        return {leaf: word for word, leaf in self.word2leaf.items()}

    @cached_property
    def idx_to_leaf(self) -> NDArray[np.int32]:
        """A row per token: its position in ``decode``, and its leaf; int32 ``[len(decode), 2]``."""
        pairs = np.stack([np.arange(len(self.decode), dtype=np.int32), self.leaves], axis=1)
        pairs.flags.writeable = False  # read-only: changes would have no effect on the trie
        return pairs

    @cached_property
    def jump(self) -> Sequence[NDArray[np.int32]]:
        """For each node, the array of its children in ascending order: int32; empty for a leaf."""
        return _PerNode(self.num_nodes, self._jump)

    @cached_property
    def ordering(self) -> NDArray[np.int32]:
        """The inner nodes, children before parents and the root last: int32."""
        is_inner = np.ones(self.num_nodes, bool)
        is_inner[self.leaves] = False
        ordering = np.flatnonzero(is_inner).astype(np.int32)
        ordering.flags.writeable = False
        return ordering

    @cached_property
    def node2prefix(self) -> Mapping[int, list[Any]]:
        """Maps each node to the list of letters from the root to it, built on access."""
        return _Prefixes(self.layout)

    def _children(self, node: int) -> dict[Any, int]:
        return {self.layout.edge(child): child for child in self.layout.children(node)}

    def _jump(self, node: int) -> NDArray[np.int32]:
        return np.sort(np.array(self.layout.children(node), np.int32))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.decode)} tokens, {self.num_nodes} nodes>"

    # ---------------------------------------------------------------- evaluation and look-ups

    @abc.abstractmethod
    def evaluate_batch(self, operation: Operation, batch: Weights) -> Any:
        """Return the result of ``operation`` for each row and node: ``[len(batch), num_nodes]``.

        Args:
            operation: How the weights of the tokens below a node are combined.
            batch: Weights that ``check_batch`` has returned.
        """

    @abc.abstractmethod
    def evaluate_rows(self, operation: Operation, batch: list[Weights]) -> Sequence[Any]:
        """Return the result of ``operation`` for each row: ``[num_nodes]``, in the row's precision.

        Each result owns its memory, so that a kept row does not keep the whole batch alive.
        """

    def prepare(self) -> None:
        """Evaluate each operation in float32 and float64, so that later calls compile nothing."""
        for operation in get_args(Operation):
            for dtype in (np.float32, np.float64):
                self.evaluate_rows(operation, [np.zeros(len(self.decode), dtype)])
        self.release()

    def release(self) -> None:  # noqa: B027  (a trie may keep nothing)
        """Free the buffers that the trie keeps for reuse, if it keeps any."""

    def tokens_below(self, node: int) -> NDArray[np.int32]:
        """Return the positions in ``decode`` of the tokens that begin with a node's prefix.

        Args:
            node: A node; for a leaf, the result is its one token.

        Returns:
            The positions, ascending: int32 ``[n]``.

        Raises:
            OptionError: (``ValueError``) If the trie has no such node.
            OptionTypeError: (``TypeError``) If ``node`` is no integer.
        """
        layout, start = self.layout, self.layout.run(integer(0, self.root)("node", node))
        end, tokens = start + 1, []
        while start < end:  # these runs have one level, so their child runs follow one another
            first, last = np.searchsorted(layout.leaf_runs, (start, end))
            tokens.append(layout.leaf_tokens[first:last])
            start, end = int(layout.run_children[start]), int(layout.run_children[end])
        return np.sort(np.concatenate(tokens))

    def tokens_with(self, prefix: Iterable[Any]) -> NDArray[np.int32]:
        """Return the positions in ``decode`` of the tokens that begin with a prefix.

        Args:
            prefix: Its letters, such as ``b" Pa"``.

        Returns:
            The positions, ascending: int32 ``[n]``; empty if no token begins with the prefix.
        """
        node = self.node(prefix)
        return np.empty(0, np.int32) if node is None else self.tokens_below(node)

    def node(self, prefix: Iterable[Any]) -> int | None:
        """Return a prefix's node, an index into results; ``None`` if it is a prefix of no token.

        Args:
            prefix: Its letters, such as ``b" Pa"``.

        Raises:
            OptionTypeError: (``TypeError``) If ``prefix`` is a string, but no token begins with a
                character, as in a vocabulary of bytes.
        """
        node = self.root
        if isinstance(prefix, str) and not any(
            isinstance(each, str) for each in self.children[node]
        ):
            raise OptionTypeError(
                "prefix must not be a string, as no token begins with a character: for tokens of "
                "bytes, pass prefix.encode()"
            )
        for letter in prefix:
            if letter not in (children := self.children[node]):
                return None
            node = children[letter]
        return node

    def mass(self, sums: Any, prefix: Iterable[Any]) -> Any:
        """Return the sums at the node of a prefix; 0 if no token begins with the prefix.

        Args:
            sums: A result of ``weight_sum`` or ``batch_weight_sum``: ``[…, num_nodes]``. Not for
                logarithms and maxima, where 0 does not mean "none": use ``node`` for those.
            prefix: Its letters, such as ``b" th"``.

        Returns:
            A number, or one for each row: ``[…]``, of the type and on the device of ``sums``.

        Raises:
            WeightsError: (``ValueError``) If ``sums`` does not have one number per node, or if no
                token begins with the prefix and ``sums`` has negative numbers, such as logarithms.
            OptionTypeError: (``TypeError``) If ``prefix`` is a string; see ``node``.
        """
        shape = [*getattr(sums, "shape", ())]
        if shape[-1:] != [self.num_nodes]:
            raise WeightsError(
                f"sums must be an array or tensor [..., {self.num_nodes}], one number per node; "
                f"got the shape {shape}"
            )
        node = self.node(prefix)
        if node is not None:
            return sums[..., node][()]
        if (sums < 0).any():
            raise WeightsError(
                "no token begins with the prefix, and sums has negative numbers: 0 would be "
                "wrong for logarithms. Call trie.node(prefix): it is None for such a prefix"
            )
        return sums[..., :0].sum(-1)

    # ---------------------------------------------------------------- prefix weights

    def weight_sum(self, ws: Weights) -> Any:
        """Return the sum of the weights of all tokens below each node: ``[num_nodes]``.

        Args:
            ws: Weights ``[len(decode)]``.

        Raises:
            WeightsError: If the length is wrong.
            WeightsTypeError: If the elements are not real numbers.
        """
        return self._one("sum", ws)

    def weight_max(self, ws: Weights) -> Any:
        """Return the largest token weight below each node: ``[num_nodes]``.

        Also correct for negative weights and log-probabilities; otherwise like ``weight_sum``.
        """
        return self._one("max", ws)

    def log_weight_sum(self, ws: Weights) -> Any:
        """Return the log-sum-exp of the weights below each node: ``[num_nodes]``.

        The logarithm of ``weight_sum(exp(ws))``, for log-weights. It is accurate even if the
        exponentials would underflow, since the largest weight below a node is subtracted before
        ``exp`` and added after the logarithm. Otherwise like ``weight_sum``.
        """
        return self._one("log_sum", ws)

    def batch_weight_sum(self, ws: Any) -> Any:
        """Return ``weight_sum`` of each row of weights: ``[batch, num_nodes]``.

        Args:
            ws: Weights ``[batch, len(decode)]``, or a sequence of rows ``[len(decode)]``. All
                results have the precision of the most precise row.
        """
        return self._batch("sum", ws)

    def batch_weight_max(self, ws: Any) -> Any:
        """Return ``weight_max`` of each row of weights: ``[batch, num_nodes]``."""
        return self._batch("max", ws)

    def batch_log_weight_sum(self, ws: Any) -> Any:
        """Return ``log_weight_sum`` of each row of weights: ``[batch, num_nodes]``."""
        return self._batch("log_sum", ws)

    def mass_sum(self, ws: Weights) -> Any:
        """Return ``weight_sum(ws)``: this is the older name of that method."""
        return self.weight_sum(ws)

    def batch_mass_sum(self, ws: Any) -> Any:
        """Return ``batch_weight_sum(ws)``: this is the older name of that method."""
        return self.batch_weight_sum(ws)

    def _one(self, operation: Operation, ws: Weights) -> Any:
        return self.evaluate_rows(operation, [check_weights(ws, len(self.decode))])[0]

    def _batch(self, operation: Operation, ws: Any) -> Any:
        return self.evaluate_batch(operation, check_batch(ws, len(self.decode)))

    # ---------------------------------------------------------------- drawing

    def visualize(
        self, ws: Weights | None = None, *, max_depth: int | None = None, max_nodes: int = 60
    ) -> graphviz.Digraph:
        """Draw the trie; a notebook shows the drawing, and ``.write("trie.svg")`` saves it.

        The drawing is pruned to ``max_depth`` letters and to the ``max_nodes`` heaviest nodes;
        without ``ws``, the heaviest nodes are those with the most tokens below them.

        Args:
            ws: Weights to label the nodes with: one per token (drawn as sums) or one
                per node, as the other methods return them.
            max_depth: Letters from the root to draw, at most; by default no limit.
            max_nodes: Nodes of the trie to draw, at most.

        Raises:
            MissingExtraError: If the package ``graphviz`` is not installed (extra ``viz``).
            WeightsError: If ``ws`` is neither one weight per token nor one per node.
        """
        from genlm_backend.trie.visualize import draw_trie

        return draw_trie(self, ws, max_depth=max_depth, max_nodes=max_nodes)


@final
class _PerNode(Sequence[Any]):
    """A value for each node, built at its first use and then cached."""

    def __init__(self, num_nodes: int, make: Callable[[int], Any]) -> None:
        self._nodes, self._make = range(num_nodes), make
        self._made: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, node: Any) -> Any:
        if isinstance(node, slice):
            return [self[i] for i in self._nodes[node]]
        value = self._made.get(node)
        if value is None:
            node = self._nodes[node]  # normalises negative and NumPy indices
            value = self._made.setdefault(node, self._make(node))
        return value


@final
class _Prefixes(Mapping[int, list[Any]]):
    """Maps each node to the letters from the root to it, and a leaf to its token's letters."""

    def __init__(self, layout: TrieLayout) -> None:
        self._layout = layout

    def __len__(self) -> int:
        return self._layout.num_nodes

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, node: int) -> list[Any]:
        layout, letters = self._layout, []
        root = layout.num_nodes - 1
        if not 0 <= node <= root:
            raise KeyError(node)
        while node != root:
            if layout.token(node) is None:
                letters.append(layout.letter(node))
            node = layout.parent(node)
        return letters[::-1]
