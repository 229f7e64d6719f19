"""Vocabularies and weights that break tries."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from genlm_backend import Token


class EndOfSequence:
    """A marker as programs over tokens use it: an iterable that yields itself."""

    def __iter__(self):
        return iter([self])

    def __repr__(self):
        return "EOS"


EOS = EndOfSequence()

spellings = st.one_of(
    st.binary(max_size=6),
    st.text("ab", max_size=5).map(str.encode),
    st.sampled_from([b"", b"\x00", b"\x00\x00", b"a\x00", b"\xff\xff", b"x" * 100]),
)
tokens = st.lists(spellings, min_size=1, max_size=40).flatmap(
    lambda words: st.permutations(range(len(words))).map(
        lambda ids: [Token(i, word) for i, word in zip(ids, words, strict=True)]
    )
)
plain = st.lists(spellings, min_size=1, max_size=30, unique=True)
texts = st.lists(st.text(max_size=5), min_size=1, max_size=30, unique=True)
sequences = st.lists(
    st.lists(st.one_of(st.integers(-2, 3), st.sampled_from(["a", None, (1, 2)])), max_size=4).map(
        tuple
    ),
    min_size=1,
    max_size=30,
    unique=True,
)
marked = st.lists(spellings, max_size=20, unique=True).map(lambda words: [*words, EOS])
vocabularies = st.one_of(tokens, plain, texts, sequences, marked)


@st.composite
def weights(draw, size, dtype=np.float32):
    """Peaked, negative, infinite, undefined, tiny and huge values side by side."""
    kind = draw(st.sampled_from(["peaked", "any", "log"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if kind == "peaked":
        values = np.exp(rng.normal(0, 10, size))
    elif kind == "log":
        values = rng.normal(-50, 400, size)
    else:
        values = rng.normal(0, 3, size)
    values = values.astype(dtype)
    special = draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1e-30]), max_size=3))
    for value in special:
        values[rng.integers(size)] = value
    return values
