"""build_layout: builds the arrays of a vocabulary's trie.

A *word* is an entry as the codes of its letters. One pass over the sorted words finds the runs (see
``layout.py``) from the length of each word's common prefix with the word before it (Kasai et al.,
2001). Then array arithmetic gives runs and nodes their numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genlm_backend.errors import VocabularyError, VocabularyTypeError
from genlm_backend.runtime.compiled import compiled
from genlm_backend.tokenization import Token
from genlm_backend.trie.layout import Int32, TrieLayout


def build_layout(decode: Sequence[Any]) -> TrieLayout:
    if not decode:
        raise VocabularyError("a trie needs a vocabulary of at least one token; got none")
    # 1. Find the runs: run k < num_words ends in the leaf of word k; the others are branches.
    alphabet, letters, lengths, order = _sort(decode)
    parents, bottoms, firsts = _find_runs(lengths, _shared_lengths(letters, lengths))
    num_words, num_runs = len(lengths), len(parents)
    tops = np.where(parents < 0, -1, bottoms[parents])
    levels = _levels(parents, np.lexsort((bottoms, firsts)))

    # 2. Number the runs from the deepest level up, alphabetically within a level.
    found = np.lexsort((firsts, -levels))
    numbers = np.empty_like(found)
    numbers[found] = np.arange(num_runs)
    run_parents = numbers[parents[found[:-1]]].astype(np.int32)
    run_children = np.zeros(num_runs + 1, np.int32)
    np.cumsum(np.bincount(run_parents, minlength=num_runs), out=run_children[1:])
    run_start = np.zeros(num_runs + 1, np.int32)
    np.cumsum((bottoms - tops)[found], out=run_start[1:])

    # 3. Number the nodes from the bottom of each run up, and find their letters.
    runs = np.repeat(np.arange(num_runs, dtype=np.int32), np.diff(run_start))
    words = firsts[found][runs]
    depths = bottoms[found][runs] + run_start[runs] - np.arange(len(runs))
    has_letter = (depths > 0) & (depths <= lengths[words])  # neither the root nor a leaf
    ends = np.cumsum(lengths)[words] - lengths[words] + depths
    codes = np.zeros(len(runs), letters.dtype)
    codes[has_letter] = letters[ends[has_letter] - 1]

    # 4. Number the runs again, by kind (``sources``): those that end in a leaf, then branches.
    leaf_runs = np.flatnonzero(found < num_words).astype(np.int32)
    branch_runs = np.flatnonzero(found >= num_words).astype(np.int32)
    sources = np.empty(num_runs, np.int32)
    sources[leaf_runs] = np.arange(num_words)
    sources[branch_runs] = np.arange(num_words, num_runs)
    branch_above = np.full(num_runs, num_runs - num_words, np.int32)
    branch_above[:-1] = sources[run_parents] - num_words
    return TrieLayout(
        alphabet=alphabet,
        codes=codes,
        run_start=run_start,
        run_parent=run_parents,
        run_children=run_children,
        sorted_tokens=order,
        leaf_tokens=order[found[leaf_runs]],
        leaf_runs=leaf_runs,
        leaf_parents=branch_above[leaf_runs],
        branch_runs=branch_runs,
        branch_parents=branch_above[branch_runs],
        node_sources=sources[runs],
    )


# -------------------------------------------------------------------- words and runs


def _sort(
    decode: Sequence[Any],
) -> tuple[list[Any] | None, NDArray[np.unsignedinteger], NDArray[np.int64], Int32]:
    """Return the alphabet (``None``: bytes), and the sorted words' codes, lengths and positions."""
    if all(isinstance(item, bytes) for item in decode):
        words = [bytes(item) for item in decode]  # plain bytes, since Tokens would sort by id
        alphabet, width = None, 1
    else:
        words, alphabet = coded_entries(decode)
        width = 4
    order = sorted(range(len(words)), key=words.__getitem__)
    sorted_words = [words[i] for i in order]
    lengths = np.fromiter(map(len, sorted_words), np.int64, len(words)) // width
    if lengths.sum() + len(words) + 1 > np.iinfo(np.int32).max:
        raise VocabularyError("a trie's vocabulary must have at most about 2**31 letters")
    flat = b"".join(sorted_words)
    if width == 1:
        codes = np.frombuffer(flat, np.uint8)
    else:
        codes = np.frombuffer(flat, ">u4").astype(np.uint32)
    return alphabet, codes, lengths, np.array(order, np.int32)


@compiled
def _shared_lengths(codes, lengths):
    """Return each word's common-prefix length with the word before it: int64 ``[num_words]``."""
    shared = np.zeros(len(lengths), np.int64)
    start = 0
    for k in range(1, len(lengths)):
        before = start
        start += lengths[k - 1]
        limit = min(lengths[k - 1], lengths[k])
        common = 0
        while common < limit and codes[before + common] == codes[start + common]:
            common += 1
        shared[k] = common
    return shared


@compiled
def _find_runs(lengths, shared):
    """Return each run's parent (-1 for the root's), its lowest node's depth and its first word."""
    # Run k < num_words ends in the leaf of word k, one below the node of the word's last letter.
    num_words = len(lengths)
    parents = np.full(2 * num_words, -1, np.int64)
    bottoms = np.zeros(2 * num_words, np.int64)
    firsts = np.zeros(2 * num_words, np.int64)
    open_runs = np.empty(num_words + 1, np.int64)  # branches above the latest leaf, outermost first
    num_open, num_runs = 0, num_words
    for k in range(num_words):
        bottoms[k], firsts[k] = lengths[k] + 1, k
        child = k
        depth = shared[k + 1] if k + 1 < num_words else -1
        while num_open and bottoms[open_runs[num_open - 1]] > depth:
            num_open -= 1
            parents[child] = open_runs[num_open]
            child = open_runs[num_open]
        if depth < 0:
            break
        if not num_open or bottoms[open_runs[num_open - 1]] < depth:
            bottoms[num_runs], firsts[num_runs] = depth, firsts[child]
            open_runs[num_open] = num_runs
            num_open, num_runs = num_open + 1, num_runs + 1
        parents[child] = open_runs[num_open - 1]
    return parents[:num_runs], bottoms[:num_runs], firsts[:num_runs]


@compiled
def _levels(parents, preorder):
    """Return the number of branches above each run, int64 ``[num_runs]``."""
    levels = np.zeros(len(parents), np.int64)
    for run in preorder[1:]:
        levels[run] = levels[parents[run]] + 1
    return levels


# -------------------------------------------------------------------- the entries


def coded_entries(decode: Iterable[Any]) -> tuple[list[bytes], list[Any]]:
    """Return each entry's letter codes as bytes, four per letter, and the letter of each code."""
    # Codes 0 to 255 are the bytes themselves; other letters are numbered as they first occur.
    code_of: dict[Hashable, int] = {letter: letter for letter in range(256)}
    words = []
    for position, item in enumerate(decode):
        try:
            codes = [code_of.setdefault(letter, len(code_of)) for letter in item]
        except TypeError as error:
            raise VocabularyTypeError(
                f"decode[{position}] must be an iterable of hashable letters, such as bytes or a "
                f"string, got {item!r} ({error})"
            ) from error
        words.append(np.array(codes, ">u4").tobytes())  # big-endian, so that bytes sort like codes
    return words, list(code_of)


def keys_of(decode: Iterable[Any]) -> list[Hashable]:
    """Return the key of each entry: ``(bytes, token_id)`` for a ``Token``, else the entry."""
    return [
        (item.byte_string, item.token_id) if isinstance(item, Token) else item for item in decode
    ]


def check_unique(decode: Sequence[Any]) -> None:
    """Raise a ``VocabularyError`` for equal keys, a ``VocabularyTypeError`` for unhashable ones."""
    is_ordinary = all(type(item) is Token for item in decode)
    if is_ordinary and len({item.token_id for item in decode}) == len(decode):
        return  # fast path: build no keys
    seen: dict[Hashable, int] = {}
    for position, key in enumerate(keys_of(decode)):
        try:
            first = seen.setdefault(key, position)
        except TypeError as error:
            raise VocabularyTypeError(
                f"decode[{position}] is {key!r}, which is not hashable: pass a tuple"
            ) from error
        if first != position:
            raise VocabularyError(
                f"decode[{first}] and decode[{position}] are the same entry, {key!r}: two "
                "entries with the same bytes must be Tokens with different ids"
            )
