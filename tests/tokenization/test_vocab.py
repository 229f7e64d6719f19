"""What decoding a vocabulary returns: bytes, texts, and which ids are special or have no token."""

import copy
import pickle

import pytest
from tokenizers import Tokenizer, decoders, models

from genlm_backend import Token, decode_vocab
from tests.tokenization.checks import check_strings
from tests.tokenization.small_tokenizers import SMALL, byte_level, llama_like


def test_missing_ids_are_undefined_and_empty_tokens_are_not():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "": 2, "b": 7}, unk_token="a"))
    vocabulary = decode_vocab(tokenizer, self_check=False)
    assert [bytes(t) for t in vocabulary.byte_vocab] == [b"a", b"", b"", b"", b"", b"", b"", b"b"]
    assert vocabulary.undefined_ids == {1, 3, 4, 5, 6}
    assert [t.token_id for t in vocabulary.byte_vocab] == list(range(8))


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Metaspace(), None])
def test_undefined_ids_have_no_bytes_and_a_placeholder_string(decoder):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "": 2, "##": 3, "b": 7}, unk_token="a"))
    tokenizer.decoder = decoder
    vocabulary = decode_vocab(tokenizer, self_check=False)
    check_strings(vocabulary)
    assert [bytes(vocabulary.byte_vocab[i]) for i in (1, 4, 5, 6)] == [b""] * 4
    assert vocabulary.str_vocab[4] == "<|undefined_4|>"
    if decoder is None:
        assert vocabulary.str_vocab[2] == "<|empty_2|>"


def test_fallback_decides_the_strings_of_tokens_that_are_not_utf8():
    tokenizer = byte_level()
    by_name = {f: decode_vocab(tokenizer, f) for f in ("tokenizer", "latin1", "replace")}
    token_id = next(t.token_id for t in by_name["latin1"].byte_vocab if t.byte_string == b"\xe9")
    assert by_name["tokenizer"].str_vocab[token_id] == "é"  # as the vocabulary spells it
    assert by_name["latin1"].str_vocab[token_id] == "é"
    assert by_name["replace"].str_vocab[token_id] == "\ufffd"
    space = tokenizer.token_to_id("Ġ")
    assert {v.str_vocab[space] for v in by_name.values()} == {" "}
    with pytest.raises(ValueError, match="latin1"):
        decode_vocab(tokenizer, "utf-16")  # pyright: ignore


@pytest.mark.parametrize("fallback", ["tokenizer", "latin1", "replace"])
@pytest.mark.parametrize("name", SMALL)
def test_no_token_has_an_empty_string(name, fallback):
    check_strings(decode_vocab(SMALL[name](), fallback))


def test_vocabulary_is_a_pair_that_can_be_resized_and_copied():
    vocabulary = decode_vocab(llama_like())
    byte_vocab, str_vocab = vocabulary
    assert byte_vocab is vocabulary.byte_vocab
    assert str_vocab is vocabulary.str_vocab
    size = len(byte_vocab)
    wider = vocabulary.resized(size + 3)
    assert wider.byte_vocab[size:] == [Token(size + i, b"") for i in range(3)]
    assert [bytes(t) for t in wider.byte_vocab[size:]] == [b""] * 3
    assert wider.undefined_ids == {size, size + 1, size + 2}
    assert wider.special_ids == vocabulary.special_ids
    narrower = vocabulary.resized(1)
    assert len(narrower.byte_vocab) == len(narrower.str_vocab) == 1
    assert narrower.special_ids == {0}
    for other in (pickle.loads(pickle.dumps(vocabulary)), copy.deepcopy(vocabulary)):
        assert other == vocabulary
        assert other.special_ids == vocabulary.special_ids
