"""decode_vocab: a tokenizer's vocabulary as bytes and as strings."""

from __future__ import annotations

import warnings
from typing import Any, Literal, final, get_args

from genlm_backend.checks import one_of, switch
from genlm_backend.tokenization.reader import read_byte_vocab
from genlm_backend.tokenization.self_check import check_byte_vocab
from genlm_backend.tokenization.token import ByteVocab, Token, make_tokens

Fallback = Literal["tokenizer", "latin1", "replace"]


@final
class Vocabulary(tuple[list[Token], list[str]]):
    """The pair ``(byte_vocab, str_vocab)``, with the sets of special and undefined ids.

    No string is empty. If id 7 has no token, its string is ``<|undefined_7|>``; if its token has no
    bytes, ``<|empty_7|>``.

    Attributes:
        special_ids: Ids of special tokens; the bytes of each are its name.
        undefined_ids: Ids without a token: holes, and the padding of a model's embedding. Their
            bytes are empty, as are the bytes of some real tokens.
    """

    special_ids: frozenset[int]
    undefined_ids: frozenset[int]

    def __new__(
        cls,
        byte_vocab: list[Token],
        str_vocab: list[str],
        special_ids: frozenset[int] = frozenset(),
        undefined_ids: frozenset[int] = frozenset(),
    ) -> Vocabulary:
        self = super().__new__(cls, (byte_vocab, str_vocab))
        self.special_ids, self.undefined_ids = special_ids, undefined_ids
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, self.special_ids, self.undefined_ids)

    @property
    def byte_vocab(self) -> list[Token]:
        """The tokens, indexed by id."""
        return self[0]

    @property
    def str_vocab(self) -> list[str]:
        """The tokens as strings, indexed by id; no string is empty."""
        return self[1]

    def resized(self, size: int) -> Vocabulary:
        """Return a vocabulary of exactly ``size`` ids: padded with undefined ids, or truncated."""
        extra = range(len(self.byte_vocab), size)
        return Vocabulary(
            self.byte_vocab[:size] + [Token(i, b"") for i in extra],
            self.str_vocab[:size] + [_undefined(i) for i in extra],
            frozenset(i for i in self.special_ids if i < size),
            frozenset(i for i in self.undefined_ids if i < size) | frozenset(extra),
        )

    def of_model(self, size: int | None) -> Vocabulary:
        """Return the vocabulary resized to a model's ids; warn about tokens that the model lacks.

        If ``size`` is ``None``, keep all ids. The warning names the line three calls up.
        """
        num_ids = len(self.byte_vocab)
        if size is None or size == num_ids:
            return self
        if size < num_ids:
            cut = ", ".join(map(repr, self.byte_vocab[size : size + 8]))
            warnings.warn(
                f"the tokenizer has {num_ids} ids, but the model only {size}: ids {size} to "
                f"{num_ids - 1} are left out ({cut}{', …' if num_ids - size > 8 else ''})",
                stacklevel=4,
            )
        return self.resized(size)


def _undefined(token_id: int) -> str:
    return f"<|undefined_{token_id}|>"


def decode_vocab(
    tokenizer: Any, byte2str_fallback: Fallback = "tokenizer", *, self_check: bool = True
) -> Vocabulary:
    """Return the bytes and the text of every token id of ``tokenizer``.

    The bytes come from the object alone, such as its decoder or the model or table that it holds,
    so no file is loaded or fetched. They are the bytes that the id contributes in the middle of a
    text. A special token's bytes are its name. The bytes of other added tokens are their decoded
    content, or in byte-level vocabularies the content itself.

    Args:
        tokenizer: The tokenizer: a Hugging Face tokenizer (Rust, slow or mistral-common's), a bare
            ``tokenizers.Tokenizer``, a SentencePiece processor, a tiktoken encoding, or an
            object that holds one of these.
        byte2str_fallback: The string of a token whose bytes are not valid UTF-8: its spelling in
            the tokenizer's files ("tokenizer"), one character per byte ("latin1"), or with U+FFFD
            in place of invalid bytes ("replace").
        self_check: Whether to encode probe texts (words, white space, bytes, some added tokens)
            and compare the normalised texts with the bytes of their tokens. It takes one or two
            milliseconds, even for 262,000 tokens.

    Returns:
        The pair ``(byte_vocab, str_vocab)``, lists indexed by token id, with the attributes
        ``special_ids`` and ``undefined_ids``. An id without a token, such as 151643, has no bytes
        and the string ``<|undefined_151643|>``. A token without bytes, such as token 7, has the
        string ``<|empty_7|>``. So no string is empty.

    Raises:
        TokenizerDecodeError: (``ValueError``) If the bytes of a token cannot be determined.
        OptionError: (``ValueError``) If ``byte2str_fallback`` is none of the three strings.
        OptionTypeError: (``TypeError``) If ``self_check`` is not True or False.
    """
    one_of(*get_args(Fallback))("byte2str_fallback", byte2str_fallback)
    switch("self_check", self_check)
    vocab = read_byte_vocab(tokenizer)
    if self_check:
        check_byte_vocab(vocab)
    strings = _to_strings(vocab, byte2str_fallback)
    return Vocabulary(
        make_tokens(vocab.byte_strings), strings, vocab.special_ids, vocab.undefined_ids
    )


def _to_strings(vocab: ByteVocab, fallback: Fallback) -> list[str]:
    strings = []
    for token_id, byte_string in enumerate(vocab.byte_strings):
        try:
            string = byte_string.decode()
        except UnicodeDecodeError:
            if fallback == "tokenizer":
                string = vocab.spellings[token_id] or ""
            elif fallback == "latin1":
                string = byte_string.decode("latin-1")
            else:
                string = byte_string.decode("utf-8", "replace")
        strings.append(string or f"<|empty_{token_id}|>")
    for token_id in vocab.undefined_ids:
        strings[token_id] = _undefined(token_id)
    return strings
