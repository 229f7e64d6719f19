"""Added tokens: special, normalised, of white space, or bytes of the model as well."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from genlm_backend import decode_vocab
from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization.decoder import byte_level_alphabet
from tests.tokenization.checks import check_strings
from tests.tokenization.small_tokenizers import SMALL, byte_level, gemma_like, llama_like


def test_normalized_added_tokens_spell_normalized_text_and_others_do_not():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<|END|>", " spaced "])
    tokenizer.add_tokens(
        [
            AddedToken("Ġliteral é", normalized=False),
            AddedToken("Shouted", normalized=True),
            "plain word",
        ]
    )
    vocabulary = decode_vocab(tokenizer)
    added = [bytes(t).decode() for t in vocabulary.byte_vocab[size:]]
    assert added == ["<|END|>", " spaced ", "Ġliteral é", "shouted", "plain word"]
    assert vocabulary.special_ids == {tokenizer.token_to_id("<eos>"), size, size + 1}


def test_normalized_added_token_of_a_llama_tokenizer_joins_to_the_text():
    tokenizer = llama_like()
    tokenizer.add_tokens([AddedToken("abba abba", normalized=True)])
    vocabulary = decode_vocab(tokenizer)
    text = "c abba abba"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.token_to_id("abba abba") in ids
    assert b"".join(vocabulary.byte_vocab[i] for i in ids) == b" " + text.encode()


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("content", ["  ", "   ", " ", "\n", " x ", "<t> "])
@pytest.mark.parametrize("name", ["byte-level", "unigram", "llama-like", "word-piece"])
def test_added_token_with_white_space_keeps_it(name, content, normalized):
    tokenizer = SMALL[name]()
    tokenizer.add_tokens([AddedToken(content, normalized=normalized)])
    vocabulary = decode_vocab(tokenizer)
    added = tokenizer.token_to_id(content)
    ids = tokenizer.encode(f"ab{content}ab", add_special_tokens=False).ids
    if added not in ids:  # its normalizer has made it something else
        assert (name == "llama-like" and normalized) or name == "word-piece"
        return
    before = b"".join(vocabulary.byte_vocab[i] for i in ids[: ids.index(added)])
    after = b"".join(vocabulary.byte_vocab[i] for i in ids[ids.index(added) + 1 :])
    assert (before.strip(), after.strip()) == (b"ab", b"ab")
    if not normalized:
        space = b" " if name == "word-piece" else b""  # which decoding prints before every word
        assert vocabulary.byte_vocab[added].byte_string == space + content.encode()


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("name", ["byte-level", "unigram", "llama-like"])
def test_added_token_that_strips_white_space_does_not_spell_it(name, flag):
    tokenizer = SMALL[name]()
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, **{flag: True}) for text in ("\n", "(brown)")]
    )
    vocabulary = decode_vocab(tokenizer)
    for text in ("\n", "(brown)"):
        token_id = tokenizer.token_to_id(text)
        assert vocabulary.byte_vocab[token_id].byte_string == text.encode()


@pytest.mark.parametrize("content", ["é", "ıÃ"])
def test_added_token_that_also_spells_other_bytes_raises_decode_error(content):
    vocab = {letter: i for i, letter in enumerate(byte_level_alphabet())}
    merges = [tuple(content)] if len(content) > 1 else []
    tokenizer = Tokenizer(models.BPE({**vocab, content: vocab.get(content, 256)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    decode_vocab(tokenizer)
    tokenizer.add_tokens([AddedToken(content, normalized=False)])
    with pytest.raises(TokenizerDecodeError, match="does not round-trip"):
        decode_vocab(tokenizer)


def test_added_tokens_are_decoded_with_a_byte_level_normalizer():
    tokenizer = byte_level()
    tokenizer.pre_tokenizer, tokenizer.normalizer = None, normalizers.ByteLevel()
    tokenizer.add_tokens(["日本", "\n\n"])
    vocabulary = decode_vocab(tokenizer)
    text = "a日本\n\nb"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.token_to_id("日本") in ids
    assert b"".join(vocabulary.byte_vocab[i] for i in ids) == text.encode()


def test_added_token_already_in_the_model_keeps_the_models_bytes():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    assert tokenizer.token_to_id("Ġl") is not None
    right = decode_vocab(tokenizer).byte_vocab[tokenizer.token_to_id("Ġl")]
    tokenizer.add_tokens([AddedToken("Ġl", normalized=True)])
    token_id = tokenizer.token_to_id("Ġl")
    assert tokenizer.id_to_token(token_id) == "ġl"  # "ġ" is another byte
    assert decode_vocab(tokenizer).byte_vocab[token_id].byte_string == right.byte_string == b" l"


def test_id_of_a_word_with_and_without_a_space_raises_decode_error():
    tokenizer = llama_like()
    tokenizer.add_tokens([AddedToken("ab", normalized=True)])
    texts = ["c ab", "cab"]  # the normalizer makes the added token "▁ab", and the model has "ab"
    ids = [tokenizer.encode(text, add_special_tokens=False).ids[-1] for text in texts]
    assert ids == [tokenizer.token_to_id("ab")] * 2
    with pytest.raises(TokenizerDecodeError, match="does not round-trip"):
        decode_vocab(tokenizer)


def test_special_tokens_spell_their_names_without_normalization():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("<PAD>", normalized=True)])
    vocabulary = decode_vocab(tokenizer)
    token = vocabulary.byte_vocab[tokenizer.token_to_id("<PAD>")]
    assert token.byte_string == b"<PAD>"
    assert token.token_id in vocabulary.special_ids


@functools.cache
def serialised(name):
    return {**SMALL, "gemma-like": gemma_like}[name]().to_str()


WORDS = [" ", "  ", "   ", "\n", "\n\n", "\t", "a", "b", "ab", "<t>", "é", "日本", "x", "."]
ADDED = st.builds(
    AddedToken,
    st.sampled_from(["▁▁", "ĠĠ", "  ", "   ", "\n", "\n\n", "\t", "<t>", " x", "x ", "ab", "Q"]),
    normalized=st.booleans(),
    lstrip=st.booleans(),
    rstrip=st.booleans(),
    single_word=st.booleans(),
)


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(["byte-level", "byte-level-no-regex", "gemma-like", "unigram"]),
    added=st.lists(ADDED, max_size=3),
    texts=st.lists(st.lists(st.sampled_from(WORDS), max_size=8).map("".join), max_size=6),
)
def test_bytes_match_the_tokenizers_decoding_for_any_added_tokens(name, added, texts):
    tokenizer = Tokenizer.from_str(serialised(name))
    tokenizer.add_tokens(added)
    vocabulary = decode_vocab(tokenizer)
    check_strings(vocabulary)
    for text in texts:
        text = f"a{text}"  # a decoder may take all the spaces of the first token away
        try:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # of tokenizers, whose tokens overlap by their spaces
            if type(error).__name__ != "PanicException":
                raise
            continue
        if vocabulary.special_ids.intersection(ids):
            continue
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert joined.removeprefix(" ") == tokenizer.decode(ids).removeprefix(" ")
        if name != "unigram" and not any(token.lstrip or token.rstrip for token in added):
            assert joined == text


def test_normalized_added_token_spells_its_normalized_content():
    words = [*sorted(byte_level_alphabet()), "Hello"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder, tokenizer.normalizer = decoders.ByteLevel(), normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken(word, normalized=True) for word in ("Hello", "K")])
    vocabulary = decode_vocab(tokenizer)
    for text in ("say hello", "Hello", "quick"):
        ids = tokenizer.encode(text).ids
        assert b"".join(vocabulary.byte_vocab[i] for i in ids) == text.lower().encode()
    assert tokenizer.token_to_id("K") in tokenizer.encode("quick").ids


@pytest.mark.parametrize("content", ["é", "Ï"])
def test_single_word_token_that_is_also_a_byte_raises_decode_error(content):
    vocab = {letter: i for i, letter in enumerate(byte_level_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(content, normalized=False, single_word=True)])
    with pytest.raises(TokenizerDecodeError, match="does not round-trip"):
        decode_vocab(tokenizer)


def test_tokenizer_that_fails_on_some_texts_is_still_decoded():
    tokenizer = byte_level()
    tokenizer.add_tokens(
        [
            AddedToken("    ", lstrip=True, normalized=False),
            AddedToken("a ", rstrip=True, normalized=False),
        ]
    )
    vocabulary = decode_vocab(tokenizer)
    ids = tokenizer.encode("an apple").ids
    assert b"".join(vocabulary.byte_vocab[i] for i in ids) == b"an apple"


@pytest.mark.parametrize("normalized", [False, True])
def test_added_token_of_word_piece_begins_with_the_printed_space(normalized):
    words = ["[UNK]", "the", "fox", "a", ".", "nai", "##ve", "##es"]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_tokens([AddedToken("naive", normalized=normalized)])
    vocabulary = decode_vocab(tokenizer)
    assert len(vocabulary.byte_vocab) == 9
    assert vocabulary.byte_vocab[8].byte_string == b" naive"
    for text in ("the naive fox", "naive naive", "the naive.", "foxes naivea"):
        ids = tokenizer.encode(text).ids
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert joined == " " + tokenizer.decode(ids)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("content", ["x▁y", "▁new", "▁▁▁▁▁"])
@pytest.mark.parametrize("name", ["unigram", "llama-like"])
def test_added_token_of_metaspace_spells_blocks_as_spaces(name, content, normalized):
    tokenizer = SMALL[name]()
    tokenizer.add_tokens([AddedToken(content, normalized=normalized)])
    vocabulary = decode_vocab(tokenizer)
    token = vocabulary.byte_vocab[tokenizer.token_to_id(content)]
    prepended = " " if normalized and name == "llama-like" else ""  # by its normalizer
    assert token.decode() == prepended + content.replace("▁", " ")
    a = tokenizer.token_to_id("a")
    assert tokenizer.decode([a, token.token_id, a]).lstrip(" ") == f"a{token.decode()}a"


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("content", ["né", "Ġq", "日本 né"])
def test_byte_level_letters_in_an_added_token_are_plain_text(content, normalized):
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(content, normalized=normalized)])
    vocabulary = decode_vocab(tokenizer)
    text = f"a{content}b"
    ids = tokenizer.encode(text).ids
    assert tokenizer.token_to_id(content) in ids
    assert b"".join(vocabulary.byte_vocab[i] for i in ids) == text.encode()
