"""Every declared decoder, on tokenizers trained here on a few sentences."""

import copy
import functools
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from genlm_backend import Token, decode_vocab
from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization.decoder import byte_level_alphabet
from genlm_backend.tokenization.reader import read_byte_vocab
from tests.tokenization.checks import check_strings
from tests.tokenization.samples import LANGUAGES, ODD

TEXTS = [*LANGUAGES, *ODD]


def trained(tokenizer, trainer):
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_level(**pre):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **pre)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    return trained(tokenizer, trainer)


def unigram(byte_fallback=False):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=1500, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    return trained(tokenizer, trainer)


def llama_like():
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {"<unk>": 0, "<s>": 1, **{b: 2 + i for i, b in enumerate(bytes_)}}
    for piece in ["▁", "a", "b", "c", "é", "▁a", "ab", "▁ab", "▁▁"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    return trained(tokenizer, trainer)


def suffix_bpe():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    return trained(tokenizer, trainer)


SMALL = {
    "byte-level": byte_level,
    "byte-level-no-regex": lambda: byte_level(use_regex=False),
    "unigram": unigram,
    "llama-like": llama_like,
    "word-piece": word_piece,
    "suffix-bpe": suffix_bpe,
}


@pytest.mark.parametrize("name", SMALL)
def test_every_token_is_what_the_rust_decoder_says(name):
    tokenizer = SMALL[name]()
    special = decode_vocab(tokenizer).special_ids
    anchor = "a" if name != "suffix-bpe" else "a</w>"
    end = "##a" if name == "word-piece" else "a"
    start = b"a " if name == "suffix-bpe" else b"a"
    for token in decode_vocab(tokenizer).byte_vocab:
        if token.token_id in special:
            assert token.byte_string == tokenizer.id_to_token(token.token_id).encode()
        else:
            text = tokenizer.decoder.decode([anchor, tokenizer.id_to_token(token.token_id), end])
            assert text == (start + token + b"a").decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["byte-level", "byte-level-no-regex", "llama-like"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_joined_bytes_are_the_text(name, text):
    tokenizer = SMALL[name]()
    vocabulary = decode_vocab(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    joined = b"".join(vocabulary.byte_vocab[i] for i in ids)
    if name == "llama-like":
        text = " " + text.replace("▁", " ")
    assert joined == text.encode()


@pytest.mark.parametrize("name", ["word-piece", "suffix-bpe", "unigram"])
def test_words_come_back_whatever_became_of_the_spaces(name):
    tokenizer = SMALL[name]()
    vocabulary = decode_vocab(tokenizer)
    for text in LANGUAGES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if vocabulary.special_ids.intersection(ids):
            continue
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        expected = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        assert "".join(joined.split()) == "".join(expected.split())


@pytest.mark.parametrize("name", ["byte-level", "unigram", "word-piece", "suffix-bpe"])
def test_a_decoder_that_is_not_declared_is_inferred(name):
    tokenizer = SMALL[name]()
    declared = decode_vocab(tokenizer)
    state = tokenizer.to_str()
    data = json.loads(state)
    data["decoder"] = None
    bare = Tokenizer.from_str(json.dumps(data))
    assert bare.decoder is None
    assert [t.byte_string for t in decode_vocab(bare).byte_vocab] == [
        t.byte_string for t in declared.byte_vocab
    ]


def test_a_llama_like_decoder_is_inferred_from_its_normalizer():
    tokenizer = llama_like()
    declared = decode_vocab(tokenizer).byte_vocab
    data = json.loads(tokenizer.to_str())
    data["decoder"] = None
    bare = decode_vocab(Tokenizer.from_str(json.dumps(data))).byte_vocab
    assert [t.byte_string for t in bare] == [t.byte_string for t in declared]


def test_words_split_at_white_space_stand_behind_a_space():
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert [bytes(t) for t in decode_vocab(tokenizer).byte_vocab] == [b" hello", b" world", b" ?"]


def test_what_cannot_be_known_is_an_error_that_names_everything():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(TokenizerDecodeError, match=r"Tokenizer.*CTC") as caught:
        decode_vocab(tokenizer)
    assert isinstance(caught.value, ValueError)
    assert caught.value.tokenizer == "Tokenizer"
    assert "CTC" in caught.value.reason

    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(TokenizerDecodeError, match="white space"):
        decode_vocab(tokenizer)

    with pytest.raises(TokenizerDecodeError, match="object"):
        decode_vocab(object())


def test_a_decoder_that_lies_is_found_out_and_the_token_named():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(TokenizerDecodeError, match="does not come back") as caught:
        decode_vocab(tokenizer)
    assert caught.value.token_id is not None
    assert caught.value.token == tokenizer.id_to_token(caught.value.token_id)
    assert "Ġ" in str(caught.value.token)
    assert decode_vocab(tokenizer, self_check=False).byte_vocab[300]


def test_a_byte_level_token_outside_the_alphabet_is_its_utf8():
    tokenizer = Tokenizer(models.BPE({"a": 0, "日本": 1, "Ġa": 2, "é": 3, "a日": 4}, []))
    tokenizer.decoder = decoders.ByteLevel()
    vocab = decode_vocab(tokenizer, self_check=False).byte_vocab
    assert [bytes(t) for t in vocab] == [b"a", "日本".encode(), b" a", b"\xe9", "a日".encode()]


def test_only_whole_byte_tokens_are_bytes():
    names = ["<0x41>", "<0xFF>", "<0xfe>", "x<0x41>", "<0x41>x", "<0x4>", "<0xGG>", "<0x041>"]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="x"))
    tokenizer.decoder = decoders.ByteFallback()
    vocab = decode_vocab(tokenizer, self_check=False).byte_vocab
    assert [bytes(t) for t in vocab] == [b"A", b"\xff", b"\xfe", *(n.encode() for n in names[3:])]


def test_regular_expressions_and_strips_in_a_decoder():
    tokenizer = Tokenizer(models.WordLevel({"_ab__": 0, "c1d22": 1}, unk_token="?"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Strip("_", 1, 1), decoders.Replace(Regex("[0-9]+"), "#")]
    )
    vocab = decode_vocab(tokenizer, self_check=False).byte_vocab
    assert [bytes(t) for t in vocab] == [b"ab_", b"c#d#"]


def test_special_added_and_normalized_tokens():
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


def test_an_added_token_goes_through_a_llama_normalizer():
    tokenizer = llama_like()
    tokenizer.add_tokens([AddedToken("abba abba", normalized=True)])
    vocabulary = decode_vocab(tokenizer)
    text = "c abba abba"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.token_to_id("abba abba") in ids
    assert b"".join(vocabulary.byte_vocab[i] for i in ids) == b" " + text.encode()


def test_holes_are_undefined_and_real_empty_tokens_are_not():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "": 2, "b": 7}, unk_token="a"))
    vocabulary = decode_vocab(tokenizer, self_check=False)
    assert [bytes(t) for t in vocabulary.byte_vocab] == [b"a", b"", b"", b"", b"", b"", b"", b"b"]
    assert vocabulary.undefined_ids == {1, 3, 4, 5, 6}
    assert [t.token_id for t in vocabulary.byte_vocab] == list(range(8))


def test_strings_of_tokens_that_are_no_text():
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


def test_the_result_is_a_pair_that_can_be_resized_and_copied():
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


def test_nothing_is_loaded_again(monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(Tokenizer, "from_file", refuse)
    monkeypatch.setattr(Tokenizer, "from_pretrained", refuse)
    monkeypatch.setattr(Tokenizer, "to_str", refuse)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>")
    assert len(decode_vocab(tokenizer).byte_vocab) == 500
    assert read_byte_vocab(tokenizer).name.startswith(("PreTrained", "Tokenizers"))


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"),
        models.BPE({"a": 0, "b": 1}, [], unk_token="<unk>"),
        models.BPE({"a": 0, "b": 1}, []),
        models.Unigram([("a", 0.0), ("b", 0.0)]),
        models.Unigram([("a", 0.0), ("b", 0.0), ("?", 0.0)], unk_id=2),
    ],
    ids=["word-level", "bpe", "bpe-that-drops", "unigram", "unigram-unknown"],
)
def test_a_tokenizer_that_cannot_spell_the_probes_is_decoded_all_the_same(model):
    vocabulary = decode_vocab(Tokenizer(model))
    assert [bytes(token) for token in vocabulary.byte_vocab[:2]] == [b"a", b"b"]


class PythonDecoder:
    def decode(self, tokens):
        return "".join(tokens)

    def decode_chain(self, tokens):
        return tokens


class PythonNormalizer:
    def normalize(self, normalized):
        normalized.lowercase()


class PythonPreTokenizer:
    def pre_tokenize(self, pre_tokenized):
        pre_tokenized.split(lambda _, text: text.split(" ", "merged_with_next"))


def test_a_decoder_written_in_python_is_an_error_that_says_so():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Decoder.custom(PythonDecoder())
    with pytest.raises(TokenizerDecodeError, match="serialised") as caught:
        decode_vocab(tokenizer)
    assert caught.value.tokenizer == "Tokenizer"


@pytest.mark.parametrize("name", SMALL)
def test_a_normalizer_and_a_pre_tokenizer_written_in_python_do_not_matter(name):
    tokenizer = SMALL[name]()
    declared = decode_vocab(tokenizer).byte_vocab
    own = tokenizer.normalizer, tokenizer.pre_tokenizer
    custom = normalizers.Normalizer.custom(PythonNormalizer())
    tokenizer.normalizer = normalizers.Sequence([custom, own[0]]) if own[0] else custom
    custom = pre_tokenizers.PreTokenizer.custom(PythonPreTokenizer())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([custom, own[1]]) if own[1] else custom
    vocabulary = decode_vocab(tokenizer).byte_vocab
    assert [bytes(token) for token in vocabulary] == [bytes(token) for token in declared]


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_nothing_is_inferred_from_what_is_written_in_python(part):
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    if part == "normalizer":
        tokenizer.normalizer = normalizers.Normalizer.custom(PythonNormalizer())
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(PythonPreTokenizer())
    with pytest.raises(TokenizerDecodeError, match="serialised"):
        decode_vocab(tokenizer)


def byte_pieces():
    return [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), None])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_bytes_are_bytes_where_the_decoder_does_not_say_so(kind, decoder):
    pieces = ["▁", "a", "b", "▁a", *byte_pieces()]
    if kind == "unigram":
        scores = [("<unk>", 0.0), *((piece, -1.0) for piece in pieces)]
        model = models.Unigram(scores, unk_id=0, byte_fallback=True)
    else:
        model = models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    vocabulary = decode_vocab(tokenizer)
    singles = {token.byte_string for token in vocabulary.byte_vocab if len(token) == 1}
    assert singles == {bytes([byte]) for byte in range(256)}
    for text in TEXTS:
        text = text.replace("<0x41>", "")  # a Unigram model would take it for the byte
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert joined.removeprefix(" ") == text.replace("▁", " ").removeprefix(" ")


def test_byte_names_are_names_where_there_is_no_byte_fallback():
    tokenizer = Tokenizer(models.WordLevel({"<0x41>": 0, "x": 1}, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()
    assert decode_vocab(tokenizer).byte_vocab[0].byte_string == b"<0x41>"


RAREST = "\U0002a6d6"


@pytest.mark.parametrize(
    "known",
    ["\U0010fffd", "▁\U0010fffd", RAREST, f"▁{RAREST}", f"{RAREST}x", f"\U0010fffd{RAREST}"],
)
@pytest.mark.parametrize(
    "pre_tokenizer", [pre_tokenizers.Metaspace(), pre_tokenizers.UnicodeScripts()]
)
def test_the_unknown_token_is_found_whatever_characters_are_known(known, pre_tokenizer):
    scores = [("?", 0.0), ("▁", -1.0), ("a", -1.0), (known, -1.0)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Metaspace()
    assert read_byte_vocab(tokenizer).unknown_ids == {0}
    assert decode_vocab(tokenizer).byte_vocab[3].byte_string == known.replace("▁", " ").encode()


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("content", ["  ", "   ", " ", "\n", " x ", "<t> "])
@pytest.mark.parametrize("name", ["byte-level", "unigram", "llama-like", "word-piece"])
def test_an_added_token_of_white_space_is_white_space(name, content, normalized):
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
        assert vocabulary.byte_vocab[added].byte_string == content.encode()


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("name", ["byte-level", "unigram", "llama-like"])
def test_an_added_token_that_takes_white_space_along_does_not_spell_it(name, flag):
    tokenizer = SMALL[name]()
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, **{flag: True}) for text in ("\n", "(brown)")]
    )
    vocabulary = decode_vocab(tokenizer)
    for text in ("\n", "(brown)"):
        token_id = tokenizer.token_to_id(text)
        assert vocabulary.byte_vocab[token_id].byte_string == text.encode()


@pytest.mark.parametrize("fallback", ["tokenizer", "latin1", "replace"])
@pytest.mark.parametrize("name", SMALL)
def test_no_text_is_empty(name, fallback):
    check_strings(decode_vocab(SMALL[name](), fallback))


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Metaspace(), None])
def test_ids_without_a_token_spell_nothing_and_say_so(decoder):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "": 2, "##": 3, "b": 7}, unk_token="a"))
    tokenizer.decoder = decoder
    vocabulary = decode_vocab(tokenizer, self_check=False)
    check_strings(vocabulary)
    assert [bytes(vocabulary.byte_vocab[i]) for i in (1, 4, 5, 6)] == [b""] * 4
    assert vocabulary.str_vocab[4] == "<|undefined_4|>"
    if decoder is None:
        assert vocabulary.str_vocab[2] == "<|empty_2|>"


def gemma_like():
    tokenizer = llama_like()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def clip_like():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\w+|[^\s\w]+"), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<unk>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    return trained(tokenizer, trainer)


@pytest.mark.parametrize("declared", [True, False])
def test_word_ends_of_a_byte_level_vocabulary_are_spaces(declared):
    tokenizer = clip_like()
    if not declared:
        data = json.loads(tokenizer.to_str())
        tokenizer = Tokenizer.from_str(json.dumps({**data, "decoder": None}))
    vocabulary = decode_vocab(tokenizer)
    for text in LANGUAGES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert not vocabulary.special_ids.intersection(ids)
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert "".join(joined.split()) == "".join(text.lower().split())
    assert vocabulary.byte_vocab[tokenizer.token_to_id("o</w>")].byte_string == b"o "


def test_bytes_that_were_trained_as_special_tokens_are_bytes():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<eos>", *byte_pieces()], show_progress=False
    )
    tokenizer.train_from_iterator(LANGUAGES[:4], trainer)
    vocabulary = decode_vocab(tokenizer)
    assert vocabulary.special_ids == {0}
    for text in LANGUAGES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert joined.removeprefix(" ") == text


@pytest.mark.parametrize("content", ["é", "ıÃ"])
def test_an_added_token_that_is_also_other_bytes_of_the_model_is_an_error(content):
    vocab = {letter: i for i, letter in enumerate(byte_level_alphabet())}
    merges = [tuple(content)] if len(content) > 1 else []
    tokenizer = Tokenizer(models.BPE({**vocab, content: vocab.get(content, 256)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    decode_vocab(tokenizer)
    tokenizer.add_tokens([AddedToken(content, normalized=False)])
    with pytest.raises(TokenizerDecodeError, match="does not come back"):
        decode_vocab(tokenizer)


def test_an_added_token_in_a_normalizer_that_writes_bytes():
    tokenizer = byte_level()
    tokenizer.pre_tokenizer, tokenizer.normalizer = None, normalizers.ByteLevel()
    tokenizer.add_tokens(["日本", "\n\n"])
    vocabulary = decode_vocab(tokenizer)
    text = "a日本\n\nb"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.token_to_id("日本") in ids
    assert b"".join(vocabulary.byte_vocab[i] for i in ids) == text.encode()


def test_an_added_token_of_the_model_is_spelt_as_the_model_spells_it():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    assert tokenizer.token_to_id("Ġl") is not None
    right = decode_vocab(tokenizer).byte_vocab[tokenizer.token_to_id("Ġl")]
    tokenizer.add_tokens([AddedToken("Ġl", normalized=True)])
    token_id = tokenizer.token_to_id("Ġl")
    assert tokenizer.id_to_token(token_id) == "ġl"  # "ġ" is another byte
    assert decode_vocab(tokenizer).byte_vocab[token_id].byte_string == right.byte_string == b" l"


def test_an_id_that_is_a_word_with_and_without_a_space_is_an_error():
    tokenizer = llama_like()
    tokenizer.add_tokens([AddedToken("ab", normalized=True)])
    texts = ["c ab", "cab"]  # the normalizer makes the added token "▁ab", and the model has "ab"
    ids = [tokenizer.encode(text, add_special_tokens=False).ids[-1] for text in texts]
    assert ids == [tokenizer.token_to_id("ab")] * 2
    with pytest.raises(TokenizerDecodeError, match="does not come back"):
        decode_vocab(tokenizer)


def test_special_tokens_spell_their_names_and_not_what_a_normalizer_makes_of_them():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("<PAD>", normalized=True)])
    vocabulary = decode_vocab(tokenizer)
    token = vocabulary.byte_vocab[tokenizer.token_to_id("<PAD>")]
    assert token.byte_string == b"<PAD>"
    assert token.token_id in vocabulary.special_ids


def test_continuing_subwords_of_bpe_join_their_word():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", continuing_subword_prefix="##"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>"],
        continuing_subword_prefix="##",
        show_progress=False,
    )
    trained(tokenizer, trainer)
    assert tokenizer.decoder is None
    vocabulary = decode_vocab(tokenizer)
    for text in LANGUAGES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert joined == " " + text


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
def test_whatever_is_added_the_bytes_are_what_the_tokenizer_decodes(name, added, texts):
    tokenizer = Tokenizer.from_str(serialised(name))
    tokenizer.add_tokens(added)
    vocabulary = decode_vocab(tokenizer)
    check_strings(vocabulary)
    for text in texts:
        text = f"a{text}"  # a decoder may take all the spaces of the first token away
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if vocabulary.special_ids.intersection(ids):
            continue
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert joined.removeprefix(" ") == tokenizer.decode(ids).removeprefix(" ")
        if name != "unigram" and not any(token.lstrip or token.rstrip for token in added):
            assert joined == text


def test_an_added_token_that_only_a_normalised_text_gives_is_spelt_normalised():
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
def test_a_whole_word_that_is_also_a_byte_of_the_model_is_an_error(content):
    vocab = {letter: i for i, letter in enumerate(byte_level_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(content, normalized=False, single_word=True)])
    with pytest.raises(TokenizerDecodeError, match="does not come back"):
        decode_vocab(tokenizer)


def test_a_text_on_which_the_tokenizer_fails_says_nothing():
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
