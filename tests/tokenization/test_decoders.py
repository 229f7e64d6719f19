"""Every declared decoder, on small tokenizers."""

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from genlm_backend import decode_vocab
from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization.reader import read_byte_vocab
from genlm_backend.tokenization.self_check import PROBES
from tests.tokenization.samples import LANGUAGES
from tests.tokenization.small_tokenizers import SMALL, TEXTS, byte_level, byte_pieces, clip_like


@pytest.mark.parametrize("name", SMALL)
def test_bytes_of_every_token_match_the_rust_decoder(name):
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
def test_joined_bytes_are_the_text_apart_from_spaces(name):
    tokenizer = SMALL[name]()
    vocabulary = decode_vocab(tokenizer)
    for text in LANGUAGES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if vocabulary.special_ids.intersection(ids):
            continue
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        expected = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        assert "".join(joined.split()) == "".join(expected.split())


def test_wrong_decoder_raises_decode_error_that_names_the_token():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(TokenizerDecodeError, match="does not round-trip") as caught:
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


def test_only_complete_byte_names_are_decoded_as_bytes():
    names = ["<0x41>", "<0xFF>", "<0xfe>", "x<0x41>", "<0x41>x", "<0x4>", "<0xGG>", "<0x041>"]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="x"))
    tokenizer.decoder = decoders.ByteFallback()
    vocab = decode_vocab(tokenizer, self_check=False).byte_vocab
    assert [bytes(t) for t in vocab] == [b"A", b"\xff", b"\xfe", *(n.encode() for n in names[3:])]


def test_strip_and_regex_stages_of_a_decoder_are_applied():
    tokenizer = Tokenizer(models.WordLevel({"_ab__": 0, "c1d22": 1}, unk_token="?"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Strip("_", 1, 1), decoders.Replace(Regex("[0-9]+"), "#")]
    )
    vocab = decode_vocab(tokenizer, self_check=False).byte_vocab
    assert [bytes(t) for t in vocab] == [b"ab_", b"c#d#"]


def test_decoding_neither_loads_nor_serialises_the_tokenizer(monkeypatch):
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


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), None])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_byte_fallback_is_decoded_without_a_byte_fallback_decoder(kind, decoder):
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


def test_byte_names_stay_text_without_byte_fallback():
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
def test_unknown_token_is_found_even_if_rare_characters_are_known(known, pre_tokenizer):
    scores = [("?", 0.0), ("▁", -1.0), ("a", -1.0), (known, -1.0)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Metaspace()
    assert read_byte_vocab(tokenizer).unknown_ids == {0}
    assert decode_vocab(tokenizer).byte_vocab[3].byte_string == known.replace("▁", " ").encode()


@pytest.mark.parametrize("declared", [True, False])
def test_word_end_suffixes_of_a_byte_level_vocabulary_are_spaces(declared):
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


def test_byte_tokens_trained_as_special_tokens_decode_as_bytes():
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


FUSE = decoders.Fuse()


@pytest.mark.parametrize(
    ("stages", "part"),
    [
        ([FUSE, decoders.Replace("th", "TH")], "Replace stage after Fuse"),
        ([FUSE, decoders.Replace(Regex("[a-z]+"), "x")], "Replace stage after Fuse"),
        ([FUSE, decoders.Metaspace()], "Metaspace stage after Fuse"),
        ([FUSE, decoders.WordPiece()], "WordPiece stage after Fuse"),
        ([FUSE, decoders.BPEDecoder()], "BPEDecoder stage after Fuse"),
        ([FUSE, decoders.ByteFallback()], "ByteFallback stage after Fuse"),
        ([decoders.ByteLevel(), decoders.Replace("a", "b")], "Replace stage after ByteLevel"),
    ],
)
def test_rewriting_stage_after_all_tokens_are_joined_raises_decode_error(stages, part):
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence(stages)
    with pytest.raises(TokenizerDecodeError, match=part):
        decode_vocab(tokenizer, self_check=False)


def test_single_character_stages_after_fuse_are_decoded():
    tokenizer = SMALL["unigram"]()
    expected = decode_vocab(tokenizer)
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([FUSE, decoders.Replace("▁", " "), FUSE, strip])
    assert [*map(bytes, decode_vocab(tokenizer).byte_vocab)] == [*map(bytes, expected.byte_vocab)]
    tokenizer = byte_level()
    expected = decode_vocab(tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), FUSE, strip])
    assert [*map(bytes, decode_vocab(tokenizer).byte_vocab)] == [*map(bytes, expected.byte_vocab)]


def test_decoder_that_prints_other_text_raises_and_names_the_token():
    characters = sorted({*"".join(PROBES)})
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(characters)}, []))
    tokenizer.decoder = decoders.Fuse()
    assert decode_vocab(tokenizer).byte_vocab[characters.index("\x1f")].byte_string == b"\x1f"
    # A unit separator is white space to Python, and none to the tokenizer.
    tokenizer.decoder = decoders.Replace(Regex(r"\s"), " ")
    with pytest.raises(
        TokenizerDecodeError, match=r"tokenizer's decoder prints .*a.x01b.x1fc"
    ) as caught:
        decode_vocab(tokenizer)
    assert caught.value.token == "\x1f"
    assert decode_vocab(tokenizer, self_check=False).byte_vocab


def test_added_token_that_is_printed_differently_raises_decode_error():
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate("ab<>")}, []))
    tokenizer.decoder = decoders.Replace(Regex(r"\s"), " ")
    decode_vocab(tokenizer)
    tokenizer.add_tokens(["<\x1f>"])
    with pytest.raises(TokenizerDecodeError, match="tokenizer's decoder prints") as caught:
        decode_vocab(tokenizer)
    assert caught.value.token == "<\x1f>"


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Metaspace(replacement="_"),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    ],
)
def test_decoder_that_keeps_the_space_mark_raises_decode_error(pre_tokenizer):
    tokenizer = SMALL["unigram"]()
    tokenizer.pre_tokenizer = pre_tokenizer
    if "_" in pre_tokenizer.pre_tokenize_str("a b")[-1][0]:
        tokenizer.decoder = decoders.Metaspace(replacement="_")
    decode_vocab(tokenizer)
    tokenizer.decoder = decoders.Fuse()
    with pytest.raises(TokenizerDecodeError, match="does not round-trip"):
        decode_vocab(tokenizer)
